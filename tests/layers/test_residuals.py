"""What a chunk of layers keeps of a microbatch for its backward, what that makes again, and what is left for a second half."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.layers.partition.halves import Place
from jshard.layers.pipeline.residuals import Chunk
from jshard.programs.jaxprs import equations

near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
TABLE = np.linspace(-1, 1, 7).astype(np.float32)


@functools.partial(jax.checkpoint, prevent_cse=False)
def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


@functools.partial(jax.checkpoint, prevent_cse=False)
def again(x, w):
    return jax.nn.sigmoid(x) @ w


@jax.jit
def shifted(x, shift):
    return x * jnp.exp(shift)


def run(own, edges, given, number, x):
    """Each of what goes in has something of its own made of it, which the backward needs."""
    by_own = sum(n * jnp.sin(each) for n, each in enumerate(own))
    y, z = again(x["y"], by_own), x["z"] * jnp.tanh(jnp.cumsum(edges[0]))
    z = dropped(z * TABLE[:3], jax.random.fold_in(jax.random.key(0), number))
    return {"y": jnp.exp2(y) * jnp.cos(given["scale"]) + x["y"], "z": shifted(z, given["shift"]) + y * x["z"]}


def made():
    draw = np.random.default_rng(0)
    of = lambda *shape: draw.normal(size=shape).astype(np.float32)
    x = {"y": of(5, 3), "z": of(5, 3)}
    return [[of(3, 3) for _ in range(3)], [of(3)], {"scale": of(3), "shift": of(5, 1)}, np.int32(2), x]


def buffers(types):
    """Two places for each array, of which the second is used."""
    return jax.tree.map(lambda x: Place(jnp.zeros((2, *x.shape), x.dtype), jnp.int32(1)), types)


def filled(places, arrays):
    return jax.tree.map(lambda place, x: Place(x, place.number), places, arrays)


def stepped(chunk, args, by_y):
    """Forward and backward, as a pipeline runs them: by the places of what is kept and left, or by what is made again."""
    before, count = args[:-1], 1 + bool(chunk.reads[1] or chunk.left)
    if chunk.recomputes:
        y, kept = chunk.again(0, args)
        each = [kept, *(chunk.again(1, args)[1] for _ in range(count - 1))]
    else:
        places = buffers(chunk.kept)
        y, kept = chunk.forward(args, places)
        each = [filled(places, kept)] * count
    into = buffers(chunk.left)
    gradients, left = chunk.backward(0, before, each[0], by_y, into if chunk.left else None)
    if count == 1:
        return y, gradients
    late, _ = chunk.backward(1, before, each[1], by_y, filled(into, left) if chunk.left else None)
    is_none = lambda x: x is None
    one, other = (jax.tree.leaves(each, is_none) for each in (gradients, late))
    assert [x is None for x in one] == [x is not None for x in other]
    return y, jax.tree.map(lambda one, other: other if one is None else one, gradients, late, is_leaf=is_none)


@functools.cache
def whole():
    own, edges, given, number, x = made()
    by_y = jax.tree.map(np.cos, x)
    f = lambda x, own, edges: run(own, edges, given, number, x)
    y, pull = jax.vjp(f, x, own, edges)
    return by_y, jax.tree.map(np.asarray, (y, pull(by_y)))


SAID = ("shares", "splits", "recomputes")
CASES = {  # what is said; how much is kept, of that for parameters, and left for them; what the program makes in all
    "at once": ([], 6, 0, 0, {"sin": 6, "logistic": 2, "tanh": 2, "cumsum": 2, "dot_general": 3, "random_bits": 2}),
    "in two halves": (
        ["splits"], 6, 1, 1, {"sin": 6, "logistic": 3, "tanh": 2, "cumsum": 2, "dot_general": 3, "random_bits": 2},
    ),
    "made again": (
        ["recomputes"], 14, 0, 0, {"sin": 3, "logistic": 2, "tanh": 1, "cumsum": 1, "dot_general": 3, "random_bits": 2},
    ),
    "in two halves, with what all stages have": (
        ["shares", "splits"], 6, 2, 2, {"sin": 6, "logistic": 3, "tanh": 3, "cumsum": 4, "dot_general": 3, "random_bits": 2},
    ),
    "made again for each half": (
        # JAX 0.11 reads one array fewer for parameters
        SAID, *((15, 12) if jax.__version_info__ >= (0, 11) else (16, 13)), 0,
        {"sin": 6, "logistic": 4, "tanh": 2, "cumsum": 3, "dot_general": 4, "random_bits": 3},
    ),
}  # fmt: skip


@pytest.mark.quick("made again", "made again for each half")
@pytest.mark.parametrize("case", CASES)
def test_a_backward_has_what_is_made_of_the_microbatch_and_makes_the_rest_again(case):
    said, *counts, operations = CASES[case]
    args, (by_y, expected) = made(), whole()
    chunk = Chunk(run, args, **{word: word in said for word in SAID})
    late = {*chunk._numbers(chunk.reads[1])}  # what the gradients of parameters read of what is kept
    assert [len(jax.tree.leaves(each)) for each in (chunk.kept, list(late), chunk.left)] == counts
    step = lambda args, by_y: stepped(chunk, args, by_y)
    counted = Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(args, by_y)))
    assert {name: counted[name] for name in operations} == operations
    y, gradients = jax.jit(step)(args, by_y)
    jax.tree.map(near, (y, gradients), (expected[0], expected[1][: 2 + ("shares" in said)]))


def test_a_function_that_layers_call_is_called_forward_still():
    args = made()
    chunk = Chunk(run, args, **dict.fromkeys(SAID, False))
    program = jax.make_jaxpr(lambda *args: chunk.forward(args, buffers(chunk.kept)))(*args)
    assert [eqn.params.get("name") for eqn in equations(program)].count("shifted") == 1


def looped(own, edges, given, number, x):
    return {**x, "y": jax.lax.scan(lambda y, w: (jnp.sin(y @ w), None), x["y"], jnp.stack(own))[0]}


RESULTS = {  # what is said, and how many results the loops have: forward, or those that make again, and backward
    "at once": ([], [3, 2]),
    "in two halves": (["splits"], [3, 2, 1]),
    "made again": (["splits", "recomputes"], [2, 3, 1, 2]),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_loop_makes_nothing_that_nobody_reads(case):
    said, results = RESULTS[case]
    args, (by_y, _) = made(), whole()
    chunk = Chunk(looped, args, **{word: word in said for word in SAID})
    program = jax.make_jaxpr(lambda args, by_y: stepped(chunk, args, by_y))(args, by_y)
    assert [len(eqn.outvars) for eqn in equations(program) if eqn.primitive.name == "scan"] == results
