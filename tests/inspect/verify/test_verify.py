"""Programs that are right verify bitwise; each planted fault is caught, and the report names where it begins."""

from __future__ import annotations

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.inspect.verify import verify
from jshard.layers import body
from jshard.layers import sharded_matmul as product
from jshard.signals.active_config import unload
from tests.support.one_shard_map import in_one_shard_map

YAML = """\
jshard:
  mesh: {data: 2, tensor: 4}

layer1: {row: data, column: tensor}
layer2:
  row: data
  reduction: tensor
layer3: {row: data}
"""


@pytest.fixture(autouse=True)
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.yaml").write_text(YAML)
    jshard.load("mlp.yaml")
    yield
    unload()


def put(shape, *spec, dtype=np.float32):
    numbers = np.random.default_rng(0).normal(size=shape).astype(dtype)
    return jax.device_put(numbers, jax.NamedSharding(jshard.mesh(), P(*spec)))


def over(body, in_specs, out_specs, **more):
    """A shard_map on whatever mesh holds when it is called."""
    return jax.shard_map(body, mesh=jshard.mesh(), in_specs=in_specs, out_specs=out_specs, **more)


class MLP(nnx.Module):
    def __init__(self, rngs, **arguments):
        with jshard.signal("layer1"):
            self.up = jshard.Linear(8, 16, rngs=rngs, **arguments)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(16, 4, rngs=rngs, **arguments)

    def __call__(self, x, activation=nnx.relu):
        with jshard.signal("layer1"):
            x = activation(self.up(x))
        with jshard.signal("layer2"):
            return self.down(x)


def loss(model, x):
    return (model(x) ** 2).mean()


# -- programs that are right --


def test_verify_of_a_loss_is_the_verdict_and_a_table():
    assert str(verify(loss, MLP(nnx.Rngs(0)), put((8, 8), "data"))) == (
        "EQUAL on {data: 2, tensor: 4} and on one device: 6 arrays, all bitwise\n"
        "-           -       loss                           bitwise\n"
        "mlp.yaml:5  layer2  gradient of model.down.bias    bitwise\n"
        "mlp.yaml:5  layer2  gradient of model.down.kernel  bitwise\n"
        "mlp.yaml:4  layer1  gradient of model.up.bias      bitwise\n"
        "mlp.yaml:4  layer1  gradient of model.up.kernel    bitwise\n"
        "-           -       gradient of x                  bitwise\n"
        "probes: whole numbers modulo 2039, 3 draws, every sum exact in any order"
    )


def all_bitwise(verification):
    assert verification.ok and verification, str(verification)
    assert {(found.verdict, found.zero) for found in verification.findings} == {("bitwise", False)}, str(verification)
    return True


def two_layers(x, a, b):
    """A hand-written program under signals, each layer with a body of its own."""
    with jshard.signal("layer1"):
        h = over(lambda x, a: jnp.maximum(x @ a, 0), (P("data"), P(None, "tensor")), P("data", "tensor"))(x, a)
    with jshard.signal("layer2"):
        y = over(
            lambda h, b: lax.psum(h @ b, "tensor"), (P("data", "tensor"), P("tensor")), P("data")
        )(h, b)  # fmt: skip
    return (y**2).sum()


def hand_written():
    return put((8, 8), "data"), put((8, 16), None, "tensor"), put((16, 4), "tensor")


def test_verify_of_a_hand_written_shard_map_over_plain_arrays():
    assert all_bitwise(verify(two_layers, *hand_written()))


@pytest.mark.parametrize(("has_gradients", "sizes"), [(True, [2, 4, 1, 1]), (False, [2, 4, 2, 4, 1, 1])])
def test_verify_traces_a_program_that_holds_its_gradients_once_for_each_mesh(has_gradients, sizes):
    traced = []

    def value(x):
        traced.extend(jshard.mesh().shape.values())
        return (x**2).sum()

    assert verify(jax.grad(value) if has_gradients else value, put((4, 4), "data"))
    assert traced == sizes


