"""`jshard train` of models that know nothing of meshes, by claims: the losses of one device, and everything where it is claimed."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jshard.cli import main
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from tests.support import plain

P = jax.P
REST = {"row": "data", "match": ["**"]}
STORED = {**REST, "store": "data"}
PLANS = {
    "data": {"rest": REST},
    "fsdp": {"rest": STORED},
    "tensor": {
        "wide": {"row": "data", "column": "tensor", "match": ["{up,first}/**"]},
        "sums": {"row": "data", "reduction": "tensor", "store": {"optimizer": "data"}, "match": ["{down,second}/**"]},
        "rest": STORED,
    },
}
# What a step asks for beside all-reduces: each parameter is gathered once, again what the gradients of activations are multiplied
# by, and each gradient scattered once, but that of a scale that meets the statistics of the batch, which are whole.
COUNTS = {"Dense": (6, 2, 6), "Filters": (8, 3, 7), "bridged": (6, 2, 6)}
NAMES = {"Dense": ("up", "down"), "Filters": ("first", "second"), "bridged": ("Dense_0", "Dense_1")}


def experiment(model, plan, tmp_path, *overrides, mesh=None, **train):
    """An experiment by a file in `tmp_path`; without a plan on one device."""
    mesh = mesh or ({"data": 2, "tensor": 4} if plan else {"data": 1})
    settings = {
        "model": f"tests.support.plain:{model}",
        "data": "tests.support.plain:data",
        "batch": 16,
        "steps": 4,
        "log": {"every": 1},
        **train,
    }
    signals = {name: dict(keys) for name, keys in PLANS[plan].items()} if plan else {}
    for name in signals:
        globs = [glob.replace("{up,first}", NAMES[model][0]) for glob in signals[name]["match"]]
        signals[name]["match"] = [glob.replace("{down,second}", NAMES[model][1]) for glob in globs]
    path = tmp_path / f"{plan}.yaml"
    path.write_text(json.dumps({"jshard": {"mesh": mesh, "train": settings}, **signals}))
    return Experiment.build(current.load(path, overrides), current.mesh())


def losses(built, steps=3):
    step = built.step()
    batch = built.first_batch()
    return [float(step(*batch)) for _ in range(steps)], step


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one device, and what is right of the test data then."""
    found = {}
    for model in NAMES:
        built = experiment(model, None, tmp_path_factory.mktemp(model))
        found[model], step = losses(built)
    current.unload()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", NAMES)
def test_losses_are_those_of_one_device(alone, tmp_path, model, plan):
    built = experiment(model, plan, tmp_path)
    assert plain.drawn[-1]  # each parameter by a program that draws parts
    found, step = losses(built)
    np.testing.assert_allclose(found, alone[model], rtol=1e-5)
    where = jax.tree.map(lambda array: array.sharding, nnx.state((built.model, built.optimizer)))
    assert jax.tree.map(lambda array: array.sharding, step.state) == where
    counts = collections.Counter()
    for line in built.explain():
        assert line.signal != "-", line
        counts[line.collective, line.phase] += line.count
    moved = {key: n for key, n in counts.items() if key[0] != "all_reduce"}
    gathered, again, scattered = COUNTS[model]
    fsdp = {("all_gather", "forward"): gathered, ("all_gather", "backward"): again}
    fsdp["reduce_scatter", "backward"] = scattered
    assert plan == "tensor" or moved == (fsdp if plan == "fsdp" else {})


def lies(variable):
    array = variable.get_value()
    return array.sharding.spec, array.addressable_shards[0].data.shape


@pytest.mark.seconds
def test_parameters_and_optimizer_state_lie_where_they_are_claimed(tmp_path):
    built = experiment("Dense", "tensor", tmp_path)
    model, (adam, *_) = built.model, built.optimizer.opt_state
    assert isinstance(model, plain.Dense)
    at_rest = {
        "up": {"kernel": (P(None, "tensor"), (16, 8)), "bias": (P("tensor"), (8,))},
        "norm": {"scale": (P("data"), (16,)), "bias": (P("data"), (16,))},
        "down": {"kernel": (P("tensor", None), (8, 8)), "bias": (P(None), (8,))},
    }
    of_optimizer = {**at_rest, "down": {"kernel": (P("tensor", "data"), (8, 4)), "bias": (P("data"), (4,))}}
    for layer in at_rest:
        for name in at_rest[layer]:
            assert lies(getattr(getattr(model, layer), name)) == at_rest[layer][name]
            assert lies(adam.mu[layer][name]) == lies(adam.nu[layer][name]) == of_optimizer[layer][name], (layer, name)
    memory = {rest.signal: (rest.parameters, rest.optimizer) for rest in built.explain().memory}
    assert memory == {"wide": (544, 1088), "sums": (288, 288), "rest": (128, 256), "-": (0, 8)}


def test_an_override_places_anew(tmp_path):
    built = experiment("Dense", "tensor", tmp_path, "wide.store=data")
    assert isinstance(built.model, plain.Dense)
    assert lies(built.model.up.kernel) == (P("data", "tensor"), (8, 8))


def test_no_array_is_made_to_explain(tmp_path):
    experiment("Dense", "tensor", tmp_path)
    configuration = current.load(tmp_path / "tensor.yaml")
    built = Experiment.build(configuration, current.mesh(), only_shapes=True)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(built.model)))
    assert isinstance(built.model, plain.Dense)
    assert built.model.up.kernel.get_value().sharding.spec == P(None, "tensor")
    assert len(built.explain().claims) == 6


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_to_the_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment("Dense", "tensor", tmp_path, output="run", checkpoint={"every": 2})
    assert main(["train", "tensor.yaml"]) == 0
    whole = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert main(["train", "tensor.yaml", "steps=2", "output=again"]) == 0
    assert main(["resume", "again", "--trust", "steps=4"]) == 0
    again = [json.loads(line) for line in Path("again/metrics.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert [(line["step"], line["loss"]) for line in again if "loss" in line] == [
        (line["step"], line["loss"]) for line in whole if "loss" in line
    ]
    assert again[-1] == whole[-1]  # the accuracy


@pytest.mark.slow
def test_a_step_by_claims_is_verified(tmp_path):
    found = experiment("Dense", "tensor", tmp_path).verify()
    assert found, str(found)
    signals = {finding.name: finding.cause.signal for finding in found.findings}
    assert signals["gradient of model.up.kernel"] == "wide"
    assert signals["model.norm.scale after"] == "rest"


@pytest.mark.seconds
def test_on_auto_axes_parameters_lie_as_claimed_and_losses_are_those_of_one_device(alone, tmp_path):
    built = experiment("Dense", "tensor", tmp_path, "jshard.axis_types=auto")
    assert isinstance(built.model, plain.Dense)
    assert lies(built.model.down.kernel) == (P("tensor", None), (8, 8))
    found, _ = losses(built)
    np.testing.assert_allclose(found, alone["Dense"], rtol=1e-5)
