"""`jshard.jit` recognises a call of the same objects without taking them apart, and sees every change that matters."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.layers.call_cache import take
from jshard.signals.active_config import unload

SIGNALS = {"up": {"row": "data", "column": "tensor"}, "down": {"row": "data", "reduction": "tensor"}}
X = np.linspace(-1, 1, 8 * 8, dtype=np.float32).reshape(8, 8)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.scale = 1.0
        self.kind = "plain"
        with jshard.signal("up"):
            self.up = jshard.Linear(8, 16, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x))) * self.scale


@pytest.fixture(autouse=True)
def loaded():
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 2}}, **SIGNALS})
    yield
    unload()


@pytest.fixture
def splits(monkeypatch):
    """How often NNX has taken something apart."""
    counted = []
    real = nnx.split
    monkeypatch.setattr(nnx, "split", lambda *args, **kwargs: counted.append(1) or real(*args, **kwargs))
    return counted


def placed(x=X):
    return jshard.place(x, jshard.Layout(jshard.mesh(), "data", *(None,) * (np.ndim(x) - 1)))


def made(seed=0):
    model = Model(nnx.Rngs(seed))
    return model, jshard.Optimizer(model, optax.adam(0.1))


def train(model, optimizer, x):
    value, gradients = nnx.value_and_grad(lambda model: jshard.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return value


@functools.partial(jax.jit, static_argnums=0)
def once(graph, state, x):
    model, optimizer = nnx.merge(graph, state)
    value = train(model, optimizer, x)
    return value, nnx.state((model, optimizer))


def expected(steps, change=lambda model, optimizer, turn: None):
    """The losses of as many steps without jshard.jit, `change` applied before each."""
    model, optimizer = made()
    losses = []
    for turn in range(steps):
        change(model, optimizer, turn)
        value, state = once(*nnx.split((model, optimizer)), placed())
        nnx.update((model, optimizer), state)
        losses.append(float(value))
    return losses


@pytest.mark.quick("True")
@pytest.mark.parametrize("donate", [False, True])
def test_second_call_takes_nothing_apart_and_trains_on(splits, donate):
    model, optimizer = made()
    step = jshard.jit(train, donate=donate)
    x = placed()
    losses = [float(step(model, optimizer, x))]
    after_first = len(splits)
    losses += [float(step(model, optimizer, x)) for _ in range(4)]
    assert len(splits) == after_first
    np.testing.assert_allclose(losses, expected(5), rtol=1e-5)
    assert int(optimizer.step[...]) == 5


def scaled(model, optimizer, turn):
    model.scale = float(1 + turn // 2)


def replaced(model, optimizer, turn):
    if turn == 2:
        with jshard.signal("up"):
            model.up = jshard.Linear(8, 16, rngs=nnx.Rngs(7))


def emptied(model, optimizer, turn):
    if turn == 2:
        model.up.kernel[...] = model.up.kernel[...] * 0


@pytest.mark.quick("replaced")
@pytest.mark.parametrize("change", [scaled, replaced, emptied])
def test_change_between_two_calls_is_seen(change):
    model, optimizer = made()
    step = jshard.jit(train)
    losses = []
    for turn in range(4):
        change(model, optimizer, turn)
        losses.append(float(step(model, optimizer, placed())))
    np.testing.assert_allclose(losses, expected(4, change), rtol=1e-5)


@pytest.mark.quick("explicit")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_kernel_that_lies_elsewhere_than_before_is_seen(axis_types):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 2}, "axis_types": axis_types}, **SIGNALS})
    model, optimizer = made()
    step = jshard.jit(train)
    for _ in range(2):
        step(model, optimizer, placed())
    whole = jshard.place(model.up.kernel[...], jshard.Layout(jshard.mesh(), None, None))
    model.up.kernel.set_raw_value(whole)
    losses = [float(step(model, optimizer, placed()))]
    np.testing.assert_allclose(losses, expected(3)[2:], rtol=1e-5)
    assert model.up.kernel[...].sharding.spec == jax.P(None, "tensor")  # moved back


def test_metadata_of_a_variable_is_seen():
    model, _ = made()

    @jshard.jit
    def total(model, x):
        return jshard.sum(model(x)) * model.up.kernel.get_metadata().get("factor", 1.0)

    once = total(model, placed())
    assert total(model, placed()) == once
    model.up.kernel.set_metadata("factor", 2.0)
    assert total(model, placed()) == 2 * once


def test_keys_of_a_batch_are_seen():
    model, _ = made()

    @jshard.jit
    def total(model, batch):
        return jshard.sum(model(batch.get("x", batch.get("y"))) * (1.0 if "x" in batch else 2.0))

    once = total(model, {"x": placed()})
    assert total(model, {"y": placed()}) == 2 * once
    assert total(model, {"x": placed()}) == once


def test_other_batches_dtypes_and_pytrees_of_arrays_are_seen(splits):
    model, _ = made()

    @jshard.jit
    def total(model, batch, scale):
        return jshard.sum(model(batch["x"])) * scale

    def dense(x, scale):
        with jax.set_mesh(jshard.mesh()):
            return float(jax.jit(lambda x: jnp.sum(model(x)))(placed(x))) * scale

    for x, scale in [(X, 1.0), (X * 2, 3.0), (X[:4], 3.0), (X, 2.0)]:
        np.testing.assert_allclose(
            total(model, {"x": placed(x), "no": None}, jnp.float32(scale)), dense(x, scale), rtol=1e-5
        )
    np.testing.assert_allclose(
        total(model, {"x": X, "no": None}, jnp.float32(1)), dense(X, 1.0), rtol=1e-5
    )  # from the host


def test_places_of_modules_among_the_arguments_are_seen():
    model, other = made()[0], made(1)[0]

    @jshard.jit
    def first(one, two, x):
        return jshard.sum((two if one is None else one)(x) * (2.0 if two is None else 1.0))

    assert np.isclose(first(model, None, placed()), 2 * first(None, model, placed()))
    assert np.isclose(first(model, other, placed()), first(None, model, placed()))
    assert not np.isclose(first(other, model, placed()), first(None, model, placed()))


def test_another_configuration_is_seen():
    """Also in where the results lie."""
    model, _ = made()
    outputs = jshard.jit(lambda model, x: model(x))
    before = outputs(model, placed())
    assert outputs(model, placed()).sharding == before.sharding == placed().sharding
    scattered = {"row": "data", "reduction": "tensor", "output": "scatter"}
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 2}}, **SIGNALS, "down": scattered})
    after = outputs(model, placed())
    assert after.sharding == jshard.Layout(jshard.mesh(), ("data", "tensor"), None).sharding
    np.testing.assert_allclose(after, before, rtol=1e-6)


class Odd(nnx.Module):
    """Holds what can change unseen: an array that is no variable, a list of layers, shared layers."""

    def __init__(self, rngs):
        with jshard.signal("down"):
            self.layers = nnx.List([jshard.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)])
        self.again = self.layers[0]
        self.offset = nnx.data(jnp.zeros(()))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.again(x) + self.offset


@pytest.mark.quick("False")
@pytest.mark.parametrize("offset", [True, False])
def test_odd_modules_are_taken_apart_as_often_as_is_needed(offset):
    model = Odd(nnx.Rngs(0))
    if not offset:
        model.offset = 0.0
    step = jshard.jit(lambda model, x: jshard.sum(model(x)))
    plain = lambda: float(jnp.sum(model(placed())))
    for turn in range(6):
        if turn == 2:
            model.layers[1] = model.layers[0]
        if turn == 3:
            with jshard.signal("down"):
                model.layers.append(jshard.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(3)))
        if turn == 4 and offset:
            model.offset = model.offset + 1
        if turn == 5:
            model.again.kernel[...] = model.again.kernel[...] * 2
        np.testing.assert_allclose(float(step(model, placed())), plain(), rtol=1e-4, err_msg=str(turn))


class Held(nnx.Module):
    """Holds a list and a dict of Python beside an array."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.sizes, self.names = [1, 2], {"m": 1}
        self.again = self.sizes


