"""Floor 1: how arrays lie on a mesh, and how they get there."""

from jshard.layouts.creation import create as create
from jshard.layouts.gathering import gather as gather
from jshard.layouts.layout import Layout as Layout
from jshard.layouts.mesh import build_mesh as build_mesh
from jshard.layouts.redistribution import redistribute as redistribute
from jshard.layouts.scattering import scatter as scatter
