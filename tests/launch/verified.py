"""Functions that `jshard verify` holds on two processes: `right`, and `torn`, wrong on the devices of process 1 alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jshard


def right(x: jax.Array) -> jax.Array:
    return jnp.sum(x**2)


def torn(x: jax.Array) -> jax.Array:
    def body(x_bd: jax.Array) -> jax.Array:
        return jax.lax.psum(x_bd.sum(), "data") + (jax.lax.axis_index("data") >= 2)

    return jax.shard_map(body, mesh=jshard.mesh(), in_specs=P("data"), out_specs=P(), check_vma=False)(x)
