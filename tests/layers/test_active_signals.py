"""A signal that is active where a plain layer is called claims the parameters of that layer."""

from __future__ import annotations

import collections
import functools
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers.program_claims import active_signals

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 16)).astype(np.float32)
MESH = {"data": 2, "tensor": 4}
SIGNALS = {"layer1": {"row": "data", "column": "tensor"}, "layer2": {"row": "data", "reduction": "tensor"}}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer1"):
            x = nnx.relu(self.up(x))
        with jshard.signal("layer2"):
            return self.down(x)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jshard.signal("layer1"):
            x = nn.relu(nn.Dense(32, name="up")(x))
        with jshard.signal("layer2"):
            return nn.Dense(8, name="down")(x)


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def linen_loss(params, x):
    return jnp.mean(LinenModel().apply({"params": params}, x) ** 2)


def nnx_model():
    return Model(nnx.Rngs(0))


def linen_parameters():
    return LinenModel().init(jax.random.key(0), X)["params"]


def by_path(tree):
    if isinstance(tree, (nnx.Module, nnx.State)):
        return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(tree, nnx.Param))}
    return {f"{layer}/{name}": x for layer, arrays in tree.items() for name, x in arrays.items()}


def load(signals=SIGNALS, axis_types="explicit", **head):
    return jshard.load({"jshard": {"mesh": MESH, "axis_types": axis_types, **head}, **signals})


def linen_model():
    """Build a model that is called as an NNX model is."""
    return functools.partial(LinenModel().apply, {"params": linen_parameters()})


@pytest.mark.quick("linen_model-auto")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("build", [nnx_model, linen_model])
def test_a_plain_layer_under_a_signal_outside_of_jit_and_shard_is_one_sentence(build, axis_types):
    """Nothing is said where layers are built or split, of a signal that splits nothing, and of arrays that are split."""
    load({**SIGNALS, "layer2": {}}, axis_types)
    called = lambda x: model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build()
        if build is nnx_model:
            jshard.create(Model, nnx.Rngs(0))
    text = (
        'signal "layer1" (<dict>) is entered at test_active_signals.py:{}, and the plain layer under it runs whole on every '
        "device; write @jshard.jit above the step, or loss = jshard.shard(loss)"
    )
    line = (Model.__call__ if build is nnx_model else LinenModel.__call__.__wrapped__).__code__.co_firstlineno
    for run in (called, nnx.jit(called), nnx.jit(jax.grad(lambda x: called(x).sum()))):
        with pytest.warns(UserWarning) as found:
            run(X)
        assert [str(each.message) for each in found] == [text.format(line + (1 if build is nnx_model else 2))]
        assert Path(found[0].filename).name == "test_active_signals.py"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load({**SIGNALS, "layer2": {}}, axis_types, mesh={"data": 8, "tensor": 1})  # one column
        called(X)
        load({**SIGNALS, "layer2": {}}, axis_types)
        jshard.explain(called, X)
        jshard.jit(lambda model, x: model(x))(split := nnx_model(), X)
        split(X)
        nnx.jit(lambda model, x: model(x))(split, X)


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize(("build", "loss"), [(nnx_model, nnx_loss), (linen_parameters, linen_loss)])
def test_an_active_signal_claims_the_layers_called_under_it(build, loss, axis_types):
    jshard.unload()
    value, gradients = jax.value_and_grad(loss)(build(), X)
    want = by_path(gradients)
    before = build()
    load(axis_types=axis_types)
    sharded = jshard.shard(loss)
    placed = sharded.place(before, X) if loss is linen_loss else jshard.shard(before, X)
    shapes = {path: x.sharding.shard_shape(x.shape) for path, x in by_path(placed).items()}
    assert shapes == {"up/kernel": (16, 8), "up/bias": (8,), "down/kernel": (8, 8), "down/bias": (8,)}
    got, found = nnx.jit(nnx.value_and_grad(sharded) if loss is nnx_loss else jax.value_and_grad(sharded))(placed, X)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for path, gradient in by_path(found).items():
        np.testing.assert_allclose(gradient, want[path], rtol=1e-4, atol=1e-6, err_msg=path)
        assert gradient.sharding.shard_shape(gradient.shape) == shapes[path]
    ledger = jshard.explain(sharded, placed, X, backward=False)
    over_tensor = [(line.collective, line.signal, line.count) for line in ledger if line.mesh_axes == ("tensor",)]
    assert over_tensor == [("all_reduce", "layer2", 1)]  # columns stay split, and are summed once


