"""The benchmark of a training step runs, and all its variants train alike; that of a plan prints two times."""

from __future__ import annotations

import re

import pytest

from benchmarks import plan, step
from jshard.signals.current import unload


@pytest.fixture(autouse=True)
def unloaded():
    yield
    unload()


@pytest.mark.parametrize("arguments", [[], ["--devices", "8", "--optimizer", "sgd"]])
def test_quick_benchmark_of_a_step_prints_a_line_for_each_variant(capsys, arguments):
    step.main(["--quick", *arguments])
    told = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?)  +[\d.]+ ms +[\d.]+ - [\d.]+ ms +[\d.]+ +[\d,]+ us$", told, re.MULTILINE)
    assert rows == [
        "shard_map by hand", "shard_map by hand, again", "jshard by layers", "jshard.step", "jit with NamedShardings",
        "one device",
    ]  # fmt: skip
    assert "16-32-8, batch 32: all variants agree on the losses of three steps" in told


def test_benchmark_refuses_variants_that_do_not_agree():
    steps = {step.HAND: iter([3.0, 2.0, 1.0]).__next__, "other": iter([3.0, 2.0, 1.1]).__next__}
    with pytest.raises(AssertionError, match="other: the losses of three steps"):
        step.agree(steps)
    with pytest.raises(AssertionError, match="the losses do not fall"):
        step.agree({step.HAND: lambda: 1.0})


@pytest.mark.slow
def test_quick_benchmark_of_a_plan_prints_what_the_compiler_and_the_cache_take(capsys):
    plan.main(["--quick", "--topology", "cpu:8", "--tensor", "4"])
    of = r"90,432 parameters, 2 layers, cpu:8 \(8 devices, pretended\), needs [\d.]+ KiB per device; planned"
    took = r"in [\d.]+ s, [\d.]+ s of processor time"
    first, again = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"{of} by its compiler {took}", first)
    assert re.fullmatch(f"{of} from the cache {took}", again)