def taken(model, numbers=None):
    return take((model,), [model.w.get_raw_value()] if numbers is None else numbers, None, None, [])


CHANGES = {
    "nothing": lambda model: None,
    "a list grows": lambda model: model.sizes.append(3),
    "a list shrinks": lambda model: model.sizes.pop(),
    "a member of a list": lambda model: model.sizes.__setitem__(1, 7),
    "a key more": lambda model: model.names.update(n=1),
    "a key less": lambda model: model.names.clear(),
    "a later key": lambda model: model.names.update(n=model.names.pop("m")),
    "an earlier key": lambda model: model.names.update(a=model.names.pop("m")),
    "a member of a dict": lambda model: model.names.update(m=2),
    "another array": lambda model: model.w.set_raw_value(jnp.zeros(2)),
    "an array of another shape": lambda model: model.w.set_raw_value(
        jax.device_put(np.ones(3, np.float32), model.w.sharding)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_inside_a_module_is_seen_and_numbers_are_none_of_it(change):
    model = Held()
    snapshot = taken(model)
    CHANGES[change](model)
    assert (snapshot.operands((model,), None, None) is not None) == (change in ("nothing", "another array"))


def test_variables_that_hold_one_array_are_not_told_apart():
    model = Held()
    model.v = nnx.Param(jnp.zeros(()))
    model.v.set_raw_value(model.w.get_raw_value())
    assert taken(model, [model.w.get_raw_value()] * 2) is None
    assert taken(Held(), [jnp.ones(2)]) is None


def test_a_set_can_change_unseen():
    model = Held()
    model.kinds = {"a"}
    assert taken(model) is None


@jax.tree_util.register_pytree_node_class
class Box:
    """An array that no attribute of a module shows."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)


@pytest.mark.parametrize("array", [-3.0, 5.0, [1.0, 2.0]], ids=str)
def test_arrays_that_are_no_variables_are_seen(array):
    model = Held()
    numbers = lambda: jax.tree.leaves(nnx.split(model, nnx.Variable, ...)[1:])
    assert taken(model, numbers()) is not None
    for value in (Box(jnp.array(array)), jnp.array(array), np.array(array)):
        model.box = nnx.data(value)
        assert taken(model, numbers()) is None


def test_a_step_keeps_no_model_alive():
    step = jshard.jit(train)
    x = placed()
    model, optimizer = made()
    for _ in range(3):
        step(model, optimizer, x)
    gone = weakref.ref(model), weakref.ref(model.up.kernel[...]), weakref.ref(optimizer)
    before = len(jax.live_arrays())
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert len(jax.live_arrays()) <= before - 12


def test_live_arrays_are_constant_over_many_calls():
    model, optimizer = made()
    step, x = jshard.jit(train), placed()
    for _ in range(3):
        step(model, optimizer, x)
    held = len(jax.live_arrays())
    for _ in range(50):
        step(model, optimizer, x)
    assert len(jax.live_arrays()) == held


def test_variable_made_inside_a_step_is_there_after_it():
    model, _ = made()

    @jshard.jit
    def grows(model, x):
        model.extra = nnx.Param(jnp.zeros(()))
        return jshard.sum(model(x))

    assert grows(model, placed()) == grows(model, placed())
    assert float(model.extra[...]) == 0
