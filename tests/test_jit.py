"""`jshard.jit` and `jshard.value_and_grad`: each way to train equals plain Flax, rests split, and compiles once per shape."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jshard
from jshard.layouts.layout import Layout
from jshard.runs import events
from tests.support import processes

IN, HIDDEN, OUT, ROWS = 16, 32, 8, 8
CONFIGURATION = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor", "store": "data", "match": ["up/**"]},
    "down": {"row": "data", "reduction": "tensor", "store": "data", "match": ["down/kernel"]},
    "rest": {"row": "data", "match": ["**"]},
}
SPLIT = {"up": (("data",), ("tensor",)), "down": (("tensor",), ("data",))}


@pytest.fixture(autouse=True)
def nothing_loaded():
    jshard.unload()


class Net(nnx.Module):
    def __init__(self, rngs, *, dropout=0.0, norm=False):
        self.up, self.down = nnx.Linear(IN, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, OUT, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout) if dropout else None

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.up(x))
        x = x if self.norm is None else self.norm(x)
        return self.down(x if self.dropout is None else self.dropout(x, rngs=rngs))


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def batch(number, rows=ROWS):
    rng = np.random.default_rng(number)
    return rng.normal(size=(rows, IN)).astype("float32"), rng.integers(0, OUT, rows)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train: the two functions, as Flax or as jshard has them, and what `jit` is given beside the step."""

    jit: Callable[..., Any]
    value_and_grad: Callable[..., Any]


def objects(seed=0, **says):
    model = Net(nnx.Rngs(seed), **says)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


# Each way yields, call by call, what the call returned; then the trees in which kernels and moments are looked for.


def step_of(way, loss=loss_of):
    @way.jit
    def step(model, optimizer, x, y):
        value, gradients = way.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    return step


def trained(way, model, optimizer, loss=loss_of):
    step = step_of(way, loss)
    for number in range(3):
        yield step(model, optimizer, *batch(number))
    yield nnx.state((model, optimizer))


def by_loss(way):
    return trained(way, *objects())


def by_plain_gradient(way):
    return by_loss(Way(way.jit, nnx.value_and_grad))


def with_aux_keywords_and_static_arguments(way):
    model, optimizer = objects()

    def loss(model, x, y, scale):
        logits = model(x) * scale
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"logits": logits}

    @functools.partial(way.jit, static_argnames=("kind",))
    def step(model, optimizer, x, *, y, kind):
        scale = {"double": 2.0, "once": 1.0}[kind]
        (value, aux), gradients = way.value_and_grad(lambda model, x, y: loss(model, x, y, scale), has_aux=True)(
            model, x, y=y
        )
        optimizer.update(model, gradients)
        return value, aux

    for number in range(3):
        x, y = batch(number)
        yield step(model, optimizer, x, y=y, kind="double")
    yield nnx.state((model, optimizer))


def two_models(way):
    (one, first), (other, second) = objects(0), objects(1)

    def loss(one, other, x, y):
        return loss_of(one, x, y) + ((one(x) - other(x)) ** 2).mean()

    @way.jit
    def step(one, first, other, second, x, y):
        value, (ones, others) = way.value_and_grad(loss, argnums=(0, 1))(one, other, x, y)
        first.update(one, ones)
        second.update(other, others)
        return value

    for number in range(3):
        yield step(one, first, other, second, *batch(number))
    yield nnx.state((one, first, other, second))


def rngs_with_dropout(way):
    (model, optimizer), rngs = objects(dropout=0.5), nnx.Rngs(7)

    def loss(model, x, y, rngs):
        return optax.softmax_cross_entropy_with_integer_labels(model(x, rngs=rngs), y).mean()

    @way.jit
    def step(model, optimizer, rngs, x, y):
        value, gradients = way.value_and_grad(loss)(model, x, y, rngs)
        optimizer.update(model, gradients)
        return value

    for number in range(3):
        yield step(model, optimizer, rngs, *batch(number))
    yield nnx.state((model, optimizer))


def batch_norm(way):
    return trained(way, *objects(norm=True))


def moving_average(way):
    (model, optimizer), average = objects(), Net(nnx.Rngs(0))

    @way.jit
    def step(model, optimizer, average, x, y):
        value, gradients = way.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        both = nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(average, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, *both))
        return value

    for number in range(3):
        yield step(model, optimizer, average, *batch(number))
    yield nnx.state((model, optimizer, average))


def evaluation(way):
    model, _ = objects()
    predict = way.jit(lambda model, x: model(x))
    for number in range(3):
        yield predict(model, batch(number)[0])
    yield nnx.state(model)


