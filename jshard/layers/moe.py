"""`jshard.MoE`: a mixture-of-experts feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.layers.layer import AuxLoss
from jshard.layers.partition.by_hand import HandRule, by_hand
from jshard.layers.partition.part import Here, Part, moving_as
from jshard.layers.partition.plan import Step
from jshard.layers.partition.planner import Planned, Planner
from jshard.layers.partition.run import Run
from jshard.layers.partition.value import Value
from jshard.layouts.layout import check_divides
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn
from jshard.signals.active_config import configuration


class MoE(nnx.Module):
    """The sum of `weight * down_e(activation(gate_e(x)) * up_e(x))` over the `top_k` experts e chosen by a router.

    Parameters: `router/kernel` (width, experts), `gate/kernel` and `up/kernel` (experts, width, hidden), `down/kernel`
    (experts, hidden, width). The router computes in float32; the weights of a token's experts add to 1. With a `capacity` an
    expert takes the first `capacity * top_k * T / experts` tokens of a row of T, and drops the others; the choice is equal
    on every mesh. With None nothing is dropped, and each expert has room for all tokens, at experts / top_k times the work.
    A `dropless` view (`nnx.view`), such as generation's, also drops nothing, so that a text does not depend on other prompts.

    Each call sets `auxiliary`: `balance` times the load-balance loss, which is 1 for a uniform choice of experts, and
    `router_z` times the mean square of the log of the router's denominators.

    `expert: axis` splits the experts, in addition to `column` of gate and up and `reduction` of down. If rows are split over
    this mesh axis too (`row: [data, expert]`), an all-to-all moves tokens to their experts, and another moves them back.
    """

    def __init__(
        self, width: int, hidden: int, experts: int, *, top_k: int = 2, capacity: float | None = None, balance: float = 0.01,
        router_z: float = 0.0, activation: Callable[[Array], Array] = nnx.silu, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs,
    ):  # fmt: skip
        if experts < 1:
            raise JShardError(f"jshard.MoE has experts={experts}", hint="use 1 or more")
        if not 1 <= top_k <= experts:
            raise JShardError(
                f"jshard.MoE chooses top_k={top_k} of {experts} experts", hint=f"use top_k from 1 to {experts}"
            )
        if capacity is not None and capacity <= 0:
            raise JShardError(
                f"jshard.MoE has capacity={capacity:g}, so that its experts take no token",
                hint="use capacity 1.25, or leave it out: then no token is dropped",
            )
        draw = jax.nn.initializers.lecun_normal(batch_axis=(0,))
        einsum = functools.partial(nnx.Einsum, kernel_init=draw, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.router = nnx.Linear(width, experts, use_bias=False, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.gate, self.up = (einsum("becd,edf->becf", (experts, width, hidden)) for _ in range(2))
        self.down = einsum("becf,efd->becd", (experts, hidden, width))
        self.auxiliary = AuxLoss(jnp.zeros(()))
        self.experts, self.top_k, self.capacity, self.activation = experts, top_k, capacity, activation
        self.balance, self.router_z, self.dropless = balance, router_z, False

    def set_view(self, dropless: bool | None = None) -> None:
        self.dropless = self.dropless if dropless is None else dropless

    def __call__(self, x: Array) -> Array:
        rows, length, width = x.shape
        scores = self.router(x.astype(jnp.float32))
        shares = jax.nn.softmax(scores, -1)
        weights, chosen = jax.lax.top_k(shares, self.top_k)
        one_hot = jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32)
        self._weigh(scores, shares, one_hot)
        slots, room = self._slots(chosen.reshape(rows, -1), one_hot.reshape(rows, -1, self.experts), length)
        given = exchanged(_at(x, _sources(slots, self.experts * room, self.top_k)).reshape(rows, -1, room, width))
        made = self.down(self.activation(self.gate(given)) * self.up(given))
        made = exchanged(made, back=True).reshape(rows, -1, width)
        weights = (weights / weights.sum(-1, keepdims=True)).astype(made.dtype)
        return jnp.einsum("btkd,btk->btd", _at(made, slots).reshape(rows, length, self.top_k, width), weights)

    def _weigh(self, scores: Array, shares: Array, one_hot: Array) -> None:
        used = one_hot.sum(2).mean((0, 1)) / self.top_k
        balance = self.experts * (used * shares.mean((0, 1))).sum()
        z = jnp.square(jax.nn.logsumexp(scores, -1)).mean()
        self.auxiliary.set_value(self.balance * balance + self.router_z * z)

    def _slots(self, chosen: Array, one_hot: Array, length: int) -> tuple[Array, int]:
        """Return the slot of each choice, and the slots per expert; a dropped choice has a slot beyond all experts'."""
        room = length
        if self.capacity is not None and not self.dropless:
            room = min(length, -int(-self.capacity * one_hot.shape[1] // self.experts))
        before = ((jnp.cumsum(one_hot, 1) - 1) * one_hot).sum(-1)
        return jnp.where(before < room, chosen * room + before, self.experts * room), room


def _sources(slots: Array, count: int, top_k: int) -> Array:
    """Return the token of each slot; empty slots have token 0, whose result is not read."""
    tokens = jnp.arange(slots.shape[1]) // top_k
    return jax.vmap(lambda slots: jnp.zeros_like(tokens, shape=count).at[slots].set(tokens, mode="drop"))(slots)


def _at(x: Array, places: Array) -> Array:
    """Return the rows of x at `places`, with zeros beyond the end."""
    return jnp.take_along_axis(x, places[..., None], axis=1, mode="fill", fill_value=0)


# -- by hand --


def exchanged(x: Array, *, back: bool = False) -> Array:
    """Move the slots `x[rows, experts, ...]` to the experts' devices, or `back` to the rows' devices."""
    present = configuration()
    signals = [] if present is None else list(present.signals.values())
    by_axes = {signal.expert: signal for signal in signals if signal.expert}
    if len(by_axes) > 1:
        one, other, *_ = by_axes.values()
        raise JShardError(
            f"{one} splits experts over {'+'.join(one.expert)}, and {other} over {'+'.join(other.expert)}",
            hint="give both the same expert: tokens go to their experts one way",
        )
    for names, signal in by_axes.items():
        rows = tuple(name for name in names if any(name in other.row for other in signals))
        return _exchange(names, rows, signal.name, signal.label("expert"))[back](x)
    return x


@functools.cache
def _exchange(
    names: tuple[str, ...], rows: tuple[str, ...], claim: str, label: str
) -> tuple[Callable[[Array], Array], ...]:
    """Return the exchange and its inverse, each the gradient of the other."""

    def brought(back: bool, axes: Axes) -> Axes:
        first, second = (tuple(name for name in each if name not in names) for each in axes[:2])
        lead = ((*first, *rows), second) if back else (first, (*second, *names))
        return *lead, *axes[2:]

    def plan_rule(back: bool, plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
        value = plan.force(values[0])
        what = f"{value.shape[1]} experts"
        check_divides(value.shape[1], names, plan.mesh, label=label, what=what, otherwise="add experts")
        axes = brought(back, value.axes)
        plan.have(value, axes)
        return [Value(value.shape, axes, value.dtype)], Step()

    def rule(back: bool, run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
        part, (axes,) = run.force(parts[0], step.claim), step.results
        return [Here(part.shape, axes, part.local(axes, frozenset(), lambda _: moving_as(claim=claim, key="expert")))]

    def one_way(back: bool) -> Callable[[Array], Array]:
        there, home = (
            by_hand(lambda x: (x,), HandRule(functools.partial(plan_rule, way), functools.partial(rule, way)))
            for way in (back, not back)
        )
        move = jax.custom_vjp(lambda x: there(x)[0])
        move.defvjp(lambda x: (there(x)[0], None), lambda _, cotangent: (home(cotangent)[0],))
        return move

    return one_way(False), one_way(True)