def test_verify_of_further_meshes():
    verification = verify(two_layers, *hand_written(), meshes=[{"data": 4, "tensor": 2}, {"data": 1, "tensor": 8}])
    assert all_bitwise(verification)
    assert str(verification).splitlines()[0] == (
        "EQUAL on {data: 2, tensor: 4}, {data: 4, tensor: 2}, {data: 1, tensor: 8} and on one device: 12 arrays, all bitwise"
    )


@pytest.mark.seconds
@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["nnx.jit", "plain"])
def test_verify_of_a_training_step_compares_what_it_leaves_behind(wrap):
    model = MLP(nnx.Rngs(0))
    optimizer = jshard.Optimizer(model, optax.adamw(1e-3))

    @wrap
    def train(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    before = jax.tree.map(np.asarray, nnx.state((model, optimizer)))
    verification = verify(train, model, optimizer, put((8, 8), "data"))
    assert all_bitwise(verification)
    names = [finding.name for finding in verification.findings]
    assert {"train", "model.up.kernel after", "optimizer.step after"} <= set(names)
    assert not any(name.startswith("gradient") for name in names)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state((model, optimizer))))


@pytest.mark.seconds
def test_verify_of_a_jshard_step():
    @in_one_shard_map
    def train(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model, x: jshard.mean(model(x) ** 2))(model, x)
        optimizer.update(model, gradients)
        return value

    model = MLP(nnx.Rngs(0))
    assert all_bitwise(verify(train, model, jshard.Optimizer(model, optax.adam(1e-3)), put((8, 8), "data")))


def test_verify_of_a_result_that_lies_otherwise_on_one_device():
    def f(x, w):
        split = "data" if jshard.mesh().size > 1 else None
        return jshard.place(x @ w, jshard.Layout(jshard.mesh(), split, None))

    assert all_bitwise(verify(f, put((8, 16)), put((16, 8))))


@pytest.mark.quick("explicit")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_verify_of_results_that_are_no_scalars_of_products_that_no_signal_splits(axis_types):
    jshard.load({"jshard": {"mesh": {"x": 4}, "axis_types": axis_types}, "a": {"row": "x"}})
    x, w = np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)
    assert all_bitwise(verify(lambda x, w: jshard.matmul(x, w), x, w))
    assert all_bitwise(verify(lambda x, w: {"rows": jshard.matmul(x, w), "one": jshard.matmul(x[0], w)}, x, w))


def test_verify_lets_one_device_choose_as_the_mesh_does():
    """A product that its signal does not split is split by its rows, and gradients are summed in bfloat16, as the signal asks:
    on one device there is nothing to choose, and it would be another program."""
    jshard.load({"jshard": {"mesh": {"data": 8}}, "layer": {"dtype": {"reduce": "bfloat16"}}})

    def f(x, w):
        with jshard.signal("layer"):
            return jshard.matmul(x, w)

    x, w = put((16, 8), "data"), put((8, 8))
    assert [told.words for told in jshard.explain(f, x, w).choices] == [
        "row=data, 0 B on the wire per device forward, 224 B backward, 1/8 of the arithmetic"
    ]
    verification = verify(f, x, w, meshes=[{"data": 2}])
    assert verification.ok, str(verification)


def test_verify_on_an_auto_mesh():
    jshard.load("mlp.yaml", ["jshard.axis_types=auto"])
    assert all_bitwise(verify(loss, MLP(nnx.Rngs(0)), put((8, 8), "data")))


def test_verify_of_smooth_operations_by_stand_ins():
    def f(model, x, labels):
        with jshard.signal("layer3"):
            x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return optax.softmax_cross_entropy(model(x, nnx.gelu), labels).mean()

    labels = put((8, 4), "data")
    verification = verify(f, MLP(nnx.Rngs(0)), put((8, 8), "data"), labels)
    assert all_bitwise(verification)
    for name in ("exp", "log", "rsqrt", "tanh"):
        assert name in verification.probes.split("stand-ins for ")[1].split(", ")