def test_the_claims_table_has_the_parameters_of_active_signals():
    load()
    model = jshard.shard(nnx_model(), X)
    rows = {row.parameter: (row.signal, row.in_use) for row in jshard.explain(nnx_loss, model, X).claims}
    assert rows["up/kernel"] == ("layer1", ("", "tensor"))
    assert rows["down/kernel"] == ("layer2", ("tensor", ""))


def sentence(call):
    with pytest.raises(JShardError) as raised:
        call()
    return str(raised.value)


def line_of(text):
    """The first line of this file that has a text."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_active_signals.py:{1 + next(at for at, line in enumerate(lines) if line.strip() == text)}"


def test_a_glob_of_another_signal_is_refused_with_both_lines(tmp_path):
    file = tmp_path / "tp.yaml"
    file.write_text(
        "jshard: {mesh: {data: 2, tensor: 4}}\nlayer1: {row: data, column: tensor}\nlayer2: {row: data}\n"
        'other: {row: data, match: ["down/**"]}\n'
    )
    jshard.load(file)
    line = line_of('with jshard.signal("layer2"):')
    assert sentence(lambda: jshard.shard(nnx_model(), X)) == (
        f'parameters "down/bias" and 1 more are claimed by signal "layer2" ({file}:3) at {line} and by signal "other" '
        f'({file}:4) as "down/**"; make the glob narrower, or use that signal there'
    )


def test_two_stars_claim_what_no_active_signal_does():
    load({"layer1": SIGNALS["layer1"], "layer2": {}, "rest": {"row": "data", "store": "data", "match": ["**"]}})
    model = jshard.shard(Tied(nnx.Rngs(0)), TOKENS)
    assert by_path(model)["up/kernel"].sharding.spec == jax.P(None, "tensor")
    assert by_path(model)["embed/embedding"].sharding.spec == jax.P("data", None)


TOKENS = np.arange(8, dtype=np.int32).reshape(4, 2)


class Tied(nnx.Module):
    """A table that is looked up under one signal, or none, and multiplied by under another."""

    def __init__(self, rngs, *signals):
        self.embed, self.up = nnx.Embed(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.signals = signals

    def __call__(self, tokens):
        lookup, attend = self.signals or (None, None)
        x = under(lookup, self.embed, tokens)
        with jshard.signal("layer1"):
            x = self.up(x)
        return under(attend, self.embed.attend, x)


def under(name, f, x):
    if name is None:
        return f(x)
    with jshard.signal(name):
        return f(x)


def test_a_parameter_under_two_signals_that_differ_is_refused_and_under_two_that_agree_is_not():
    load({**SIGNALS, "same": SIGNALS["layer2"]})
    line = line_of("with jshard.signal(name):")
    assert sentence(lambda: jshard.shard(Tied(nnx.Rngs(0), "layer2", "layer1"), TOKENS)) == (
        f'parameter "embed/embedding" is claimed by signal "layer2" (<dict>) at {line} and by signal "layer1" (<dict>) at '
        f"{line}; use one signal at both"
    )
    model = jshard.shard(Tied(nnx.Rngs(0), "layer2", "same"), TOKENS)
    assert by_path(model)["embed/embedding"].sharding.spec == jax.P("tensor", None)


def test_a_parameter_that_no_signal_claims_is_refused_and_the_default_claims_it():
    load({"layer1": SIGNALS["layer1"], "all": {"row": "data"}})
    hint = 'claim them, or write rest: {match: ["**"]}'
    assert sentence(lambda: jshard.shard(Tied(nnx.Rngs(0)), TOKENS)) == (
        f'no signal of <dict> claims 1 of 3 parameters: "embed/embedding"; {hint}'
    )
    load({"layer1": SIGNALS["layer1"], "all": {"row": "data", "store": "data"}}, default="all")
    assert by_path(jshard.shard(Tied(nnx.Rngs(0)), TOKENS))["embed/embedding"].sharding.spec == jax.P("data", None)


def test_signals_that_split_parameters_and_claim_none_are_refused():
    load()
    assert sentence(lambda: jshard.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), X)) == (
        'no signal of <dict> claims 2 of 2 parameters: "bias", "kernel"; claim them, or write rest: {match: ["**"]}'
    )


def test_the_signal_around_the_whole_call_is_active_in_it():
    load()
    with jshard.signal("layer1"):
        model = jshard.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), X)
    assert model.kernel[...].sharding.spec == jax.P(None, "tensor")


def test_a_program_that_uses_parameters_under_no_signal_takes_the_claims_of_one_that_does():
    load()
    model = jshard.shard(nnx_model(), X)
    total = jshard.shard(lambda model: sum(jnp.sum(p) for p in jax.tree.leaves(nnx.state(model))))(model)
    np.testing.assert_allclose(total, sum(np.sum(x) for x in by_path(nnx_model()).values()), rtol=1e-4)


def test_a_parameter_rests_in_the_dtype_of_the_active_signal():
    load({**SIGNALS, "layer1": {**SIGNALS["layer1"], "dtype": {"param": "bfloat16"}}})
    model = jshard.shard(nnx_model(), X)
    assert {path: str(x.dtype) for path, x in by_path(model).items()} == {
        "up/kernel": "bfloat16", "up/bias": "bfloat16", "down/kernel": "float32", "down/bias": "float32",
    }  # fmt: skip


def cast(w, x):
    w = w.astype(jnp.bfloat16)
    with jshard.signal("a"):
        return x @ w


def looped(w, x):
    def turn(x, w):
        with jshard.signal("a"):
            return x @ w, None

    return jax.lax.scan(jax.checkpoint(turn), x, jnp.stack([w, w]))[0]


def branched(w, x):
    def product(w, x):
        with jshard.signal("a"):
            return x @ w

    return jax.lax.cond(x.sum() > 0, product, lambda w, x: x, w, x)


def until(w, x):
    def product(x):
        with jshard.signal("a"):
            return jax.jit(jnp.matmul)(x, w)

    return jax.lax.while_loop(lambda x: x.sum() < 1, product, x)


def penalized(w, x):
    with jshard.signal("a"):
        x = x @ w
    with jshard.signal("b"):
        return jnp.sum(x) + jnp.sum(w**2)


def scaled(w, x):
    with jshard.signal("a"):
        v = w / jnp.linalg.norm(w)
    return x @ v


def nested(w, x):
    with jshard.signal("b"), jshard.signal("a"):
        return x @ w


@pytest.mark.parametrize("f", [cast, looped, branched, until, penalized, scaled, nested], ids=lambda f: f.__name__)
def test_a_use_is_found_through_casts_loops_and_branches(f):
    load({"a": {}, "b": {}})
    jaxpr = jax.make_jaxpr(f)(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))
    [use, *others] = active_signals(jaxpr, ["w", ""], {}, ())["w"]
    assert (use.names[-1], others) == ("a", [])
    assert use.is_layer == (f is not scaled)


def test_the_gradient_under_a_signal_counts_in_the_same_collectives_as_globs():
    counts = []
    globs = {"layer1": {**SIGNALS["layer1"], "match": ["up/**"]}, "layer2": {**SIGNALS["layer2"], "match": ["down/**"]}}
    for signals in (SIGNALS, globs):
        load(signals)
        model = jshard.shard(nnx_model(), X)
        ledger = jshard.explain(jshard.shard(nnx_loss), model, X)
        counts.append(collections.Counter((e.collective, e.phase, e.mesh_axes, e.count, e.payload) for e in ledger))
    assert counts[0] == counts[1]
