"""Parameters of primitives with sizes, for a shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshard.layouts.axes import Factored, Factors
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn

Choice = dict[int, tuple[str, ...]]  # for each factor, the mesh axes that it is split over


def axes_of(of: Factored, choice: Choice) -> Axes:
    """Return the mesh axes of each axis: those of its factors, major first."""
    return tuple(tuple(name for factor in each for name in choice.get(factor, ())) for each in of)


def local_shape(shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a shard."""
    return tuple(n // math.prod(sizes[name] for name in names) for n, names in zip(shape, axes, strict=True))


def localized(eqn: Eqn, found: Factors, choice: Choice, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a primitive's parameters with the sizes of a shard."""
    params, name = eqn.params, eqn.primitive.name
    made = local_shape(tuple(eqn.outvars[0].aval.shape), axes_of(found.results[0], choice), sizes)
    if name == "broadcast_in_dim":
        return {"shape": made}
    if name == "reshape":
        return {"new_sizes": made}
    if name == "dynamic_slice":
        return {"slice_sizes": made}
    if key := {"gather": "slice_sizes", "slice": "limit_indices"}.get(name):  # what is the whole of an axis
        given = eqn.invars[0].aval.shape
        local = local_shape(given, axes_of(found.operands[0], choice), sizes)
        return {key: tuple(m if k == n else k for k, n, m in zip(params[key], given, local, strict=True))}
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        axes = {"feature_group_count": numbers.lhs_spec[1], "batch_group_count": numbers.lhs_spec[0]}
        # the groups are the major factor of their axis
        split = {
            key: axes_of((found.operands[0][axis][:1] if params[key] >= 2 else (),), choice)
            for key, axis in axes.items()
        }
        return {key: local_shape((params[key],), of, sizes)[0] for key, of in split.items()}
    return {}


def ranges_of(eqn: Eqn, shape: tuple[int, ...]) -> dict[int, list[range]]:
    """Return the range of each piece along each cut axis."""
    asked = eqn.params
    if eqn.primitive.name == "split":
        ends = [0, *np.cumsum(asked["sizes"]).tolist()]
        return {asked["axis"]: [range(at, end) for at, end in itertools.pairwise(ends)]}
    strides = asked["strides"] or (1,) * len(shape)
    each = map(range, asked["start_indices"], asked["limit_indices"], strides)
    return {axis: [some] for axis, (some, size) in enumerate(zip(each, shape, strict=True)) if some != range(size)}
