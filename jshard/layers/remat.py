"""The policies of `remat`: the saved results of a forward pass; the backward pass recomputes the others."""

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

CHUNK = "chunk"  # a pipeline's chunks of layers are recomputed: only their inputs are saved

# A product is saved after its sum over devices, which would else run again.
PRODUCTS = frozenset(
    "conv_general_dilated dot_general psum psum_invariant ragged_dot_general reduce_scatter".split()
)  # fmt: skip
# Do not save gathered values or reshapes of them. For a reshape of another value, its operand is saved.
GATHERED = frozenset(
    "all_gather all_gather_invariant broadcast_in_dim copy expand_dims one_device_cast one_device_sum pad pcast pvary reshape "
    "slice split squeeze transpose unstack".split()
)


def recomputed(f: F, remat: str | tuple[str, ...], *, regather: bool = False, in_scan: bool = False) -> F:
    """Return `f` with a backward pass that recomputes the values not saved under the policy
    `remat`. `regather` only repeats gathers; every policy includes it. Without both, `f` is
    returned unchanged. The pipeline applies CHUNK around its chunks, so it has no effect here."""
    remat = "" if remat == CHUNK else remat
    if not remat and not regather:
        return f
    # XLA cannot merge a loop with its backward loop, so a barrier is needless; a loop of a single iteration is no loop.
    return _real_checkpoint(f, policy=policy_of(remat), prevent_cse=not in_scan)  # type: ignore[return-value]  # it keeps the signature


def _real_checkpoint(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Apply `jax.checkpoint` with complex arrays passed as pairs of real arrays. JAX rounds saved
    values to their dtype, and has no such operation for complex numbers."""

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
    """Restrict a policy to real numbers; complex numbers are recomputed from these."""

    def keeps(primitive: Any, *operands: Any, **params: object) -> bool:
        dtypes = [operand.dtype for operand in operands if hasattr(operand, "dtype")]
        dtypes += [params[key] for key in ("new_dtype", "dtype") if params.get(key) is not None]
        is_complex = primitive.name in ("complex", "fft") or any(
            jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes
        )
        return not is_complex and policy(primitive, *operands, **params)

    return keeps


def _is_product(primitive: Any, *_: object, **__: object) -> bool:
    return primitive.name in PRODUCTS


def _is_not_gathered(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Return True if a result is saved: gathers and reshapes are not. A policy sees a single
    operation. Gathered activations, which are saved, are followed by a `checkpoint_name`."""
    name = primitive.name
    if name == "convert_element_type":  # the smaller of two dtypes is saved
        return params["new_dtype"].itemsize < operands[0].dtype.itemsize
    if params.get("name") == gather_kernel.__name__:  # type: ignore[attr-defined]  # a gather by permutes, for example
        return False
    if name == "pallas_call":
        return (declared(params) or {}).get("op") != "all_gather"
    jaxpr = params.get(CALLS.get(name, ""))
    if not is_jaxpr(jaxpr):
        return name not in GATHERED
    inside = (eqn for eqn in level(jaxpr) if eqn.primitive.name != "convert_element_type")  # a cast before a gather
    return any(_is_not_gathered(e.primitive, *(atom.aval for atom in e.invars), **e.params) for e in inside)


def activation(x: jax.Array) -> jax.Array:
    """Mark gathered activations as saved for the backward pass."""
    return checkpoint_name(x, "activation")
