"""A layer of somebody's own, in ten lines: its parameters are created, trained, stored, explained and verified as a Linear's are."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.inspect.report.facts import GRADIENT, OPTIMIZER, PARAMETER
from jshard.inspect.report.gather import facts_of_function
from jshard.layers.layer import ModelArray, ModelArrays, model_arrays, parameters_by_path
from jshard.layouts.layout import Layout
from jshard.signals.signal import DTypes, Signal
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

P = jax.P
ROOT = Path(__file__).parent.parent.parent


class Gated(jshard.Layer):
    parameter_axes = dict.fromkeys(("gate", "up", "down"), ("reduction", "column"))

    def __init__(self, inputs, hidden, outputs, *, rngs):
        super().__init__()
        for name, shape in {"gate": (inputs, hidden), "up": (inputs, hidden), "down": (hidden, outputs)}.items():
            setattr(self, name, self.parameter(name, nnx.initializers.lecun_normal(), shape, rngs))

    def __call__(self, x):
        with self.scope():
            gated = nnx.silu(jshard.matmul(x, self.gate[...])) * jshard.matmul(x, self.up[...])
            return jshard.matmul(gated, self.down[...])


class Model(nnx.Module):
    """Two of them under one signal, and a layer of Flax's under none."""

    def __init__(self, rngs):
        with jshard.signal("gated"):
            self.blocks = nnx.List([Gated(8, 16, 8, rngs=rngs), Gated(8, 16, 8, rngs=rngs)])
        self.scale = nnx.Linear(8, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale.kernel[...].sum()


NAMES = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("gate", "up", "down")]
LAYOUTS = {  # keys of the signal, where a matrix rests, and where its optimizer state does
    "store": ({"row": "data", "store": "data"}, P("data", None), P("data", None)),
    "store.optimizer": ({"row": "data", "store": {"optimizer": "data"}}, P(None, None), P("data", None)),
    "column": ({"row": "data", "column": "tensor", "store": "data"}, P("data", "tensor"), P("data", "tensor")),
    "reduction": ({"row": "data", "reduction": "tensor"}, P("tensor", None), P("tensor", None)),
}
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def loaded(keys, axis_types="explicit"):
    return cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 2}, "axis_types": axis_types}, "gated": keys})


def loss(model, x):
    return jshard.mean(model(x) ** 2)


def train(model, optimizer, x):
    value, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradients)
    return value


def arrays(node):
    return {".".join(map(str, path)): each[...] for path, each in nnx.to_flat_state(nnx.state(node))}


@pytest.fixture(scope="module")
def by_flax():
    """The parameters at the beginning, and after three steps; with no configuration."""
    model = Model(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, arrays(model))
    optimizer = jshard.Optimizer(model, optax.adam(1e-2))
    for _ in range(3):
        train(model, optimizer, X)
    return before, arrays(model)


