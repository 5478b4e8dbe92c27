"""A decoder that learns text: the same on every mesh, to the bit across restarts, and less each time of what it did not know."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.cli import main
from jshard.layers.token_loss import losses_of
from jshard.layouts.paths import keys_of
from jshard.signals import active_config as current
from jshard.training.checkpoints.checkpoint import Checkpoint
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.figures import Figures
from jshard.training.settings import Settings

FILE = Path(__file__).parents[2] / "configs/lm/english.yaml"
SMALL = (
    "model.width=32", "model.depth=2", "model.heads=4", "model.hidden=64", "model.dropout=0.1", "data.length=32",
    "data.text=english", "batch=8", "steps=4", "optimizer.schedule.warmup_cosine.warmup=1", "log.every=1", "evaluation.every=4", "checkpoint.every=2",
)  # fmt: skip
MESHES = {
    "one device": (),
    "data": ("jshard.mesh.data=8",),
    "tensor": ("jshard.mesh.data=2", "jshard.mesh.tensor=4"),
    "fsdp and sequence": (
        "jshard.mesh.data=4", "jshard.mesh.tensor=2", "_split.store=data", "_split.sequence=tensor",
    ),
}  # fmt: skip


OTHERS = {
    "ring": ("ring",),
    "ulysses": ("ring", "_split.attention=ulysses"),
    "experts": ("experts",),
    "experts, tensor": ("experts", "jshard.mesh={data: 2, tensor: 2, expert: 2}"),
}


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """A folder with some English in it, where the runs are."""
    folder = tmp_path_factory.mktemp("lm")
    for cached in (of_microbatches, piped, loss_of_logits):  # a worker may come back to this file, in a new folder
        cached.cache_clear()
    (folder / "english").mkdir()
    for number in range(4):
        text = "".join(
            f"{word} {number} is followed by {word} {number + 1}.\n" for word in ("one", "two", "three", "four")
        )
        (folder / f"english/{number}.txt").write_text(text * 3)
    return folder


@pytest.fixture(autouse=True)
def there(english, monkeypatch):
    monkeypatch.chdir(english)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The experiments of this file. Where a configuration says what another has said, the same mesh, signals and
    training, it finds the model and the programs that were built for that, until these are cleared."""
    made, build = {}, Experiment.build

    def once(configuration, mesh, *, only_shapes=False):
        said = json.dumps(dict(configuration.train), sort_keys=True, default=dict)
        key = configuration.fingerprint, mesh, said, only_shapes
        if key not in made:
            made[key] = build(configuration, mesh, only_shapes=only_shapes)
            return made[key]
        found = copy.copy(made[key])
        found.configuration, found.settings = configuration, Settings(configuration)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "build", once)
        yield made


def trained(name: str, *overrides: str, file: Path = FILE) -> list[dict[str, float]]:
    """Train, and read what was written of it."""
    assert main(["train", str(file), *SMALL, *overrides, f"output={name}"]) == 0
    return written(name)


def written(name: str) -> list[dict[str, float]]:
    lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    timed = ("examples_per_second", "tokens_per_second", "memory")
    return [{key: figure for key, figure in line.items() if key not in timed} for line in lines]


def parameters(*overrides: str) -> dict[str, np.ndarray]:
    """What a model begins with that was not trained yet."""
    experiment = Experiment.build(current.load(FILE, [*SMALL, *overrides]), current.mesh())
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(experiment.model, nnx.Param)))
    return {"/".join(map(str, keys_of(path))): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def alone(english):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(english)
        at_first = parameters("output=alone")
        return trained("alone"), at_first


@pytest.fixture(scope="module")
def experts_alone(english):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(english)
        return trained("experts-alone", "jshard.mesh={data: 1, tensor: 1, expert: 1}", file=FILE.with_stem("experts"))


@pytest.mark.slow
def test_run_of_one_device_goes_on_to_the_bit(alone, built):
    built.clear()
    goes_on("alone", alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES][1:])
