"""Loops over layers with parameters gathered a layer ahead, forward and backward, and gradients scattered a layer
late.

Only a layer's input is kept, unless its signals ask for more.
"""

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
from jshard.programs.jaxprs import OpenJaxpr, Tree, dependent, is_in

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
    """Scan `layer` over the results of `gathers`, each of the shard of its number, and over `each`, arrays led by the
    axis of layers.

    If one product reads a kernel and its gradient leaves by permutes, the gradient is multiplied a part at a time,
    and sent while the layer goes on. Other gradients are scattered beside the backward of the layer before.

    The first and last turn are outside the loops, so no gather or scatter is wasted: `length` gathers forward, one
    less backward. If nothing `travels`, because all is whole, nothing is carried ahead: only gradients are a layer
    late.

    The last turn's forward and backward are neighbours; XLA keeps its residuals unless `remat` is "full".
    """
    ahead = _Ahead(layer, gathers, (carry, shards, each), length=length, reverse=reverse, travels=travels, remat=remat)
    call = jax.custom_vjp(lambda *operands: ahead.forward(*operands)[0])
    call.defvjp(ahead.forward, ahead.backward)
    # What the layer closes over is an operand, as a custom derivative may close over nothing that is differentiated.
    return call(carry, shards, each, ahead.program.consts)


class _Turns:
    """The turns of a loop over layers, with each turn's part of stacked arrays."""

    def __init__(self, length: int, *, reverse: bool):
        self.length, self.reverse = length, reverse

    def place(self, turn: Array | int) -> Any:
        return self.length - 1 - turn if self.reverse else turn

    def at(self, arrays: Sequence[Any], turn: Array | int) -> Arrays:
        return [_layer_of(x, self.place(turn)) for x in arrays]

    def put(self, arrays: Sequence[Any], some: Mapping[int, Any], turn: Array | int) -> Arrays:
        return [_put_layer(x, some[n], self.place(turn)) if n in some else x for n, x in enumerate(arrays)]

    def stacked(self, *pieces: Sequence[Any]) -> Arrays:
        """The layers' arrays, given in the order of turns: one turn or several in a piece."""
        found = [jnp.concatenate(some) for some in zip(*pieces, strict=True)]
        return [x[::-1] for x in found] if self.reverse else found


