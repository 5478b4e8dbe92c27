"""`jshard.jit(view='shards')`: the second door of the same layer bodies, a whole function in one shard_map."""

from __future__ import annotations

import collections

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.signals.active_config import unload

P = jax.P
EVERYWHERE = [
    *((case, "2x4", "explicit") for case in cases.on("2x4")),
    *((case, "2x4", "auto") for case in cases.on("2x4", ("row column gather", "row reduction scatter", "store"))),
    *((case, "8", "explicit") for case in cases.on("8", ("column gather", "reduction scatter", "store"))),
    *((case, "1x1", "explicit") for case in cases.on("1x1", ("row column gather", "store reduction"))),
    *((case, "4x2", "explicit") for case in cases.on("4x2", ("row reduction scatter", "store column"))),
    *((case, "2x2x2", "explicit") for case in cases.on("2x2x2") if "p" in case.uses),
]


@pytest.mark.quick(12)
@pytest.mark.parametrize(("case", "mesh", "axis_types"), EVERYWHERE, ids=str)
def test_linear_in_every_strategy_through_the_second_door(case, mesh, axis_types):
    with cases.loaded(case.configuration(mesh, axis_types)) as grid:
        args = cases.layer_of(case), *cases.operands(case)
        f = jshard.jit(view="shards")(cases.forward_and_gradients)
        compiled = f.lower(*args).compile()
        cases.assert_results(case, f(*args))
        if axis_types == "explicit":
            cases.assert_collectives(case, grid, cases.assert_priced(f, args, compiled), compiled)
        else:
            forward, backward = (case.expected(phase, grid) for phase in ("forward", "backward"))
            joined = {
                kind: min(n, backward[kind])
                for kind, n in forward.items()
                if case.keys.get("store") and "gather" in kind[0]
            }
            assert cases.collectives_got(compiled) in (
                forward + backward,
                forward + backward - collections.Counter(joined),
            )


# -- a training step --

CONFIGURATION = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor"},
    "down": {"row": "data", "reduction": "tensor"},
}


@pytest.fixture
def mesh():
    with cases.loaded(CONFIGURATION) as grid:
        yield grid


def mlp():
    return jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0))


def batch():
    x, y = cases.numbers((8, 16)), cases.numbers((8, 8), 1)
    return cases.placed(x, P("data")), cases.placed(y, P("data"))


def train(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda model: jshard.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def test_both_doors_train_alike(mesh):
    x, y = batch()
    losses, models = [], []
    for wrap in (nnx.jit, jshard.jit(view="shards")):
        model = mlp()
        optimizer = jshard.Optimizer(model, optax.adam(1e-2))
        step = wrap(train)
        losses.append([float(step(model, optimizer, x, y)) for _ in range(5)])
        models.append(model)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *map(nnx.state, models))
    cases.assert_lies(models[1].up.kernel[...], P(None, "tensor"))


def test_step_traces_once_for_equal_arguments_and_anew_for_others(mesh):
    traces = []

    @jshard.jit(view="shards")
    def double(x):
        traces.append(x.shape)
        return 2 * x

    x = cases.placed(cases.numbers((8, 16)), P("data"))
    cases.assert_equal(double(x), 2 * x)
    first = len(traces)
    assert traces[-1] == (4, 16)  # one device's part
    double(x)
    assert len(traces) == first
    double(cases.placed(cases.numbers((8, 16)), P("data", "tensor")))
    assert traces[-1] == (4, 4)
    before = len(traces)
    with jshard.signal("up"):
        double(x)
    jshard.load(CONFIGURATION | {"other": {}})
    double(cases.placed(cases.numbers((8, 16)), P("data")))
    assert len(traces) > before


def test_step_finds_where_results_lie_and_takes_it_from_outputs(mesh):
    x = cases.placed(cases.numbers((8, 16)), P("data", "tensor"))
    found = jshard.jit(view="shards")(lambda x: {"y": x + 1, "rows": jshard.sum(x)})(x)
    cases.assert_lies(found["y"], P("data", "tensor"))
    cases.assert_lies(found["rows"], P())
    given = jshard.jit(view="shards")(
        lambda x: jshard.collectives.all_gather(x, "tensor", axis=1, result="invariant"), outputs=P("data")
    )(x)
    cases.assert_lies(given, P("data"))
    cases.assert_equal(given, x)


