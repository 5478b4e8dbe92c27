"""The work of a device inside a shard_map: collectives and products, by mesh axis names only."""

from __future__ import annotations

from jshard.kernels.all_reduction import all_reduce as all_reduce
from jshard.kernels.chip import interpret as interpret
from jshard.kernels.collective_matmul import all_gather_matmul as all_gather_matmul
from jshard.kernels.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from jshard.kernels.collectives import COLLECTIVES as COLLECTIVES
from jshard.kernels.collectives import Collective as Collective
from jshard.kernels.collectives import all_to_all as all_to_all
from jshard.kernels.collectives import axis_index as axis_index
from jshard.kernels.collectives import axis_size as axis_size
from jshard.kernels.collectives import broadcast as broadcast
from jshard.kernels.collectives import permute as permute
from jshard.kernels.collectives import send_recv as send_recv
from jshard.kernels.gather_scatter import all_gather as all_gather
from jshard.kernels.gather_scatter import reduce_scatter as reduce_scatter
from jshard.kernels.kernel_traffic import declare as declare
from jshard.kernels.local_matmul import matmul as matmul
from jshard.kernels.select_algorithm import choose as choose