def test_run_is_that_of_one_device_and_goes_on_to_the_bit(alone, built, mesh):
    losses, at_first = alone
    folder = mesh.replace(" ", "-")
    found = parameters(*MESHES[mesh], f"output={folder}")
    assert found.keys() == at_first.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, at_first[name], err_msg=name)
    found = trained(folder, *MESHES[mesh])
    alike(found, losses)
    if mesh == "fsdp and sequence":
        built.clear()
    goes_on(folder, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_run_of_another_file_is_that_of_one_device_and_goes_on_to_the_bit(request, name):
    """A ring, and heads that are exchanged, change nothing of the model; experts on devices nothing of that with experts."""
    file, *overrides = OTHERS[name]
    found = trained(name, *overrides, file=FILE.with_stem(file))
    alike(found, request.getfixturevalue("experts_alone") if file == "experts" else request.getfixturevalue("alone")[0])
    goes_on(name, found)


@functools.cache
def of_microbatches() -> list[dict[str, float]]:
    """Losses of a run on one device."""
    return trained("microbatches", "model.depth=4", "microbatches=4")


@functools.cache
def piped(schedule: str) -> list[dict[str, float]]:
    return trained(f"pipe-{schedule}", "model.depth=4", file=FILE.parents[1] / f"pipe-{schedule}.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_pipeline_trains_as_microbatches_on_one_device_do_and_goes_on_to_the_bit(schedule):
    found = piped(schedule)
    alike(found, of_microbatches())
    goes_on(f"pipe-{schedule}", found)


@pytest.mark.slow
def test_a_pipeline_goes_on_with_another_number_of_stages():
    """A checkpoint has layers in their order, whoever ran them: what is read is what was saved, to the bit."""
    file, found = FILE.parents[1] / "pipe-1f1b.yaml", piped("1f1b")
    more = "jshard.mesh={stage: 4, data: 1, tensor: 2}"
    assert main(["resume", "pipe-1f1b", "--from", "2", more, "output=stages-4"]) == 0
    alike(written("stages-4"), found[2:])
    saved, layers = Checkpoint.find(Path("pipe-1f1b/checkpoints"), "2", "pipe-1f1b"), []
    for words in (("output=pipe-1f1b",), (more, "output=stages-4")):
        experiment = Experiment.build(current.load(file, [*SMALL, "model.depth=4", *words]), current.mesh())
        state, _ = saved.restore(experiment.step().state, "a test")
        layers.append(state)
    for two, four in zip(*map(jax.tree.leaves, layers), strict=True):
        np.testing.assert_array_equal(jax.device_get(raw(two)), jax.device_get(raw(four)))
    assert {
        x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(layers[1]) if x.shape[:1] == (4,) and x.ndim > 2
    } == {1}


@pytest.mark.slow
def test_unequal_stages_train_as_microbatches_do_and_go_on_with_another_number_of_them(capsys):
    """Five layers, on two stages by balance, which train says, and then on four as ranges say."""
    alone = trained("five", "model.depth=5", "microbatches=4")
    file = FILE.parents[1] / "pipe-1f1b.yaml"
    capsys.readouterr()
    found = trained("balance", "model.depth=5", "blocks.stage=balance", file=file)
    assert "; blocks: stages of 3, 2 layers, " in "".join(capsys.readouterr())
    alike(found, alone)
    more = ["jshard.mesh={stage: 4, data: 1, tensor: 2}", "blocks.stage={0..1: 0, 2..2: 1, 3..3: 2, 4..4: 3}"]
    assert main(["resume", "balance", "--from", "2", *more, "output=ranges"]) == 0
    alike(written("ranges"), found[2:])


def raw(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def alike(found: list[dict[str, float]], losses: list[dict[str, float]]) -> None:
    for line, expected in zip(found, losses, strict=True):
        assert line.keys() == expected.keys()
        np.testing.assert_allclose([*line.values()], [*expected.values()], rtol=1e-5)


def goes_on(name: str, found: list[dict[str, float]]) -> None:
    """From the checkpoint behind step 2 the run has the figures that it had: all that changes is read, and nothing is
    left as it was."""
    shutil.rmtree(f"{name}/checkpoints/4")
    Path(name, "metrics.jsonl").write_text("")
    assert main(["resume", name]) == 0
    assert written(name) == found[2:]


WIDER = (*SMALL, "model.hidden=48", "model.dropout=0", "loss={z: 0.01, chunk: 4}", "batch=16")


@functools.cache
def loss_of_logits() -> float:
    """The loss of the first batch, by all logits at once on one device."""
    experiment = Experiment.build(current.load(FILE, [*WIDER]), current.mesh())
    x, y = experiment.data.first()
    each = losses_of(jnp.asarray(jax.device_get(experiment.model(x))), y, 0.01)
    return float(jnp.where(y >= 0, each, 0).sum() / (y >= 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", ["one device", "tensor", "fsdp and sequence"])
def test_logits_of_a_step_are_nowhere_whole_and_its_loss_is_theirs(mesh, microbatches):
    """No array of a device's rows, places and words is in what is compiled; its loss, and an evaluation's, is that of all."""
    expected, words = loss_of_logits(), (*WIDER, *MESHES[mesh], f"microbatches={microbatches}")
    experiment = Experiment.build(current.load(FILE, words), current.mesh())
    step = experiment.step()
    sizes = current.mesh().shape
    rows, vocabulary = 16 // microbatches // sizes["data"], 256 // sizes["tensor"]
    programs = [experiment.lowered()]
    if microbatches == 1:
        programs.append(step.scores.lower(step.state, *experiment.first_batch()))
    for each in programs:
        found = re.findall(r"f32\[(\d+(?:,\d+)+)\]", each.compile().as_text())
        shapes = {tuple(map(int, shape.split(","))) for shape in found}
        logits = [shape for shape in shapes if shape[-1] == vocabulary and len(shape) > 2]
        assert max(map(math.prod, logits)) == rows * 4 * vocabulary, logits
        assert (rows * 32, vocabulary) not in shapes
    np.testing.assert_allclose(float(step(*experiment.first_batch())), expected, rtol=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", ["one device", "tensor", "fsdp and sequence"])
def test_flops_of_a_step_are_6_n_t_and_those_of_attention(mesh):
    experiment = Experiment.build(current.load(FILE, [*SMALL, *MESHES[mesh]]), current.mesh())
    found = Figures(experiment, experiment.step())
    layers, width, hidden, vocabulary, length, tokens = 2, 32, 64, 256, 32, 8 * 32
    kernels = layers * (4 * width**2 + 3 * width * hidden) + width * vocabulary  # not the embedding, which is looked up
    attention = (
        12 * layers * width * length * tokens
    )  # two products of T x T a head, computed whole though half is masked
    assert sum(found.flops.values()) == (6 * kernels * tokens + attention) / found.devices
    assert found.devices == (1 if mesh == "one device" else 8)


@pytest.mark.quick("data")
@pytest.mark.parametrize("mesh", MESHES)
def test_dropout_is_the_same_on_every_mesh(mesh):
    current.load(FILE, MESHES[mesh])
    x = np.ones((8, 4, 32), np.float32)
    dropout = jshard.shard(nnx.Dropout(0.5, rngs=nnx.Rngs(3)), x)
    np.testing.assert_array_equal(dropout(x), nnx.Dropout(0.5, rngs=nnx.Rngs(3))(x))
