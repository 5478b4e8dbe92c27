"""A loop over layers whose stored parameters are gathered one layer ahead, forward and backward, and whose gradients are
scattered one layer behind. Of a layer its input is kept, and no more, unless its signals say what else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import partial_eval

from jshard.kernels.collectives import pvary
from jshard.layers.partition.halves import dependent
from jshard.layers.partition.lazy_product import (
    Multiply,
    Product,
    after,
    first_of,
    leaves_in_slices,
    product_scattered,
    token_of,
    with_products,
)
from jshard.layers.partition.readers import readers
from jshard.layers.remat import recomputed
from jshard.programs.jaxprs import is_in

Arrays = list[Any]
Gathers = Sequence[tuple[int, Callable[[Any], Any]]]  # of which shard, and how
Layer = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]  # carry, gathered, each -> carry, ys


def scan_ahead(
    layer: Layer,
    gathers: Gathers,
    carry: Arrays,
    shards: Arrays,
    each: Arrays,
    *,
    length: int,
    reverse: bool,
    travels: bool,
    remat: str | tuple[str, ...],
) -> tuple[Arrays, Arrays]:
    """Scan `layer` over what `gathers` give, each of the shard of that number, and over `each`, arrays that are led by the axis
    of layers.

    Of kernels that one product reads, and that leave by permutes, a part of the gradient is multiplied at a time and sent while
    the layer goes on; other gradients are scattered beside the backward of the layer before.

    The first and the last turn stand before and behind the loops, so that nothing is gathered or scattered for nothing:
    `length` gathers forward, one less backward. Where nothing `travels`, as all is whole, nothing is carried ahead: only the
    gradients are a layer late.

    Of the last turn, whose forward and backward stand beside each other, XLA keeps what the forward made, unless `remat` is
    "full".
    """

    place = lambda turn: length - 1 - turn if reverse else turn

    def at(arrays: Sequence[Any], turn: Any) -> Arrays:
        return [_layer_of(x, place(turn)) for x in arrays]

    def put(arrays: Sequence[Any], some: Mapping[int, Any], turn: Any) -> Arrays:
        return [_put_layer(x, some[n], place(turn)) if n in some else x for n, x in enumerate(arrays)]

    def stacked(*pieces: Sequence[Any]) -> Arrays:
        """The layers' arrays, given in the order of turns: one turn or several in a piece."""
        found = [jnp.concatenate(some) for some in zip(*pieces, strict=True)]
        return [x[::-1] for x in found] if reverse else found

    one = lambda arrays: [x[None] for x in arrays]

    def taken(shards: Sequence[Any], turn: Any) -> Arrays:
        """A layer's shards. XLA for TPU would cast those of all layers in front of the loop, and keep both."""
        some = [_layer_of(x, turn) for x in shards]
        for (number, _), dtype in zip(gathers if soon else [], dtypes, strict=False):
            if (some[number].dtype, dtype) == (jnp.float32, jnp.bfloat16):
                some[number] = lax.reduce_precision(some[number], 8, 7)
        return some

    def gathered(shards: Sequence[Any], turn: Any, token: Any, *, in_turn: bool) -> tuple[Arrays, Any]:
        """Gather when `token` is there, and `in_turn` one after another."""
        full: Arrays = []
        for number, f in gathers:
            full.append(f(taken(shards, after(token, place(turn)))[number]))
            # what else is gathered may be read by nothing
            token = token_of(full[-1]) if in_turn and number in soon else token
        return full, token

    start = lambda: jnp.zeros(())  # of a chain: nothing is before it
    gather = lambda shards: [f(shards[number]) for number, f in gathers]
    ahead = lambda shards, turn: gather(taken(shards, place(turn))) if travels else []
    in_use = lambda full, shards, turn: full if travels else gather(at(shards, turn))
    # What the layer closes over is an operand, as a custom derivative may close over nothing that is differentiated.
    shard_of_one = at(shards, 0)
    operands = carry, gather(shard_of_one), at(each, 0)
    dtypes = [x.dtype for x in operands[1]]
    program = jax.make_jaxpr(layer)(*operands)
    kernels = program.jaxpr.invars[len(carry) :][: len(gathers)]
    late = _late(gathers, program.jaxpr, kernels, shard_of_one, operands[1]) if travels else set(range(len(shards)))
    soon, later = ([n for n in range(len(shards)) if (n in late) is each] for each in (False, True))

    def run(carry: Arrays, full: Arrays, own: Arrays, each: Arrays, consts: Arrays) -> tuple[Arrays, Arrays]:
        *own, token = own
        shard = dict(zip(soon, own, strict=True))

        def product(n: int, gather: Callable[[Any], Any]) -> Product:
            def scattered(product: Multiply, x: Any, kernel: Any) -> Any:
                nonlocal token
                y, token = product_scattered(product, x, kernel, shard[n], token, gather)
                return y

            return scattered

        products = {v: product(*each) for v, each in zip(kernels, gathers, strict=True) if each[0] in shard}
        outs = with_products(program.jaxpr, [*consts, *carry, *full, *each], products)
        return [*outs[: len(carry)], token], outs[len(carry) :]

    some = lambda arrays, numbers: [arrays[n] for n in numbers]
    given_once = operands[0], operands[1], [*some(shard_of_one, soon), start()], operands[2], program.consts
    one_layer = _Kept(recomputed(run, remat or "full", in_scan=True), given_once)
    last_layer = _Kept(recomputed(run, remat), given_once) if remat == "full" else one_layer

    def given(full: Arrays, shards: Arrays, each: Arrays, consts: Arrays, turn: Any) -> tuple[Arrays, ...]:
        """What a layer is given beside what is carried."""
        return in_use(full, shards, turn), [*at(some(shards, soon), turn), start()], at(each, turn), consts

    def forward(carry: Arrays, shards: Arrays, each: Arrays, consts: Arrays) -> Any:
        def turn(state: Any, number: Any) -> Any:
            carry, full = state
            after = ahead(shards, number + 1)
            (*out, _), ys, kept = one_layer.forward(carry, *given(full, shards, each, consts, number))
            return (out, after), (kept, ys)

        (last, full), (kept, ys) = lax.scan(turn, (carry, ahead(shards, 0)), jnp.arange(length - 1))
        (*out, _), y, of_last = last_layer.forward(last, *given(full, shards, each, consts, length - 1))
        return (out, stacked(ys, one(y))), (kept, of_last, full, shards, each, consts)

    def backward(kept: Any, cotangents: Any) -> Any:
        every, last, full, shards, each, consts = kept
        of_carry, of_ys = map(smooth, cotangents)
        kept_at = lambda number: [_layer_of(x, number) for x in every]

        def pull(
            layer: _Kept, number: Any, kept: Arrays, full: Arrays, of_out: Arrays, done: Arrays, token: Any
        ) -> list[Arrays]:
            """The cotangents of a layer: of what is carried, of what is scattered later, of each and of consts; and
            `done`, with those that were scattered at once."""
            operands = given(full, shards, each, consts, number)
            found = layer.backward(kept, *operands, [*of_out, token], at(of_ys, number))
            of_carry, of_full, (*own, _), of_each, of_consts = map(smooth, found)
            behind = [x for x, (n, _) in zip(of_full, gathers, strict=True) if n in late]
            return [of_carry, behind, of_each, of_consts, put(done, dict(zip(soon, own, strict=True)), number)]

        def again(number: Any, token: Any, *, in_turn: bool) -> tuple[Arrays, Any]:
            with jax.named_scope("checkpoint"), jax.named_scope("rematted_computation"):  # so that it is told as such
                return gathered(shards, number, token, in_turn=in_turn) if soon else (ahead(shards, number), token)

        def scattered(of_full: Arrays, number: Any, done: Arrays) -> Arrays:
            gather = lambda shards: [f(shards[later.index(n)]) for n, f in gathers if n in late]
            own = jax.vjp(gather, at(some(shards, later), number))[1](of_full)[0]
            return put(done, dict(zip(later, own, strict=True)), number)

        def turn(state: Any, number: Any) -> Any:
            of_carry, full, behind, sums, done = state
            before, last = again(number - 1, start(), in_turn=True)
            done = scattered(behind, number + 1, done)
            of_carry, behind, of_each, of_consts, done = pull(
                one_layer, number, kept_at(number), full, of_carry, done, last
            )
            return (of_carry, before, behind, list(map(jnp.add, sums, of_consts)), done), of_each

        before, _ = (
            again(length - 2, token_of(of_carry[0]) if of_carry else start(), in_turn=False)
            if length > 1
            else ([], None)
        )
        done = [pvary(lax.empty(x.shape, x.dtype), tuple(jax.typeof(x).mat.varying)) for x in shards]
        found = pull(last_layer, length - 1, last, full, of_carry, done, start())
        of_carry, behind, of_last, sums, of_shards = found
        of_each = stacked(one(of_last))
        if length > 1:
            state = of_carry, before, behind, sums, of_shards
            state, between = lax.scan(turn, state, jnp.arange(1, length - 1), reverse=True)
            of_carry, full, behind, sums, of_shards = state
            of_shards = scattered(behind, 1, of_shards)
            of_carry, behind, of_first, of_consts, of_shards = pull(
                one_layer, 0, kept_at(0), full, of_carry, of_shards, start()
            )
            sums = list(map(jnp.add, sums, of_consts))
            of_each = stacked(one(of_first), between, one(of_last))
        of_shards = scattered(behind, 0, of_shards)
        return (
            padded(of_carry, carry), of_shards, padded(of_each, each), padded(sums, consts),
        )  # fmt: skip

    call = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    call.defvjp(forward, backward)
    return call(carry, shards, each, program.consts)


