"""Signals that name workers: state and gradients lie on them, and what spans several sets of them trains or is one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from jshard.cli import main
from jshard.errors import JShardError
from jshard.inspect.plan import explain
from jshard.layers import Linear
from jshard.signals import active_config
from jshard.signals.scope import signal
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.train import train
from jshard.training.optimizers.optimizer import Optimizer

ROOT = Path(__file__).parents[3]
TWO = """
import numpy as np
from flax import nnx

import jshard

class Two(nnx.Module):
    def __init__(self, first, second, inputs=8, *, rngs):
        self.names = first, second
        with jshard.signal(first):
            self.up = jshard.Linear(inputs, 16, rngs=rngs)
        with jshard.signal(second):
            self.down = jshard.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        with jshard.signal(self.names[0]):
            x = nnx.relu(self.up(x))
        with jshard.signal(self.names[1]):
            return self.down(x)

def data():
    x = np.arange(128, dtype=np.float32).reshape(16, 8) / 64
    return {"train": (x, np.arange(16) % 4), "test": (x, np.arange(16) % 4)}
"""


@pytest.fixture(autouse=True)
def _in_the_root_with_a_model_of_two_layers(tmp_path, monkeypatch):
    (tmp_path / "two.py").write_text(TWO)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    yield
    sys.modules.pop("two", None)
    active_config.unload()


def two(first: str, second: str) -> list[str]:
    said = {"model": f"{{path: 'two:Two', first: {first}, second: {second}}}", "data": "two:data", "batch": 8}
    return [f"jshard.train.{key}={value}" for key, value in said.items()]  # a signal of one file is called batch


def devices(x: jax.Array) -> list[int]:
    return sorted(device.id for device in x.devices())


SMALL = [
    "jshard.mesh={data: 4, tensor: 2}",
    "model.features=8",
    "model.hidden=16",
    "model.depth=1",
    "data.features=8",
    "batch=64",
]
MODELS = {  # of files that name none
    "configs/mlp.yaml": two("layer1", "layer2"),
    "examples/gt/arrays.yaml": two("batch", "weights"),
    "examples/gt/compiled.yaml": two("hot_batch", "hot_batch"),
    "examples/gt/stages.yaml": two("encoder", "decoder"),
}
SIZES = {"configs/pod-fsdp.yaml": SMALL, "configs/pod-tensor.yaml": SMALL}
SIZES["configs/pod-slices.yaml"] = ["jshard.mesh={slice: {size: 2, over: dcn}, data: 2, tensor: 2}", *SMALL[1:]]
FILES = [str(path.relative_to(ROOT)) for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml")]
PARTS = {  # files that others include, and those of other programs
    "configs/pod.yaml",
    "examples/cluster/jobset.yaml",
}
FOLDERS = (
    "configs/adopt/",
    "configs/decoder/",
    "configs/first-steps/",
    "configs/lm/",
    "configs/pipe-",
)  # of models elsewhere, too large here, with text, or without an experiment: own tests
ELSEWHERE = {path for path in FILES if path.startswith(FOLDERS)} - {"configs/adopt/transformer.yaml"}
ELSEWHERE |= {"examples/gt/pipeline.yaml"}  # tests/layers/test_pieces.py


@pytest.mark.quick("configs/xor.yaml")
@pytest.mark.parametrize("path", sorted({*FILES} - PARTS - ELSEWHERE))
def test_what_check_accepts_train_runs(path, capsys):
    assert main(["check", path, "--trust", *MODELS.get(path, ())]) == 0
    words = [*MODELS.get(path, ()), *SIZES.get(path, ()), "jshard.train.steps=2"]
    configuration = active_config.load(path, words)
    built = Experiment.build(configuration, active_config.mesh())
    built.output = built.checkpoint = None
    found = train(built)
    assert list(found) == ["loss", "test_loss"] if "pod" in path else 0 <= found["test_accuracy"] <= 1
    assert "step 2/2   loss " in capsys.readouterr().out


def test_parts_are_no_experiments():
    assert PARTS < {*FILES}
    assert all("include: pod.yaml" in (ROOT / path).read_text() for path in SIZES)
    assert "kind" in next(yaml.safe_load_all((ROOT / "examples/cluster/jobset.yaml").read_text()))


BATCH = np.arange(32, dtype=np.float32).reshape(8, 4) / 32, np.ones((8, 6), np.float32)


def loss(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def updated(layer: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    for _ in range(3):
        optimizer.update(layer, nnx.grad(loss)(layer, x, y))


@pytest.fixture(scope="module")
def updated_plainly():
    """Flax's layer and optimizer, on one device."""
    active_config.unload()
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adamw(0.1), wrt=nnx.Param)
    nnx.jit(updated)(layer, optimizer, *BATCH)
    return layer, optimizer


@pytest.mark.quick(1)
# A backward on other workers is no part of one program, which test_gt tells.
@pytest.mark.parametrize(("backward", "compiled"), [(None, True), (None, False), ("back", False)])
@pytest.mark.parametrize("axis", [0, 1])
def test_optimizer_state_lies_on_the_workers_of_its_parameters(updated_plainly, axis, backward, compiled):
    said = {"shard": {"axis": axis, "workers": [2, 3]}} | ({"backward": backward} if backward else {})
    active_config.load({"layer": said, "back": {"shard": {"axis": axis, "workers": [4, 5]}}})
    with signal("layer"):
        layer = Linear(4, 6, rngs=nnx.Rngs(0))
    optimizer = Optimizer(layer, optax.adamw(0.1))
    plain, plain_optimizer = updated_plainly
    before = {name: getattr(layer, name)[...].sharding for name in ("kernel", "bias")}
    (nnx.jit(updated) if compiled else updated)(layer, optimizer, *BATCH)
    adam, plain_adam = optimizer.opt_state[0], plain_optimizer.opt_state[0]
    for name, sharding in before.items():
        for ours, theirs in ((layer, plain), (adam.mu, plain_adam.mu), (adam.nu, plain_adam.nu)):
            mine = (ours[name] if ours is not layer else getattr(layer, name))[...]
            assert mine.sharding.is_equivalent_to(sharding, mine.ndim)
            assert devices(mine) == [2, 3]
            dense = (theirs[name] if theirs is not plain else getattr(plain, name))[...]
            np.testing.assert_allclose(mine, dense, rtol=2e-5, atol=1e-7)


