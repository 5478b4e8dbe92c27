"""What `remat` says: which results of a forward pass are kept for the backward pass, and which are computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])

# A product is kept as the sum over devices leaves it: it would have to be summed again.
PRODUCTS = frozenset(
    "conv_general_dilated dot_general psum psum_invariant ragged_dot_general reduce_scatter".split()
)  # fmt: skip


def recomputed(f: F, remat: str | tuple[str, ...], *, in_scan: bool = False) -> F:
    """Let the backward pass of `f` compute anew what this word does not keep; as it is where nothing is said."""
    if not remat:
        return f
    # A loop can't be merged with its backward, so nothing has to keep XLA from that.
    return jax.checkpoint(f, policy=_policy(remat), prevent_cse=not in_scan)  # type: ignore[return-value]  # it keeps the signature


def _policy(remat: str | tuple[str, ...]) -> Callable[..., bool] | None:
    if isinstance(remat, tuple):
        return jax.checkpoint_policies.save_only_these_names(*remat)
    return _is_product if remat == "products" else None


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in PRODUCTS
