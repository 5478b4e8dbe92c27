"""`jshard.Optimizer`: state lies as parameters lie, steps equal unsharded ones, and a step is one program and no more."""

from __future__ import annotations

import collections
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jshard
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

P = jax.P
TENSOR = {"up": {"row": "data", "column": "tensor"}, "down": {"row": "data", "reduction": "tensor"}}
STORE = {name: {"row": "data", "store": "data"} for name in TENSOR}
STORE_OPTIMIZER = {name: {"row": "data", "store": {"optimizer": "data"}} for name in TENSOR}
SIGNALS = {"tensor": TENSOR, "store": STORE, "store optimizer": STORE_OPTIMIZER}
TX = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
# where the kernel and bias of up and of down lie, and where their optimizer state lies
AS_COLUMNS = {"up": (P(None, "tensor"), P("tensor")), "down": (P("tensor"), P())}
WHOLE, BY_DATA = dict.fromkeys(TENSOR, (P(), P())), dict.fromkeys(TENSOR, (P("data"), P("data")))
LIES = {
    "tensor": (AS_COLUMNS, AS_COLUMNS),
    "store": (BY_DATA, BY_DATA),
    "store optimizer": (WHOLE, BY_DATA),
}
# the means of squares over rows and over columns of a kernel lie as what is left of it
ADAFACTOR = {
    "tensor": {"v_row": {"up": P(), "down": P()}, "v_col": {"up": P("tensor"), "down": P("tensor")}},
    "store": {"v_row": {"up": P("data"), "down": P()}, "v_col": {"up": P(), "down": P("data")}},
}
ADAFACTOR["store optimizer"] = ADAFACTOR["store"]


def configuration(name, axis_types="explicit"):
    return {"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **SIGNALS[name]}


def made(tx):
    model = jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0))
    return model, jshard.Optimizer(model, tx)