def test_verify_takes_numpy_numbers_of_64_bits_without_a_warning():
    def f(x, y):
        return (x * jax.nn.one_hot(y, 4)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_bitwise(verify(f, put((8, 4), "data"), np.arange(8) % 4))


@pytest.mark.seconds
def test_verify_of_scan_remat_dropout_and_cond():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layer = MLP(rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, k):
            @jax.checkpoint
            def body(carry, k):
                h = lax.cond(k[0, 0] > 0, lambda h: h @ k, lambda h: 2 * h, carry)
                return jnp.tanh(h), h.sum()

            x = self.dropout(self.layer(x))
            x, sums = lax.scan(body, x, k)
            return (x**2).sum() + sums.sum()

    deep = Deep(nnx.Rngs(0))
    verification = verify(lambda deep, x, k: deep(x, k), deep, put((8, 8), "data"), put((3, 4, 4)))
    assert verification.ok, str(verification)
    assert {finding.verdict for finding in verification.findings} == {"bitwise"}, str(verification)


@pytest.mark.parametrize("dtype", [{"compute": "bfloat16"}, {"reduce": "bfloat16"}], ids=["compute", "reduce"])
def test_verify_of_low_precision_that_was_asked_for(dtype):
    word, name = next(iter(dtype.items()))
    jshard.load("mlp.yaml", [f"layer1.dtype.{word}={name}", f"layer2.dtype.{word}={name}"])
    assert all_bitwise(verify(loss, MLP(nnx.Rngs(0)), put((8, 8), "data")))


def test_verify_of_a_deep_model_draws_few_numbers():
    def f(x, layers):
        for w in layers:
            x = jnp.maximum(x @ w, 0)
        return x.sum()

    layers = [put((8, 8)) for _ in range(10)]
    assert verify(f, put((8, 8), "data"), layers).ok


def test_verify_of_what_has_no_stand_in_states_a_tolerance():
    def f(x):
        with jshard.signal("layer3"):
            return jnp.fft.rfft(x).real.sum() + jnp.cumprod(x, axis=1).sum()

    verification = verify(f, put((8, 8), "data"))
    assert verification.ok
    (verdict, *lines, _) = str(verification).splitlines()
    assert 'within 1e-09 (because: fft in signal "layer3" has no exact stand-in; ' in lines[0]
    assert 'in signal "layer3" has no exact stand-in; ' in lines[1]
    assert verdict == "EQUAL on {data: 2, tensor: 4} and on one device: 2 arrays, 0 bitwise, 2 within a tolerance"


def complex_numbers(x):
    return (x * jnp.exp(1j * x.sum(1, keepdims=True))).real.sum()


def until_it_is_small(x):
    return jax.lax.while_loop(lambda x: (x * x).sum() > 1.0, lambda x: x / 2, x).sum()


@pytest.mark.quick("fft")
@pytest.mark.parametrize("unknown", [lambda x: jnp.fft.rfft(x).real.sum(), lambda x: jnp.linalg.cholesky(x @ x.T).sum(),
                                     complex_numbers, until_it_is_small], ids=["fft", "cholesky", "complex", "while"])  # fmt: skip
def test_an_operation_without_a_stand_in_taints_only_what_depends_on_it(unknown):
    def f(factor, x, y):
        wrong = factor if jshard.mesh().size > 1 else 1.0
        return unknown(x) * wrong, (y @ x).sum(), unknown(2 * x) + (y * wrong).sum()

    x, y = put((8, 8)), put((8, 8), "data")
    tainted, proven, both = verify(functools.partial(f, 1.0), x, y, backward=False).findings
    assert (tainted.verdict, proven.verdict, both.verdict) == ("within", "bitwise", "within")
    assert tainted.because.endswith("has no exact stand-in")
    tainted, proven, both = verify(functools.partial(f, 1.01), x, y, backward=False).findings
    assert (tainted.verdict, proven.verdict, both.verdict) == ("differs", "bitwise", "differs")

    def g(x, y):
        return unknown(x), (y @ x).sum() * (1.01 if jshard.mesh().size > 1 else 1.0)

    verification = verify(g, x, y, backward=False)
    assert [each.verdict for each in verification.findings] == ["within", "differs"] and verification.beginnings


def test_verify_within_a_tolerance_catches_a_deviation_that_is_larger():
    def f(off, x):
        y = jnp.fft.rfft(x).real.sum(1)
        return y * (1 + off) if jshard.mesh().size > 1 else y

    x = put((8, 8), "data")
    (found,) = verify(functools.partial(f, 0.0), x, backward=False).findings
    assert found.words == (
        f"within {found.tolerance:.2g} (because: fft at test_verify.py:{f.__code__.co_firstlineno + 1} has no exact stand-in; "
        "a larger deviation would have been caught)"
    )
    (planted,) = verify(functools.partial(f, 2.0**-20), x, backward=False).findings
    assert planted.verdict == "differs" and planted.words == f"differs by {2.0**-20:.2g}"


def test_a_tolerance_that_hides_a_fault_of_any_collective_is_no_proof():
    verification = verify(lambda x: jnp.sin(2.0**50 * jnp.fft.rfft(x).real.sum()), put((8, 8), "data"), backward=False)
    (found,) = verification.findings
    assert found.verdict == "unproven" and found.tolerance >= 1e-3 and not verification
    assert ", which hides a factor of 1.001 in a collective (because: " in found.words
    assert verification.verdict.startswith(
        "NOT PROVEN: 1 of 1 array held only within a tolerance that hides a factor of "
    )


@pytest.mark.parametrize("part, verdict", [(1.0, "within"), (2.0**-28, "unproven")])
def test_a_tolerance_that_hides_a_fault_of_one_collective_is_no_proof(part, verdict):
    def f(x):
        with jshard.signal("layer3"):
            total = jax.shard_map(
                lambda x: jax.lax.psum(x.sum(), "data"), mesh=jshard.mesh(), in_specs=jax.P("data"), out_specs=jax.P()
            )(x)
        return jnp.fft.rfft(jnp.ones(8)).real.sum() + part * total

    (found,) = verify(f, put((8, 8), "data"), backward=False).findings
    assert found.verdict == verdict
    if verdict == "unproven":
        assert 'which hides a factor of 1.001 in a collective of "layer3" (' in found.words


def test_a_collective_whose_fault_another_result_shows_is_proven():
    def f(x):
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "data"), mesh=jshard.mesh(), in_specs=jax.P("data"), out_specs=jax.P()
        )(x)
        return jnp.fft.rfft(jnp.ones(8)).real.sum() + 2.0**-28 * total, total

    assert [each.verdict for each in verify(f, put((8, 8), "data"), backward=False).findings] == ["within", "bitwise"]


