"""Gradients of kernels made a slice at a time, when only slices are read, as in a scatter by permutes.

Each part is sent while the next is multiplied. The whole gradient never stands in memory, and no pass cuts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels.invariant_cast import set_varying
from jshard.layers.partition.halves import standing_at
from jshard.layers.partition.readers import readers
from jshard.programs.jaxprs import Eqn, OpenJaxpr, Tree, bound, called, evaluate, flow, is_in, pruned, read_by

Multiply = Callable[[Array, Array], Array]  # by a kernel
Product = Callable[[Multiply, Array, Array], Array]

OF_EACH = frozenset(("convert_element_type", "pcast", "pvary"))  # done with each number, so with those of a slice too
SAME = OF_EACH | {"transpose"}


@dataclasses.dataclass(eq=False)
class LazyProduct:
    """The dot_general of `x` and `y`, its axes in another order, and elementwise operations on the result."""

    eqn: Eqn
    x: Array
    y: Array
    order: tuple[int, ...]  # which axis of the product each is
    token: Any  # slices are made when it is there
    then: tuple[Any, ...] = ()

    @functools.cached_property
    def whole(self) -> Array:
        return self._made(self.x, self.y)

    def slice(self, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
        """Multiply slices of the operands."""
        (of_x, of_y), (batch_x, batch_y) = self.eqn.params["dimension_numbers"]
        free = lambda rank, *others: [axis for axis in range(rank) if not any(axis in each for each in others)]
        free_x, free_y = free(self.x.ndim, of_x, batch_x), free(self.y.ndim, of_y, batch_y)
        axes = [
            *zip(batch_x, batch_y, strict=True),
            *((axis, None) for axis in free_x),
            *((None, axis) for axis in free_y),
        ]
        operands = [self.x, self.y]
        for at, start, size in zip(self.order, starts, sizes, strict=True):
            for number, axis in enumerate(axes[at]):
                if axis is not None and size != operands[number].shape[axis]:
                    operands[number] = lax.dynamic_slice_in_dim(operands[number], after(self.token, start), size, axis)
        return self._made(*operands)

    def transposed(self, order: Sequence[int]) -> LazyProduct:
        return dataclasses.replace(self, order=tuple(self.order[at] for at in order))

    def _made(self, x: Array, y: Array) -> Array:
        # a slice at a place that varies over mesh axes varies over them, as types of the whole product don't say
        names = jax.typeof(x).mat.varying | jax.typeof(y).mat.varying
        made = lax.transpose(_bound(self.eqn, [set_varying(x, names), set_varying(y, names)])[0], self.order)
        for eqn in self.then:
            if eqn.primitive.name == "convert_element_type":
                (made,) = _bound(eqn, [made])
            else:
                made = set_varying(made, names | eqn.outvars[0].aval.mat.varying)
        return made


def evaluate_lazily(program: Any, xs: Sequence[Any], token: Array) -> list[Any]:
    """Run a traced program. Products are not made before their numbers are read, and only slices of them where that is all."""
    return evaluate(program, xs, lambda eqn, given: _evaluated(eqn, given, token))


def _evaluated(eqn: Eqn, given: Sequence[Any], token: Array) -> Sequence[Any]:
    lazy = next((x for x in given if isinstance(x, LazyProduct)), None)
    if lazy is None:
        if eqn.primitive.name != "dot_general":
            return _bound(eqn, given)
        x, y = given
        return [LazyProduct(eqn, x, y, tuple(range(len(eqn.outvars[0].aval.shape))), token)]
    if (program := called(eqn)) is not None:
        with standing_at(eqn):
            return evaluate_lazily(program, given, token)
    match eqn.primitive.name:
        case "transpose":
            return [lazy.transposed(eqn.params["permutation"])]
        case name if name in OF_EACH:
            return [dataclasses.replace(lazy, then=(*lazy.then, eqn))]
        case "dynamic_slice" if given[0] is lazy:
            with standing_at(eqn):
                return [lazy.slice(given[1:], eqn.params["slice_sizes"])]
        case _:
            return _bound(eqn, list(map(whole, given)))


def whole(x: Any) -> Any:
    """Return the whole of an array or of a product not made yet."""
    return x.whole if isinstance(x, LazyProduct) else x


def with_products(program: Any, xs: Sequence[Any], products: Mapping[Any, Product]) -> list[Any]:
    """Run a traced program, and make its products by these variables with other functions."""

    def step(eqn: Eqn, given: list[Any]) -> Sequence[Any]:
        at = next((n for n, v in enumerate(eqn.invars) if is_in(v, products)), None)
        if at is None:
            return _bound(eqn, given)
        product = lambda x, w: _bound(eqn, [x, w] if at else [w, x])[0]
        return [products[eqn.invars[at]](product, given[1 - at], given[at])]

    return evaluate(program, xs, step)


def first_of(jaxpr: OpenJaxpr, kernels: Collection[Any]) -> set[Any]:
    """Return the kernels multiplying values without another product before them: their gradients come last."""
    first: set[Any] = set()

    def step(eqn: Eqn, are_behind: list[bool]) -> list[bool]:
        """Return whether the results are products by these variables, or depend on such products."""
        by = read_by([eqn]).intersection(kernels)
        first.update(() if any(are_behind) else by)
        return [any(are_behind) or bool(by)] * len(eqn.outvars)

    flow(jaxpr, [False] * len(jaxpr.invars), step, False, inside=False)
    return first


def is_sliced(program: Any, number: int) -> bool:
    """Return whether all readers of an operand take slices."""
    return {"dynamic_slice"}.issuperset(readers(program, through=SAME)[number])


def leaves_in_slices(gather: Callable[[Any], Any], shard: Array, full: Array) -> bool:
    """Return whether the gradient of a gathered `shard` leaves in slices only, as by permutes."""
    return is_sliced(jax.make_jaxpr(lambda shard, of_full: jax.vjp(gather, shard)[1](of_full))(shard, full), 1)


def product_scattered(
    product: Multiply, x: Array, kernel: Array, shard: Array, token: Array, gather: Callable[[Any], Any]
) -> tuple[Array, Array]:
    """Return `product(x, kernel)` for a kernel gathered from `shard`, and `token`; the kernel's gradient goes to
    `shard`.

    The gradient of `token` is a time: it exists when this gradient has been scattered. The gradient of the product
    before this one is scattered after it.
    """

    def forward(x: Array, kernel: Array, shard: Array, token: Array) -> tuple[tuple[Array, Array], Any]:
        return (product(x, kernel), token), (x, kernel, shard)

    def backward(kept: Tree, cotangents: tuple[Array, Array]) -> tuple[Array, None, Array, Array]:
        (x, kernel, shard), (of_y, token) = kept, cotangents
        (of_x,) = jax.vjp(lambda x: product(x, kernel), x)[1](of_y)
        of_shard = _of_shard(product, x, kernel, shard, of_y, token, gather)
        return of_x, None, of_shard, token_of(of_shard)

    call = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    call.defvjp(forward, backward)
    return call(x, kernel, shard, token)


def product_scattered_first(
    product: Multiply, x: Array, kernel: Array, shard: Array, gather: Callable[[Any], Any]
) -> Array:
    """Return `product(x, kernel)`. Backward makes the gradient of `x` first, so that the gathered kernel need not stay, then
    makes and scatters that of the kernel, and only then goes on. Where nobody wants the gradient of `x` nothing waits."""
    is_wanted: bool  # the gradient of `x`; `forward` is told

    def forward(x: Any, kernel: Any, shard: Any) -> tuple[Array, Any]:
        nonlocal is_wanted
        is_wanted = x.perturbed
        return product(x.value, kernel.value), (x.value, kernel.value, shard.value)

    def backward(kept: Tree, of_y: Array) -> tuple[Array, None, Array]:
        x, kernel, shard = kept
        (of_x,) = jax.vjp(lambda x: product(x, kernel), x)[1](of_y)
        x = after(token_of(of_x), x) if is_wanted else x
        of_shard = _of_shard(product, x, kernel, shard, of_y, jnp.zeros(()), gather)
        return after(token_of(of_shard), of_x) if is_wanted else of_x, None, of_shard

    call = jax.custom_vjp(lambda x, kernel, shard: product(x, kernel))
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(x, kernel, shard)


def _of_shard(
    product: Multiply, x: Array, kernel: Array, shard: Array, of_y: Array, token: Array, gather: Callable[[Any], Any]
) -> Array:
    """The gradient of `shard`: that of the kernel that was gathered from it, multiplied as it is sent."""

    def pull(shard: Array, x: Array, kernel: Array, of_y: Array) -> Array:
        (of_kernel,) = jax.vjp(lambda kernel: product(x, kernel), kernel)[1](of_y)
        return jax.vjp(gather, shard)[1](of_kernel)[0]

    operands = shard, x, kernel, of_y
    program = jax.make_jaxpr(pull)(*operands)
    live, inputs = pruned(program)  # without the gather
    return whole(evaluate_lazily(program.replace(jaxpr=live), [operands[n] for n in inputs], token)[0])


def after(token: Array, x: Any) -> Array:
    """Return the same numbers, unknown to any compiler before `token` exists.

    A slice at such a number waits for the token. XLA for TPU removes barriers before it schedules, and assumes that
    each collective has links of its own: it puts ready collectives together, and their wire shows.
    """
    x = jnp.asarray(x)
    return lax.min(x, x + (token != token).astype(x.dtype))


def token_of(x: Array) -> Array:
    """Return a number available no earlier than `x`."""
    one = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()).astype(jnp.float32)
    return set_varying(one, frozenset())


def _bound(eqn: Eqn, xs: Sequence[Any]) -> Sequence[Any]:
    with standing_at(eqn), eqn.ctx.manager:
        return bound(eqn, xs)
