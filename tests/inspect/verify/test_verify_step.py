"""A whole training step of an experiment is proven: loss, gradients, and what the optimizer makes of them; faults in the
update are caught there."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard.cli import main
from jshard.inspect.verify import verify
from jshard.inspect.verify.dataflow import on_the_way, stood_in
from jshard.layers import token_loss
from jshard.signals.active_config import unload
from jshard.signals.scope import unplaced
from jshard.training.experiments import experiment as training_experiment
from jshard.training.experiments import loop
from jshard.training.experiments.experiment import Experiment
from jshard.training.optimizers import clipping
from tests.support import cases
from tests.support.outside import users_environment

YAML = """\
jshard:
  mesh: {data: 2, tensor: 4}
  train: {model: "steps:Model", data: "steps:data", loss: "steps:loss", batch: 8}

layer1: {row: data, column: tensor}
layer2: {row: data, reduction: tensor}
"""
MODEL = """\
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard


class Model(nnx.Module):
    def __init__(self, dropout=0.0, *, rngs):
        with jshard.signal("layer1"):
            self.up = jshard.Linear(8, 16, rngs=rngs)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(16, 4, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else lambda x: x

    def __call__(self, x):
        with jshard.signal("layer1"):
            x = self.dropout(nnx.relu(self.up(x)))  # relu's gradient is chosen by a comparison, and divides nothing
        with jshard.signal("layer2"):
            return self.down(x)


def data():
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), np.arange(16) % 4
    return {"train": rows, "test": rows}


def loss(outputs, targets):  # linear between its corners, and divided by a power of two: exact as it is
    return jshard.sum(jnp.where(outputs > 0, outputs, 0.0) * (targets[:, None] + 1)) * 0.125