OWN = """\
import jax
import jax.numpy as jnp


@jax.custom_vjp
def own(x, power):
    return x**power

own.defvjp(lambda x, power: (own(x, power), x), lambda x, slope: (FACTOR * slope * 3 * x**2, None))

def f(x):
    return own(x, 3).sum() + jax.nn.relu(x).sum()
"""


@pytest.mark.quick("2")
@pytest.mark.parametrize("factor", [1, 2])
def test_a_derivative_of_ones_own_is_named_with_a_finite_difference_beside_it(factor, tmp_path):
    file = tmp_path / "m.py"
    file.write_text(OWN.replace("FACTOR", str(factor)))
    module = {"__name__": "m"}
    exec(compile(file.read_text(), str(file), "exec"), module)
    verification = verify(module["f"], put((8, 8), "data"))
    (own,) = verification.own
    assert verification.ok and own.by_rule == pytest.approx(factor * own.by_difference, rel=1e-4)
    line = "derivatives of your own: own() at m.py:5, not compared with its function; in a random direction its rule gives "
    assert f"{line}{own.by_rule:.6g}, a finite difference {own.by_difference:.6g}" in str(verification).splitlines()


def test_a_derivative_that_can_not_run_by_itself_is_named_too():
    @jax.custom_jvp
    def summed(x):
        return jax.lax.psum(x, "data")

    summed.defjvp(lambda x, dx: (summed(*x), jax.lax.psum(*dx, "data")))

    def f(x):
        return jax.shard_map(summed, mesh=jshard.mesh(), in_specs=jax.P("data"), out_specs=jax.P())(x).sum()

    (own,) = verify(f, put((8, 8), "data")).own
    assert own.unknown.startswith(
        "NameError: "
    ) and f"() at test_verify.py:{summed.fun.__code__.co_firstlineno}" in str(own)