@pytest.mark.seconds
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_of_ones_own_rests_and_trains_as_its_signal_says(by_flax, layout, axis_types):
    keys, rests, of_state = LAYOUTS[layout]
    before, after = by_flax
    with loaded(keys, axis_types):
        model = Model(nnx.Rngs(0))
        optimizer = jshard.Optimizer(model, optax.adam(1e-2))
        for name in NAMES:
            cases.assert_lies(arrays(model)[name], rests)
            np.testing.assert_array_equal(arrays(model)[name], before[name])
        step = nnx.jit(train)
        for _ in range(3):
            step(model, optimizer, X)
        state = arrays(optimizer)
        for name in NAMES:
            cases.assert_lies(arrays(model)[name], rests)
            for moment in ("mu", "nu"):
                cases.assert_lies(state[f"opt_state.0.{moment}.{name}"], of_state)
        for name, array in arrays(model).items():
            np.testing.assert_allclose(array, after[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_layer_of_ones_own_is_explained_and_reported_under_its_signal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gated.yaml").write_text("jshard: {mesh: {data: 2}}\n\ngated: {row: data, store: data}\n")
    with cases.loaded("gated.yaml"):
        model = Model(nnx.Rngs(0))
        optimizer = jshard.Optimizer(model, optax.adam(1e-2))
        ledger = jshard.explain(train, model, optimizer, X)
        facts = facts_of_function(train, (model, optimizer, X), {})
    of_gated = [line for line in ledger if line.signal == "gated"]
    assert cases.collectives_asked([line for line in of_gated if line.phase == "forward"]) == {("all_gather", 2): 6}
    assert cases.collectives_asked([line for line in of_gated if line.phase == "backward"]) == {
        ("reduce_scatter", 2): 6, ("all_gather", 2): 4,  # nobody asks for the gradient of x, which the first two would be for
    }  # fmt: skip
    assert {str(line.place) for line in of_gated} == {"gated.yaml:3"}
    kept = {rest.signal: (rest.parameters, rest.gradients, rest.optimizer) for rest in ledger.memory}
    matrices = 6 * 8 * 16 * 4 // 2
    assert kept == {"gated": (matrices, matrices, 2 * matrices), "-": (32, 32, 64 + 4 + 4)}
    assert [each.signal for each in ledger.unused] == []
    for kind in (PARAMETER, GRADIENT, OPTIMIZER):
        drawn = [array for array in facts.arrays if array.kind == kind and array.shape in ((8, 16), (16, 8))]
        assert {array.signal for array in drawn} == {"gated"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_of_ones_own_verifies(layout):
    with loaded(LAYOUTS[layout][0]):
        model = Model(nnx.Rngs(0))
        verification = jshard.verify(train, model, jshard.Optimizer(model, optax.adam(1e-2)), X)
    assert verification.ok, str(verification)
    signals = {finding.name: finding.cause.path for finding in verification.findings}
    assert {signals[f"model.{name} after"] for name in NAMES} == {("gated",)}
    assert {signals[f"optimizer.opt_state.0.mu.{name} after"] for name in NAMES} == {("gated",)}
    assert signals["model.scale.kernel after"] == ()


def test_gradients_of_a_layer_of_ones_own_are_summed_in_the_dtype_of_its_signal():
    with loaded({"row": "data", "dtype": {"param": "bfloat16", "reduce": "float32"}}):
        model = Model(nnx.Rngs(0))
        assert {arrays(model)[name].dtype for name in NAMES} == {jnp.dtype("bfloat16")}

        @in_one_shard_map
        def gradients(model, x):
            with jshard.signal("gated"):
                return jshard.value_and_grad(lambda model: loss(model, x))(model)[1]

        x = jshard.signal.tensor(X, name="gated")
        ledger = jshard.explain(gradients, model, x, backward=False)
        carried = {
            (line.payload, line.dtype) for line in ledger if line.collective == "all_reduce" and line.payload > 4
        }
        assert carried == {(8 * 16 * 4, "float32"), (8 * 4, "float32")}
        assert {each.dtype for name, each in arrays(gradients(model, x)).items() if name in NAMES} == {
            jnp.dtype("bfloat16")
        }


def test_layers_say_where_their_parameters_rest_only_under_a_signal():
    assert Gated(8, 16, 8, rngs=nnx.Rngs(0)).parameter_layouts() == {}
    with loaded({"store": "data"}):
        assert jshard.Linear(8, 8, rngs=nnx.Rngs(0)).parameter_layouts() == {}
        model = Model(nnx.Rngs(0))
        layouts = model.blocks[0].parameter_layouts()
        assert {name: layout.spec for name, layout in layouts.items()} == dict.fromkeys(
            ("gate", "up", "down"), P("data", None)
        )
        found = model_arrays(model)
        assert found["blocks", 1, "up"].layout == layouts["up"]
        assert found["blocks", 1, "up"].signal.name == "gated"
        assert found["scale", "kernel"] == model_arrays(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))["kernel",]


class Outer(nnx.Module):
    """Holds a model that is sharded by itself too."""

    def __init__(self, inner):
        self.inner = inner
        with jshard.signal("a"):
            self.built = jshard.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.own = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.own(self.inner(x)) + self.built(x)


def test_arrays_of_sharded_models_are_under_their_claims():
    """Those of a model inside of one are claimed by their paths from the outermost."""
    words = {"a": {"row": "data", "store": "data", "match": ["inner/**"]}, "b": {"row": "data", "match": ["**"]}}
    inner = [jshard.shard(nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))) for _ in range(2)]
    with cases.loaded({"jshard": {"mesh": {"data": 2}}, **words}):
        both = nnx.List([jshard.shard(Outer(each), X) for each in inner])
        found = model_arrays(both)
        for number, outer in enumerate(both):
            for name, under in {"inner": "a", "built": "a", "own": "b"}.items():
                of = found[number, name, "kernel"]
                assert of.signal_path == (under,) and of.signal.name == under
                assert of.layout == Layout.of(getattr(outer, name).kernel[...])
    assert model_arrays(both)[0, "own", "kernel"].signal is None


class Within(jshard.Layer):
    """Has a layer of Flax's, which it does not lay out."""

    parameter_axes = {"w": ("reduction", "column")}

    def __init__(self):
        super().__init__()
        self.w = self.parameter("w", nnx.initializers.ones, (8, 8), nnx.Rngs(0))
        self.inside = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))


def test_a_layer_lays_out_its_own_parameters_and_those_inside_are_under_its_signal():
    with loaded({"row": "data", "store": "data"}):
        with jshard.signal("gated"):
            layer = Within()
        for model, path in ((layer, ()), (nnx.Dict(one=layer), ("one",))):
            found = model_arrays(model)
            assert found[*path, "w"].layout == layer.parameter_layouts()["w"]
            inside = found[*path, "inside", "kernel"]
            assert (inside.signal_path, inside.signal.name, inside.layout) == (("gated",), "gated", None)


