"""What people read of a run: tokens a second, perplexity, FLOP by count and by formula, the share of a peak, time left."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jshard.hardware.chips import CHIPS
from jshard.printing.units import duration
from jshard.programs.flops import Flops, arithmetic_of
from jshard.schedules import generate
from jshard.signals import active_config as current
from jshard.training.experiments.figures import Figures, tokens_in
from jshard.training.telemetry.progress import figures_in_words
from tests.support import decoder


@pytest.mark.quick("2-4")
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 4)])
def test_flops_of_a_decoder_are_6_n_t_and_those_of_attention(data, tensor):
    size = decoder.Size(layers=3)
    current.load(decoder.configured(data, tensor))
    program, args = decoder.training_step(size)
    jaxpr = program.trace(*args).jaxpr
    tokens, width = size.batch * size.length, size.features
    kernels = size.layers * (4 * width**2 + 3 * width * size.hidden) + width * size.vocabulary
    attention = 12 * size.layers * size.length * width * tokens
    embedding = 4 * width * size.vocabulary * tokens  # one-hot products here; tokens have no gradient
    # The embedding's signal says nothing of tensor: it is whole at each place along it.
    assert (
        arithmetic_of(jaxpr, remat=False).total
        == (6 * kernels * tokens + attention) / (data * tensor) + embedding / data
    )
    again = 2 * (kernels - width * size.vocabulary - size.layers * width * size.hidden) * tokens + attention / 3
    # Each block is computed twice, but for the last product, whose result nobody needs again.
    assert arithmetic_of(jaxpr).total - arithmetic_of(jaxpr, remat=False).total == again / (data * tensor)


def figures(tokens: int, **more) -> Figures:
    """Figures of 100 steps of 8 examples."""
    made = object.__new__(Figures)
    known = {"steps": 100, "examples": 8, "tokens": tokens, "is_likelihood": bool(tokens), "devices": 1}
    known["learning_rate"] = lambda done: None
    vars(made).update(known | {"arithmetic": None, "table": None, "layers": "", "chip": CHIPS["cpu"]} | more)
    return made


def test_share_of_the_peak_is_time_at_the_peak_by_the_time_of_a_step():
    counted = Flops({"bfloat16": 197e12 / 4, "int8": 393e12 / 8})
    found = figures(64, chip=CHIPS["v5e"], arithmetic=counted)(50, math.log(2), 2.0)
    assert found["share_of_peak"] == 0.75
    assert (found["tokens_per_second"], found["examples_per_second"], found["seconds_left"]) == (128, 16, 25)
    assert found["perplexity"] == pytest.approx(2)
    split = figures(64, chip=CHIPS["v5e"], arithmetic=Flops({"bfloat16": 197e12}, at_most=True), devices=4)
    assert split(50, 1.0, 2.0)["share_of_peak"] == 0.5  # the compiler decides what each computes


def test_a_pipeline_says_how_much_of_a_step_its_stages_wait():
    """The share of the peak is of the whole step's time, in which they wait too."""
    made = figures(
        64, chip=CHIPS["v5e"], arithmetic=Flops({"bfloat16": 197e12 / 4}), table=generate("zero_bubble", 4, 16)
    )
    assert (made.opening() or "").endswith(
        "v5e does 197 TFLOP/s in bfloat16; each stage waits 11.1 % of it by zero_bubble: at most 88.9 % of the peak"
    )
    assert made(50, 1.0, 2.0)["share_of_peak"] == 0.5
    made.layers = "blocks: stages of 5, 4, 4, 3 layers"
    assert (made.opening() or "").endswith("at most 88.9 % of the peak; blocks: stages of 5, 4, 4, 3 layers")


def test_no_peak_is_known_of_a_cpu_so_no_share_is_told():
    found = figures(64, arithmetic=Flops({"float32": 1e9}))
    assert "share_of_peak" not in found(50, 1.0, 2.0)
    assert found.opening() == (
        "a step: 64 tokens, 1.00 GFLOP in products on one device, without what remat computes again; no peak of cpu is known"
    )
    on_chips = figures(64, arithmetic=Flops({"bfloat16": 1.5e15}), chip=CHIPS["v5e"], devices=256).opening()
    assert on_chips is not None and on_chips.endswith(
        "1.50 PFLOP in products on each of 256 devices, without what remat computes again; v5e does 197 TFLOP/s in bfloat16"
    )


def test_figures_are_one_line_of_words():
    told = {"loss": 1.25, "perplexity": 3.49034, "examples_per_second": 16, "tokens_per_second": 4096}
    told |= {"share_of_peak": 0.413, "memory": 3 * 2**30, "seconds_left": 600.0}
    assert figures_in_words(told) == (
        "loss 1.2500   perplexity 3.49   4,096 tokens/s   41.3% of peak   3.00 GiB memory   10 min left"
    )
    assert figures_in_words({"loss": 1.0, "examples_per_second": 16}) == "loss 1.0000   16 examples/s"
    assert [duration(seconds) for seconds in (119, 120, 7199, 7200)] == ["119 s", "2 min", "120 min", "2.0 h"]


def test_last_step_has_no_time_left_and_examples_no_perplexity():
    assert figures(0)(100, 1.0, 2.0).keys() - {"memory"} == {"loss", "examples_per_second"}


def test_tokens_are_numbers_in_a_sequence():
    assert tokens_in(np.zeros((1, 7), np.int32)) == 7
    assert [
        tokens_in(targets) for targets in (np.zeros(3, np.int32), np.zeros((1, 7)), {"a": np.zeros((1, 7), int)})
    ] == [0] * 3