def train(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda model: jshard.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def batch():
    return cases.placed(cases.numbers((8, 16)), P("data")), cases.placed(cases.numbers((8, 8), 1), P("data"))


def by_layers(model, optimizer):
    """A step as one jit of the split state, the state kept in the hand."""
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def program(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        return train(model, optimizer, x, y), nnx.state((model, optimizer))

    def step(x, y):
        nonlocal state
        value, state = program(state, x, y)
        nnx.update((model, optimizer), state)
        return value

    return step


def by_one_shard_map(model, optimizer):
    program = in_one_shard_map(train)
    return lambda x, y: program(model, optimizer, x, y)


def by_jit(model, optimizer):
    program = jshard.jit(train)
    return lambda x, y: program(model, optimizer, x, y)


DOORS = {"layers": by_layers, "jit": by_jit, "shards": by_one_shard_map}


def assert_state_lies(name, tx, optimizer):
    parameters, state = LIES[name][1], optimizer.opt_state
    if tx == "adafactor":
        for array, layers in ADAFACTOR[name].items():
            for layer, spec in layers.items():
                cases.assert_lies(getattr(state[0], array)[layer]["kernel"][...], spec)
        return
    moments = (state[0].mu, state[0].nu) if tx == "adamw" else (state[0].trace,)
    for moment in moments:
        for layer, specs in parameters.items():
            for parameter, spec in zip(("kernel", "bias"), specs, strict=True):
                cases.assert_lies(moment[layer][parameter][...], spec)
    if tx == "adamw":
        cases.assert_lies(state[0].count[...], P())
    cases.assert_lies(optimizer.step[...], P())


@functools.cache
def unsharded(tx):
    """Return 20 losses and the parameters after them, in plain Flax and optax on one device."""
    jshard.unload()
    model = jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX[tx], wrt=nnx.Param)
    step = nnx.jit(train)
    x, y = cases.numbers((8, 16)), cases.numbers((8, 8), 1)
    losses = [float(step(model, optimizer, x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
    return losses, nnx.to_pure_dict(nnx.state(model))


@pytest.mark.quick("store-adamw-layers-auto")
@pytest.mark.parametrize(
    ("name", "tx", "door", "axis_types"),
    [
        *((name, tx, "layers", "explicit") for name in SIGNALS for tx in TX),
        *((name, "adamw", "layers", "auto") for name in SIGNALS),
        ("tensor", "adafactor", "layers", "auto"),
        *((name, "adamw", door, "explicit") for name in SIGNALS for door in ("jit", "shards")),
        ("store", "momentum", "shards", "explicit"),
        ("store optimizer", "adamw", "jit", "auto"),
    ],
)
def test_twenty_steps_equal_unsharded_and_state_lies_as_parameters_do(name, tx, door, axis_types):
    expected, parameters = unsharded(tx)
    with cases.loaded(configuration(name, axis_types)):
        model, optimizer = made(TX[tx])
        assert_state_lies(name, tx, optimizer)
        step, args = DOORS[door](model, optimizer), batch()
        losses = [float(step(*args)) for _ in range(20)]
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)
        close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)
        jax.tree.map(close, nnx.to_pure_dict(nnx.state(model)), parameters)
        assert_state_lies(name, tx, optimizer)
        for layer, specs in LIES[name][0].items():
            for parameter, spec in zip(("kernel", "bias"), specs, strict=True):
                cases.assert_lies(getattr(getattr(model, layer), parameter)[...], spec)
        assert int(optimizer.step[...]) == 20


# -- one program a step --


def executions(f, folder):
    """The programs dispatched while `f` runs, by JAX's own profiler, which may note each more than once."""
    with jax.profiler.trace(folder):
        jax.block_until_ready(f())
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    return collections.Counter(name for name in names if name.startswith("PjitFunction"))


@pytest.mark.parametrize("door", ["layers", "jit"])
def test_a_step_is_one_dispatch_compiles_once_and_transfers_nothing(door, tmp_path):
    with cases.loaded(configuration("tensor")):
        step, args = DOORS[door](*made(TX["adamw"])), batch()
        assert cases.compilations(lambda: step(*args)) >= 1
        assert cases.compilations(lambda: step(*args)) == 0
        with jax.transfer_guard("disallow"):
            step(*args)
        alone = jax.jit(lambda x: x + 1)
        alone(args[0])
        ((_, once),) = executions(lambda: alone(args[0]), tmp_path / "alone").items()
        ((_, thrice),) = executions(lambda: [step(*args) for _ in range(3)], tmp_path / "step").items()
        assert thrice == 3 * once


@pytest.mark.slow
@pytest.mark.parametrize("door", ["layers", "jit"])
def test_live_arrays_stay_constant_over_a_thousand_steps(door):
    with cases.loaded(configuration("tensor")):
        step, args = DOORS[door](*made(TX["adamw"])), batch()
        counts = set()
        step(*args)
        gc.collect()
        for number in range(1, 1001):
            value = step(*args)
            if number % 100 == 0:
                value.block_until_ready()
                counts.add(len(jax.live_arrays()))
        assert len(counts) == 1


# -- store: {optimizer: ...} --


def test_optimizer_store_slices_gradients_and_gathers_updates():
    with cases.loaded(configuration("store optimizer")):
        model, optimizer = made(TX["adamw"])
        graph, state = nnx.split((model, optimizer))

        def step(state, x, y):
            model, optimizer = nnx.merge(graph, state)
            return train(model, optimizer, x, y), nnx.state((model, optimizer))

        ledger = jshard.explain(step, state, *batch())
        compiled = jax.jit(step).lower(state, *batch()).compile()
        parameters = 4
        assert cases.collectives_asked(ledger.only(collective="all_gather")) == {("all_gather", 2): parameters}
        backward = ledger.only(phase="backward")
        assert cases.collectives_asked(backward) == {("all_reduce", 2): parameters}
        assert cases.collectives_got(compiled) == cases.collectives_asked(ledger)
        assert cases.wire_bytes(compiled) == ledger.total


def test_optimizer_store_replicates_the_state_of_what_does_not_divide():
    signals = {"up": {"store": {"optimizer": "tensor"}}, "down": {}}
    with cases.loaded({"jshard": {"mesh": {"tensor": 4}}, **signals}):
        model = jshard.MLP(16, 30, 8, rngs=nnx.Rngs(0))
        momentum = jshard.Optimizer(model, TX["momentum"]).opt_state[0].trace
        cases.assert_lies(momentum["up"]["bias"][...], P(None))
        cases.assert_lies(momentum["up"]["kernel"][...], P("tensor", None))


def test_state_that_comes_from_the_host_rests_split_again_under_jit():
    with cases.loaded(configuration("store optimizer")):
        model, optimizer = made(TX["adamw"])
        nnx.update(optimizer, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), nnx.state(optimizer)))
        jshard.jit(train)(model, optimizer, *batch())
        assert_state_lies("store optimizer", "adamw", optimizer)


# -- what sees only parts --


