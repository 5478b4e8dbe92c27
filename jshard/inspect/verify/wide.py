"""Runs equations in 64 bits, whatever dtypes they ask for: the rounding that is left hides no fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jshard.inspect.verify.residues import PROVABLE, retyped, touches_floats
from jshard.layouts.primitives import MATRICES
from jshard.programs.jaxprs import Eqn, bound

# What has a meaning in 64 bits. All else, such as a kernel, runs in its own dtypes.
WIDENED = PROVABLE - {"bitcast_convert_type"} | {"fft", "cumprod", "cumlogsumexp", "reduce_prod", *MATRICES.split()}


def widened(dtype: DTypeLike) -> Any:
    """Return the dtype of 64 bits in place of a floating-point or complex one."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.float64
    return np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def keeps_its_dtypes(eqn: Eqn) -> bool:
    """Say whether an equation on floating-point numbers runs in its own dtypes."""
    return touches_floats(eqn) and eqn.primitive.name not in WIDENED


def wide_results(eqn: Any, x: Sequence[Any], *, rounds: bool) -> list[Any]:
    """Compute the results of an equation whose operands have 64 bits. With `rounds` a conversion leaves only the bits of its
    dtype."""
    if keeps_its_dtypes(eqn):
        results = bound(eqn, [jnp.asarray(each, v.aval.dtype) for each, v in zip(x, eqn.invars, strict=True)])
    elif eqn.primitive.name == "reduce_precision":
        results = x
    elif eqn.primitive.name == "convert_element_type" and rounds:
        results = bound(eqn, x)
    else:
        results = retyped(eqn, x, np.float64)
    return [jnp.asarray(each, widened(each.dtype)) for each in results]