def test_donate_gives_the_memory_away(mesh):
    x, y = batch()
    model = mlp()
    optimizer = jshard.Optimizer(model, optax.sgd(1e-2))
    before = model.up.kernel[...]
    jshard.jit(view="shards")(train)(model, optimizer, x, y)
    assert not before.is_deleted()
    before = model.up.kernel[...]
    step = jshard.jit(view="shards")(train, donate=True)
    step(model, optimizer, x, y)
    assert before.is_deleted()
    assert not model.up.kernel[...].is_deleted()
    assert step.__name__ == "train"


def test_step_stands_under_jit_scan_and_remat(mesh):
    x, _ = batch()
    model = mlp()
    graph, state = nnx.split(model)
    step = jshard.jit(view="shards")(lambda model, x: nnx.relu(nnx.remat(lambda model, x: model(x))(model, x)))
    inside = jax.jit(lambda state, x: step(nnx.merge(graph, state), x))(state, x)
    np.testing.assert_allclose(inside, nnx.relu(model(x)), rtol=1e-5, atol=1e-5)
    twice = jnp.stack([x, 2 * x])
    _, stacked = jax.lax.scan(lambda state, x: (state, step(nnx.merge(graph, state), x)), state, twice)
    np.testing.assert_allclose(stacked[0], inside, rtol=1e-5, atol=1e-5)


# -- errors --


def test_step_without_a_configuration():
    unload()
    with pytest.raises(jshard.JShardError) as error:
        jshard.jit(view="shards")(train)(1.0)
    assert str(error.value) == (
        "jshard.jit(view='shards') needs a mesh, and no configuration is loaded; call jshard.load(\"configs/mlp.yaml\")"
    )


def test_step_of_an_array_that_lies_nowhere(mesh):
    with pytest.raises(jshard.JShardError) as error:
        jshard.jit(view="shards")(train)(mlp(), 1.0, batch()[0], {"y": jnp.ones((8, 8))})
    assert str(error.value) == (
        "argument 3 (y) of train, an array of shape (8, 8), does not lie on the mesh; "
        'place it first: jshard.signal.tensor(x, name="layer1")'
    )


def test_step_that_returns_another_tree_than_its_outputs_say(mesh):
    with pytest.raises(ValueError, match="out_specs"):
        jshard.jit(view="shards")(lambda x: (x, x), outputs=[P("data"), P("data")])(batch()[0])


def test_step_that_moves_a_parameter(mesh):
    model = mlp()

    def move(model):
        model.up.kernel[...] = jshard.place(model.up.kernel[...], jshard.Layout(jshard.mesh(), None, None))

    with pytest.raises(jshard.JShardError) as error:
        jshard.jit(view="shards")(move)(model)
    assert str(error.value) == (
        "move takes argument 0 (up.kernel) lying as P(None, 'tensor') and leaves it as P(None, None); "
        "redistribute it to where it was, or keep this part of the step outside jshard.jit(view='shards')"
    )


@pytest.mark.parametrize("returns", [lambda mean: mean, lambda mean: {"loss": mean, "rate": 0.1}], ids=["loss", "tree"])
def test_step_that_returns_the_mean_of_a_part(mesh, returns):
    def losses(x):
        return returns(jnp.mean(x))

    with pytest.raises(jshard.JShardError) as error:
        jshard.jit(view="shards")(losses)(batch()[0])
    assert str(error.value) == (
        'losses returns an array of shape () that differs along mesh axis "data": each device has that of its part; reduce '
        "over all devices: jshard.mean(x) in place of jnp.mean(x), as jshard.sum and jshard.max"
    )


def test_step_inside_jit_on_an_auto_mesh_tells_that_nothing_says_how_arrays_lie():
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}}):
        x = cases.placed(cases.numbers((8, 8)), P("data"))
        stepped = jshard.jit(view="shards")(lambda x: jshard.mean(x))
        with pytest.raises(jshard.JShardError) as error:
            jax.jit(stepped)(x)
        assert str(error.value) == (
            "<lambda>, a jshard.jit(view='shards'), is traced on an auto mesh, where nothing tells how its arrays lie; "
            "call it outside jax.jit, or write axis_types: explicit"
        )


def test_step_finds_where_results_lie_where_an_auto_mesh_is_set():
    with cases.loaded({"jshard": {"mesh": {"data": 2}, "axis_types": "auto"}}):
        x = cases.placed(np.ones((8, 8), np.float32), P("data"))
        with jax.set_mesh(jshard.mesh()):
            doubled, total = jshard.jit(view="shards")(lambda x: (2 * x, jshard.sum(x)))(x)
        assert (doubled.sharding.spec, total.sharding.spec, float(total)) == (P("data"), P(), 64.0)