def test_a_derivative_that_fails_by_itself_without_a_message_is_named_too():
    @jax.custom_jvp
    def own(x):
        if not jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError
        return x

    own.defjvp(lambda x, dx: (own(*x), *dx))

    def f(x):
        return jax.shard_map(own, mesh=jshard.mesh(), in_specs=P("data"), out_specs=P("data"))(x).sum()

    (derivative,) = verify(f, put((8, 8), "data")).own
    assert derivative.unknown == "ValueError"


def test_verify_draws_a_bar_on_a_terminal_and_nowhere_else(capsys, monkeypatch):
    verify(two_layers, *hand_written(), backward=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "120")
    verify(two_layers, *hand_written(), backward=False)
    assert "runs two_layers on {data: 2, tensor: 4}" in capsys.readouterr().err


def test_verify_of_shapes_alone():
    model = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    assert verify(loss, model, jax.ShapeDtypeStruct((8, 8), np.float32)).ok


def test_verify_to_json_is_the_same_report():
    told = json.loads(verify(two_layers, *hand_written()).to_json())
    assert told["ok"] is True
    assert [each["name"] for each in told["findings"]] == [
        "two_layers", "gradient of x", "gradient of a", "gradient of b",
    ]  # fmt: skip
    assert told["findings"][0]["mesh"] == {"data": 2, "tensor": 4}


# -- planted faults --


def caught(verification, signal, line, words, phase="forward"):
    """It differs, begins under `signal` at `line` of the YAML, and looks like `words`."""
    assert not verification.ok and not verification, str(verification)
    (begin,) = verification.beginnings
    assert (begin.cause.signal, str(begin.cause.place), begin.cause.phase) == (signal, f"mlp.yaml:{line}", phase), str(
        verification
    )
    assert words in begin.looks, str(verification)
    assert str(verification).splitlines()[0].startswith("NOT EQUAL: ")
    assert begin.cause.source.startswith("test_verify.py:")
    return True


def test_fault_of_an_elementwise_operation_begins_in_its_signal_and_not_in_the_sum_behind_it():
    def f(x):
        with jshard.signal("layer1"):
            h = x * jshard.mesh().shape["data"]
        with jshard.signal("layer2"):
            return (h**2).sum()

    assert caught(verify(f, put((8, 8), "data"), backward=False), "layer1", 4, "")


def test_what_a_call_leaves_behind_without_an_optimizer_is_of_its_forward():
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    phases = {
        each.name: each.cause.phase
        for each in verify(lambda model, x: model(x).sum(), model, put((8, 8), "data")).findings
    }
    assert (phases["model.mean after"], phases["value"], phases["gradient of x"]) == ("forward", "forward", "backward")


def second(body, *, check_vma=False):
    """`two_layers` with another second layer."""

    def f(x, a, b):
        with jshard.signal("layer1"):
            h = over(lambda x, a: jnp.maximum(x @ a, 0), (P("data"), P(None, "tensor")), P("data", "tensor"))(x, a)
        with jshard.signal("layer2"):
            y = over(body, (P("data", "tensor"), P("tensor")), P("data"), check_vma=check_vma)(h, b)
        with jshard.signal("layer3"):
            return (jnp.tanh(y) + y).sum()

    return f


