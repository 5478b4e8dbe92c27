"""Two ledgers of a program are equal: the one that `explain` reads from its trace, and the one that its Steps alone give."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import pytest

import jshard
from benchmarks.models import sized
from examples import english
from jshard.cli import experiment, target
from jshard.inspect.ledger import Ledger
from tests.inspect.verify.test_configurations import FILES
from tests.support import linen_models
from tests.support.other_models import MODELS, TINY, is_installed
from tests.support.step_bytes import step_bytes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of names that other people's models take
ROOT = Path(__file__).parents[2]

OF_LAYERS = ("digits", "pod-fsdp", "pod-slices", "pod-tensor", "xor")  # jshard's layers alone: nothing is planned
PIPELINES = {  # A plan is of one call. Here a table says how often each stage runs it, and what goes between stages.
    "pipe-1f1b", "pipe-balance", "pipe-interleaved", "pipe-pod", "pipe-zero-bubble",
}  # fmt: skip
PLANNED = [name for name in FILES if name not in PIPELINES]
WIDE = "{param: float32, compute: bfloat16, reduce: float32}"
VARIANTS = [  # what no configuration says
    ("lm/ring", "_split.attention=ulysses"),
    ("lm/pod", f"columns.dtype={WIDE}", f"sums.dtype={WIDE}"),
    ("cnn/fsdp", "rest.dtype={compute: bfloat16, reduce: float32}"),
    ("decoder/fsdp", "columns.remat=full", "sums.remat=full"),
    ("lm/english", "columns.remat=products", "columns.output=gather", "model.depth=5"),
    ("lm/english", "columns.store={parameters: data, prefetch: true}", "sums.store={parameters: data, keep: true}"),
    ("lm/english", "columns.store=data", "columns.sequence=tensor", "sums.sequence=tensor", "rest.sequence=tensor"),
]
PLANS = [(name, plan) for name, adopted in MODELS.items() if is_installed(adopted.package) for plan in adopted.plans]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configurations, the examples and some English."""
    folder = tmp_path_factory.mktemp("configurations")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        english.main("runs/english")
        for path in sorted(Path("runs/english").iterdir())[12:]:
            path.unlink()
    return folder


def explained(ledger: Ledger) -> dict[tuple[str, str, str], int]:
    """Bytes of a ledger by phase, collective and mesh axes, but for those of an optimizer, which has no plan."""
    total = collections.Counter[tuple[str, str, str]]()
    for line in ledger:
        if line.phase != "update":
            total[line.phase, line.collective, ", ".join(sorted(line.mesh_axes))] += line.total
    return {key: count for key, count in total.items() if count}


def asked(name: str, *words: str) -> Ledger:
    how = {"args": None, "config": None, "on": None, "trust": True, "name": "explain"}
    path, overrides = f"configs/{name}.yaml", [*FILES[name], *words]
    chosen = target.Target.of(argparse.Namespace(path=path, overrides=overrides, **how))
    built: Any = experiment.built(chosen, only_shapes=True)
    return built.asked


def check(ledger: Ledger) -> None:
    for program in ledger.programs:
        assert step_bytes(program) == explained(ledger)


def asked_by_a_model(name: str, plan: str) -> Ledger:
    found = sized(name, TINY)
    jshard.load(found.plans[plan])
    sharded = jshard.shard(found.loss)
    model = sharded.place(found.model, *found.batch) if name in linen_models.MODELS else found.model
    sharded.place(model, *found.batch)
    step = found.value_and_grad(sharded)
    return jshard.explain(lambda model, *batch: step(model, *batch), model, *found.batch)


@pytest.mark.quick("cnn/tensor", "decoder/fsdp", "decoder/qwen3-8b", "digits", "lm/experts", "lm/pod", "lm/ring")
@pytest.mark.parametrize("name", PLANNED)
def test_the_bytes_of_steps_are_those_that_explain_counts(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    ledger = asked(name)
    assert len(ledger.programs) == (name not in OF_LAYERS)
    check(ledger)


@pytest.mark.slow
@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_so_they_are_with_other_words(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    check(asked(*words))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), PLANS, ids=map(" under ".join, PLANS))
def test_so_they_are_for_other_peoples_models(name, plan):
    check(asked_by_a_model(name, plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", linen_models.MODELS)
def test_so_they_are_for_models_of_linen(extra, name):
    extra(linen_models.package(name))
    for plan in sized(name, TINY).plans:
        check(asked_by_a_model(name, plan))
