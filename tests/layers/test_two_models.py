"""Two models in one function: globs may begin with the name of an argument, and layers of the same names are kept apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jshard
from jshard.errors import JShardError

X, Y = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
GEN = {"row": "data", "column": "tensor", "match": ["G/**"]}
DISC = {"row": "data", "store": "data", "match": ["D/**"]}


def config(axis_types="explicit", **signals):
    return {"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **signals}


class Net(nnx.Module):
    """A network whose layer has the name of the other's."""

    def __init__(self, seed):
        self.up = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.up(x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(16, use_bias=False, name="up")(x)


def nnx_models():
    return Net(0), Net(1)


def linen_models():
    return tuple(LinenNet().init(jax.random.key(seed), X) for seed in (0, 1))


def trees():
    return tuple({"up": {"kernel": np.asarray(net.up.kernel)}} for net in nnx_models())


def applied(model, x):
    if isinstance(model, nnx.Module):
        return model(x)
    kernel = model.get("params", model)["up"]["kernel"]
    return x @ kernel


def loss(G, D, x):
    return (applied(D, jnp.tanh(applied(G, x))) ** 2).mean()


KINDS = {"nnx": nnx_models, "linen": linen_models, "trees": trees}


def kernels(*found):
    """The kernel in each model or gradient."""
    return [jax.tree.leaves(nnx.state(each) if isinstance(each, nnx.Module) else each)[0] for each in found]


def axes(x):
    return jshard.Layout.of(x).axes


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_an_argument_leads_the_globs_of_its_model(kind, axis_types):
    jshard.unload()
    value, gradients = jshard.value_and_grad(loss, argnums=(0, 1))(*KINDS[kind](), X)
    jshard.load(config(axis_types, gen=GEN, disc=DISC))

    @jshard.jit
    def step(G, D, x):
        return (*jshard.value_and_grad(loss, argnums=(0, 1))(G, D, x), G, D)

    given = KINDS[kind]()
    told, found, *models = step(*given, X)
    np.testing.assert_allclose(told, value, rtol=1e-5)
    for one, other in zip(kernels(*found), kernels(*gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    lies = [axes(each) for each in kernels(*(given if kind == "nnx" else models))]
    assert lies == [((), ("tensor",)), (("data",), ())]
    assert [axes(each) for each in kernels(*found)] == lies
    rows = {each.parameter: (each.signal, each.in_use, each.at_rest) for each in jshard.explain(step, *given, X).claims}
    assert rows == {
        "G/up/kernel": ("gen", ("", "tensor"), ("", "tensor")),
        "D/up/kernel": ("disc", ("", ""), ("data", "")),
    }


def test_layers_of_one_name_lie_as_their_own_model_uses_them():
    """One claim for both, and other roles: `column` is the last axis of one kernel and the first of the other."""
    jshard.load(config(both={"row": "data", "column": "tensor", "match": ["up"]}))
    placed = jshard.shard(lambda G, D, x: ((x @ G["up"]) @ D["up"].T).sum(), parameters=("G", "D")).place(
        {"up": jnp.ones((16, 8))}, {"up": jnp.ones((32, 8))}, X
    )
    assert [each["up"].sharding.spec for each in placed] == [jax.P(None, "tensor"), jax.P("tensor", None)]


def test_a_function_of_one_of_the_models_leaves_the_globs_of_the_other():
    jshard.load(config(gen=GEN, disc=DISC))
    G, D = map(jshard.shard, nnx_models())
    sample = jshard.shard(lambda G, x: applied(G, x))
    sample(G, X)
    assert G.up.kernel[...].sharding.spec == jax.P(None, "tensor")
    jshard.shard(loss)(G, D, X)
    assert D.up.kernel[...].sharding.spec == jax.P("data", None)


def test_a_glob_of_a_part_of_a_model_and_of_an_argument_fits_both():
    jshard.load(config(gen=GEN, disc={**DISC, "match": ["D/**", "!D/G/**"]}))
    G, D = {"up": jnp.ones((16, 16))}, {"G": jnp.ones((16, 16)), "out": jnp.ones((16, 16))}
    f = jshard.shard(lambda G, D, x: (x @ G["up"] @ D["G"] @ D["out"]).sum(), parameters=("G", "D"))
    lies = jax.tree.map(lambda x: x.sharding.spec, f.place(G, D, X))
    assert lies == ({"up": jax.P(None, "tensor")}, {"G": jax.P(None, "tensor"), "out": jax.P("data", None)})


WRONG = {
    "a part": ({"gen": {**GEN, "match": ["G/upp/**"]}, "disc": DISC}, 'has match "G/upp/**", which fits no parameter; did you mean "G/up/**"?'),
    "a name": ({"gen": GEN, "disc": {**DISC, "match": ["Disc/**"]}}, 'has match "Disc/**", which fits no parameter; '),
    "unclaimed": ({"gen": GEN}, 'claims 1 of 2 parameters: "D/up/kernel"; '),
    "both": ({"gen": GEN, "disc": {**DISC, "match": ["up/**"]}}, 'parameter "G/up/kernel" is claimed by signal "gen"'),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_claim_that_is_wrong_is_told_with_the_name_of_the_argument(case):
    signals, sentence = WRONG[case]
    jshard.load(config(**signals))
    with pytest.raises(JShardError) as told:
        jshard.value_and_grad(loss, argnums=(0, 1))(*nnx_models(), X)
    assert sentence in str(told.value)


def test_a_model_whose_globs_no_name_mends_is_refused_at_once():
    jshard.load(config(gen={**GEN, "match": ["upp/**"]}))
    with pytest.raises(JShardError, match='which fits no parameter; did you mean "up/'):
        jshard.shard(Net(0))


def test_an_array_that_is_an_argument_is_a_parameter_of_its_name():
    jshard.load(config(gen={"row": "data", "column": "tensor", "match": ["theta"]}))
    f = jshard.shard(lambda theta, x: (x @ theta).sum(), parameters="theta")
    theta = f.place(np.ones((16, 16), np.float32), X)
    assert theta.sharding.spec == jax.P(None, "tensor")
    np.testing.assert_allclose(f(theta, X), X.sum() * 16, rtol=1e-4)