def held(f, *args):
    return verify(f, *(args or hand_written()), backward=False)


def test_fault_missing_sum():
    found = held(second(lambda h, b: h @ b))
    assert caught(found, "layer2", 7, 'a sum over mesh axis "tensor" is missing')


def test_fault_missing_sum_in_one_shard_map_around_all():
    def body(x, a, b):
        with jshard.signal("layer1"):
            h = jnp.maximum(x @ a, 0)
        with jshard.signal("layer2"):
            y = h @ b
        with jshard.signal("layer3"):
            return lax.psum((jnp.tanh(y) + y).sum(), ("data", "tensor"))

    def f(x, a, b):
        return over(body, (P("data"), P(None, "tensor"), P("tensor")), P())(x, a, b)

    assert caught(held(f), "layer2", 7, 'a sum over mesh axis "tensor" is missing')


def test_fault_sum_too_many():
    found = held(second(lambda h, b: lax.psum(lax.psum(h @ b, "tensor"), "tensor")))
    assert caught(found, "layer2", 7, '4 times too large, the size of mesh axis "tensor": an extra sum over it')


def test_fault_reduction_in_bfloat16():
    def body(h, b):
        return lax.psum((h @ b).astype(jnp.bfloat16), "tensor").astype(jnp.float32)

    assert caught(held(second(body, check_vma=True)), "layer2", 5, "only low bits differ: a sum in bfloat16")


def test_fault_reduction_in_bfloat16_of_a_gradient():
    @jax.custom_vjp
    def bias(y, c):
        return y + c

    def back(_, g):
        return g, lax.psum(g.sum(0).astype(jnp.bfloat16), "data").astype(jnp.float32)

    bias.defvjp(lambda y, c: (bias(y, c), None), back)

    def f(x, c):
        with jshard.signal("layer3"):
            y = over(lambda x, c: bias(x, c), (P("data"), P()), P("data"))(x, c)
        return (31 * y * y * y).sum()

    found = verify(f, put((8, 4), "data"), put((4,)))
    assert caught(found, "layer3", 8, "only low bits differ", phase="backward")


def test_fault_swapped_axis_in_a_spec():
    """Two mesh axes on one array axis, in one order going in and in the other coming out."""

    def f(x):
        with jshard.signal("layer3"):
            y = over(lambda x: 2 * x, P(("data", "tensor")), P(("tensor", "data")))(x)
        return (jnp.arange(8.0)[:, None] * y).sum()

    found = held(f, put((8, 8), ("data", "tensor")))
    assert caught(found, "layer3", 8, "the right numbers in other places: a swapped axis")


def test_fault_swapped_mesh_axes_of_equal_size():
    jshard.load("mlp.yaml", ["jshard.mesh.data=2", "jshard.mesh.tensor=2"])

    def f(x):
        with jshard.signal("layer3"):
            y = over(lambda x: x, P("data", "tensor"), P("tensor", "data"), check_vma=False)(x)
        return jnp.sin(y)

    found = held(f, put((8, 8), "data", "tensor"))
    assert caught(found, "layer3", 8, "the right numbers in other places: a swapped axis")


def test_fault_mean_by_the_local_count():
    def f(x):
        with jshard.signal("layer3"):
            return over(lambda x: lax.psum(x.mean(0), "data"), P("data"), P())(x)

    found = held(f, put((8, 8), "data"))
    assert caught(found, "layer3", 8, '2 times too large, the size of mesh axis "data"')


def test_fault_gradient_only():
    """A custom_vjp that forgets the sum of its parameter's gradient."""

    @jax.custom_vjp
    def scale(x, w):
        return x * w

    def back(kept, g):
        x, w = kept
        return g * w, (g * x).sum(0) if lax.axis_size("data") else None

    scale.defvjp(lambda x, w: (scale(x, w), (x, w)), back)

    def body(x, w):
        return jax.vjp(scale, x, w)[1](jnp.ones_like(x))[1]

    def f(x, w):
        value = (x * w).sum()
        with jshard.signal("layer3"):
            return value, over(body, (P("data"), P()), P(), check_vma=False)(x, w)

    found = verify(f, put((8, 4), "data"), put((4,)), backward=False)
    assert caught(found, "layer3", 8, 'a sum over mesh axis "data" is missing', phase="backward")
    assert [finding.verdict for finding in found.findings] == ["bitwise", "differs"]


