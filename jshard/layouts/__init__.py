"""Floor 1: how arrays lie on a mesh, and how they get there."""

from jshard.layouts.create import create as create
from jshard.layouts.gather import gather as gather
from jshard.layouts.layout import Layout as Layout
from jshard.layouts.mesh import build_mesh as build_mesh
from jshard.layouts.redistribute import redistribute as redistribute
from jshard.layouts.scatter import scatter as scatter
