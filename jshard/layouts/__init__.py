"""Floor 1: layouts of arrays on a mesh, and the moves between layouts."""

from jshard.layouts.creation import create as create
from jshard.layouts.gathering import gather as gather
from jshard.layouts.layout import Layout as Layout
from jshard.layouts.mesh import build_mesh as build_mesh
from jshard.layouts.redistribution import redistribute as redistribute
from jshard.layouts.scattering import scatter as scatter