def _layer_of(x: Array, number: Any) -> Array:
    """One of stacked arrays, as rows of all. XLA for TPU may want an axis of layers to be elsewhere, and then copies all."""
    if x.ndim == 1:
        return lax.dynamic_index_in_dim(x, number, keepdims=False)
    return lax.dynamic_slice_in_dim(_rows(x), number * x.shape[1], x.shape[1])


def _put_layer(x: Array, one: Array, number: Any) -> Array:
    if x.ndim == 1:
        return lax.dynamic_update_index_in_dim(x, one, number, 0)
    return lax.dynamic_update_slice_in_dim(_rows(x), one, number * x.shape[1], 0).reshape(x.shape)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _late(gathers: Gathers, jaxpr: Any, kernels: Sequence[Any], shards: Arrays, full: Arrays) -> set[int]:
    """Which shards have their gradients scattered a layer late: all of which a part can't leave while the next is multiplied.

    Behind the gradients that a layer makes last it has no work to hide them. Where these are more than a third, all are late.
    """
    once = {v for v, read in zip(jaxpr.invars, readers(jaxpr, through=False), strict=True) if read == ["dot_general"]}
    found = set[int]()
    for v, (n, f), x in zip(kernels, gathers, full, strict=True):
        if v not in once or not leaves_in_slices(f, shards[n], x):
            found.add(n)
    soon = [v for v, (n, _) in zip(kernels, gathers, strict=True) if n not in found]
    size = lambda some: sum(v.aval.size for v in some)
    return found if 3 * size(first_of(jaxpr, soon)) <= size(soon) else {n for n, _ in gathers}