@pytest.mark.parametrize(
    ("tx", "primitive"),
    [
        (TX["adafactor"], "reduce_sum"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), "reduce_sum"),
        (optax.lamb(1e-2), "reduce_sum"),
    ],
    ids=["adafactor", "clip_by_global_norm", "lamb"],
)
def test_an_optimizer_that_reduces_over_whole_parameters_inside_step(tx, primitive):
    with cases.loaded(configuration("tensor")):
        model, optimizer = made(tx)
        with pytest.raises(jshard.JShardError) as error:
            in_one_shard_map(train)(model, optimizer, *batch())
    assert str(error.value) == (
        f"the optimizer reduces over whole parameters ({primitive}), and inside a shard_map it sees one device's shard; "
        "return the gradients from the shard_map, and call optimizer.update outside"
    )


def test_the_mend_works():
    """Gradients returned from the shard_map, the update under jit."""
    with cases.loaded(configuration("tensor")):
        model, optimizer = made(TX["adafactor"])
        other, its_optimizer = made(TX["adafactor"])

        @in_one_shard_map
        def gradients_of(model, x, y):
            return nnx.grad(lambda model: jshard.mean((model(x) - y) ** 2))(model)

        args = batch()
        nnx.jit(lambda model, optimizer, gradients: optimizer.update(model, gradients))(
            model, optimizer, gradients_of(model, *args)
        )
        by_layers(other, its_optimizer)(*args)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, nnx.state(model), nnx.state(other))


def test_where_nothing_is_split_any_optimizer_works_inside_step():
    with cases.loaded({"jshard": {"mesh": {"data": 2}}, "up": {"row": "data"}, "down": {"row": "data"}}):
        model, optimizer = made(TX["adafactor"])
        step = in_one_shard_map(train)
        first = float(step(model, optimizer, *batch()))
        assert float(step(model, optimizer, *batch())) < first


# -- other ways to hold it --


def test_plain_optax_and_nnx_optimizer_take_the_transformation_of_an_optimizer():
    with cases.loaded(configuration("store optimizer")):
        model, theirs = made(TX["adamw"])
        tx = jshard.Optimizer(model, TX["adamw"]).tx
        assert_state_lies("store optimizer", "momentum", jshard_momentum(model))
        held = nnx.Optimizer(model, tx, wrt=nnx.Param)
        parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        state = tx.init(parameters)
        cases.assert_lies(state[0].mu["up"]["kernel"], P("data"))
        cases.assert_lies(held.opt_state[0].mu["up"]["kernel"][...], P("data"))
        gradients = jax.tree.map(jnp.ones_like, parameters)
        updates, state = jax.jit(tx.update)(gradients, state, parameters)
        cases.assert_lies(updates["up"]["kernel"], P())
        cases.assert_lies(state[0].mu["up"]["kernel"], P("data"))
        dense, _ = TX["adamw"].update(gradients, TX["adamw"].init(parameters), parameters)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, dense)


def jshard_momentum(model):
    return jshard.Optimizer(model, TX["momentum"])


def test_without_a_configuration_it_is_the_plain_one():
    model, optimizer = made(TX["adamw"])
    plain = nnx.Optimizer(model, TX["adamw"], wrt=nnx.Param)
    assert jax.tree.structure(nnx.state(optimizer)) == jax.tree.structure(nnx.state(plain))
    assert optimizer.tx is TX["adamw"]


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_optimizer_that_multiplies_whole_parameters_is_told_what_lies_split(axis_types):
    with cases.loaded(configuration("tensor", axis_types)):
        with pytest.raises(jshard.JShardError) as error:
            made(optax.contrib.muon(1e-3))
    assert str(error.value) == (
        'the optimizer multiplies whole parameters, and down.kernel of shape (32, 8) is split over mesh axis "tensor"; use '
        "one that treats each element by itself, such as adamw, or do not split the parameter: write only row"
    )


def test_optimizer_that_multiplies_whole_parameters_runs_where_they_are_whole():
    rows = {name: {"row": "data"} for name in TENSOR}
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **rows}):
        model, optimizer = made(optax.contrib.muon(1e-3))
        before = np.asarray(model.up.kernel[...])
        nnx.jit(train)(model, optimizer, *batch())
        assert np.abs(np.asarray(model.up.kernel[...]) - before).max() > 0


def test_state_lies_as_the_signal_says_where_an_auto_mesh_is_set():
    with cases.loaded(
        {"jshard": {"mesh": {"data": 2}, "axis_types": "auto"}, "layer": {"store": {"optimizer": "data"}}}
    ):
        with jax.set_mesh(jshard.mesh()), jshard.signal("layer"):
            model = jshard.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
            optimizer = jshard.Optimizer(model, optax.adam(0.1))
            optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((4, 4))).sum())(model))
        state = [leaf.sharding.spec for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim == 2]
        assert state == [P("data")] * 2