"""
PARAMETERS = ("down.bias", "down.kernel", "up.bias", "up.kernel")
EIGHTH = {"name": "sgd", "learning_rate": 0.125}


@pytest.fixture
def plain_steps():
    """verify of an experiment also takes two steps by plain Flax and optax."""


@pytest.fixture(autouse=True)
def written(request, tmp_path, monkeypatch):
    if "plain_steps" not in request.fixturenames:
        monkeypatch.setattr(training_experiment, "plain_steps", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("steps.py").write_text(MODEL)
    Path("steps.yaml").write_text(YAML)
    yield
    unload()


def experiment(*overrides, **train):
    """Changed as on the command line, with these keys under `jshard.train`."""
    configuration = jshard.load(
        "steps.yaml", [*overrides, *(f"jshard.train.{key}={_written(train[key])}" for key in train)]
    )
    return Experiment.build(configuration, jshard.mesh())


def _written(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"
    return value


def by_name(verification):
    return {finding.name: finding for finding in verification.findings}


def test_step_of_sgd_is_bitwise_without_any_stand_in(plain_steps):
    assert str(experiment(optimizer=EIGHTH).verify()) == (
        "EQUAL on {data: 2, tensor: 4} and on one device: 11 arrays, all bitwise\n"
        "two steps by plain Flax and optax in 64 bits: 7 arrays equal within 1e-09\n"
        "-             -       loss                           bitwise\n"
        "steps.yaml:6  layer2  gradient of model.down.bias    bitwise\n"
        "steps.yaml:6  layer2  gradient of model.down.kernel  bitwise\n"
        "steps.yaml:5  layer1  gradient of model.up.bias      bitwise\n"
        "steps.yaml:5  layer1  gradient of model.up.kernel    bitwise\n"
        "-             -       gradient of x                  bitwise\n"
        "steps.yaml:6  layer2  model.down.bias after          bitwise\n"
        "steps.yaml:6  layer2  model.down.kernel after        bitwise\n"
        "steps.yaml:5  layer1  model.up.bias after            bitwise\n"
        "steps.yaml:5  layer1  model.up.kernel after          bitwise\n"
        "-             -       optimizer.step after           bitwise\n"
        "probes: whole numbers modulo 2039, 3 draws, every sum exact in any order"
    )


@pytest.mark.seconds
def test_step_of_adamw_tells_which_lines_stand_ins_prove():
    verification = experiment().verify()
    told = by_name(verification)
    assert verification.ok, str(verification)
    assert {told[f"gradient of model.{name}"].stand_ins for name in PARAMETERS} == {()}
    assert {told[f"model.{name} after"].stand_ins for name in PARAMETERS} == {("pow", "sqrt")}
    assert told["optimizer.opt_state.0.mu.up.kernel after"].stand_ins == ()
    assert told["optimizer.opt_state.0.nu.up.kernel after"].stand_ins == ()
    assert (told["optimizer.opt_state.0.nu.up.kernel after"].cause.path, told["loss"].cause.path) == (("layer1",), ())
    names = "loss", "gradient of model.up.kernel", "model.up.kernel after", "optimizer.opt_state.0.nu.up.kernel after"
    assert [told[name].cause.phase for name in names] == ["forward", "backward", "update", "update"]
    assert str(verification).splitlines()[-4:-1] == [
        "-             -       optimizer state after, 2 arrays  bitwise",
        "steps.yaml:6  layer2  optimizer state after, 4 arrays  bitwise",
        "steps.yaml:5  layer1  optimizer state after, 4 arrays  bitwise",
    ]


@pytest.mark.slow
def test_step_over_further_meshes_and_other_strategies():
    step = experiment("layer1.store={optimizer: data}", "layer2.store=data", optimizer="adafactor")
    verification = step.verify([{"data": 4, "tensor": 2}, {"data": 1, "tensor": 8}])
    assert verification.ok and len(verification.findings) % 3 == 0, str(verification)
    assert {finding.verdict for finding in verification.findings} == {"bitwise"}
    assert [finding.mesh["data"] for finding in verification.findings if finding.name == "loss"] == [2, 4, 1]


@pytest.mark.seconds
def test_step_with_dropout_draws_the_same_numbers_on_every_mesh():
    verification = experiment(model={"path": "steps:Model", "dropout": 0.5}, optimizer=EIGHTH).verify(
        [{"data": 4, "tensor": 2}]
    )
    assert verification.ok, str(verification)
    assert {(found.verdict, found.zero) for found in verification.findings} == {("bitwise", False)}
    assert "model.dropout.rngs.count after" in by_name(verification)


def test_random_numbers_are_the_same_on_every_mesh_from_one_seed():
    def f(key, rngs, x):
        drawn = jax.random.uniform(key, x.shape) + jax.random.normal(rngs.noise(), x.shape)
        return jnp.where(jax.random.bernoulli(rngs.mask(), 0.5, x.shape), x, 0.0) * drawn

    jshard.load("steps.yaml")
    x = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(jshard.mesh(), P("data", "tensor")))
    verification = verify(f, jax.random.key(7), nnx.Rngs(noise=1, mask=2), x, meshes=[{"data": 8, "tensor": 1}])
    assert verification.ok and not any(found.zero for found in verification.findings), str(verification)
    assert {finding.verdict for finding in verification.findings} == {"bitwise"}, str(verification)


def test_fault_random_numbers_of_each_device_are_caught():
    """Every device draws for itself."""

    def f(key, x):
        def body(key, x):
            return x * jax.random.uniform(jax.random.fold_in(key, lax.axis_index("data")), x.shape)

        return jax.shard_map(body, mesh=jshard.mesh(), in_specs=(P(), P("data")), out_specs=P("data"))(key, x)

    jshard.load("steps.yaml")
    x = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(jshard.mesh(), P("data")))
    assert not verify(f, jax.random.key(7), x, backward=False).ok


# -- two steps by plain Flax and optax --


def cross_entropy_experiment(**train):
    """Trained by cross entropy in two microbatches, its gradients clipped."""
    Path("steps.yaml").write_text(YAML.replace(', loss: "steps:loss"', ""))
    return experiment(microbatches=2, optimizer={"name": "adamw", "clip": 0.01, "learning_rate": 0.1}, **train)


@pytest.mark.seconds
def test_two_steps_are_those_of_plain_flax_and_optax(plain_steps):
    verification = cross_entropy_experiment().verify()
    plain = verification.plain
    assert verification.ok and not plain.wrong and not plain.unknown, str(verification)
    assert {"loss of step 1", "loss of step 2", "model.up.kernel", "optimizer.step"} < plain.offs.keys()
    assert str(plain) == f"two steps by plain Flax and optax in 64 bits: {len(plain.offs)} arrays equal within 1e-09"


def test_a_dtype_that_is_asked_for_sums_over_devices_is_no_fault(plain_steps):
    """Plain steps have no such sums, and in 64 bits these have no such dtype."""
    verification = experiment("layer2.dtype={reduce: bfloat16}").verify()
    assert verification.ok and not verification.plain.wrong, str(verification)


@pytest.mark.seconds
def test_verify_of_a_model_whose_module_makes_arrays():
    """Devices are pretended before it is imported."""
    Path("arrays.py").write_text(MODEL + "\nMASK = jnp.ones(8)\n")
    Path("arrays.yaml").write_text(YAML.replace("steps:", "arrays:"))
    done = subprocess.run(
        [sys.executable, "-m", "jshard", "verify", "arrays.yaml"],
        capture_output=True, text=True, env={**users_environment(), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("EQUAL on {data: 2, tensor: 4}"), done.stderr


def counted_twice(monkeypatch):
    monkeypatch.setattr(loop, "accumulated", lambda f, real=loop.accumulated: real(lambda *args: 2 * f(*args)))


def norm_twice(monkeypatch):
    real = clipping._sum_of_squares
    monkeypatch.setattr(clipping, "_sum_of_squares", lambda leaves: 2 * real(leaves))


def another_loss(monkeypatch):
    real = token_loss.losses_of
    monkeypatch.setattr(token_loss, "losses_of", lambda x, y, z: real(x, y, z) + 1e-6 * x[..., 0])


MOMENT = "optimizer.opt_state.1.0.mu.up.kernel"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "fault, off", [(counted_twice, "loss of step 1"), (norm_twice, MOMENT), (another_loss, MOMENT)]
)
def test_a_fault_of_the_step_itself_is_found_by_plain_flax_and_optax_alone(fault, off, monkeypatch, plain_steps):
    fault(monkeypatch)
    verification = cross_entropy_experiment().verify()
    assert all(finding.is_proven for finding in verification.findings), str(verification)
    assert not verification.ok and off in verification.plain.wrong
    count = f"{len(verification.plain.wrong)} of {len(verification.plain.offs)} arrays"
    assert str(verification).splitlines()[0] == (
        f"NOT EQUAL: {count} differ from plain Flax and optax after two steps on {{data: 2, tensor: 4}}"
    )


def test_numbers_that_are_created_otherwise_than_by_plain_flax_are_told(monkeypatch, plain_steps):
    built = experiment()
    built.model.up.kernel[...] *= 1.001
    verification = built.verify()
    assert verification.plain.wrong.keys() == {"model.up.kernel as created"}, verification.plain


def test_a_large_model_is_verified_at_two_layers_or_refused(monkeypatch, capsys):
    Path("deep.py").write_text(MODEL.replace("dropout=0.0, *", "dropout=0.0, depth=5, *"))
    Path("steps.yaml").write_text(YAML.replace("steps:Model", "deep:Model"))
    monkeypatch.setattr(training_experiment, "MOST", 500)
    assert main(["verify", "steps.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "deep:Model has 848 B of parameters: verified at depth=2"
    monkeypatch.setattr(training_experiment, "memory_of_host", lambda: 20_000)
    assert main(["verify", "steps.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        'jshard.train.model (steps.yaml:3) is "deep:Model", which has 848 B of parameters in two layers; verifying '
        "needs 25 times as much memory, and this host has 19.5 KiB; make it smaller, as in: jshard verify steps.yaml model.width=256"
    )


# -- faults in the update --


def shifted(tx, change):
    """`tx`, whose updates are changed on the way out by `change(update, mesh axes that its array lies over)`."""

    def update(updates, state, params=None):
        updates, state = tx.update(updates, state, params)
        return jax.tree.map(lambda update, axes: change(update, axes), updates, _specs(params)), state

    return optax.GradientTransformation(tx.init, update)


def _specs(params):
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, params)


def over(body, spec):
    return jax.shard_map(body, mesh=jshard.mesh(), in_specs=spec, out_specs=spec, check_vma=False)


def summed_again(update, spec):
    """The sum over data is taken once more."""
    return over(lambda part: lax.psum(part, "data"), spec)(update)


def scaled_by_its_own_part(update, spec):
    """A norm that every device takes of its own part, and nobody sums."""
    return over(lambda part: part * jnp.sum(jnp.maximum(part, 0)), spec)(update)


def half_as_many(update, spec):
    return update / jshard.mesh().shape["data"]


def turned(update, spec):
    """Every device of `tensor` hands its part on to the next."""

    def body(part):
        count = lax.axis_size("tensor")
        return lax.ppermute(part, "tensor", [(n, (n + 1) % count) for n in range(count)])

    return over(body, spec)(update)


def faulty(change):
    step = experiment(optimizer=EIGHTH)
    optimizer = jshard.Optimizer(step.model, shifted(optax.sgd(0.125), change))
    return dataclasses.replace(step, optimizer=optimizer).verify()


@pytest.mark.quick("turned-")
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (summed_again, '2 times too large, the size of mesh axis "data"'),
        (scaled_by_its_own_part, 'a sum over mesh axis "tensor" is missing'),
        (half_as_many, '2 times too small, the size of mesh axis "data"'),
        (turned, "the right numbers in other places"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_fault_in_the_update_is_caught_and_gradients_are_right(change, cause):
    verification = faulty(change)
    verdicts = {name: finding.verdict for name, finding in by_name(verification).items()}
    assert not verification.ok
    assert {verdicts[f"gradient of model.{name}"] for name in PARAMETERS} == {"bitwise"} == {verdicts["loss"]}
    assert "differs" in {verdicts[f"model.{name} after"] for name in PARAMETERS}
    (begin,) = verification.beginnings
    assert begin.cause.phase == "update" and cause in begin.looks, str(begin)
    if change is half_as_many:  # outside every shard_map: told by the parameter that it leaves behind
        assert (begin.cause.signal, str(begin.cause.place)) == ("layer2", "steps.yaml:6")
    else:
        line = change.__code__.co_firstlineno
        assert (
            begin.cause.source.startswith("test_verify_step.py:")
            and abs(int(begin.cause.source.split(":")[1]) - line) < 130
        )


def test_fault_gradient_that_is_not_summed_is_caught_in_gradient_and_parameter():
    """Each device updates by the gradient of its own rows."""

    def step(model, optimizer, x):
        def body(x, kernel):
            return jax.grad(lambda kernel: jnp.maximum(x @ kernel, 0).sum())(lax.pcast(kernel, "data", to="varying"))

        own = jax.shard_map(body, mesh=jshard.mesh(), in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
        gradients = nnx.state(model, nnx.Param)
        gradients["kernel"][...] = own(x, model.kernel[...])
        optimizer.update(model, gradients)

    jshard.load("steps.yaml")
    with jshard.signal("layer2"):
        model = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jax.device_put(model.kernel[...], jax.NamedSharding(jshard.mesh(), P()))
    x = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(jshard.mesh(), P("data")))
    verification = verify(step, model, jshard.Optimizer(model, optax.sgd(0.125)), x)
    assert not verification.ok
    assert by_name(verification)["model.kernel after"].verdict == "differs"
    (begin,) = verification.beginnings
    assert 'a sum over mesh axis "data" is missing' in begin.looks, str(verification)


# -- which results stand-ins are behind --


def test_stand_ins_are_followed_through_everything_that_holds_a_program():
    def f(x, y):
        def body(carry, each):
            first, second = carry
            return (jnp.exp(second), each), first

        (first, second), stacked = lax.scan(body, (x, x), jnp.stack([x, x]))
        one = lax.cond(y[0] > 0, lambda x: jnp.sin(x), lambda x: x, x)
        other = jax.jit(lambda x, y: (x, jnp.tanh(y)))(x, y)
        return first, second, stacked, one, *other, lax.fori_loop(0, 2, lambda _, x: jnp.log(x), x), x / y

    x = np.ones(3, np.float32)
    found = on_the_way(jax.make_jaxpr(f)(x, x), stood_in)
    told = [set(names) for names in found]
    assert told == [{"exp"}, set(), {"exp"}, {"comparison", "sin"}, set(), {"tanh"}, {"log"}, set()]


@pytest.mark.quick("auto")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_a_variable_that_a_plain_call_alone_changes_is_a_fault(axis_types):
    words = {"row": "data", "column": "tensor", "match": ["**"]}
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, "all": words}):
        model, x = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), np.ones((4, 8), np.float32)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        def step(model, optimizer, x, drops=False):
            before = jax.tree.map(lambda x: x, nnx.state(model, nnx.Param))
            loss, gradients = jshard.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
            optimizer.update(model, gradients)
            if drops and not unplaced.value:
                nnx.update(model, before)
            return loss

        assert verify(jshard.jit(step), model, optimizer, x).ok
        verification = verify(functools.partial(step, drops=True), model, optimizer, x)
        assert [(each.name, each.verdict) for each in verification.findings if each.is_wrong] == [
            ("model.bias after", "dropped"), ("model.kernel after", "dropped")
        ]  # fmt: skip
        assert "changes in a plain call, but not in this one" in str(verification)
        assert verification.verdict == "NOT EQUAL: 2 of 9 arrays differ on {data: 2, tensor: 4} and on one device"