def test_fault_gradient_of_a_custom_vjp_under_grad():
    @jax.custom_vjp
    def copied(x):
        return x

    copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tensor"),))  # one sum too many

    def f(x, w):
        with jshard.signal("layer3"):
            y = over(lambda x, w: copied(x) * w, (P("data"), P()), P("data"), check_vma=True)(x, w)
        return (y * y).sum()

    found = verify(f, put((8, 4), "data"), put((4,)))
    assert caught(found, "layer3", 8, "4 times too large", phase="backward")
    assert {f.name for f in found.findings if f.verdict == "differs"} == {"gradient of x"}


def test_fault_gradient_inside_shard_map_unchecked():
    def body(x, w):
        return jax.grad(lambda w: lax.psum((x * w).sum() ** 2, "data"))(w)

    def f(x, w):
        with jshard.signal("layer3"):
            return over(body, (P("data"), P()), P(), check_vma=False)(x, w)

    found = verify(f, put((8, 4), "data"), put((4,)))
    assert not found.ok
    (begin,) = found.beginnings
    assert (begin.cause.signal, str(begin.cause.place)) == ("layer3", "mlp.yaml:8"), str(found)


def test_fault_all_gather_in_the_wrong_order():
    def f(x):
        with jshard.signal("layer3"):
            gather = functools.partial(lax.all_gather, axis=0, tiled=True)
            y = over(lambda x: gather(gather(x, "data"), "tensor"), P(("data", "tensor")), P(), check_vma=False)(x)
        return jnp.sin(y)

    found = held(f, put((8, 4), ("data", "tensor")))
    assert caught(found, "layer3", 8, "the right numbers in other places")


def test_fault_slice_of_the_wrong_rank():
    def body(x):
        turned = (lax.axis_index("tensor") + 1) % lax.axis_size("tensor")
        size = x.shape[1] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(x, turned * size, size, 1)

    def f(x):
        with jshard.signal("layer3"):
            return over(body, P("data"), P("data", "tensor"))(x)

    assert caught(held(f, put((8, 8), "data")), "layer3", 8, "another device's part")


def test_fault_sum_over_one_of_two_axes():
    def f(x):
        with jshard.signal("layer2"):
            return over(lambda x: lax.psum(x.sum(), "data"), P("data", "tensor"), P(), check_vma=False)(x)

    found = held(f, put((8, 8), "data", "tensor"))
    assert caught(found, "layer2", 7, 'a sum over mesh axis "tensor" is missing')


def test_fault_outside_every_signal_names_the_users_line():
    def f(x):
        return over(lambda x: x.sum(0), P("data"), P(), check_vma=False)(x)

    found = held(f, put((8, 8), "data"))
    (begin,) = found.beginnings
    line = f.__code__.co_firstlineno + 1
    assert str(begin).startswith(f"the part outside every signal (test_verify.py:{line}), forward: off by ")
    assert begin.looks == 'a sum over mesh axis "data" is missing'


