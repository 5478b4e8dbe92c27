"""What `remat` says: which results of a forward pass are kept for the backward pass, and which are computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jshard.kernels.gather_scatter import gather_kernel
from jshard.kernels.kernel_traffic import declared
from jshard.programs.jaxprs import CALLS, is_jaxpr, level

F = TypeVar("F", bound=Callable[..., Any])

CHUNK = "chunk"  # the chunks of layers that stages run are computed anew: their inputs alone are kept

# A product is kept as the sum over devices leaves it: it would have to be summed again.
PRODUCTS = frozenset(
    "conv_general_dilated dot_general psum psum_invariant ragged_dot_general reduce_scatter".split()
)  # fmt: skip
# What a gather gave is not kept, nor what is only that in another shape. Of such a shape of anything else its operand is kept.
GATHERED = frozenset(
    "all_gather all_gather_invariant broadcast_in_dim copy expand_dims one_device_cast one_device_sum pad pcast pvary reshape "
    "slice split squeeze transpose unstack".split()
)


def recomputed(f: F, remat: str | tuple[str, ...], *, regather: bool = False, in_scan: bool = False) -> F:
    """Let the backward pass of `f` compute anew what this word does not keep. With `regather` it gathers again what was
    gathered, and computes nothing: every word implies it. Where neither is said `f` stays as it is. What CHUNK says is done
    around the chunks of a pipeline, and not here."""
    remat = "" if remat == CHUNK else remat
    if not remat and not regather:
        return f
    # A loop can't be merged with its backward, so nothing has to keep XLA from that; one of a single turn is no loop.
    return _real_checkpoint(f, policy=policy_of(remat), prevent_cse=not in_scan)  # type: ignore[return-value]  # it keeps the signature


def _real_checkpoint(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Hand complex arrays to `jax.checkpoint` as two real ones each. JAX rounds what a checkpoint keeps to its dtype, and has
    no such operation for complex numbers."""

    def call(*args: object) -> Any:
        leaves, tree = jax.tree.flatten(args)
        where = [jnp.iscomplexobj(x) for x in leaves]
        pairs = [(jnp.real(x), jnp.imag(x)) if c else x for x, c in zip(leaves, where, strict=True)]

        def joined(*pairs: Any) -> Any:
            return f(*tree.unflatten([jax.lax.complex(*x) if c else x for x, c in zip(pairs, where, strict=True)]))

        return jax.checkpoint(joined, **how)(*pairs)

    return call


def policy_of(remat: str | tuple[str, ...]) -> Callable[..., bool] | None:
    if isinstance(remat, tuple):
        return _of_real(jax.checkpoint_policies.save_only_these_names(*remat))
    policy = {"products": _is_product, "": _is_not_gathered}.get(remat)
    return None if policy is None else _of_real(policy)


def _of_real(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Let a policy keep real numbers only: complex ones are computed anew from these."""

    def keeps(primitive: Any, *operands: Any, **params: object) -> bool:
        dtypes = [each.dtype for each in operands if hasattr(each, "dtype")]
        dtypes += [params[key] for key in ("new_dtype", "dtype") if params.get(key) is not None]
        is_complex = primitive.name in ("complex", "fft") or any(
            jnp.issubdtype(each, jnp.complexfloating) for each in dtypes
        )
        return not is_complex and policy(primitive, *operands, **params)

    return keeps


def _is_product(primitive: Any, *_: object, **__: object) -> bool:
    return primitive.name in PRODUCTS


def _is_not_gathered(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether a result is kept. A policy sees no further than one operation: gathers of activations, which are kept, are
    followed by one more, a `checkpoint_name`."""
    name = primitive.name
    if name == "convert_element_type":  # of two dtypes of one array the smaller is kept
        return params["new_dtype"].itemsize < operands[0].dtype.itemsize
    if params.get("name") == gather_kernel.__name__:  # type: ignore[attr-defined]  # by permutes, say
        return False
    if name == "pallas_call":
        return (declared(params) or {}).get("op") != "all_gather"
    jaxpr = params.get(CALLS.get(name, ""))
    if not is_jaxpr(jaxpr):
        return name not in GATHERED
    inside = (eqn for eqn in level(jaxpr) if eqn.primitive.name != "convert_element_type")  # to gather in another dtype
    return any(_is_not_gathered(e.primitive, *(atom.aval for atom in e.invars), **e.params) for e in inside)


def activation(x: jax.Array) -> jax.Array:
    """Let the backward pass keep activations that were gathered."""
    return checkpoint_name(x, "activation")