def metrics_beside_the_gradient(way):
    """The model is called plainly beside the loss."""
    model, optimizer = objects()

    @way.jit
    def step(model, optimizer, x, y):
        value, gradients = way.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        logits = model(x)
        return value, (logits.argmax(-1) == y).mean(), logits

    for number in range(3):
        yield step(model, optimizer, *batch(number))
    yield nnx.state((model, optimizer))


def a_loss_that_closes_over_the_batch(way):
    model, optimizer = objects()

    @way.jit
    def step(model, optimizer, x, y):
        value, gradients = way.value_and_grad(lambda model: jshard.cross_entropy(model(x), y))(model)
        optimizer.update(model, gradients)
        return value

    for number in range(3):
        yield step(model, optimizer, *batch(number))
    yield nnx.state((model, optimizer))


def gradients_in_parts(way):
    def loss(model, x, y):
        parts = jax.tree.map(lambda each: each.reshape(2, -1, *each.shape[1:]), (x, y))
        add = lambda total, part: (total + loss_of(model, *part) / 2, None)
        return jax.lax.scan(add, jnp.float32(0), parts)[0]

    return trained(way, *objects(), loss)


def aux_in_parts(way):
    """The gradients of a loss over parts, and what it adds up beside them."""
    model, optimizer = objects()

    def loss(model, x, y):
        def add(total, part):
            logits = model(part[0])
            value = optax.softmax_cross_entropy_with_integer_labels(logits, part[1]).mean()
            return (total[0] + value / 2, total[1] + (logits.argmax(-1) == part[1]).mean() / 2), logits

        parts = jax.tree.map(lambda each: each.reshape(2, -1, *each.shape[1:]), (x, y))
        (value, right), logits = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), parts)
        return value, {"right": right, "logits": logits.reshape(-1, OUT)}

    @way.jit
    def step(model, optimizer, x, y):
        found, gradients = way.value_and_grad(loss, has_aux=True)(model, x, y)
        optimizer.update(model, gradients)
        return found

    for number in range(3):
        yield step(model, optimizer, *batch(number))
    yield nnx.state((model, optimizer))


def a_checkpoint_between_two_steps(way):
    (model, optimizer), step = objects(), step_of(way)

    for number in range(3):
        yield step(model, optimizer, *batch(number))
        read = jax.tree.map(np.asarray, nnx.state((model, optimizer)))  # as orbax leaves it on the host
        nnx.update((model, optimizer), jax.tree.map(jax.device_put, read))
    yield step(model, optimizer, *batch(3))
    yield nnx.state((model, optimizer))


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(OUT, name="down")(linen.relu(linen.Dense(HIDDEN, name="up")(x)))


def linen_variables(way):
    model, tx = Dense(), optax.adam(1e-2)
    variables = model.init(jax.random.key(0), batch(0)[0])
    state = tx.init(variables)

    def loss(variables, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(variables, x), y).mean()

    @way.jit
    def step(variables, state, x, y):
        value, gradients = way.value_and_grad(loss)(variables, x, y)
        updates, state = tx.update(gradients, state, variables)
        return optax.apply_updates(variables, updates), state, value

    for number in range(3):
        variables, state, value = step(variables, state, *batch(number))
        yield value
    yield variables, state


