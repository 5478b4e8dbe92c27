"""`jshard.shard` of Linen: its modules, and functions of a tree of parameters."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import jshard
from jshard.errors import JShardError
from jshard.layers.linen import arguments, check_nothing_looks_like_parameters, trees_of_parameters
from jshard.layouts.paths import words_of
from jshard.signals.active_config import configuration
from jshard.signals.scope import unplaced

rng = np.random.default_rng(0)
WIDTH, WORDS = 16, 32
TOKENS = rng.integers(0, WORDS, (8, 4)).astype(np.int32)
IMAGES = rng.normal(size=(8, 4, 4, 2)).astype(np.float32)


class Decoder(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(WORDS, WIDTH, name="embed")
        x = table(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        attention = nn.MultiHeadDotProductAttention(4, decode=self.decode, name="attention")
        x = x + attention(nn.LayerNorm(name="norm")(x), mask=mask)
        x = x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(32, name="up")(x)))
        return table.attend(x)


class Vision(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="norm")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.RNN(nn.LSTMCell(8, name="cell"), name="rnn")(x.mean(1))
        return nn.Dense(4, name="head")(x[:, -1])


MODELS = {"decoder": (Decoder(), TOKENS), "vision": (Vision(), IMAGES)}
COLUMNS = {"decoder": ["attention/{query,key,value}/**", "up/**"], "vision": ["conv/**", "norm/**"]}
SUMS = {"decoder": ["attention/out/**", "down/**", "embed/**"], "vision": ["head/**"]}


def plan(name, model):
    if name != "tensor":
        store = {"store": "data"} if name == "fsdp" else {}
        return {"jshard": {"mesh": {"data": 4}}, "rest": {"row": "data", "match": ["**"], **store}}
    return {
        "jshard": {"mesh": {"data": 2, "tensor": 4}},
        "columns": {"row": "data", "column": "tensor", "match": COLUMNS[model]},
        "sums": {"row": "data", "reduction": "tensor", "match": SUMS[model]},
        "rest": {"row": "data", "match": ["**"]},
    }


def paths(tree):
    return {"/".join(words_of(path)): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def loss_of(module):
    """A batch in a dict, statistics handed back: as one writes it for one device."""

    def loss(params, state, key, batch):
        logits, updated = module.apply(
            {"params": params, **state}, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.mean(logits**2), updated

    return loss


@pytest.fixture(scope="module")
def alone():
    found = {}

    def of(name):
        jshard.unload()
        if name not in found:
            module, x = MODELS[name]
            variables = module.init(jax.random.key(0), x)
            params, state = variables["params"], {key: each for key, each in variables.items() if key != "params"}
            args = params, state, jax.random.PRNGKey(1), {"x": x}
            found[name] = args, jax.device_get(jax.jit(jax.value_and_grad(loss_of(module), has_aux=True))(*args))
        return found[name]

    return of


# The attention, the MLP and the lookup have an all-reduce each, and as many backward; a stored parameter a gather and a scatter,
# and each kernel and scale of the decoder a gather again; of vision, whose loop takes its cell whole, what stands outside of it.
COUNTS = {
    ("decoder", "data"): {}, ("vision", "data"): {},
    ("decoder", "fsdp"): {
        ("all_gather", "forward"): 15, ("all_gather", "backward"): 8, ("reduce_scatter", "backward"): 15,
    },
    ("vision", "fsdp"): {
        ("all_gather", "forward"): 18, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 18,
    },
    ("decoder", "tensor"): {("all_reduce", "forward"): 3, ("all_reduce", "backward"): 3},
}  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["data", "fsdp", "tensor"])
@pytest.mark.parametrize("model", MODELS)
def test_a_function_of_params_equals_one_device(alone, model, name):
    (params, *rest), ((loss, updated), gradients) = alone(model)
    jshard.load(plan(name, model))
    sharded = jshard.shard(loss_of(MODELS[model][0]))
    placed = sharded.place(params, *rest)
    step = jax.value_and_grad(sharded, has_aux=True)
    (got, after), found = jax.jit(step)(placed, *rest)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    jax.tree.map(lambda x, want: np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6), after, updated)
    each = zip(paths(placed).items(), jax.tree.leaves(gradients), jax.tree.leaves(found), strict=True)
    for (path, parameter), want, gradient in each:
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-5 * np.abs(want).max() + 1e-7, err_msg=path)
        assert gradient.sharding == parameter.sharding, path
    counts = collections.Counter()
    for line in jshard.explain(step, placed, *rest):
        if line.payload >= 8 * 4 * WIDTH * 4 // 2 and line.mesh_axes == ("tensor",) or line.collective != "all_reduce":
            counts[line.collective, line.phase] += line.count
        assert line.signal.split("/")[-1] in plan(name, model), line
    assert dict(counts) == COUNTS.get((model, name), counts)


@pytest.mark.seconds
def test_what_a_parameter_is_used_for_tells_how_it_lies(alone):
    for model, wanted in {
        "decoder": {
            "attention/query/kernel": jax.P(None, "tensor", None), "attention/query/bias": jax.P("tensor", None),
            "attention/out/kernel": jax.P("tensor", None, None), "embed/embedding": jax.P("tensor", None),
            "up/kernel": jax.P(None, "tensor"), "norm/scale": jax.P(None),
        },
        "vision": {
            "conv/kernel": jax.P(None, None, None, "tensor"), "conv/bias": jax.P("tensor"),
            "norm/scale": jax.P("tensor"), "head/kernel": jax.P("tensor", None),
        },
    }.items():  # fmt: skip
        args, _ = alone(model)
        jshard.load(plan("tensor", model))
        placed = paths(jshard.shard(loss_of(MODELS[model][0])).place(*args))
        assert {path: placed[path].sharding.spec for path in wanted} == wanted


@pytest.mark.seconds
def test_a_module_makes_its_variables_where_they_rest_and_is_partitioned(alone):
    (params, state, *_), _ = alone("vision")
    want = MODELS["vision"][0].apply({"params": params, **state}, IMAGES, train=False)
    jshard.load(plan("tensor", "vision"))
    module = jshard.shard(Vision())
    assert isinstance(module, Vision) and repr(module) == repr(Vision())
    variables = module.init(jax.random.key(0), IMAGES, train=False)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), variables, {"params": params, **state})
    assert variables["params"]["conv"]["kernel"].sharding.spec == jax.P(None, None, None, "tensor")
    assert variables["batch_stats"]["norm"]["mean"].sharding.spec == jax.P(None)
    np.testing.assert_allclose(module.apply(variables, IMAGES, train=False), want, rtol=1e-5, atol=1e-6)
    _, after = module.apply(freeze(variables), IMAGES, rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats"])
    assert after["batch_stats"]["norm"]["mean"].sharding.spec == jax.P("tensor")


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))


def test_a_module_is_sharded_once_and_its_statistics_are_made_as_in_training():
    jshard.load({"jshard": {"mesh": {"data": 4}}, "rest": {"row": "data", "store": "data", "match": ["**"]}})
    module, x = jshard.shard(jshard.shard(Normed())), IMAGES[:, 0, :, 0]
    assert type(module).__bases__ == (Normed,)
    variables = module.init(jax.random.key(0), x)
    assert variables["params"]["Dense_0"]["kernel"].sharding.spec == jax.P("data", None)
    jax.tree.map(np.testing.assert_array_equal, variables, Normed().init(jax.random.key(0), x))
    for f in (lambda: module.init(jax.random.key(0), x), lambda: module.apply(variables, x, mutable=["batch_stats"])):
        names = jax.make_jaxpr(f)().pretty_print(name_stack=True)
        assert "Normed/Dense_0" in names and "Normed." not in names  # Flax gives nn.nowrap's others a name
    with unplaced(True):
        alone = module.init(jax.random.key(0), x)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(alone)} == {1}


@pytest.mark.seconds
def test_a_cache_of_linen_is_split_as_what_is_written_to_it(alone):
    (params, *_), _ = alone("decoder")
    module = Decoder(decode=True)
    cache = start = module.init(jax.random.key(0), TOKENS)["cache"]
    want = []
    for at in range(3):
        logits, cache = module.apply(
            {"params": params, **({"cache": start} if not at else cache)}, TOKENS[:, at : at + 1], mutable=["cache"]
        )
        want.append(logits)
    jshard.load(plan("tensor", "decoder"))
    sharded = jshard.shard(module)
    variables = {"params": params, "cache": start}
    for at in range(3):
        logits, after = sharded.apply(variables, TOKENS[:, at : at + 1], mutable=["cache"])
        np.testing.assert_allclose(logits, want[at], rtol=1e-5, atol=1e-5)
        variables = {"params": params, **after}
    assert after["cache"]["attention"]["cached_key"].sharding.spec == jax.P("data", None, "tensor", None)


@pytest.mark.seconds
def test_parameters_may_be_abstract(alone):
    (params, *rest), _ = alone("decoder")
    jshard.load(plan("fsdp", "decoder"))
    placed = jshard.shard(loss_of(Decoder())).place(*jax.eval_shape(lambda: (params, *rest)))
    assert isinstance(placed["up"]["kernel"], jax.ShapeDtypeStruct)
    assert placed["up"]["kernel"].sharding.spec == jax.P("data", None)


def test_a_linen_module_in_the_bridge_is_claimed_as_one_of_nnx():
    x = rng.normal(size=(8, WIDTH)).astype(np.float32)

    class Product(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(32, name="up")(x)))

    jshard.unload()
    want = nnx.bridge.ToNNX(Product(), rngs=nnx.Rngs(0)).lazy_init(x)(x)
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "up": {"row": "data", "column": "tensor", "match": ["up/**"]},
                 "down": {"row": "data", "reduction": "tensor", "match": ["down/**"]}})  # fmt: skip
    model = jshard.shard(nnx.bridge.ToNNX(Product(), rngs=nnx.Rngs(0)).lazy_init(x), x)
    np.testing.assert_allclose(model(x), want, rtol=1e-5, atol=1e-6)
    assert model.up["kernel"].sharding.spec == jax.P(None, "tensor")
    assert model.down["kernel"].sharding.spec == jax.P("tensor", None)


def test_what_is_not_called_params_is_a_sentence(alone):
    (params, *_), _ = alone("decoder")
    jshard.load(plan("data", "decoder"))
    with pytest.raises(JShardError) as error:
        jshard.shard(lambda weights, x: Decoder().apply({"params": weights}, x))(params, TOKENS)
    assert str(error.value) == (
        '<lambda> takes a tree of arrays as "weights", and no model or tree of parameters for <dict> to claim; '
        'if "weights" holds the parameters, write jshard.shard(<lambda>, parameters="weights")'
    )


def takes(x, *more, params=None, **others):
    return x


def test_parameters_are_found_by_place_and_by_name():
    tree = {"w": np.ones(2)}
    variables = {"params": tree}
    given = (1, 2, 3, variables), {"params": tree, "batch": variables, "number": 4}
    assert list(trees_of_parameters(arguments(takes, *given))) == ["argument 3", "params", "batch"]


def test_an_argument_by_place_and_a_keyword_of_its_name_are_two():
    def f(x, /, **more):
        return x - more["x"]

    assert list(arguments(f, (1,), {"x": 2})) == ["argument 0", "x"]
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rows": {"row": "data"}})
    x = np.arange(8.0, dtype=np.float32)
    for run in (jshard.shard(f), jshard.jit(f)):
        np.testing.assert_array_equal(run(x, x=2 * x), -x)


class Strange:
    """Nothing tells what it takes."""

    __signature__ = "strange"

    def __call__(self, x):
        return x


NESTED = {"layer": {"w": np.ones(2, np.float32)}}
LOOKS = {  # a function, what it is given, and the name of what looks like parameters
    "by place": (takes, (NESTED,), {}, "x"),
    "one of several": (takes, (1, 2, NESTED), {}, "argument 2"),
    "by name": (takes, (1,), {"weights": NESTED}, "weights"),
    "to C": (min, (NESTED,), {}, "argument 0"),
    "to who knows": (Strange(), (NESTED,), {}, "argument 0"),
    "whole numbers": (takes, ({"layer": {"w": np.ones(2, np.int32)}},), {}, None),
    "numbers of Python": (takes, ({"layer": {"w": 1.0}},), {}, None),
    "not nested": (takes, (NESTED["layer"],), {}, None),
}


@pytest.mark.parametrize("case", LOOKS)
def test_a_tree_of_trees_of_floats_looks_like_parameters(case):
    f, args, kwargs, name = LOOKS[case]
    jshard.load({"jshard": {"mesh": {"data": 4}}, "rest": {"row": "data", "match": ["**"]}})
    if name is None:
        check_nothing_looks_like_parameters(f, arguments(f, args, kwargs), configuration())
        return
    with pytest.raises(JShardError) as error:
        check_nothing_looks_like_parameters(f, arguments(f, args, kwargs), configuration())
    assert str(error.value) == (
        f'{getattr(f, "__name__", "Strange")} takes a tree of arrays as "{name}", and no model or tree of parameters for '
        f'<dict> to claim; if "{name}" holds the parameters, write jshard.shard({getattr(f, "__name__", "Strange")}, '
        f'parameters="{name}")'
    )


def test_arguments_for_what_holds_no_parameters_are_a_sentence():
    with pytest.raises(JShardError) as error:
        jshard.shard(Decoder(), TOKENS)
    assert str(error.value) == (
        "jshard.shard was given arguments for Decoder, which holds no parameters; "
        "write shard(module).init(...), which returns them placed"
    )
    with pytest.raises(JShardError) as error:
        jshard.shard(np.mean, TOKENS)
    assert str(error.value) == (
        "jshard.shard was given arguments for mean, which holds no parameters; "
        "write shard(mean).place(...), which returns them placed"
    )


def test_a_glob_that_fits_no_parameter_of_linen_is_a_sentence(alone):
    (params, *rest), _ = alone("decoder")
    jshard.load({"jshard": {"mesh": {"data": 4}}, "a": {"row": "data", "match": ["atention/**", "**"]}})
    with pytest.raises(JShardError) as error:
        jshard.shard(loss_of(Decoder()))(params, *rest)
    assert str(error.value) == (
        'signal "a" (<dict>) has match "atention/**", which fits no parameter; did you mean "attention/**"?'
    )


def test_without_a_configuration_linen_runs_as_it_is():
    jshard.unload()
    module = jshard.shard(Decoder())
    variables = module.init(jax.random.key(0), TOKENS)
    np.testing.assert_array_equal(module.apply(variables, TOKENS), Decoder().apply(variables, TOKENS))
    assert jshard.shard(lambda params: 0).place(variables["params"]) is variables["params"]


def test_the_page_on_kinds_of_models_shows_a_linen_module_that_runs():
    page = Path(__file__).parents[2].joinpath("docs/kinds-of-models.md").read_text().split("## Linen")[1]
    shown: dict = {"__name__": "shown"}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], shown)
    trees = shown["params"], shown["gradients"]
    shown.clear()  # a class that was sharded is kept, and its functions would keep these
    for tree in trees:
        assert {path: x.sharding.spec for path, x in paths(tree).items()} == {
            "down/bias": jax.P(None), "down/kernel": jax.P("tensor", None),
            "up/bias": jax.P("tensor"), "up/kernel": jax.P(None, "tensor"),
        }  # fmt: skip


def of_theta(theta, x):
    return jnp.mean((x @ theta["up"]["kernel"]) ** 2)


THETA = {"up": {"kernel": np.ones((16, 8), np.float32)}}
UP = {"jshard": {"mesh": {"data": 2, "tensor": 4}}, "up": {"row": "data", "column": "tensor", "match": ["up/**"]}}


@pytest.mark.parametrize("names", ["theta", ("theta",)])
def test_parameters_names_the_argument_that_holds_them(names):
    x = rng.normal(size=(8, 16)).astype(np.float32)
    jshard.unload()
    want = jax.grad(of_theta)(THETA, x)["up"]["kernel"]
    jshard.load(UP)
    loss = jshard.shard(of_theta, parameters=names)
    theta = loss.place(THETA, x)
    assert theta["up"]["kernel"].sharding.spec == jax.P(None, "tensor")
    gradient = jax.jit(jax.grad(loss))(theta, x)["up"]["kernel"]
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    assert gradient.sharding == theta["up"]["kernel"].sharding


UNNAMED = {  # what is called, and the error
    "a tree of another name that a glob fits": (
        lambda: jshard.shard(of_theta)(THETA, np.ones((8, 16), np.float32)),
        'of_theta takes a tree of arrays as "theta", and no model or tree of parameters for <dict> to claim; if "theta" holds '
        'the parameters, write jshard.shard(of_theta, parameters="theta")',
    ),
    "a name that is no argument": (
        lambda: jshard.shard(of_theta, parameters="thta"),
        'jshard.shard(of_theta, parameters="thta"): of_theta has no argument of that name; did you mean "theta"?',
    ),
    "nothing to place": (
        lambda: jshard.shard(of_batch).place({"x": np.ones((8, 4), np.float32)}),
        'of_batch has no model and no argument of parameters to place; write jshard.shard(of_batch, parameters="batch")',
    ),
}


def of_batch(batch):
    return batch["x"].sum()


@pytest.mark.parametrize("case", UNNAMED)
def test_parameters_that_nothing_names_are_a_sentence(case):
    call, words = UNNAMED[case]
    jshard.load(UP)
    with pytest.raises(JShardError) as error:
        call()
    assert str(error.value) == words


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="up")(x)


def test_the_params_of_a_train_state_are_parameters():
    x = np.ones((8, 16), np.float32)
    jshard.unload()
    params = Mlp().init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=Mlp().apply, params=params, tx=optax.sgd(0.1))
    want = Mlp().apply({"params": params}, x)
    jshard.load({**UP, "up": {**UP["up"], "match": ["up/**"]}})
    predict = jshard.shard(lambda state, x: state.apply_fn({"params": state.params}, x))
    placed = predict.place(state, x)
    assert placed.params["up"]["kernel"].sharding.spec == jax.P(None, "tensor")
    np.testing.assert_allclose(predict(placed, x), want, rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Up:
    """A model as Equinox has them: a tree of arrays that is called."""

    kernel: jax.Array
    count: jax.Array
    activation: Callable = dataclasses.field(metadata={"static": True})

    def __call__(self, x):
        return self.activation(x @ self.kernel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    up: Up

    def __call__(self, x):
        return self.up(x)


def net_loss(net, x):
    return jnp.mean(net(x) ** 2)


def test_a_callable_tree_of_arrays_is_a_model_under_any_name():
    x = rng.normal(size=(8, 16)).astype(np.float32)
    net = Net(Up(jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), jnp.zeros(4, jnp.int32), jnp.tanh))
    jshard.unload()
    want = jax.grad(net_loss, allow_int=True)(net, x).up.kernel
    jshard.load(UP)
    loss = jshard.shard(net_loss)
    placed = loss.place(net, x)
    assert isinstance(placed, Net) and placed.up.kernel.sharding.spec == jax.P(None, "tensor")
    gradient = jax.jit(jax.grad(loss, allow_int=True))(placed, x).up.kernel
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)
    assert gradient.sharding == placed.up.kernel.sharding
    with pytest.raises(JShardError, match=r"a Net, which is a tree of arrays; write loss = jshard.shard\(loss\)"):
        jshard.shard(net, x)