class _Ahead:
    """A loop with layers gathered ahead, and its backward.

    forward    gather 0 | gather 1       gather 2       ...               |
                        | layer 0        layer 1        ... layer n - 2   | layer n - 1
    backward            | gather n - 2   gather n - 3   ...               |
                        | layer n - 1    layer n - 2    ... layer 1       | layer 0
                        |                scatter n - 1  ... scatter 2     | scatter 1   scatter 0
    """

    def __init__(
        self,
        layer: Layer,
        gathers: Gathers,
        given: tuple[Arrays, Arrays, Arrays],
        *,
        length: int,
        reverse: bool,
        travels: bool,
        remat: str | tuple[str, ...],
    ):
        carry, shards, each = given
        self.gathers, self.travels, self.turns = gathers, travels, _Turns(length, reverse=reverse)
        self.carried = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carry]
        shard_of_one = self.turns.at(shards, 0)
        operands = carry, self._gather(shard_of_one), self.turns.at(each, 0)
        self.dtypes = [x.dtype for x in operands[1]]
        self.program = jax.make_jaxpr(layer)(*operands)
        self.kernels = self.program.jaxpr.invars[len(carry) :][: len(gathers)]
        late = set(range(len(shards)))
        if travels:
            late = _late(gathers, self.program.jaxpr, self.kernels, shard_of_one, operands[1])
        self.soon, self.later = ([n for n in range(len(shards)) if (n in late) is each] for each in (False, True))
        once = operands[0], operands[1], [*_some(shard_of_one, self.soon), _start()], operands[2], self.program.consts
        self.one_layer = _Kept(recomputed(self._run, remat or "full", in_scan=True), once)
        self.last_layer = _Kept(recomputed(self._run, remat), once) if remat == "full" else self.one_layer

    def _run(self, carry: Arrays, full: Arrays, own: Arrays, each: Arrays, consts: Arrays) -> tuple[Arrays, Arrays]:
        """Run a layer on gathered values; gradients of `own` shards leave during its backward."""
        *own, token = own
        shard = dict(zip(self.soon, own, strict=True))

        def product(n: int, gather: Callable[[Any], Any]) -> Product:
            def scattered(product: Multiply, x: Any, kernel: Any) -> Any:
                nonlocal token
                y, token = product_scattered(product, x, kernel, shard[n], token, gather)
                return y

            return scattered

        pairs = zip(self.kernels, self.gathers, strict=True)
        products = {v: product(*each) for v, each in pairs if each[0] in shard}
        outs = with_products(self.program.jaxpr, [*consts, *carry, *full, *each], products)
        return [*outs[: len(carry)], token], outs[len(carry) :]

    # -- what is gathered, and scattered --

    def _gather(self, shards: Sequence[Any]) -> Arrays:
        return [f(shards[number]) for number, f in self.gathers]

    def _taken(self, shards: Sequence[Any], turn: Array | int) -> Arrays:
        """A layer's shards. XLA for TPU would cast those of all layers in front of the loop, and keep both."""
        some = [_layer_of(x, turn) for x in shards]
        for (number, _), dtype in zip(self.gathers if self.soon else [], self.dtypes, strict=False):
            if (some[number].dtype, dtype) == (jnp.float32, jnp.bfloat16):
                some[number] = lax.reduce_precision(some[number], 8, 7)
        return some

    def _next(self, shards: Sequence[Any], turn: Array | int) -> Arrays:
        return self._gather(self._taken(shards, self.turns.place(turn))) if self.travels else []

    def _again(self, shards: Sequence[Any], turn: Array | int, token: Array, *, in_turn: bool) -> tuple[Arrays, Any]:
        """Gather for the backward pass: when `token` is there, and `in_turn` one after another."""
        with jax.named_scope("checkpoint"), jax.named_scope("rematted_computation"):  # so that it is told as such
            if not self.soon:
                return self._next(shards, turn), token
            full: Arrays = []
            for number, f in self.gathers:
                full.append(f(self._taken(shards, after(token, self.turns.place(turn)))[number]))
                # what else is gathered may be read by nothing
                token = token_of(full[-1]) if in_turn and number in self.soon else token
            return full, token

    def _scattered(self, of_full: Arrays, shards: Arrays, turn: Array | int, done: Arrays) -> Arrays:
        own = self.turns.at(_some(shards, self.later), turn)
        gather = lambda own: [f(own[self.later.index(n)]) for n, f in self.gathers if n in self.later]
        return self.turns.put(done, dict(zip(self.later, jax.vjp(gather, own)[1](of_full)[0], strict=True)), turn)

    def _given(
        self, full: Arrays, shards: Arrays, each: Arrays, consts: Arrays, turn: Array | int
    ) -> tuple[Arrays, ...]:
        """Return the operands of a layer other than the carry."""
        own = [*self.turns.at(_some(shards, self.soon), turn), _start()]
        in_use = full if self.travels else self._gather(self.turns.at(shards, turn))
        return in_use, own, self.turns.at(each, turn), consts

    # -- the loop, and its backward --

    def forward(self, carry: Arrays, shards: Arrays, each: Arrays, consts: Arrays) -> Any:
        last = self.turns.length - 1

        def turn(state: Tree, number: Array | int) -> Any:
            carry, full = state
            after = self._next(shards, number + 1)
            (*out, _), ys, kept = self.one_layer.forward(carry, *self._given(full, shards, each, consts, number))
            return (out, after), (kept, ys)

        (behind, full), (kept, ys) = lax.scan(turn, (carry, self._next(shards, 0)), jnp.arange(last))
        (*out, _), y, of_last = self.last_layer.forward(behind, *self._given(full, shards, each, consts, last))
        return (out, self.turns.stacked(ys, _one(y))), (kept, of_last, full, shards, each, consts)

    def _pull(
        self, layer: _Kept, kept: Arrays, given: Tree, number: Array | int, of_out: Arrays, of_ys: Arrays, done: Arrays
    ) -> Any:
        """Return the cotangents of a layer: of the carry, of gradients scattered later, of `each` and of consts; and
        `done` with the gradients scattered at once."""
        found = layer.backward(kept, *given, of_out, self.turns.at(of_ys, number))
        of_carry, of_full, (*own, _), of_each, of_consts = map(smooth, found)
        behind = [x for x, (n, _) in zip(of_full, self.gathers, strict=True) if n in self.later]
        done = self.turns.put(done, dict(zip(self.soon, own, strict=True)), number)
        return [of_carry, behind, of_each, of_consts, done]

    def backward(self, kept: Tree, cotangents: Tree) -> Any:
        every, of_last_turn, full, shards, each, consts = kept
        of_carry, of_ys = map(smooth, cotangents)
        length, stacked = self.turns.length, self.turns.stacked

        def pull(
            layer: _Kept, number: Array | int, kept: Arrays, full: Arrays, of_out: Arrays, done: Arrays, token: Any
        ) -> Any:
            given = self._given(full, shards, each, consts, number)
            return self._pull(layer, kept, given, number, [*of_out, token], of_ys, done)

        kept_at = lambda number: [_layer_of(x, number) for x in every]

        def turn(state: Tree, number: Array | int) -> Any:
            of_carry, full, behind, sums, done = state
            before, token = self._again(shards, number - 1, _start(), in_turn=True)
            done = self._scattered(behind, shards, number + 1, done)
            found = pull(self.one_layer, number, kept_at(number), full, of_carry, done, token)
            of_carry, behind, of_each, of_consts, done = found
            return (of_carry, before, behind, list(map(jnp.add, sums, of_consts)), done), of_each

        token = token_of(of_carry[0]) if of_carry else _start()
        before = self._again(shards, length - 2, token, in_turn=False)[0] if length > 1 else []
        done = [pvary(lax.empty(x.shape, x.dtype), tuple(jax.typeof(x).mat.varying)) for x in shards]
        found = pull(self.last_layer, length - 1, of_last_turn, full, of_carry, done, _start())
        of_carry, behind, of_last, sums, of_shards = found
        of_each = stacked(_one(of_last))
        if length > 1:
            state = of_carry, before, behind, sums, of_shards
            state, between = lax.scan(turn, state, jnp.arange(1, length - 1), reverse=True)
            of_carry, full, behind, sums, of_shards = state
            of_shards = self._scattered(behind, shards, 1, of_shards)
            found = pull(self.one_layer, 0, kept_at(0), full, of_carry, of_shards, _start())
            of_carry, behind, of_first, of_consts, of_shards = found
            sums = list(map(jnp.add, sums, of_consts))
            of_each = stacked(_one(of_first), between, _one(of_last))
        of_shards = self._scattered(behind, shards, 0, of_shards)
        return padded(of_carry, self.carried), of_shards, padded(of_each, each), padded(sums, consts)


