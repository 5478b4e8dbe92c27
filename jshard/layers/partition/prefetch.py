"""A loop over layers whose stored parameters are gathered one layer ahead, forward and backward, and whose gradients are
scattered one layer behind. Of a layer its input is kept, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.kernels.collectives import pvary

Arrays = list[Any]
Layer = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]  # carry, gathered, each -> carry, ys


def scan_ahead(
    layer: Layer,
    gather: Callable[[Arrays], Arrays],
    carry: Arrays,
    shards: Arrays,
    each: Arrays,
    *,
    length: int,
    reverse: bool,
    travels: bool = True,
) -> tuple[Arrays, Arrays]:
    """Scan `layer` over `gather` of `shards` and over `each`, arrays that are led by the axis of layers.

    The first and the last turn stand before and behind the loops, so that nothing is gathered or scattered for nothing:
    `length` gathers forward, one less backward. Where nothing `travels`, as all is whole, nothing is carried ahead: only the
    gradients are a layer late.
    """

    place = lambda turn: length - 1 - turn if reverse else turn

    def at(arrays: Sequence[Any], turn: Any) -> Arrays:
        return [lax.dynamic_index_in_dim(x, place(turn), keepdims=False) for x in arrays]

    def put(arrays: Sequence[Any], some: Sequence[Any], turn: Any) -> Arrays:
        write = lax.dynamic_update_index_in_dim
        return [write(x, one, place(turn), 0) for x, one in zip(arrays, some, strict=True)]

    def stacked(*pieces: Sequence[Any]) -> Arrays:
        """The layers' arrays, given in the order of turns: one turn or several in a piece."""
        found = [jnp.concatenate(some) for some in zip(*pieces, strict=True)]
        return [x[::-1] for x in found] if reverse else found

    one = lambda arrays: [x[None] for x in arrays]
    ahead = lambda shards, turn: gather(at(shards, turn)) if travels else []
    in_use = lambda full, shards, turn: full if travels else gather(at(shards, turn))
    # What the layer closes over is an operand, as a custom derivative may close over nothing that is differentiated.
    program = jax.make_jaxpr(layer)(carry, gather(at(shards, 0)), at(each, 0))

    def run(carry: Arrays, full: Arrays, each: Arrays, consts: Arrays) -> tuple[Arrays, Arrays]:
        outs = jax_core.eval_jaxpr(program.jaxpr, consts, *carry, *full, *each)
        return outs[: len(carry)], outs[len(carry) :]

    def forward(carry: Arrays, shards: Arrays, each: Arrays, consts: Arrays) -> Any:
        def turn(state: Any, number: Any) -> Any:
            carry, full = state
            after = ahead(shards, number + 1)
            out, ys = run(carry, in_use(full, shards, number), at(each, number), consts)
            return (out, after), (carry, ys)

        (last, full), (inputs, ys) = lax.scan(turn, (carry, ahead(shards, 0)), jnp.arange(length - 1))
        out, y = run(last, in_use(full, shards, length - 1), at(each, length - 1), consts)
        return (out, stacked(ys, one(y))), (inputs, last, full, shards, each, consts)

    def backward(kept: Any, cotangents: Any) -> Any:
        inputs, last, full, shards, each, consts = kept
        of_carry, of_ys = map(_smooth, cotangents)
        inputs_at = lambda number: [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in inputs]

        def pull(number: Any, carry: Arrays, full: Arrays, of_out: Arrays) -> list[Arrays]:
            again = jax.checkpoint(run, prevent_cse=False)
            (out, ys), back = jax.vjp(again, carry, in_use(full, shards, number), at(each, number), consts)
            return [*map(_smooth, back((_padded(of_out, out), _padded(at(of_ys, number), ys))))]

        def again(number: Any) -> Arrays:
            with jax.named_scope("checkpoint"), jax.named_scope("rematted_computation"):  # so that it is told as such
                return ahead(shards, number)

        def scattered(of_full: Arrays, number: Any) -> Arrays:
            return jax.vjp(gather, at(shards, number))[1](of_full)[0]

        def turn(state: Any, number: Any) -> Any:
            of_carry, full, behind, sums, done = state
            before, done = again(number - 1), put(done, scattered(behind, number + 1), number + 1)
            of_carry, behind, of_each, of_consts = pull(number, inputs_at(number), full, of_carry)
            return (of_carry, before, behind, list(map(jnp.add, sums, of_consts)), done), of_each

        before = again(length - 2) if length > 1 else []
        of_carry, behind, of_last, sums = pull(length - 1, last, full, of_carry)
        of_shards = [pvary(lax.empty(x.shape, x.dtype), tuple(jax.typeof(x).mat.varying)) for x in shards]
        of_each = stacked(one(of_last))
        if length > 1:
            state = of_carry, before, behind, sums, of_shards
            state, between = lax.scan(turn, state, jnp.arange(1, length - 1), reverse=True)
            of_carry, full, behind, sums, of_shards = state
            of_shards = put(of_shards, scattered(behind, 1), 1)
            of_carry, behind, of_first, of_consts = pull(0, inputs_at(0), full, of_carry)
            sums = list(map(jnp.add, sums, of_consts))
            of_each = stacked(one(of_first), between, one(of_last))
        of_shards = put(of_shards, scattered(behind, 0), 0)
        return (
            _padded(of_carry, last), of_shards, _padded(of_each, each), _padded(sums, consts),
        )  # fmt: skip

    call = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    call.defvjp(forward, backward)
    return call(carry, shards, each, program.consts)


def _is_smooth(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _smooth(arrays: Sequence[Any]) -> Arrays:
    return [x for x in arrays if _is_smooth(x)]


def _padded(cotangents: Sequence[Any], primals: Sequence[Any]) -> Arrays:
    """Cotangents of all of these, of which those of whole numbers say nothing."""
    it = iter(cotangents)
    return [next(it) if _is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
