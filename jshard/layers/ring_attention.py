"""Attention over rows split by places: keys and values go around a ring of devices, or heads are exchanged (ulysses).

Axes: b rows, q and s places of queries and of keys, h heads, k key heads, g heads per key head, d the size of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from jshard.errors import JShardError
from jshard.layers import ring as on_device
from jshard.layers.partition.by_hand import HandRule, by_hand
from jshard.layers.partition.local_sizes import local_shape
from jshard.layers.partition.part import Here, Part, here_of, moving_as, names_of, vary
from jshard.layers.partition.plan import Step
from jshard.layers.partition.planner import Planned, Planner
from jshard.layers.partition.run import Run
from jshard.layers.partition.value import Value, values_of
from jshard.layers.ring import Form as Form
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn
from jshard.programs.provenance import scope


@functools.lru_cache(maxsize=256)
def ring_attention(form: Form) -> Callable[..., Array]:
    """Return attention as a function `f(q, k, v, segments)`, with at most a single array in
    `segments`. Saved are q, k, v, the result and the logs of the softmax's denominators."""
    forward = by_hand(
        functools.partial(on_device.forward, form),
        HandRule(_plan_forward, *(functools.partial(each, form) for each in (_forward_rule, _sent))),
    )
    backward = by_hand(
        functools.partial(on_device.backward, form), HandRule(_plan_backward, functools.partial(_backward_rule, form))
    )

    @jax.custom_vjp
    def attention(q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> Array:
        return forward(q, k, v, *segments)[0]

    def fwd(q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> Any:
        out, *kept = forward(q, k, v, *segments)
        return out, kept

    def bwd(kept: tuple[Any, ...], cotangent: Array) -> Any:
        return *backward(*kept, cotangent), tuple(None for _ in kept[5:])

    attention.defvjp(fwd, bwd)
    return attention


# -- the rules of the partition --


@dataclasses.dataclass(frozen=True)
class _Split:
    """The mesh axes of a call's queries and keys: of rows, places, query heads and key heads."""

    rows: tuple[str, ...]
    places: tuple[str, ...]
    heads: tuple[str, ...]
    key_heads: tuple[str, ...]

    @property
    def q(self) -> Axes:
        return self.rows, self.places, self.heads, ()

    @property
    def k(self) -> Axes:
        return self.rows, self.places, self.key_heads, ()

    @property
    def names(self) -> frozenset[str]:
        return names_of(self.q)

    @property
    def exchanged(self) -> _Split:
        """The split with whole places, and heads over the mesh axes of places too."""
        return _Split(self.rows, (), (*self.heads, *self.places), (*self.key_heads, *self.places))


def _split(q: Part | Value, k: Part | Value, sizes: Mapping[str, int]) -> _Split:
    ways = math.prod(sizes[name] for name in q.axes[2])
    if not k.shape[2] % ways:
        heads = key_heads = q.axes[2]
    elif q.axes[2][: len(k.axes[2])] == k.axes[2] and k.shape[2] == math.prod(sizes[n] for n in k.axes[2]):
        heads, key_heads = q.axes[2], k.axes[2]  # a key head on each device, replicated within its group
    else:
        heads = key_heads = ()
    return _Split(q.axes[0], q.axes[1] or k.axes[1], heads, key_heads)


def _by_ring(steps: object) -> Any:
    return moving_as(key="ring")


WHOLE_ROWS, RING, ULYSSES = "whole rows", "ring", "ulysses"


def _as_written(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Plan a call with whole rows on each device as the plain program."""
    body = eqn.params["jaxpr"]
    results, inside = plan.program(body, values)
    return results, Step(WHOLE_ROWS, body=body, inside=(inside,))


def _plan_forward(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    split, claim = _split(values[0], values[1], plan.sizes), plan.nearest
    if not split.places:
        return _as_written(plan, eqn, values)
    how = ULYSSES if claim is not None and claim.attention == "ulysses" else RING
    inside = _exchanged(plan, split, values) if how == ULYSSES else split
    axes = inside.q, inside.k, inside.k, *[(inside.rows, inside.places)] * len(values[3:])
    for value, a in zip(values, axes, strict=True):
        plan.have(value, a)
    if how == ULYSSES:
        plan.have(Value(values[0].shape, inside.q, values[0].dtype), split.q)
    return values_of(eqn.outvars, (split.q, inside.q, inside.q[:3], *axes)), Step(how)


def _sent(form: Form, eqn: Eqn, step: Step, sizes: Mapping[str, int]) -> Any:
    """Return the mesh axes of the ring, and the bytes that a device sends: forward for each operand, and backward."""
    places = step.results[0][1] if step.how == RING else ()
    parts = [local_shape(v.aval.shape, a, sizes) for v, a in zip(eqn.invars, step.results[3:], strict=True)]
    q, k, _, *segments = (math.prod(p) * v.aval.dtype.itemsize for p, v in zip(parts, eqn.invars, strict=True))
    devices = math.prod(sizes[name] for name in places)
    ring = on_device.AttentionRing(form, places, parts[0][1], devices)
    return places, *ring.sent(q, k, segments, 4 * math.prod(parts[1]))


def _exchanged(plan: Planner, split: _Split, values: list[Value]) -> _Split:
    ways = math.prod(plan.sizes[name] for name in split.exchanged.heads)
    claim, count = plan.nearest, values[1].shape[2]
    if not count % ways:
        return split.exchanged
    assert claim is not None
    over = "+".join(split.exchanged.heads)
    raise JShardError(
        f"{claim} says attention: ulysses ({claim.at('attention')}), which splits {count} key heads over {over} of size {ways}",
        hint="write attention: ring, or use a mesh axis whose size divides the key heads",
    )


def _forward_rule(form: Form, run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    of_first, *axes = step.results
    inside, split = axes[2:], _split(parts[0], parts[1], run.sizes)
    xs = [part.local(a, frozenset(), _by_ring) for part, a in zip(parts, inside, strict=True)]
    ring = on_device.AttentionRing(form, split.places, xs[0].shape[1])
    with scope(key="ring"):
        if step.how == ULYSSES:
            out, _, logs, *xs = on_device.forward(form, *_varying(xs, names_of(inside[0])))
        else:
            xs = ring.balanced(xs)
            q, k, v, *segments = _varying(xs, split.names)
            out, logs = ring.forward(q, k, v, tuple(segments))
    saved = here_of(eqn.outvars[1:], axes, (out, logs, *xs))
    with scope(key="ring"):
        first = saved[0].local(of_first, frozenset(), _by_ring) if step.how == ULYSSES else ring.in_order(out)
    return [*here_of(eqn.outvars[:1], [of_first], [first]), *saved]


def _plan_backward(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    out, logs, q, k, v, *segments, cotangent = values
    places = q.axes[1] or cotangent.axes[1]
    if not places:
        return _as_written(plan, eqn, values)
    inside = _Split(q.axes[0], q.axes[1], q.axes[2], k.axes[2])
    how, split, cut = RING if q.axes[1] else ULYSSES, inside, -len(places)
    if how == ULYSSES:
        split = _Split(inside.rows, places, inside.heads[:cut], inside.key_heads[:cut])
    plan.have(cotangent, inside.q)
    gradients = zip((q, k, k), (split.q, split.k, split.k), strict=True)
    return [Value(value.shape, axes, value.dtype) for value, axes in gradients], Step(how)


def _backward_rule(form: Form, run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    *kept, cotangent = parts
    out, logs, q, k, v, *segments = (run.array(part, step.claim) for part in kept)
    of_q, of_k, _ = step.results
    names = names_of(of_q)
    with scope(key="ring"):
        if step.how == RING:
            ring = on_device.AttentionRing(form, of_q[1], q.x.shape[1])
            ct = ring.balanced(cotangent.local(of_q, frozenset(), _by_ring))
            mine, ours = _varying([q.x, k.x, v.x], names), tuple(_varying([s.x for s in segments], names))
            gradients = ring.backward(mine[0], mine[1], mine[2], ours, logs.x, on_device.delta(out.x, ct), ct)
            gradients = ring.in_order([x.astype(q.x.dtype) for x in gradients])
        else:
            ct = cotangent.local(q.axes, frozenset(), _by_ring)
            varying = _varying([s.x for s in segments], names_of(q.axes))
            gradients = on_device.backward(form, out.x, logs.x, q.x, k.x, v.x, *varying, ct)
            inner = zip((q, k, v), gradients, step.results, strict=True)
            gradients = [Here(p.shape, p.axes, x).local(axes, frozenset(), _by_ring) for p, x, axes in inner]
        missing = tuple(sorted(names - names_of(of_k)))
        dq, *of_keys = gradients
        of_keys = [run.reduce(x, missing, "sum", step.claim) if missing else x for x in of_keys]
    return [Here(q.shape, of_q, dq), *(Here(k.shape, of_k, x) for x in of_keys)]


def _varying(xs: list[Array], names: frozenset[str]) -> list[Array]:
    return [vary(x, names) for x in xs]
