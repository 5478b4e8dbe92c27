"""Attention of queries to keys in pieces, on a device or around a ring of devices.

Axes: b rows, q and s places of queries and of keys, h heads, k key heads, g heads per key head, d the size of a head.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels.collectives import axis_index, axis_size, permute, pvary
from jshard.programs.jaxprs import Tree

LOWEST = -1e30  # the score of an unseen key; finite, so that a row without seen keys has no NaN
QUERIES = 512  # the most queries multiplied with keys at a time


@dataclasses.dataclass(frozen=True)
class Form:
    """The mask of attention, causal or a window, and the scale of the scores."""

    causal: bool
    window: int | None
    scale: float

    @property
    def of_the_past(self) -> Form:
        """The form for keys that are all before the queries."""
        return Form(False, None, self.scale)


# -- on one device --


def forward(form: Form, q: Array, k: Array, v: Array, *segments: Array) -> Any:
    """Return the result, and the saved values: the result, logs of denominators, q, k, v, segments."""
    here = jnp.arange(q.shape[1])
    state = _see(form, (q, here, segments), (k, v, here, segments), _nothing_seen(q, k))
    out, logs = _finish(state, q.dtype)
    return out, out, logs, q, k, v, *segments


def backward(form: Form, out: Array, logs: Array, q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, ...]:
    *segments, cotangent = rest
    here, segments = jnp.arange(q.shape[1]), tuple(segments)
    asked = q, cotangent, logs, delta(out, cotangent), here, segments
    return tuple(x.astype(q.dtype) for x in _unsee(form, asked, (k, v, here, segments)))


def _nothing_seen(q: Array, k: Array) -> Any:
    """Return the initial state of queries: sums, largest scores and denominators."""
    b, s, h, d = q.shape
    shape = b, s, k.shape[2], h // k.shape[2]
    return jnp.zeros((*shape, d)), jnp.full(shape, LOWEST), jnp.zeros(shape)


def _finish(state: tuple[Any, ...], dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    sums, largest, total = state
    b, s, k, g, d = sums.shape
    out = (sums / total[..., None]).astype(dtype).reshape(b, s, k * g, d)
    return out, (largest + jnp.log(total)).reshape(b, s, k * g)


def delta(out: Array, cotangent: Array) -> Array:
    return jnp.einsum("bqhd,bqhd->bqh", out, cotangent, preferred_element_type=jnp.float32)


def _seen(form: Form, queries: Any, keys: Any) -> Array:
    """Return the mask of seen keys for each query, b q 1 1 s."""
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


@jax.jit
def jshard_largest_seen(largest: Array, scores: Array) -> Array:
    """Return each query's largest score so far. It keeps exp in range and cancels, so `jshard verify` replaces it by 0."""
    return jnp.maximum(largest, scores.max(-1))