def train_state(way):
    model = Dense()
    params = model.init(jax.random.key(0), batch(0)[0])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @way.jit
    def step(state, x, y):
        def loss(params):
            logits = state.apply_fn({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradients = way.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    for number in range(3):
        state, value = step(state, *batch(number))
        yield value
    yield state


def by_dict(way, make=lambda up, down: {"up": up, "down": down}, read=lambda params: (params["up"], params["down"])):
    rng, tx = np.random.default_rng(0), optax.adam(1e-2)
    weights = [rng.normal(size=size).astype("float32") / 4 for size in ((IN, HIDDEN), (HIDDEN, OUT))]
    theta = make(*({"kernel": jnp.asarray(each)} for each in weights))
    state = tx.init(jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, theta))

    def loss(theta, x, y):
        up, down = read(theta)
        logits = jax.nn.relu(x @ up["kernel"]) @ down["kernel"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @way.jit
    def step(theta, state, x, y):
        value, gradients = way.value_and_grad(loss)(theta, x, y)
        updates, state = tx.update(gradients, state)
        theta = jax.tree.map(lambda u, x: x if u is None else x + u, updates, theta, is_leaf=lambda x: x is None)
        return theta, state, value

    for number in range(3):
        theta, state, value = step(theta, state, *batch(number))
        yield value
    yield theta, state


@functools.partial(jax.tree_util.register_dataclass, data_fields=["up", "down", "act"], meta_fields=[])
@dataclasses.dataclass
class Layers:
    """A module in Equinox's form: a tree whose leaves are arrays, and a function."""

    up: Any
    down: Any
    act: Any


def module_as_a_tree(way):
    """With a function among its leaves, which plain JAX takes as `None`."""
    act = jax.nn.relu if way.jit is jshard.jit else None
    return by_dict(way, lambda up, down: Layers(up, down, act), lambda layers: (layers.up, layers.down))


WAYS = {
    f.__name__: f
    for f in (
        by_loss, by_plain_gradient, with_aux_keywords_and_static_arguments, two_models, rngs_with_dropout, batch_norm,
        moving_average, evaluation, metrics_beside_the_gradient, a_loss_that_closes_over_the_batch, gradients_in_parts,
        aux_in_parts, a_checkpoint_between_two_steps, linen_variables, train_state, by_dict, module_as_a_tree,
    )
}  # fmt: skip


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles meanwhile."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, *_, **__: found.append(name) if name.endswith("backend_compile_duration") else None
    )
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def close(found, expected):
    arrays = ([x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")] for tree in (found, expected))
    for one, other in zip(*arrays, strict=True):
        if jnp.issubdtype(one.dtype, jnp.inexact):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def kernels(tree):
    """The layouts of all kernels, and of all that has the path of one, as moments have."""
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "kernel" in words:
            found[name := "/".join(words)] = Layout.of(x).axes, "up" if "up" in words else "down"
            assert x.addressable_shards[0].data.size * 8 == x.size, name
    return found


CASES = [
    *((name, "explicit") for name in WAYS),
    *((name, "auto") for name in ("by_loss", "batch_norm", "metrics_beside_the_gradient", "train_state")),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_way_to_train_equals_plain_flax_rests_split_and_compiles_once(name, kind):
    expected = list(WAYS[name](Way(nnx.jit, nnx.value_and_grad)))
    jshard.load({**CONFIGURATION, "jshard": {**CONFIGURATION["jshard"], "axis_types": kind}})
    calls, found, counts = WAYS[name](Way(jshard.jit, jshard.value_and_grad)), [], []
    while True:
        with compilations() as compiled:
            result = next(calls, None)
        if result is None:
            break
        found.append(result)
        counts.append(len(compiled))
    close(found, expected)
    lies = kernels(found[-1])
    assert lies and all(axes == SPLIT[which] for axes, which in lies.values()), lies
    assert not any(counts[1:]), counts


def test_explain_of_a_step_tells_before_its_first_call_what_rests_where_after_it():
    jshard.load(CONFIGURATION)
    model, optimizer = objects()

    @jshard.jit
    def step(model, optimizer, x, y):
        value, gradients = jshard.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return value

    before = jshard.explain(step, model, optimizer, *batch(0))
    assert not model.up.kernel[...].committed  # nothing has moved
    step(model, optimizer, *batch(0))
    assert str(before) == str(jshard.explain(step, model, optimizer, *batch(0)))
    parameters = nnx.state(model, nnx.Param)
    assert before.held >= 4 * sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(parameters))
    assert before.held < sum(x.nbytes for x in jax.tree.leaves(parameters))


def placed(**says):
    jshard.load({**CONFIGURATION, "jshard": {**CONFIGURATION["jshard"], **says}})


def step(model, optimizer, x, y):
    loss, gradients = jshard.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, gradients)
    return loss


def test_with_nothing_loaded_a_step_is_plain_flax():
    (model, optimizer), (alone, its) = objects(), objects()
    found = jshard.jit(step)(model, optimizer, *batch(0))
    assert found == nnx.jit(step)(alone, its, *batch(0))
    close(nnx.state(model), nnx.state(alone))
    assert len(model.up.kernel[...].sharding.device_set) == 1


def test_the_last_partial_batch_compiles_once_more_and_that_is_told():
    placed()
    told, (model, optimizer), compiled = [], objects(), jshard.jit(step)
    stop = events.listen(lambda what, fields: told.append(dict(fields)) if what == "compiles_again" else None)
    try:
        for number, rows in enumerate((8, 8, 6, 8, 6)):
            with compilations() as found:
                compiled(model, optimizer, *batch(number, rows))
            assert bool(found) is (number in (0, 2)), number
    finally:
        stop()
    assert told == [{"program": "step", "shapes": "float32[6,16], int32[6]"}]
    assert events.WORDS["compiles_again"][1](told[0]) == "step compiles again, for arguments float32[6,16], int32[6]"


def test_donated_memory_is_that_of_models_and_optimizers_and_only_where_asked():
    placed()
    for donate in (False, True):
        (model, optimizer), compiled = objects(), jshard.jit(step, donate=donate)
        x, y = map(jnp.asarray, batch(0))
        compiled(model, optimizer, x, y)
        before = [model.up.kernel[...], optimizer.opt_state[0].mu.up.kernel[...]]
        compiled(model, optimizer, x, y)
        assert [each.is_deleted() for each in before] == [donate, donate]
        assert not x.is_deleted()
    evaluated = jshard.jit(lambda model, x: model(x), donate=True)
    for _ in range(2):  # a parameter that stays is there behind the call
        evaluated(model, x)


@pytest.mark.seconds
def test_explain_verify_and_lower_take_a_step_and_list_the_collectives_of_its_loss():
    placed()
    (model, optimizer), compiled, (x, y) = objects(), jshard.jit(step), batch(0)
    before = jshard.explain(compiled, model, optimizer, x, y)
    compiled(model, optimizer, x, y)
    ledger = jshard.explain(compiled, model, optimizer, x, y)
    asked = jshard.explain(jshard.value_and_grad(loss_of), model, x, y)
    lines = lambda ledger: [(e.signal, e.phase, e.collective, e.count, e.wire) for e in ledger.lines]
    assert lines(ledger) == lines(before) == lines(asked) != []
    assert jshard.verify(compiled, model, optimizer, x, y).ok
    assert "reduce-scatter" in compiled.lower(model, optimizer, x, y).compile().as_text()


def test_a_jitted_function_runs_under_jit_scan_and_remat():
    x, _ = batch(0)
    expected = nnx.relu(Net(nnx.Rngs(0))(x))
    placed()
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    predict = jshard.jit(lambda model, x: nnx.relu(nnx.remat(lambda model, x: model(x))(model, x)))
    close(jax.jit(lambda state, x: predict(nnx.merge(graph, state), x))(state, x), expected)
    _, stacked = jax.lax.scan(lambda state, x: (state, predict(nnx.merge(graph, state), x)), state, jnp.stack([x, x]))
    close(stacked[0], expected)


def test_gradients_outside_of_jit_are_of_parameters_that_are_placed():
    expected = nnx.value_and_grad(loss_of)(Net(nnx.Rngs(0)), *batch(0))
    placed()
    model, differentiated = Net(nnx.Rngs(0)), jshard.value_and_grad(loss_of)
    differentiated(model, *batch(0))
    with compilations() as found:
        value, gradients = differentiated(model, *batch(0))
    assert not found
    close((value, gradients), expected)
    assert kernels(gradients) == kernels(nnx.state(model))


def test_a_number_among_parameters_is_one_of_them():
    jshard.load({"jshard": CONFIGURATION["jshard"], "all": {"row": "data", "column": "tensor", "match": ["**"]}})
    params, (x, _) = {"kernel": np.ones((IN, 4), np.float32), "scale": 2.0}, batch(0)
    loss = lambda params, x: jnp.mean((x @ params["kernel"] * params["scale"]) ** 2)
    close(jshard.jit(jshard.value_and_grad(loss))(params, x), jax.value_and_grad(loss)(params, x))


def test_rows_that_are_closed_over_are_split_as_those_of_an_argument():
    placed()
    (model, optimizer), (x, y) = objects(), batch(0)

    def closing(model, optimizer, x, y):
        loss, gradients = jshard.value_and_grad(lambda model: loss_of(model, x, y))(model)
        optimizer.update(model, gradients)
        return loss

    wires = [
        sum(line.count * line.wire for line in jshard.explain(jshard.jit(f), model, optimizer, x, y).lines)
        for f in (step, closing)
    ]
    assert wires[0] == wires[1]
    assert f"{ROWS // 2},{IN}" in jshard.jit(closing).lower(model, optimizer, x, y).compile().as_text()


SCRIPT = """
import sys
sys.path.insert(0, "tests")
from tests.support.processes import join
join()
import jax, numpy as np
import test_jit
from test_jit import *

model, optimizer = objects()
x, y = batch(0)
expected = [float(nnx.jit(test_jit.step)(model, optimizer, x, y)) for _ in range(2)]
jshard.load({**CONFIGURATION, "jshard": {"mesh": {"data": 2, "tensor": 2}}})
own = slice(jax.process_index() * 4, jax.process_index() * 4 + 4)
where = jax.NamedSharding(jshard.mesh(), jax.P("data"))
mine = [jax.make_array_from_process_local_data(where, each[own]) for each in (x, y)]
step = jshard.jit(test_jit.step)
for model, optimizer in (objects(), jshard.create(objects)):
    losses = [float(step(model, optimizer, *mine)) for _ in range(2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    print(model.up.kernel[...].sharding.spec, optimizer.opt_state[0].mu.up.kernel[...].sharding.spec)
"""


@pytest.mark.slow
def test_two_processes_that_each_pass_their_own_rows_train_as_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    for each in processes.run(script, 2, devices=2):
        assert each.stdout.strip().splitlines()[-2:] == 2 * ["P('data', 'tensor') P('data', 'tensor')"]
