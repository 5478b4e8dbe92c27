"""What is equal on all devices of a mesh axis, and used in parts only: its gradient is not gathered."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.layers.partition.planner import Planner
from jshard.layers.partition.run import Run
from jshard.layers.partition.unreduced import Ran, unreduced
from jshard.layers.partition.value import Later, Value

MOVES = ("all_gather", "all_to_all", "permute", "reduce_scatter")
ROWS = np.random.default_rng(0).normal(size=(8, 16, 16)).astype(np.float32)
CLAIMS = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor", "sequence": "tensor", "match": ["**/up/**"]},
    "down": {"row": "data", "reduction": "tensor", "sequence": "tensor", "match": ["**/down/**"]},
    "rest": {"row": "data", "match": ["**"]},
}


class Mlp(nnx.Module):
    """A residual block, whose rows of words `sequence` splits."""

    def __init__(self, rngs):
        self.norm, self.up, self.down = (
            nnx.LayerNorm(16, rngs=rngs),
            nnx.Linear(16, 32, rngs=rngs),
            nnx.Linear(32, 16, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Embedded(nnx.Module):
    """Whisper's encoder: a convolution, which needs its neighbours, and what is added for each place, in front of the
    first residual."""

    def __init__(self, rngs):
        self.conv, self.mlp = nnx.Conv(16, 16, 3, rngs=rngs), Mlp(rngs)
        self.places = nnx.Embed(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.mlp(jax.nn.gelu(self.conv(x)) + self.places(jnp.arange(16)))


class Recurrent(nnx.Module):
    """canvit: words behind registers, and once more with a word that the first call left."""

    def __init__(self, rngs):
        self.embed, self.mlp = nnx.Linear(16, 16, rngs=rngs), Mlp(rngs)
        self.first = nnx.Param(jax.random.normal(rngs.params(), (1, 4, 16)))

    def __call__(self, x):
        first = jnp.broadcast_to(self.first[...], (8, 4, 16))
        for at in range(2):
            words = self.mlp(jnp.concatenate([first, self.embed(x[:, 8 * at : 8 * at + 8])], 1))
            first = jnp.concatenate([words[:, :1], first[:, 1:]], 1)
        return words


class Normalized(nnx.Module):
    """heal-swin: what a layer without a claim makes, normalized behind it, and its input once more further on."""

    def __init__(self, rngs):
        self.embed, self.mix, self.mlp = nnx.Conv(4, 16, 1, rngs=rngs), nnx.Conv(16, 16, 1, rngs=rngs), Mlp(rngs)
        self.norm = nnx.LayerNorm(16, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return self.mlp(x + self.norm(self.mix(x))) + x


class Beside(nnx.Module):
    """What a convolution makes of rows with `features`, times numbers of each place, is added to what `sequence` has split."""

    def __init__(self, features, times, rngs):
        self.conv, self.mlp, self.times = nnx.Conv(features, 16, 1, rngs=rngs), Mlp(rngs), times

    def __call__(self, x):
        one, other = self.both(x)
        return one + other

    def both(self, x):
        y = jnp.sin(self.conv(x))
        y = y * jnp.cos(jnp.arange(256.0)).reshape(16, 16) if self.times else y
        return self.mlp(jnp.broadcast_to(jnp.arange(16.0), (8, 16, 16))), y


SCATTER = {("reduce_scatter", "forward", "sequence"): 1, ("all_gather", "backward", "sequence"): 1}
GATHER = {("all_gather", "forward", "sequence"): 1, ("reduce_scatter", "backward", "sequence"): 1}


@pytest.mark.seconds
@pytest.mark.parametrize(("model", "moves"), [
    (Embedded, SCATTER), (Recurrent, dict.fromkeys(SCATTER, 2)), (Normalized, SCATTER | GATHER),
])  # fmt: skip
def test_gradients_of_what_is_used_in_parts_are_not_gathered(model, moves):
    made, rows = model(nnx.Rngs(0)), ROWS[..., :4] if model is Normalized else ROWS
    loss = lambda model, x: jnp.square(model(x)).mean()
    alone = nnx.value_and_grad(loss)(made, rows)
    jshard.load(CLAIMS)
    sharded = jshard.shard(loss)
    sharded(made, rows)  # the parameters are where they rest
    step = nnx.value_and_grad(sharded)
    got = nnx.jit(step)(made, rows)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * float(np.abs(one).max()))
    assert moved(step, made, rows) == moves


def moved(step, *args):
    found = collections.Counter()
    for line in jshard.explain(lambda *args: step(*args), *args):
        if line.collective in MOVES:
            found[line.collective, line.phase, line.cause.key] += line.count
    return found


@pytest.mark.parametrize(("features", "times", "is_gathered"), [
    (4, False, False),  # the sums of rows, kernel and bias are 592 numbers, and a gather is 1,024
    (6, True, False),  # 880: numbers have no gradient
    (8, False, True),  # 1,168
])  # fmt: skip
def test_a_gradient_is_gathered_where_the_sums_in_its_place_have_more_on_the_wire(features, times, is_gathered):
    jshard.load(CLAIMS)
    made, rows = Beside(features, times, nnx.Rngs(0)), ROWS[..., :features]
    sharded = jshard.shard(lambda model, x: jnp.square(model(x)).mean())
    sharded(made, rows)
    found = moved(nnx.value_and_grad(sharded), made, rows)
    assert sum(count for (collective, *_), count in found.items() if collective == "all_gather") == 1 + is_gathered


def test_what_is_handed_on_whole_as_well_is_the_same_everywhere():
    made, rows = Beside(4, False, nnx.Rngs(0)), ROWS[..., :4]

    def both(model, x):
        one, other = model.both(x)
        return one + other, other

    jshard.unload()
    alone = both(made, rows)
    jshard.load(CLAIMS)
    for one, other in zip(alone, nnx.jit(jshard.shard(both))(made, rows), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


class Sum(nnx.Module):
    """A layer that no signal splits, and one whose columns are split, which what the first makes is added to."""

    def __init__(self, rngs):
        self.embed, self.up = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(4, 16, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(self.embed(x)) + self.up(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", [{}, {"column": "tensor"}, {"column": "tensor", "sequence": "tensor"}])
@pytest.mark.parametrize("is_placed", [False, True])
def test_a_program_is_planned_twice_and_traced_once(words, is_placed, monkeypatch):
    """Planned to find where parameters lie, and as it runs on them."""
    seen = collections.Counter()

    def counted(cls):
        equation = cls.equation

        def count(self, eqn, *args):
            seen[cls] += eqn.primitive.name == "sin"
            return equation(self, eqn, *args)

        monkeypatch.setattr(cls, "equation", count)

    counted(Planner)
    counted(Run)
    made, rows = Sum(nnx.Rngs(0)), ROWS[..., :4]
    loss = lambda model, x: jnp.square(model(x)).mean()
    jshard.unload()
    alone = loss(made, rows), nnx.value_and_grad(loss)(made, rows)
    jshard.load(
        {"jshard": CLAIMS["jshard"], "up": {"row": "data", **words, "match": ["up/**"]}, "rest": CLAIMS["rest"]}
    )
    sharded = jshard.shard(loss)
    step = nnx.value_and_grad(sharded)
    value = sharded(made, rows) if is_placed else alone[0]
    got = value, nnx.jit(step)(made, rows)
    assert seen == {Planner: 2, Run: 1}
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * float(np.abs(one).max()))
    sharded(made, rows)  # the parameters are where they rest
    assert not moved(step, made, rows)


def part(size, *axes, dtype=np.float32, **more):
    return Value((size,), (axes,), np.dtype(dtype), **more)


def number(size):
    return Later((size,), ((),), np.dtype(np.float32), lambda axes, names: None)


SIZES, OVER = {"data": 2, "tensor": 4}, frozenset({"tensor"})
BESIDE = {  # what is made of two rows and of these costs 8 numbers, where both vary
    "a parameter, summed over rows anyway": [part(4)],
    "a stored parameter": [part(2).stored((("data",),))],
    "what is made of numbers": [part(4), number(9)],
    "integers": [part(4), part(9, dtype=np.int32)],
}


def marked(size, beside=(), *, rows=(), first=(), used=None, ends=(), needed=(), opaque=False, sizes=SIZES):
    """What varies where `size` numbers are made of rows and of what is beside them, and added to what is split; `needed` is
    how the sum, or another use, takes them too."""
    x, y, z = part(2), part(size, "data"), part(size, "data", "tensor")
    cut = [(y, z.axes, OVER)]
    moves = [(y, (axes,), OVER) for axes in needed]
    steps = [*first, Ran("made", not opaque, [x, *beside], [y], [(x, (("tensor",),), OVER)] * opaque)]
    if used is not None:
        steps.append(Ran("used", not moves, [y], [used], moves))
    steps.append(Ran("added", True, [y, part(size, "data", "tensor")], [z], cut + moves))
    found = unreduced(steps, [x, *rows], [z, *ends], sizes)
    return {key: {at: set(over) for at, over in each.items()} for key, each in found.items()}


BOTH = {"made": {0: OVER}, "added": {0: OVER}}


@pytest.mark.parametrize("case", BESIDE)
def test_what_saves_a_number_varies(case):
    assert marked(18, BESIDE[case]) == BOTH
    assert marked(16, BESIDE[case]) == {}


def test_what_saves_a_number_varies_behind_what_is_made_of_parameters_alone():
    made = part(4)
    first = [Ran("sin", True, [part(4)], [made], [])]
    assert marked(18, [made], first=first) == BOTH
    assert marked(16, [made], first=first) == {}


def test_rows_that_are_used_whole_as_well_do_not_vary():
    x = part(2)
    assert marked(18, [x], rows=[x], ends=[x]) == BOTH
    assert marked(16, [x], rows=[x], ends=[x]) == {}


def test_nothing_varies_over_one_device():
    assert marked(80, [part(4)], sizes={"data": 2, "tensor": 1}) == {}
    assert marked(80, [part(4)], sizes={"data": 2, "tensor": 2}) == BOTH


def test_what_is_used_whole_does_not_vary():
    whole, split = part(80, "data"), part(80, "data", "tensor")
    assert marked(80, used=split) == BOTH | {"used": {0: OVER}}
    assert marked(80, used=whole, ends=[whole]) == {}


def test_a_loop_takes_what_varies_where_it_cuts_it():
    split = part(80, "data", "tensor")
    assert marked(80, used=split, needed=[("tensor",)]) == BOTH | {"used": {0: OVER}}
    assert marked(80, used=split, needed=[("data",)]) == {}


def test_each_way_in_which_it_is_needed_counts_once():
    assert marked(6, needed=[("tensor",)] * 2) == BOTH  # 2 x 3 numbers, of which 4 are lost
    assert marked(4, needed=[("tensor",)] * 2) == {}
    # what is needed whole counts twice: to sum it saves 3 numbers, to sum what it is made of 4, or 3
    assert marked(6, [part(1)], needed=[("data",)] * 2) == BOTH
    assert marked(6, [part(2)], needed=[("data",)] * 2) == {"added": {0: OVER}}


@pytest.mark.parametrize(("size", "saves"), [(4, True), (5, False)])
def test_what_is_needed_whole_counts_twice(size, saves):
    x, u, v, z = part(2), part(6, "data"), part(6, "data"), part(6, "data", "tensor")
    steps = [
        Ran("made", True, [x, part(size)], [u], []),  # to sum these costs 4 numbers and `size` more
        Ran("used", True, [u], [v], [(u, (("data",),), OVER)]),  # 2 x 3 numbers
        Ran("added", True, [v, part(6, "data", "tensor")], [z], [(v, z.axes, OVER)]),  # 3
    ]
    assert [*unreduced(steps, [x], [z], SIZES)] == (["made", "used", "added"] if saves else [])


def test_what_a_loop_makes_is_summed_behind_it():
    assert marked(6, needed=[("tensor",), ("tensor", "data")], opaque=True) == BOTH
    assert marked(4, needed=[("tensor",), ("tensor", "data")], opaque=True) == {}