def _see(form: Form, queries: object, keys: tuple[Any, ...], state: object) -> Any:
    """Update the state of queries by more keys (online softmax), a chunk of queries at a time."""
    k, v, *where = keys

    def of_chunk(chunk: tuple[Any, ...]) -> Any:
        (q, *places), (sums, largest, total) = chunk
        seen = _seen(form, places, where)
        scores = jnp.where(seen, _scores(form, q, k), LOWEST)
        now = jshard_largest_seen(largest, scores)
        weights, fade = jnp.where(seen, jnp.exp(scores - now[..., None]), 0), jnp.exp(largest - now)
        added = jnp.einsum("bqkgs,bskd->bqkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return sums * fade[..., None] + added, now, total * fade + weights.sum(-1)

    return jax.tree.map(_joined, lax.map(of_chunk, jax.tree.map(_in_chunks, (queries, state))))


def _unsee(form: Form, asked: tuple[Any, ...], keys: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """Return the shares of these queries and keys in the gradients of q, k and v, in float32."""
    k, v, *where = keys

    def of_chunk(chunk: tuple[Any, ...]) -> Any:
        q, cotangent, logs, delta, *places = chunk
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

    def add(sums: object, chunk: tuple[Any, ...]) -> Any:
        dq, *more = of_chunk(chunk)
        return jax.tree.map(jnp.add, sums, tuple(more)), dq

    zero = pvary(jnp.zeros(k.shape), tuple(sorted(jax.typeof(asked[0]).mat.varying | jax.typeof(k).mat.varying)))
    (dk, dv), dq = lax.scan(add, (zero, zero), jax.tree.map(_in_chunks, asked))
    return _joined(dq), dk, dv


def _in_chunks(x: Array) -> Array:
    """Split the axis of queries into chunks: axis 1, or axis 0 of a vector of places."""
    axis = min(x.ndim - 1, 1)
    length = x.shape[axis]
    count = next(n for n in itertools.count(-(-length // QUERIES)) if not length % n)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, length // count, *x.shape[axis + 1 :]), axis, 0)


def _joined(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# -- around the ring, inside shard_map --


@dataclasses.dataclass(frozen=True)
class AttentionRing:
    """The ring of devices along mesh axes that split places. Early causal queries see fewer keys.
    Each device takes a half-shard from the front of a row and another at equal distance from its
    end (zig-zag order), so that all devices have equal work."""

    form: Form
    names: tuple[str, ...]
    length: int  # of a device's shard
    devices: int = 0  # along `names`; 0 inside shard_map, where the mesh has the number

    @property
    def size(self) -> int:
        return self.devices or axis_size(self.names)

    @property
    def is_balanced(self) -> bool:
        return self.form.causal and self.form.window is None and not self.length % 2 and bool(self.hops)

    @property
    def hops(self) -> int:
        """The number of other shards of keys that a query may see."""
        if self.form.causal and self.form.window is not None:
            return min(self.size - 1, -(-(self.form.window - 1) // self.length))
        return self.size - 1

    def sent(self, q: int, k: int, segments: Sequence[int], wide: int) -> Any:
        """Return the bytes that a device sends forward for each of q, k, v and segments, and backward for all.

        Arguments are the bytes of each part; `wide` those of the gradient of k, until it is home."""
        twice, hops = 2 * self.is_balanced, self.hops
        forward = [twice * q, *((twice // 2 + hops) * each for each in (k, k, *segments))]
        home = 2 * (hops + 1) * wide if hops else 0
        return forward, twice * (q + k) + hops * (2 * k + sum(segments)) + home

    def hop(self, tree: object, by: int = 1) -> Any:
        return jax.tree.map(lambda x: permute(x, self.names, shift=by), tree)

    def places(self, device: int | Array) -> Array:
        half = self.length // 2
        if not self.is_balanced:
            return device * self.length + jnp.arange(self.length)
        return jnp.concatenate([piece * half + jnp.arange(half) for piece in (device, 2 * self.size - 1 - device)])

    def balanced(self, tree: object) -> Any:
        """Exchange half-shards into zig-zag order, so that all devices have equal work."""
        return jax.tree.map(self._balanced, tree) if self.is_balanced else tree

    def in_order(self, tree: object) -> Any:
        return jax.tree.map(self._in_order, tree) if self.is_balanced else tree

    def _pairs(self, piece: int) -> list[tuple[int, int]]:
        """Return the source and target devices of the first or second half-shards in the exchange."""
        numbers = ((device, 2 * device + piece) for device in range(self.size))
        return [(device, n if n < self.size else 2 * self.size - 1 - n) for device, n in numbers]

    def _balanced(self, x: Array) -> Array:
        even, odd = (permute(half, self.names, pairs=self._pairs(n)) for n, half in enumerate(jnp.split(x, 2, 1)))
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

    def _around(self, meet: Callable[..., Any], asked: Any, given: Tree, segments: Any, state: Tree) -> tuple[Any, Any]:
        """Pass the keys around the ring, and call `meet(form, queries, keys, state)` on every shard
        that queries may see. `meet` returns the state of the queries, and the sums for the keys,
        which travel with the keys and return home."""
        me = axis_index(self.names)
        here = self.places(me)

        def turn(number: int | Array, keys: Any, state: tuple[Any, ...]) -> tuple[Any, Any]:
            given, theirs = keys
            if not self.is_balanced:
                there = self.places((me - number) % self.size)
                return meet(self.form, (*asked, here, segments), (*given, there, theirs), state)
            # Only two of the four pairs of half-shards are needed: late queries with early keys, and either both early
            # halves or both late halves.
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
            after = self.hop(keys)  # the transfer runs under the products
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
