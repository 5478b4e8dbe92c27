"""Models that name mesh axes in their code: built and run while a configuration is loaded, whose claims place them."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jshard
from jshard.errors import JShardError
from tests.support import cases

MESH = {"mesh": {"data": 2, "tensor": 4}}
CLAIMS = {
    "jshard": MESH,
    "up": {"row": "data", "column": "tensor", "match": ["up/**"]},
    "rest": {"row": "data", "match": ["**"]},
}
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def flax_own_setting():
    """Tunix switches this off for the whole process, where a test before has imported it."""
    with nnx.use_eager_sharding(True):
        yield


def annotated(init, *names):
    return nnx.with_partitioning(init, names)


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, use_bias=False, kernel_init=annotated(init, None, "model"), rngs=rngs)
        self.down = nnx.Linear(32, 8, use_bias=False, kernel_init=annotated(init, "model", None), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class AnnotatedLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = linen.Dense(32, use_bias=False, name="up", kernel_init=linen.with_partitioning(init, (None, "model")))
        down = linen.Dense(
            8, use_bias=False, name="down", kernel_init=linen.with_logical_partitioning(init, ("model", None))
        )
        return down(linen.relu(up(x)))


class Named(nnx.Module):
    def __init__(self, name, rngs, **words):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, name), **words)
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("name", ["mlp", "tensor"])
def test_an_annotated_model_is_built_by_a_word_at_its_annotation(name):
    """Flax refuses plain construction before jshard is called; the metadata of other variables stays as it is."""
    jshard.unload()
    before = Named(name, nnx.Rngs(0), eager_sharding=False)
    jshard.load({"jshard": MESH, "all": {"column": "tensor", "match": ["**"]}})
    with pytest.raises(ValueError, match="An auto mesh context or metadata is required"):
        Named(name, nnx.Rngs(0))
    with pytest.raises(JShardError) as told:
        jshard.jit(lambda x: Named(name, nnx.Rngs(0))(x))(X)
    line = inspect.getsourcelines(Named)[1] + 3
    assert str(told.value) == (
        f"tests/layers/test_annotations.py:{line} annotates a parameter, and Flax looks for mesh axes of these names when it is "
        "built; write nnx.with_partitioning(..., eager_sharding=False): claims place it"
    )
    plain = Named(name, nnx.Rngs(0), eager_sharding=False)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(before), nnx.state(plain))
    assert plain.up.bias.get_metadata() == nnx.Linear(1, 1, rngs=nnx.Rngs(0)).bias.get_metadata()
    expected = np.asarray(plain(X))
    created = jshard.create(Named, name, nnx.Rngs(0))
    call = jshard.jit(lambda model, x: model(x))
    for f, model in ((call, created), (jshard.shard(plain, X), None)):
        given = (X,) if model is None else (model, X)
        np.testing.assert_allclose(f(*given), expected, rtol=1e-5, atol=1e-6)
        rows = {each.parameter: each.cells()[-1] for each in jshard.explain(f, *given).claims}
        assert rows == {"up/bias": "", "up/kernel": f"annotated (None, '{name}') in the model"}
        cases.assert_lies((model or plain).up.kernel[...], jax.P(None, "tensor"))


@pytest.mark.quick("nnx-auto")
@pytest.mark.parametrize("types", ["explicit", "auto"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_annotations_of_a_model_are_told_and_claims_place_it(kind, types):
    def alone(params, x):
        return jnp.square(nnx.relu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]).mean()

    jshard.load({**CLAIMS, "jshard": {**MESH, "axis_types": types}})
    if kind == "nnx":
        with nnx.use_eager_sharding(False):  # Flax would look for a mesh that has an axis "model"
            model = Annotated(nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(model))
        f, differentiated = jshard.shard(lambda model, x: jnp.square(model(x)).mean()), nnx.value_and_grad
        f.place(model, X)
    else:
        module = jshard.shard(AnnotatedLinen())
        model = module.init(jax.random.key(0), X)["params"]
        params = linen.unbox(model)
        f, differentiated = (
            jshard.shard(lambda params, x: jnp.square(module.apply({"params": params}, x)).mean()),
            jax.value_and_grad,
        )
    value, gradients = (nnx.jit if kind == "nnx" else jax.jit)(differentiated(f))(model, X)
    expected = jax.value_and_grad(alone)(jax.tree.map(np.asarray, params), X)
    found = nnx.to_pure_dict(gradients) if kind == "nnx" else linen.unbox(gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (value, found), expected)
    cases.assert_lies(found["up"]["kernel"], jax.P(None, "tensor"))
    rows = {each.parameter: each.cells()[-1] for each in jshard.explain(f, model, X).claims}
    assert rows == {
        "up/kernel": "annotated (None, 'model') in the model", "down/kernel": "annotated ('model', None) in the model",
    }  # fmt: skip