def _start() -> Array:
    """Begin a chain of tokens: nothing is before it."""
    return jnp.zeros(())


def _one(arrays: Sequence[Any]) -> Arrays:
    return [x[None] for x in arrays]


def _some(arrays: Sequence[Any], numbers: Sequence[int]) -> Arrays:
    return [arrays[n] for n in numbers]


def _layer_of(x: Array, number: Array | int) -> Array:
    """Return a layer of stacked arrays, as rows of all. XLA for TPU may want the axis of layers elsewhere, and would
    copy all."""
    if x.ndim == 1:
        return lax.dynamic_index_in_dim(x, number, keepdims=False)
    return lax.dynamic_slice_in_dim(_rows(x), number * x.shape[1], x.shape[1])


def _put_layer(x: Array, one: Array, number: Array | int) -> Array:
    if x.ndim == 1:
        return lax.dynamic_update_index_in_dim(x, one, number, 0)
    return lax.dynamic_update_slice_in_dim(_rows(x), one, number * x.shape[1], 0).reshape(x.shape)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _late(gathers: Gathers, jaxpr: OpenJaxpr, kernels: Sequence[Any], shards: Arrays, full: Arrays) -> set[int]:
    """Return the shards with gradients scattered a layer late: those that cannot leave in parts.

    The last gradients of a layer have no work behind them to hide their scatter. If these are more than a third, all
    are late.
    """
    once = {v for v, read in zip(jaxpr.invars, readers(jaxpr, through=()), strict=True) if read == ["dot_general"]}
    found = set[int]()
    for v, (n, f), x in zip(kernels, gathers, full, strict=True):
        if v not in once or not leaves_in_slices(f, shards[n], x):
            found.add(n)
    soon = [v for v, (n, _) in zip(kernels, gathers, strict=True) if n not in found]
    size = lambda some: sum(v.aval.size for v in some)
    return found if 3 * size(first_of(jaxpr, soon)) <= size(soon) else {n for n, _ in gathers}


class _Kept:
    """A layer with its residuals kept, except for parameters and values made of parameters alone."""

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

    def backward(self, kept: Arrays, *given: Tree) -> Any:
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
    """Return cotangents for all of these, empty for integers."""
    it = iter(cotangents)
    return [next(it) if is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
