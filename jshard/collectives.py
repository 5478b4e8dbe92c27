"""Collectives inside a `shard_map`, by mesh axis names; each is a line of the ledger."""

from jshard.kernels import all_gather as all_gather
from jshard.kernels import all_reduce as all_reduce
from jshard.kernels import all_to_all as all_to_all
from jshard.kernels import broadcast as broadcast
from jshard.kernels import permute as permute
from jshard.kernels import reduce_scatter as reduce_scatter
from jshard.kernels import send_recv as send_recv
