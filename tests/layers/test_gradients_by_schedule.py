"""`jshard.value_and_grad` under `jshard.pipeline` against `nnx.value_and_grad` of the whole batch on one device: all numbers are
whole, or halves, so that both are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from tests.support.drawn import drawn

WIDTH, ROWS, MICROBATCHES = 8, 16, 4
pytestmark = [pytest.mark.usefixtures("nothing_loaded"), pytest.mark.seconds]


def whole(key, shape, dtype):
    return jax.random.randint(key, shape, -1, 2).astype(dtype)


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=whole, rngs=rngs)

    def __call__(self, x):
        return x + jax.nn.relu(self.up(x))


class Stacked(nnx.Module):
    """Equal layers in a stack, between two of their own."""

    def __init__(self, *, rngs):
        self.first, self.last = Layer(rngs=rngs), Layer(rngs=rngs)
        self.blocks = jshard.stack(Layer, 2, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.last(self.blocks(self.first(x)))


class Numbered(nnx.Module):
    """Layers whose signals number their stages."""

    def __init__(self, *, rngs):
        self.one, self.two = Layer(rngs=rngs), Layer(rngs=rngs)

    def __call__(self, x):
        return self.two(self.one(x))


class Head(nnx.Module):
    """A model on no stage."""

    def __init__(self, *, rngs):
        self.out = nnx.Linear(WIDTH, 4, use_bias=False, kernel_init=whole, rngs=rngs)
        self.scale = nnx.BatchStat(jnp.full((4,), 2.0))

    def __call__(self, x):
        return self.out(x) * self.scale[...]


STAGES = {
    Stacked: {"blocks": {"stage": "equal", "match": ["blocks/**"]}, "up": {"row": "data", "column": "tensor", "match": ["blocks/up/**"]}},
    Numbered: {
        "one": {"stage": 0, "row": "data", "match": ["**/one/**", "one/**"]},
        "two": {"stage": 1, "row": "data", "match": ["**/two/**", "two/**"]},
    },
}  # fmt: skip


def load(kind, schedule="1f1b", tensor=1):
    pipeline = {"axis": "stage", "schedule": schedule}
    mesh = {"stage": 2, "data": 2, "tensor": tensor}
    rest = {"rest": {"row": "data", "match": ["**"]}}
    jshard.load(
        {
            "jshard": {"mesh": mesh, "pipeline": pipeline, "train": {"microbatches": MICROBATCHES}},
            **STAGES[kind],
            **rest,
        }
    )


def batch():
    rng = np.random.default_rng(0)
    return rng.integers(-2, 3, (ROWS, WIDTH)).astype("float32"), rng.integers(0, 2, (ROWS, WIDTH)).astype("float32")


def loss(model, x, y):
    out = model(x)
    return jnp.mean(out * y)


def with_aux(model, x, y):
    out = model(x)
    # the derivative of the root is infinite
    root = jnp.sqrt(jnp.mean(jnp.square(out * 0)))
    metrics = {
        "right": jnp.mean(out > y),
        "root": root,
        "columns": (jnp.mean(out, 0), jnp.mean(x, 0).astype("bfloat16")),
    }
    return jnp.mean(out * y), metrics


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("kind", [Stacked, Numbered])
def test_aux_is_the_mean_over_microbatches_and_adds_no_collective_over_stages(kind, schedule):
    x, y = batch()
    expected = nnx.value_and_grad(with_aux, has_aux=True)(drawn(kind), x, y)
    load(kind, schedule)
    model = jshard.shard(drawn(kind), x)
    beside = jshard.value_and_grad(with_aux, has_aux=True)
    for call in (nnx.jit(beside), jshard.jit(beside), beside):
        equal(call(model, x, y=y), expected)
    sums = []
    for f in (jshard.value_and_grad(loss), beside):
        lines = [line for line in jshard.explain(f, model, x, y) if line.axis == "stage"]
        sums.append(([(line.collective, line.count) for line in lines], [line.payload for line in lines]))
    (counts, alone), (same, wide) = sums
    assert counts == same and sum(a != b for a, b in zip(alone, wide, strict=True)) == (1 if kind is Stacked else 2)


def by_model(head, model, x):
    out = head(model(x))
    return jnp.mean(out), {"columns": jnp.mean(out, 0)}


def by_dict(x, y, *, theta):
    """A tree of a name of its own, with a whole number in it, and one that is no argument of a microbatch."""
    out = x
    for layer in (theta["one"], theta["two"]):
        out = out + jax.nn.relu(out @ layer["kernel"])
    return jnp.mean(out * y) * theta["scale"]


def by_linen(variables, x):
    out = x
    for layer in variables["params"].values():
        out = out + jax.nn.relu(out @ layer["kernel"])
    return jnp.mean(out + variables["statistics"])


def two_trees(one, two, model, x):
    """Two trees, and a model on no stage that is not differentiated."""
    out = jax.nn.relu(x @ one["one"]["kernel"]) @ two["two"]["kernel"]
    return jnp.mean(model(out))


def kernels(**more):
    rng = np.random.default_rng(1)
    return {
        name: {"kernel": jnp.asarray(rng.integers(-1, 2, (WIDTH, WIDTH)), jnp.float32)} for name in ("one", "two")
    } | more


class Counter(nnx.Module):
    def __init__(self, *, rngs):
        self.calls, self.scale = nnx.BatchStat(jnp.zeros(())), nnx.Param(jnp.full((WIDTH,), 2.0))

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.scale[...]


ARGUMENTS = {
    "two models, one in a stack": (Stacked, by_model, lambda: ([drawn(Head), drawn(Stacked), batch()[0]], {}), {"argnums": (0, 1), "has_aux": True}),
    "two models, one on numbered stages": (Numbered, by_model, lambda: ([drawn(Head), drawn(Numbered), batch()[0]], {}), {"argnums": (1, 0), "has_aux": True}),
    "the model on no stage": (Stacked, by_model, lambda: ([drawn(Head), drawn(Stacked), batch()[0]], {}), {"has_aux": True}),
    "the model on no numbered stage": (Numbered, by_model, lambda: ([drawn(Head), drawn(Numbered), batch()[0]], {}), {"has_aux": True}),
    "a dict by keyword": (Numbered, by_dict, lambda: ([*batch()], {"theta": kernels(scale=jnp.float32(2))}), {"argnums": 2}),
    "Linen variables": (Numbered, by_linen, lambda: ([{"params": kernels(), "statistics": jnp.ones(WIDTH)}, batch()[0]], {}), {}),
    "two trees and a model": (Numbered, two_trees, lambda: ([{"one": kernels()["one"]}, {"two": kernels()["two"]}, drawn(Head), batch()[0]], {}), {"argnums": (0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_each_argument_has_its_gradients(case):
    kind, f, given, how = ARGUMENTS[case]
    args, kwargs = given()
    flat = [*args, *kwargs.values()]
    positional = lambda *xs: f(*xs[: len(args)], **dict(zip(kwargs, xs[len(args) :], strict=True)))
    expected = nnx.value_and_grad(positional, **how)(*flat)
    load(kind)
    args, kwargs = given()
    differentiated = jshard.value_and_grad(f, **how)
    for call in (jshard.jit(differentiated), differentiated):
        found = call(*args, **kwargs)
        equal(found, expected)
    split = [x for x in jax.tree.leaves(found[1]) if "stage" in str(x.sharding.spec)]
    assert bool(split) == ("no" not in case.split()), "gradients of what is on stages lie split over them"


def test_leaves_that_have_no_gradient_are_none_and_functions_are_handed_on():
    def f(theta, x, act):
        return jnp.mean(act(x @ theta["one"]["kernel"]) @ theta["two"]["kernel"]) * theta["steps"]

    x, _ = batch()
    value, expected = jax.value_and_grad(lambda theta: f({**theta, "steps": 2}, x, jax.nn.relu))(kernels())
    load(Numbered)
    found = jshard.value_and_grad(f)(kernels(steps=jnp.int32(2)), x, jax.nn.relu)
    equal(found, (value, {**expected, "steps": None}))


def test_wrt_selects_of_each_model_and_the_variables_of_others_are_carried():
    def f(model, head, counter, x):
        return jnp.mean(head(counter(model(x))))

    x, _ = batch()
    wrt = nnx.All(nnx.Param, nnx.PathContains("first"))
    how = {"argnums": (0, 1), "wrt": wrt}
    both = nnx.value_and_grad(f, argnums=(nnx.DiffState(0, wrt), nnx.DiffState(1, wrt)))
    expected = both(drawn(Stacked), drawn(Head), drawn(Counter), x)
    load(Stacked)
    model, counter = drawn(Stacked), drawn(Counter)
    found = jshard.jit(jshard.value_and_grad(f, **how))(model, drawn(Head), counter, x)
    equal(found, expected)
    assert counter.calls[...] == model.calls[...] == MICROBATCHES


def of_aux(aux):
    return lambda model, x, y: (loss(model, x, y), aux(model(x)))


MEAN = "jshard.pipeline (<dict>) takes the mean of aux over microbatches, and aux"
OTHERWISE = "; return its mean over rows, or compute it by another call"
BY = "jshard.value_and_grad by jshard.pipeline (<dict>) differentiates by parameters, and "
WRONG = {
    "a count": (of_aux(lambda out: {"n": jnp.sum(out > 0)}), {"has_aux": True}, f"{MEAN}['n'] is an array of int32{OTHERWISE}"),
    "a word": (of_aux(lambda out: ["word"]), {"has_aux": True}, f"{MEAN}[0] is a str{OTHERWISE}"),
    "rows": (of_aux(lambda out: out), {"has_aux": True}, f"{MEAN} has shape (4, 8) of a microbatch and (16, 8) of all rows{OTHERWISE}"),
    "rows and columns in one": (of_aux(jnp.ravel), {"has_aux": True}, f"{MEAN} has shape (32,) of a microbatch and (128,) of all rows{OTHERWISE}"),
    "a batch": (loss, {"argnums": (0, 1)}, f'{BY}is given an array of shape (16, 8); differentiate by a tree, as {{"scale": array}}'),
    "statistics": (loss, {"wrt": nnx.Variable}, f"{BY}wrt=Variable selects other variables of Stacked; write wrt=nnx.Param, or remove jshard.pipeline"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_microbatches_do_not_give_is_one_sentence(fault):
    f, how, sentence = WRONG[fault]
    load(Stacked)
    with pytest.raises(JShardError) as told:
        jshard.value_and_grad(f, **how)(drawn(Stacked), *batch())
    assert str(told.value) == sentence