@pytest.mark.seconds
def test_stages_with_their_backward_elsewhere_train_as_on_one_worker():
    ended = []
    for words in ([], [f"{name}.shard.workers=[0]" for name in ("encoder", "encoder_back", "decoder", "decoder_back")]):
        said = [*two("encoder", "decoder"), "jshard.train.steps=3", *words]
        built = Experiment.build(active_config.load("examples/gt/stages.yaml", said), active_config.mesh())
        train(built)
        ended.append(built.model)
    apart, alone = ended
    for name, workers in (("up", [0, 1]), ("down", [2, 3])):
        kernel = getattr(apart, name).kernel[...]
        assert devices(kernel) == workers
        assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 2, kernel.shape[1])
        np.testing.assert_allclose(kernel, getattr(alone, name).kernel[...], rtol=1e-5, atol=1e-7)


def test_optimizer_that_reduces_over_parameters_on_several_sets_of_workers_is_one_sentence():
    active_config.load("examples/gt/stages.yaml", two("encoder", "decoder"))
    model = nnx.Dict()
    for name in ("encoder", "decoder"):
        with signal(name):
            model[name] = Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(JShardError) as told:
        Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert str(told.value) == (
        "the optimizer reduces over whole parameters (reduce_sum), which are on several sets of workers; use one that treats "
        "each element by itself, such as adamw"
    )


WORKERS = {"a": {"shard": {"axis": 0, "workers": [0, 1]}}, "b": {"shard": {"axis": 0, "workers": [2, 3]}}}
APART = (
    'signal "b" (<dict>) is on workers 2, 3 and signal "a" (<dict>) on workers 0, 1, but one program or gradient can\'t '
    "span both; call jshard.shard(model), which makes their workers stages of one mesh, or name the same workers for both"
)
X = np.ones((8, 4), np.float32)


def layers_apart():
    with signal("a"):
        first = Linear(4, 6, rngs=nnx.Rngs(0))
    with signal("b"):
        second = Linear(6, 2, rngs=nnx.Rngs(0))
    return lambda x: jnp.sum(second(nnx.relu(first(x))))


def arrays_apart():
    return lambda x: jnp.sum(signal.tensor(signal.tensor(x, name="a") * 2, name="b"))


@pytest.mark.parametrize("made", [layers_apart, arrays_apart])
@pytest.mark.parametrize("how", [jax.grad, jax.jit, lambda f: jax.jit(jax.grad(f)), lambda f: lambda x: explain(f, x)])
def test_one_program_or_gradient_over_two_sets_of_workers_is_one_sentence(made, how):
    active_config.load(WORKERS)
    f = made()
    with pytest.raises(JShardError) as told:
        how(f)(X)
    assert str(told.value) == APART


@pytest.mark.parametrize("made", [layers_apart, arrays_apart])
def test_arrays_travel_between_sets_of_workers_outside_programs(made):
    active_config.load(WORKERS)
    y = made()(X)
    active_config.unload()
    plain = jnp.sum(nnx.Linear(6, 2, rngs=nnx.Rngs(0))(nnx.relu(nnx.Linear(4, 6, rngs=nnx.Rngs(0))(X))))
    np.testing.assert_allclose(y, plain if made is layers_apart else 64.0, rtol=1e-6)


@pytest.mark.quick("no backward-explain", "no backward-train", "backward-explain")
@pytest.mark.parametrize("command", ["explain", "train"])
@pytest.mark.parametrize(
    ("path", "words", "sentence"),
    [
        (
            "examples/gt/arrays.yaml",
            two("features", "weights"),
            'signal "weights" (examples/gt/arrays.yaml:12) is on workers 0, 1, 2, 3, 4, 5, 6, 7 and signal "features" '
            "(examples/gt/arrays.yaml:7) on workers 0, 1, but one program or gradient can't span both; name the same workers "
            "for both, or mesh axes",
        ),
        (
            "examples/gt/stages.yaml",
            two("encoder", "decoder"),
            'signal "encoder" (examples/gt/stages.yaml:3) lies on workers 0, 1 and signal "encoder_back" '
            "(examples/gt/stages.yaml:9) on workers 2, 3, so a step is several programs, which are run and not explained; "
            "name the same workers for both, or mesh axes",
        ),
    ],
    ids=["no backward", "backward"],
)
def test_experiment_on_two_sets_of_workers_is_not_priced(command, path, words, sentence, capsys):
    status = main([command, path, *words, "jshard.train.steps=1", *["--trust"] * (command == "explain")])
    out, err = capsys.readouterr()
    err = [line for line in err.splitlines() if "pretending" not in line]
    if command == "train" and "stages" in path:  # what explain can't tell, train says and goes on
        assert (status, err, out.splitlines()[0]) == (0, [], sentence.rpartition(";")[0])
    else:
        assert (status, err) == (2, [sentence])