def test_fault_in_one_mesh_only_is_told_of_that_mesh():
    def f(x):
        with jshard.signal("layer3"):
            return over(lambda x: lax.psum(x.sum(), "data") * (lax.axis_size("data") // 4 + 1), P("data"), P())(x)

    found = verify(f, put((8, 8), "data"), backward=False, meshes=[{"data": 4, "tensor": 2}])
    assert [finding.verdict for finding in found.findings] == ["bitwise", "differs"]
    assert [begin.mesh for begin in found.beginnings] == [{"data": 4, "tensor": 2}]


def test_fault_in_jshards_own_layer_is_caught(monkeypatch):
    """Take the sum out of the body that all products run, and the check that would have found it."""
    model, x = MLP(nnx.Rngs(0)), put((8, 8), "data")
    monkeypatch.setattr(body, "all_reduce", lambda x, mesh_axes, **more: x)
    monkeypatch.setattr(jax, "shard_map", functools.partial(jax.shard_map, check_vma=False))
    product.layer.clear_cache()
    try:
        found = verify(loss, model, x, backward=False)
    finally:
        product.layer.clear_cache()
    assert caught(found, "layer2", 7, 'a sum over mesh axis "tensor" is missing')


@pytest.mark.seconds
def test_fault_in_jshards_own_layer_that_keeps_the_first_part(monkeypatch):
    """What is the same everywhere, and yet no sum: the part of the first device."""

    def first(x, mesh_axes, **more):
        return lax.psum(jnp.where(lax.axis_index(mesh_axes) == 0, x, 0), mesh_axes) if mesh_axes else x

    model, x = MLP(nnx.Rngs(0)), put((8, 8), "data")
    monkeypatch.setattr(body, "all_reduce", first)
    product.layer.clear_cache()
    try:
        found = verify(loss, model, x)
    finally:
        product.layer.clear_cache()
    assert caught(found, "layer2", 7, "values differ")  # reduction


# -- mistakes --


def refused(sentence, f, *args, **more):
    with pytest.raises(JShardError) as told:
        verify(f, *args, **more)
    assert str(told.value) == sentence


def test_verify_tells_of_an_array_from_outside():
    w = put((8, 8), "data")

    def f(x):
        return x @ w

    refused(
        "f uses an array of shape (8, 8) from outside, which is on 8 devices and can't be put on another mesh; "
        "pass it as an argument: jshard.verify(f, ..., array)",
        f,
        put((8, 8)),
    )


def test_verify_tells_of_a_mesh_from_outside():
    whole = jshard.mesh()

    def f(x):
        return jax.shard_map(lambda x: x, mesh=whole, in_specs=P("data"), out_specs=P("data"))(x)

    with pytest.raises(JShardError) as told:
        verify(f, put((8, 8), "data"))
    assert str(told.value).startswith("f runs on the configured mesh and not on one of {data: 1, tensor: 1}: ")
    assert str(told.value).endswith("; call jshard.mesh() inside it, instead of keeping a mesh from outside")


def test_verify_tells_of_workers_that_one_device_can_not_stand_for():
    jshard.load({"first": {"shard": {"axis": 1, "workers": [0, 1]}}})
    with jshard.signal("first"):
        layer = jshard.Linear(8, 8, rngs=nnx.Rngs(0))
    refused(
        'verify can\'t put signal "first" (<dict>) on another mesh: it names workers 0, 1; '
        "name a mesh axis instead: shard: {axis: 0, mesh: data}",
        lambda layer, x: layer(x),
        layer,
        np.ones((4, 8), np.float32),
    )


def test_verify_tells_of_a_mesh_axis_that_is_not_there():
    refused(
        'verify(meshes=...) has an axis "pipe", but the configured mesh is {data: 2, tensor: 4}; use data or tensor',
        two_layers,
        *hand_written(),
        meshes=[{"pipe": 2}],
    )


def test_verify_tells_of_sizes_that_a_further_mesh_can_not_split():
    refused(
        'x splits axis 0 of size 6 over mesh axis "data" of size 4; use 4 or 8, or pad',
        lambda x: x.sum(),
        put((6, 8), "data"),
        meshes=[{"data": 4, "tensor": 1}],
    )


def test_verify_tells_of_a_key_that_is_only_described():
    refused(
        "key is a ShapeDtypeStruct, and verify can't invent a random key; pass the key itself",
        lambda key, x: x * jax.random.uniform(key),
        jax.eval_shape(lambda: jax.random.key(0)),
        put((8, 8), "data"),
    )
