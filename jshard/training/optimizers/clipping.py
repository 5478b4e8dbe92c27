"""Gradient clipping by the global norm, for sharded gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jshard.kernels.all_reduction import all_reduce
from jshard.layouts.layout import Layout
from jshard.programs.provenance import scope


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Clip as `optax.clip_by_global_norm(most)`. Each device sums the squares of its shards;
    gradients split over equal mesh axes share an all-reduce of a single number."""

    def update(updates: object, state: object, params: object = None) -> tuple[Any, Any]:
        with scope(key="optimizer.clip"):
            norm = jnp.sqrt(_sum_of_squares(jax.tree.leaves(updates)))
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _sum_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    split: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        layout = None if jax.sharding.get_abstract_mesh().manual_axes else Layout.of(leaf)
        names = () if layout is None else tuple(sorted(layout.mesh_axes))
        mesh = layout.mesh if layout is not None and names else None
        split.setdefault((names, mesh), []).append(leaf)
    return sum((_over(names, mesh, alike) for (names, mesh), alike in split.items()), jnp.zeros(()))


def _over(names: tuple[str, ...], mesh: jax.sharding.Mesh, alike: Sequence[jax.Array]) -> jax.Array:
    """Sum the squares of arrays split over the mesh axes `names`."""

    def own(*parts: jax.Array) -> jax.Array:
        total = jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32))) for x in parts]).sum()
        return all_reduce(total, names, algorithm="xla")

    if not names:
        return own(*alike)
    specs = tuple(Layout.of(x).spec for x in alike)  # type: ignore[union-attr]  # they have a layout
    return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=jax.P())(*alike)
