"""A loop over layers whose stored parameters are gathered one layer ahead, forward and backward, and whose gradients are
scattered one layer behind. Of a layer its input is kept, and no more, unless its signals say what else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jshard.kernels.collectives import pvary
from jshard.layers.remat import recomputed

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
    remat: str | tuple[str, ...] = "full",
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
    operands = carry, gather(at(shards, 0)), at(each, 0)
    program = jax.make_jaxpr(layer)(*operands)

    def run(carry: Arrays, full: Arrays, each: Arrays, consts: Arrays) -> tuple[Arrays, Arrays]:
        outs = jax_core.eval_jaxpr(program.jaxpr, consts, *carry, *full, *each)
        return outs[: len(carry)], outs[len(carry) :]

    one_layer = (_Again if remat == "full" else _Kept)(
        recomputed(run, remat, in_scan=True), (*operands, program.consts)
    )

    def forward(carry: Arrays, shards: Arrays, each: Arrays, consts: Arrays) -> Any:
        def turn(state: Any, number: Any) -> Any:
            carry, full = state
            after = ahead(shards, number + 1)
            out, ys, kept = one_layer.forward(carry, in_use(full, shards, number), at(each, number), consts)
            return (out, after), (kept, ys)

        (last, full), (kept, ys) = lax.scan(turn, (carry, ahead(shards, 0)), jnp.arange(length - 1))
        out, y, of_last = one_layer.forward(last, in_use(full, shards, length - 1), at(each, length - 1), consts)
        return (out, stacked(ys, one(y))), (kept, of_last, full, shards, each, consts)

    def backward(kept: Any, cotangents: Any) -> Any:
        every, last, full, shards, each, consts = kept
        of_carry, of_ys = map(_smooth, cotangents)
        kept_at = lambda number: [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in every]

        def pull(number: Any, kept: Arrays, full: Arrays, of_out: Arrays) -> list[Arrays]:
            given = in_use(full, shards, number), at(each, number), consts
            return [*map(_smooth, one_layer.backward(kept, *given, of_out, at(of_ys, number)))]

        def again(number: Any) -> Arrays:
            with jax.named_scope("checkpoint"), jax.named_scope("rematted_computation"):  # so that it is told as such
                return ahead(shards, number)

        def scattered(of_full: Arrays, number: Any) -> Arrays:
            return jax.vjp(gather, at(shards, number))[1](of_full)[0]

        def turn(state: Any, number: Any) -> Any:
            of_carry, full, behind, sums, done = state
            before, done = again(number - 1), put(done, scattered(behind, number + 1), number + 1)
            of_carry, behind, of_each, of_consts = pull(number, kept_at(number), full, of_carry)
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
            of_carry, behind, of_first, of_consts = pull(0, kept_at(0), full, of_carry)
            sums = list(map(jnp.add, sums, of_consts))
            of_each = stacked(one(of_first), between, one(of_last))
        of_shards = put(of_shards, scattered(behind, 0), 0)
        return (
            _padded(of_carry, carry), of_shards, _padded(of_each, each), _padded(sums, consts),
        )  # fmt: skip

    call = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    call.defvjp(forward, backward)
    return call(carry, shards, each, program.consts)


class _Again:
    """A layer of which its input is kept."""

    def __init__(self, run: Callable[..., Any], operands: Sequence[Arrays]):
        self.run = run

    def forward(self, carry: Arrays, full: Arrays, each: Arrays, consts: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        return *self.run(carry, full, each, consts), carry

    def backward(self, kept: Arrays, *given: Any) -> Any:
        *operands, of_out, of_ys = given
        (out, ys), back = jax.vjp(self.run, kept, *operands)
        return back((_padded(of_out, out), _padded(of_ys, ys)))


class _Kept:
    """A layer of which what `run` leaves for its backward is kept, but not its parameters, nor what is made of them alone."""

    def __init__(self, run: Callable[..., Any], operands: Sequence[Arrays]):
        self.outputs = jax.eval_shape(run, *operands)
        pulled: Any = None

        def forward(carry: Arrays, full: Arrays, each: Arrays, consts: Arrays) -> list[Any]:
            nonlocal pulled
            outs, pull = jax.vjp(run, carry, full, each, consts)
            residuals, pulled = jax.tree.flatten(pull)
            return [*jax.tree.leaves(outs), *residuals]

        self.program = jax.make_jaxpr(forward)(*operands)
        self.pulled, self.count = pulled, len(jax.tree.leaves(self.outputs))
        jaxpr, of_carry = self.program.jaxpr, len(operands[0])
        made = set(jaxpr.invars[:of_carry])
        for eqn in jaxpr.eqns:
            if any(not isinstance(v, Literal) and v in made for v in eqn.invars):
                made.update(eqn.outvars)
        self.residuals = jaxpr.outvars[self.count :]
        self.kept = list(dict.fromkeys(v for v in self.residuals if not isinstance(v, Literal) and v in made))
        again = [n >= self.count and (isinstance(v, Literal) or v not in made) for n, v in enumerate(jaxpr.outvars)]
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
        is_kept = lambda v: not isinstance(v, Literal) and v in there
        pull = jax.tree.unflatten(self.pulled, [there[v] if is_kept(v) else next(again) for v in self.residuals])
        out, ys = self.outputs
        return pull((_padded(of_out, out), _padded(of_ys, ys)))


def _is_smooth(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _smooth(arrays: Sequence[Any]) -> Arrays:
    return [x for x in arrays if _is_smooth(x)]


def _padded(cotangents: Sequence[Any], primals: Sequence[Any]) -> Arrays:
    """Cotangents of all of these, of which those of whole numbers say nothing."""
    it = iter(cotangents)
    return [next(it) if _is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