def test_what_lies_inside_a_variable_is_placed_as_that_is():
    one = ModelArray(("gated",))
    found = ModelArrays({("a",): one})
    assert found["a",] is found["a", "b"] is found["a", "b", "c"] is one
    assert found["b", "a"] == found[()] == ModelArray()


def test_gradients_of_what_no_layer_lays_out_are_summed_in_their_own_dtype():
    wide, layout = Signal("gated", dtype=DTypes(reduce="float32")), Layout(jax.make_mesh((1,), ("data",)))
    assert ModelArray(("gated",), wide, layout).reduce_dtype == "float32"
    assert ModelArray(("gated",), wide).reduce_dtype is ModelArray(layout=layout).reduce_dtype is None


def refused(sentence, shapes, **keys):
    class Mine(jshard.Layer):
        parameter_axes = {"w": ("reduction", "column")}

        def __init__(self):
            super().__init__()
            for name, shape in shapes.items():
                setattr(self, name, self.parameter(name, nnx.initializers.zeros, shape, nnx.Rngs(0)))

    with loaded(keys), jshard.signal("gated"), pytest.raises(JShardError) as told:
        Mine()
    assert str(told.value) == sentence


def test_parameter_that_its_layer_does_not_lay_out_is_told():
    refused(
        'signal "gated" (<dict>) has a Mine without a layout for its parameter v; name it in Mine.parameter_axes: '
        '{"v": ("reduction", "column")}',
        {"v": (8, 8)},
    )


def test_parameter_that_does_not_divide_is_told_by_its_name():
    refused(
        'signal "gated" (<dict>), in w of a Mine, splits axis 0 of size 7 over mesh axis "data" of size 2; use 6 or 8, or pad',
        {"w": (7, 8)},
        store="data",
    )


def test_nobody_outside_layers_asks_for_a_kind_of_layer():
    asked = [
        path
        for path in (ROOT / "jshard").rglob("*.py")
        if "Linear" in path.read_text() and path.parent.name != "layers"
    ]
    assert asked == [ROOT / "jshard" / "__init__.py"]


def test_page_on_layers_shows_this_one():
    assert inspect.getsource(Gated) in (ROOT / "docs" / "layers.md").read_text()


class Strange(nnx.Module):
    """What models of others do to paths."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, use_bias=False, rngs=rngs) for _ in range(11)])
        self.tied = self.layers[0]
        self.by_name = nnx.Dict(
            {"x.y": nnx.Param(jnp.ones(2)), "a/b": nnx.Param(jnp.ones(8)), "3": nnx.Param(jnp.ones(3))}
        )
        setattr(self, "blocks.0", nnx.BatchNorm(2, rngs=rngs))
        self.tree = nnx.Param({"a": jnp.ones(4), "value": jnp.ones(5)})
        self.value = nnx.LoRAParam(jnp.ones(6))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.free = jshard.Linear(7, 1, use_bias=False, rngs=rngs)
        with jshard.signal("layer1"):
            self.placed = jshard.Linear(2, 2, rngs=rngs)


def test_parameters_by_path_of_nnx():
    found = {path: leaf.shape for path, leaf in parameters_by_path(Strange(nnx.Rngs(0))).items()}
    assert found == {
        **{f"layers/{number}/kernel": (2, 3) for number in range(11)},
        "by_name/x.y": (2,), "by_name/a/b": (8,), "by_name/3": (3,), "blocks.0/scale": (2,), "blocks.0/bias": (2,), "tree/a": (4,), "tree/value": (5,),
        "value": (6,), "free/kernel": (7, 1),
    }  # fmt: skip
    assert parameters_by_path(nnx.eval_shape(lambda: Strange(nnx.Rngs(0)))).keys() == found.keys()


def test_parameters_of_one_path_are_one_sentence():
    with pytest.raises(JShardError) as told:
        parameters_by_path(nnx.Dict({"a/b": nnx.Param(jnp.ones(1)), "a": nnx.Dict({"b": nnx.Param(jnp.ones(1))})}))
    assert str(told.value) == (
        'two parameters of a Dict have the path "a/b"; give one of them another name: a name with a slash reads as two'
    )


def test_parameters_by_path_of_linen_is_that_of_its_bridge():
    class Net(nn.Module):
        boxed: bool = True  # with names of mesh axes, which a bridge takes on a mesh of them alone

        @nn.compact
        def __call__(self, x):
            ones = nn.initializers.ones
            box = nn.with_partitioning(ones, (None, "model")) if self.boxed else ones
            return nn.Dense(2, kernel_init=box)(nn.BatchNorm(use_running_average=False)(x)) * self.param(
                "value", nn.ones, (2,)
            )

    x = jnp.ones((1, 2))
    variables = Net().init(jax.random.key(0), x)
    names = {"BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel", "value"}
    assert parameters_by_path(variables).keys() == parameters_by_path(variables["params"]).keys() == names
    bridged = nnx.bridge.ToNNX(Net(boxed=False), rngs=nnx.Rngs(0)).lazy_init(x)
    assert parameters_by_path(bridged).keys() == names