class _Kept:
    """A layer of which what `run` leaves for its backward is kept, but not its parameters, nor what is made of them alone."""

    def __init__(self, run: Callable[..., Any], operands: Sequence[Arrays]):
        self.outputs = jax.eval_shape(run, *operands)
        pulled: Any = None

        def forward(*operands: Arrays) -> list[Any]:
            nonlocal pulled
            outs, pull = jax.vjp(run, *operands)
            residuals, pulled = jax.tree.flatten(pull)
            return [*jax.tree.leaves(outs), *residuals]

        self.program = jax.make_jaxpr(forward)(*operands)
        self.pulled, self.count = pulled, len(jax.tree.leaves(self.outputs))
        jaxpr, of_carry = self.program.jaxpr, len(operands[0])
        made = dependent(jaxpr, tuple(n < of_carry for n in range(len(jaxpr.invars))))
        self.residuals = jaxpr.outvars[self.count :]
        self.kept = list(dict.fromkeys(v for v in self.residuals if is_in(v, made)))
        again = [*[False] * self.count, *(not is_in(v, made) for v in self.residuals)]
        self.again, self.reads = partial_eval.dce_jaxpr(jaxpr, again)

    def forward(self, *operands: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        found = jax_core.eval_jaxpr(self.program.jaxpr, self.program.consts, *jax.tree.leaves(operands))
        kept = dict(zip(self.residuals, found[self.count :], strict=True))
        out, ys = jax.tree.unflatten(jax.tree.structure(self.outputs), found[: self.count])
        return out, ys, [kept[v] for v in self.kept]

    def backward(self, kept: Arrays, *given: Any) -> Any:
        *operands, of_out, of_ys = given
        leaves = jax.tree.leaves(operands)
        leaves = [*[None] * (len(self.reads) - len(leaves)), *leaves]
        read = [x for x, is_read in zip(leaves, self.reads, strict=True) if is_read]
        again = iter(jax_core.eval_jaxpr(self.again, self.program.consts, *read))
        there = dict(zip(self.kept, kept, strict=True))
        pull = jax.tree.unflatten(self.pulled, [there[v] if is_in(v, there) else next(again) for v in self.residuals])
        out, ys = self.outputs
        return pull((padded(of_out, out), padded(of_ys, ys)))


def is_smooth(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def smooth(arrays: Sequence[Any]) -> Arrays:
    return [x for x in arrays if is_smooth(x)]


def padded(cotangents: Sequence[Any], primals: Sequence[Any]) -> Arrays:
    """Cotangents of all of these, of which those of whole numbers say nothing."""
    it = iter(cotangents)
    return [next(it) if is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
