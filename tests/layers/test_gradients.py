"""`jshard.value_and_grad`: the gradients of `nnx.value_and_grad`, summed once and together."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers.gradients import _microbatches
from jshard.signals.active_config import unload
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

P = jax.P
SIGNALS = {
    "up": {"row": "data", "column": "tensor"},
    "down": {"row": "data", "reduction": "tensor"},
    "gradients": {"row": "data"},
}


def loaded(data=4, tensor=2, up=None, down=None, **jshard_says):
    signals = {**SIGNALS, "up": SIGNALS["up"] | (up or {}), "down": SIGNALS["down"] | (down or {})}
    return cases.loaded({"jshard": {"mesh": {"data": data, "tensor": tensor}, **jshard_says}, **signals})


def mlp():
    return jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0))


def batch():
    return cases.placed(cases.numbers((8, 16)), P("data")), cases.placed(cases.numbers((8, 8), 1), P("data"))


def loss(model, x, y):
    return jshard.mean((model(x) - y) ** 2)


def step_by(differentiate, loss=loss, outputs=None):
    @in_one_shard_map(outputs=outputs)
    def train(model, optimizer, x, y):
        with jshard.signal("gradients"):
            value, gradients = differentiate(lambda model: loss(model, x, y))(model)
        optimizer.update(model, gradients)
        return value

    return train


def trained(step, model):
    optimizer = jshard.Optimizer(model, optax.sgd(0.1))
    losses = [float(step(model, optimizer, *batch())) for _ in range(3)]
    return losses, nnx.state(model, nnx.Param)


SIZES = [8 * 4, 32 * 8 * 4, 32 * 4, 16 * 32 * 4]  # bytes of each gradient


def backward(step, model):
    """Signal, collective, count and bytes of each collective of the backward pass."""
    asked = jshard.explain(step, model, jshard.Optimizer(model, optax.sgd(0.1)), *batch(), backward=False)
    return [
        (line.signal, line.collective, line.count, line.payload) for line in asked.lines if line.phase == "backward"
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("says", [{}, {"kernel": {"all_reduce": "in_order"}}, {"axis_types": "auto"}], ids=str)
def test_training_is_that_of_nnx_and_parameters_lie_as_before(sizes, says):
    with loaded(*sizes, **says):
        losses, state = trained(step_by(nnx.value_and_grad), mlp())
        ours, found = trained(step_by(jshard.value_and_grad), model := mlp())
        np.testing.assert_allclose(ours, losses, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, state)
        assert {each.data.shape for each in model.up.kernel[...].addressable_shards} == {(16, 32 // sizes[1])}
        assert model.down.bias[...].sharding.is_fully_replicated


def test_sums_stand_under_the_signal_that_asks_in_the_backward_pass_and_are_one_in_order():
    with loaded(8, 1):
        assert {line[0] for line in backward(step_by(nnx.value_and_grad), mlp())} == {
            "gradients/up",
            "gradients/down",
        }
        asked = backward(step_by(jshard.value_and_grad), mlp())
        assert asked == [("gradients", "all_reduce", 1, payload) for payload in SIZES]
    with loaded(8, 1, kernel={"all_reduce": "in_order"}):
        asked = backward(step_by(jshard.value_and_grad), mlp())
        assert asked == [("gradients", "all_to_all", 1, 8 * sum(SIZES))]


def losses_of_rows(model, x, y):
    return jnp.mean((model(x) - y) ** 2, axis=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sizes", [(8, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("says", [{}, {"kernel": {"all_reduce": "in_order"}}, {"axis_types": "auto"}], ids=str)
def test_the_losses_of_rows_are_summed_with_the_gradients(sizes, says):
    with loaded(*sizes, **says):
        losses, state = trained(step_by(nnx.value_and_grad), mlp())
        step = step_by(jshard.value_and_grad, losses_of_rows)
        ours, found = trained(step, model := mlp())
        np.testing.assert_allclose(ours, losses, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, state)
        if "axis_types" in says:
            return
        asked = jshard.explain(step, model, jshard.Optimizer(model, optax.sgd(0.1)), *batch(), backward=False)
        over_data = [(line.signal, line.phase) for line in asked.lines if line.axis == "data"]
        assert set(over_data) == {("gradients", "backward")}
        if "kernel" in says and sizes == (8, 1):
            assert len(over_data) == 1


def in_parts(model, x, y):
    """The loss of four parts of the batch, one behind the other."""

    def part(total, each):
        return total + jshard.mean((model(each[0]) - each[1]) ** 2), None

    parts = jax.tree.map(lambda a: a.reshape(-1, 1, *a.shape[1:]), (x, y))
    total, _ = jax.lax.scan(part, jnp.float32(0), parts)
    return total / len(parts[0])


def test_a_batch_in_several_parts_sums_its_gradients_once():
    with loaded(4, 2):
        model = mlp()
        asked = backward(step_by(nnx.value_and_grad, in_parts, P()), model)
        assert sum(count for _, _, count, payload in asked if payload == 1024) > 1
        once = backward(step_by(jshard.value_and_grad, in_parts, P()), model)
        assert {count for signal, _, count, _ in once if signal == "gradients"} == {1}
        losses, state = trained(step_by(nnx.value_and_grad, in_parts, P()), mlp())
        ours, found = trained(step_by(jshard.value_and_grad, in_parts, P()), mlp())
        np.testing.assert_allclose(ours, losses, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, state)


@pytest.mark.seconds
def test_stored_parameters_scatter_theirs_and_wide_sums_stay_wide():
    with loaded(4, 2, up={"store": "data"}, down={"dtype": {"compute": "bfloat16", "reduce": "float32"}}):
        model = jshard.MLP(16, 32, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        asked = backward(step_by(jshard.value_and_grad), model)
        assert ("gradients/up", "reduce_scatter") in [line[:2] for line in asked]
        assert ("gradients", "all_reduce", 1, 8 * 4) in asked
        losses, _ = trained(step_by(nnx.value_and_grad), mlp())
        np.testing.assert_allclose(trained(step_by(jshard.value_and_grad), mlp())[0], losses, rtol=1e-3)


class Counting(nnx.Module):
    def __init__(self):
        self.mlp, self.calls = mlp(), nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.mlp(x)


def test_what_is_no_parameter_is_updated_and_aux_is_handed_on():
    with loaded():
        model = Counting()

        @in_one_shard_map
        def run(model, x, y):
            with jshard.signal("gradients"):
                (value, twice), gradients = jshard.value_and_grad(
                    lambda model: (value := loss(model, x, y), 2 * value), has_aux=True
                )(model)
            return value, twice, gradients["mlp"]["down"]["bias"][...]

        value, twice, gradient = run(model, *batch())
        assert float(twice) == 2 * float(value) and int(model.calls[...]) == 1
        expected = nnx.jit(nnx.grad(loss))(model.mlp, *batch())["down"]["bias"][...]
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_over_whole_arrays_it_is_nnx():
    with loaded():
        model, (x, y) = mlp(), batch()
        differentiated = jshard.value_and_grad(loss)
        assert differentiated.__name__ == "loss"
        value, gradients = nnx.jit(differentiated)(model, x, y)
        other, expected = nnx.jit(nnx.value_and_grad(loss))(model, x, y)
        assert float(value) == float(other)
        jax.tree.map(np.testing.assert_array_equal, gradients, expected)
        value, of_rows = nnx.jit(jshard.value_and_grad(losses_of_rows))(model, x, y)
        np.testing.assert_allclose(value, other, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), of_rows, expected)


def test_mistakes_are_told():
    def local(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def refused(step):
        with pytest.raises(JShardError) as told:
            step(mlp(), jshard.Optimizer(mlp(), optax.sgd(0.1)), *batch())
        return str(told.value)

    with loaded():
        assert 'differs along mesh axis "data"' in refused(
            in_one_shard_map(lambda m, o, x, y: _value(local, m, x, y), outputs=P())
        )


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_shard_map_that_does_not_say_what_varies_and_one_without_a_configuration_are_told(is_loaded):
    with loaded() as mesh:
        x, y = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in batch())
        model = nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
        if not is_loaded:
            unload()
        value = lambda x, y: jshard.value_and_grad(losses_of_rows)(model, x, y)[0]
        with pytest.raises(JShardError) as told:
            jax.eval_shape(jax.shard_map(value, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=not is_loaded), x, y)
    assert str(told.value) == (
        "jshard.value_and_grad needs a configuration, and a shard_map with check_vma on; load one, leave check_vma on, or use "
        "nnx.value_and_grad"
    )


def test_other_arguments_inside_a_shard_map_are_told():
    with loaded() as mesh:
        x, y = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in batch())
        model = nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
        value = lambda x, y: jshard.value_and_grad(losses_of_rows, argnums=1)(model, x, y)[0]
        with pytest.raises(JShardError) as told:
            jax.eval_shape(jax.shard_map(value, mesh=mesh, in_specs=P(), out_specs=P()), x, y)
    assert str(told.value) == (
        "jshard.value_and_grad inside a shard_map differentiates by argument 0, and argnums is 1; "
        "give losses_of_rows the model first, and remove argnums"
    )


def test_rows_go_in_microbatches_and_numbers_with_each():
    asked = types.SimpleNamespace(microbatches=4, place="a.yaml:3")
    x = np.arange(48.0).reshape(8, 2, 3)
    np.testing.assert_array_equal(_microbatches(asked, x), x.reshape(4, 2, 2, 3))
    np.testing.assert_array_equal(_microbatches(asked, 2.0), [2.0] * 4)
    with loaded():
        found = _microbatches(asked, cases.placed(x.reshape(8, 6), P("data", "tensor")))
        cases.assert_lies(found, P(None, None, "tensor"))
    for rows, use in ((3, "4"), (6, "4 or 8")):
        with pytest.raises(JShardError) as told:
            _microbatches(asked, x[:rows])
        assert str(told.value) == (
            f"jshard.pipeline (a.yaml:3) has 4 microbatches, and jshard.value_and_grad is given {rows} rows; use {use} rows"
        )


def _value(f, model, x, y):
    return jshard.value_and_grad(lambda model: f(model, x, y))(model)[0]
