"""Attention over rows that are split by places: keys and values go around a ring of devices, or heads are exchanged.

Axes: b rows, q and s places of queries and of keys, h heads, k key heads, g heads that share one, d the size of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.kernels.collectives import axis_index, axis_size, permute, pvary
from jshard.layers.partition.by_hand import HandRule, by_hand
from jshard.layers.partition.part import Part, moving_as, names_of, vary
from jshard.layers.partition.plan import Step
from jshard.layers.partition.planner import Planned, Planner
from jshard.layers.partition.run import Run
from jshard.layers.partition.value import Value
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn
from jshard.programs.provenance import scope

LOWEST = -1e30  # of what is not seen: a row of such has no NaN
QUERIES = 512  # as many are multiplied with keys at a time, at most


@dataclasses.dataclass(frozen=True)
class Form:
    """What a query sees, and what products are multiplied by."""

    causal: bool
    window: int | None
    scale: float

    @property
    def of_the_past(self) -> Form:
        """Of keys that all lie before the queries."""
        return Form(False, None, self.scale)


@functools.lru_cache(maxsize=256)
def ring_attention(form: Form) -> Callable[..., Array]:
    """Return `f(q, k, v, segments)`, `segments` being a tuple of one array or none. Its backward pass keeps q, k, v, the result
    and the logs of the softmax's denominators."""
    forward = by_hand(
        functools.partial(_forward, form), HandRule(_plan_forward, functools.partial(_forward_rule, form))
    )
    backward = by_hand(
        functools.partial(_backward, form), HandRule(_plan_backward, functools.partial(_backward_rule, form))
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


# -- on one device --


def _forward(form: Form, q: Array, k: Array, v: Array, *segments: Array) -> Any:
    """Return the result, and what the backward pass keeps: the result, logs of denominators, q, k, v, segments."""
    here = jnp.arange(q.shape[1])
    state = _see(form, (q, here, segments), (k, v, here, segments), _nothing_seen(q, k))
    out, logs = _finish(state, q.dtype)
    return out, out, logs, q, k, v, *segments


def _backward(form: Form, out: Array, logs: Array, q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, ...]:
    *segments, cotangent = rest
    here, segments = jnp.arange(q.shape[1]), tuple(segments)
    asked = q, cotangent, logs, _delta(out, cotangent), here, segments
    return tuple(x.astype(q.dtype) for x in _unsee(form, asked, (k, v, here, segments)))


def _nothing_seen(q: Array, k: Array) -> Any:
    """Sums, largest scores and denominators of queries that have seen no key."""
    b, s, h, d = q.shape
    shape = b, s, k.shape[2], h // k.shape[2]
    return jnp.zeros((*shape, d)), jnp.full(shape, LOWEST), jnp.zeros(shape)


def _finish(state: tuple[Any, ...], dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    sums, largest, total = state
    b, s, k, g, d = sums.shape
    out = (sums / total[..., None]).astype(dtype).reshape(b, s, k * g, d)
    return out, (largest + jnp.log(total)).reshape(b, s, k * g)


def _delta(out: Array, cotangent: Array) -> Array:
    return jnp.einsum("bqhd,bqhd->bqh", out, cotangent, preferred_element_type=jnp.float32)


def _seen(form: Form, queries: Any, keys: Any) -> Array:
    """Which keys each query sees, b q 1 1 s."""
    (places, segments), (their_places, their_segments) = queries, keys
    apart = (places[:, None] - their_places)[None]
    seen = jnp.ones_like(apart, bool) if not form.causal else apart >= 0
    if form.window is not None:
        seen &= jnp.abs(apart) < form.window
    for ours, theirs in zip(segments, their_segments, strict=True):
        seen = seen & (ours[:, :, None] == theirs[:, None])
    return seen[:, :, None, None]


def _scores(form: Form, q: Array, k: Array) -> Array:
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    return jnp.einsum("bqkgd,bskd->bqkgs", q, k, preferred_element_type=jnp.float32) * form.scale


def _see(form: Form, queries: object, keys: tuple[Any, ...], state: object) -> Any:
    """Let queries see some more keys (online softmax), some queries at a time."""
    k, v, *where = keys

    def some(each: tuple[Any, ...]) -> Any:
        (q, *places), (sums, largest, total) = each
        seen = _seen(form, places, where)
        scores = jnp.where(seen, _scores(form, q, k), LOWEST)
        now = jnp.maximum(largest, scores.max(-1))
        weights, fade = jnp.where(seen, jnp.exp(scores - now[..., None]), 0), jnp.exp(largest - now)
        added = jnp.einsum("bqkgs,bskd->bqkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return sums * fade[..., None] + added, now, total * fade + weights.sum(-1)

    return jax.tree.map(_joined, lax.map(some, jax.tree.map(_in_chunks, (queries, state))))


def _unsee(form: Form, asked: tuple[Any, ...], keys: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """Return what queries and keys that saw each other add to the gradients of q, k and v, in float32."""
    k, v, *where = keys

    def some(each: tuple[Any, ...]) -> Any:
        q, cotangent, logs, delta, *places = each
        shape = *q.shape[:2], k.shape[2], -1
        cotangent = cotangent.reshape(*shape, q.shape[3])
        seen = _seen(form, places, where)
        weights = jnp.where(seen, jnp.exp(_scores(form, q, k) - logs.reshape(shape)[..., None]), 0)
        of_weights = jnp.einsum("bqkgd,bskd->bqkgs", cotangent, v, preferred_element_type=jnp.float32)
        of_scores = (weights * (of_weights - delta.reshape(shape)[..., None]) * form.scale).astype(q.dtype)
        dq = jnp.einsum("bqkgs,bskd->bqkgd", of_scores, k, preferred_element_type=jnp.float32)
        grouped = q.reshape(cotangent.shape)
        dk = jnp.einsum("bqkgs,bqkgd->bskd", of_scores, grouped, preferred_element_type=jnp.float32)
        dv = jnp.einsum("bqkgs,bqkgd->bskd", weights.astype(v.dtype), cotangent, preferred_element_type=jnp.float32)
        return dq.reshape(q.shape), dk, dv

    def add(sums: object, each: tuple[Any, ...]) -> Any:
        dq, *more = some(each)
        return jax.tree.map(jnp.add, sums, tuple(more)), dq

    zero = pvary(jnp.zeros(k.shape), tuple(sorted(jax.typeof(asked[0]).mat.varying | jax.typeof(k).mat.varying)))
    (dk, dv), dq = lax.scan(add, (zero, zero), jax.tree.map(_in_chunks, asked))
    return _joined(dq), dk, dv


def _in_chunks(x: Array) -> Array:
    """Cut the axis of queries: axis 1, or of places by themselves axis 0."""
    axis = min(x.ndim - 1, 1)
    length = x.shape[axis]
    count = next(n for n in itertools.count(-(-length // QUERIES)) if not length % n)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, length // count, *x.shape[axis + 1 :]), axis, 0)


def _joined(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# -- around the ring, inside shard_map --


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The devices along mesh axes that split places. Causal queries see fewer keys the earlier they are: each device takes
    one piece of a row from the front and one as far from its end, so that all have equal work."""

    form: Form
    names: tuple[str, ...]
    length: int  # of one device's part

    @property
    def size(self) -> int:
        return axis_size(self.names)

    @property
    def is_balanced(self) -> bool:
        return self.form.causal and self.form.window is None and not self.length % 2 and bool(self.hops)

    @property
    def hops(self) -> int:
        """How many other parts of keys a query may see."""
        if self.form.causal and self.form.window is not None:
            return min(self.size - 1, -(-(self.form.window - 1) // self.length))
        return self.size - 1

    def hop(self, tree: object, by: int = 1) -> Any:
        return jax.tree.map(lambda x: permute(x, self.names, shift=by), tree)

    def places(self, device: int | Array) -> Array:
        half = self.length // 2
        if not self.is_balanced:
            return device * self.length + jnp.arange(self.length)
        return jnp.concatenate([each * half + jnp.arange(half) for each in (device, 2 * self.size - 1 - device)])

    def balanced(self, tree: object) -> Any:
        """Of each array two pieces that stand side by side for the two that this device has in the ring."""
        return jax.tree.map(self._balanced, tree) if self.is_balanced else tree

    def in_order(self, tree: object) -> Any:
        return jax.tree.map(self._in_order, tree) if self.is_balanced else tree

    def _pairs(self, piece: int) -> list[tuple[int, int]]:
        """Of the first or second piece of each device: where it is in the ring."""
        numbers = ((device, 2 * device + piece) for device in range(self.size))
        return [(device, n if n < self.size else 2 * self.size - 1 - n) for device, n in numbers]

    def _balanced(self, x: Array) -> Array:
        even, odd = (permute(each, self.names, pairs=self._pairs(n)) for n, each in enumerate(jnp.split(x, 2, 1)))
        is_odd = axis_index(self.names) % 2
        return jnp.concatenate([jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)], 1)

    def _in_order(self, x: Array) -> Array:
        first, second = jnp.split(x, 2, 1)
        is_odd = axis_index(self.names) % 2
        pieces = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
        back = [[(target, source) for source, target in self._pairs(n)] for n in (0, 1)]
        return jnp.concatenate([permute(x, self.names, pairs=pairs) for x, pairs in zip(pieces, back, strict=True)], 1)

    def forward(self, q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> tuple[Array, Array]:
        def meet(form: Form, queries: tuple[Any, ...], keys: tuple[Any, ...], state: tuple[Any, ...]) -> Any:
            return _see(form, queries, keys, state), ()

        state, _ = self._around(meet, (q,), (k, v), segments, _nothing_seen(q, k))
        return _finish(state, q.dtype)

    def backward(self, q: Array, k: Array, v: Array, segments: Any, logs: Array, delta: Array, cotangent: Array) -> Any:
        def meet(form: Form, asked: tuple[Any, ...], keys: tuple[Any, ...], dq: Any) -> Any:
            more, *of_keys = _unsee(form, asked, keys)
            return more if dq is None else dq + more, tuple(of_keys)

        dq, of_keys = self._around(meet, (q, cotangent, logs, delta), (k, v), segments, None)
        return dq, *of_keys

    def _around(self, meet: Callable[..., Any], asked: Any, given: Any, segments: Any, state: Any) -> tuple[Any, Any]:
        """Let queries meet all keys that they see, while these go around: `meet(form, queries, keys, state)` returns the state
        of queries, and what is added up for keys, which goes with them and comes home."""
        me = axis_index(self.names)
        here = self.places(me)

        def turn(number: int | Array, keys: Any, state: tuple[Any, ...]) -> tuple[Any, Any]:
            given, theirs = keys
            if not self.is_balanced:
                there = self.places((me - number) % self.size)
                return meet(self.form, (*asked, here, segments), (*given, there, theirs), state)
            # Of the four pairs of pieces two are seen: the late queries see the early keys, and either both early pieces or
            # both late ones meet.
            earlier, form, no = number <= me, self.form.of_the_past, here[: len(here) // 2]
            queries, keys, (early, late) = _halves((asked, segments)), _halves(keys), _halves(state)

            def past(queries: tuple[Any, ...], keys: tuple[Any, ...], state: object) -> tuple[Any, Any]:
                (asked, ours), (given, theirs) = queries, keys
                return meet(form, (*asked, no, ours), (*given, no, theirs), state)

            late, of_early = past(queries[1], keys[0], late)
            met, of_met = past(_either(earlier, *queries), _either(earlier, *keys), _either(earlier, early, late))
            nothing = jax.tree.map(jnp.zeros_like, of_met)
            of_early = jax.tree.map(jnp.add, of_early, _either(earlier, of_met, nothing))
            both = _side_by_side(of_early, _either(earlier, nothing, of_met))
            return _side_by_side(_either(earlier, met, early), _either(earlier, late, met)), both

        def hopping(carry: tuple[Any, ...], number: int | Array) -> Any:
            keys, of_keys, state = carry
            after = self.hop(keys)  # on their way while these are multiplied
            state, more = turn(number, keys, state)
            return (after, self.hop(jax.tree.map(jnp.add, of_keys, more)), state), None

        keys = given, segments
        after = self.hop(keys) if self.hops else keys
        state, of_keys = meet(self.form, (*asked, here, segments), (*given, here, segments), state)
        if not self.hops:
            return state, of_keys
        carry = after, self.hop(of_keys), state
        (after, of_keys, state), _ = lax.scan(hopping, carry, jnp.arange(1, self.hops))
        state, more = turn(self.hops, after, state)
        return state, self.hop(jax.tree.map(jnp.add, of_keys, more), -self.hops)  # home


def _halves(tree: object) -> tuple[Any, Any]:
    return tuple(jax.tree.map(lambda x, n=n: jnp.split(x, 2, 1)[n], tree) for n in (0, 1))  # type: ignore[return-value]  # two


def _side_by_side(one: object, other: object) -> Any:
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), one, other)


def _either(first: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.where(first, *x), one, other)


# -- the rules of the partition --


@dataclasses.dataclass(frozen=True)
class _Split:
    """How queries and keys of one call are split: rows, places, heads of queries and of keys."""

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
        """Heads over the mesh axes of places too, which are whole."""
        return _Split(self.rows, (), (*self.heads, *self.places), (*self.key_heads, *self.places))


def _split(q: Part | Value, k: Part | Value, sizes: Mapping[str, int]) -> _Split:
    ways = math.prod(sizes[name] for name in q.axes[2])
    if not k.shape[2] % ways:
        heads = key_heads = q.axes[2]
    elif q.axes[2][: len(k.axes[2])] == k.axes[2] and k.shape[2] == math.prod(sizes[n] for n in k.axes[2]):
        heads, key_heads = q.axes[2], k.axes[2]  # one key head on each device, which others of its group have too
    else:
        heads = key_heads = ()
    return _Split(q.axes[0], q.axes[1] or k.axes[1], heads, key_heads)


def _by_ring(steps: object) -> Any:
    return moving_as(key="ring")


WHOLE_ROWS, RING, ULYSSES = "whole rows", "ring", "ulysses"


def _as_written(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Plan a call whose rows are whole on each device as its own program."""
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
    made = zip(eqn.outvars, (split.q, inside.q, inside.q[:3], *axes), strict=True)
    return [Value(tuple(v.aval.shape), a, v.aval.dtype) for v, a in made], Step(how)


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
    ring = _Ring(form, split.places, xs[0].shape[1])
    with scope(key="ring"):
        if step.how == ULYSSES:
            out, _, logs, *xs = _forward(form, *_varying(xs, names_of(inside[0])))
        else:
            xs = ring.balanced(xs)
            q, k, v, *segments = _varying(xs, split.names)
            out, logs = ring.forward(q, k, v, tuple(segments))
    shape, *shapes = (tuple(variable.aval.shape) for variable in eqn.outvars)
    found = [Part(shape, a, x) for shape, a, x in zip(shapes, axes, (out, logs, *xs), strict=True)]
    with scope(key="ring"):
        first = found[0].local(of_first, frozenset(), _by_ring) if step.how == ULYSSES else ring.in_order(out)
    return [Part(shape, of_first, first), *found]


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
    made = zip((q, k, k), (split.q, split.k, split.k), strict=True)
    return [Value(value.shape, axes, value.dtype) for value, axes in made], Step(how)


def _backward_rule(form: Form, run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    out, logs, q, k, v, *segments, cotangent = parts
    of_q, of_k, _ = step.results
    names = names_of(of_q)
    with scope(key="ring"):
        if step.how == RING:
            ring = _Ring(form, of_q[1], q.x.shape[1])
            ct = ring.balanced(cotangent.local(of_q, frozenset(), _by_ring))
            mine, ours = _varying([q.x, k.x, v.x], names), tuple(_varying([s.x for s in segments], names))
            found = ring.backward(mine[0], mine[1], mine[2], ours, logs.x, _delta(out.x, ct), ct)
            found = ring.in_order([x.astype(q.x.dtype) for x in found])
        else:
            ct = cotangent.local(q.axes, frozenset(), _by_ring)
            varying = _varying([s.x for s in segments], names_of(q.axes))
            found = _backward(form, out.x, logs.x, q.x, k.x, v.x, *varying, ct)
            inner = zip((q, k, v), found, step.results, strict=True)
            found = [Part(p.shape, p.axes, x).local(axes, frozenset(), _by_ring) for p, x, axes in inner]
        missing = tuple(sorted(names - names_of(of_k)))
        dq, *of_keys = found
        of_keys = [run.reduce(x, missing, "sum", step.claim) if missing else x for x in of_keys]
    return [Part(q.shape, of_q, dq), *(Part(k.shape, of_k, x) for x in of_keys)]


def _varying(xs: list[Array], names: frozenset[str]) -> list[Array]:
    return [vary(x, names) for x in xs]
