"""What a schedule costs, held against the field's formulas and against what can be counted by hand."""

from __future__ import annotations

import collections

import pytest

from jshard.schedules import KINDS, Cost, Times, generate, read
from jshard.schedules.cost import gradients_kept, inputs_kept, sends, sends_alone

SIZES = [(2, 4), (4, 8), (4, 16), (8, 32)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_cost_idle_share_is_the_formula_of_each_schedule(stages, microbatches):
    fill = stages - 1
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        cost = Cost(generate(kind, stages, microbatches, chunks))
        assert cost.lock_step.idle == pytest.approx(fill / (chunks * microbatches + fill))
    cost = Cost(generate("zero_bubble", stages, microbatches))
    # No table of one chunk is shorter: the last of M forwards goes on for p - 1 ticks, as the first of M backwards does.
    assert cost.lock_step.length == 2 * (microbatches + fill) + microbatches


def test_cost_of_zero_bubble_in_lock_step_is_beside_the_textbooks():
    cost = Cost(generate("zero_bubble", 4, 16))
    assert round(cost.lock_step.idle, 3) == 0.111  # each stage at its own pace: 0.059


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [Times(), Times(1, 2, 0.5), Times(0.5, 1, 3)])
def test_cost_in_lock_step_no_stage_runs_two_at_once(kind, times):
    cost = Cost(generate(kind, 3, 5, 2), times)
    for stage in range(3):
        bars = [bar for bar in cost.lock_step.bars if bar.stage == stage]
        assert all(before.end <= bar.start for before, bar in zip(bars, bars[1:], strict=False))
        assert sum(bar.end - bar.start for bar in bars) == pytest.approx(10 * (times.F + times.B + times.W))


def test_cost_counts_what_waits_too():
    table = read("F0 F1 F2 .    .    .    B0 B1 B2\n.  .  .  F0B0 F1B1 F2B2", "late.txt")
    assert inputs_kept(table) == [[1, 2, 3, 3, 3, 3, 3, 2, 1], [0, 1, 2, 3, 2, 1, 0, 0, 0]]
    assert gradients_kept(table) == [[0, 0, 0, 0, 1, 2, 3, 2, 1], [0, 0, 0, 1, 1, 1, 0, 0, 0]]


def test_cost_of_memory_is_flat_in_microbatches_but_for_gpipe():
    for microbatches in (16, 32):
        kept = {kind: [max(ticks) for ticks in inputs_kept(generate(kind, 4, microbatches))] for kind in KINDS}
        assert kept == {
            "gpipe": [microbatches] * 4,
            "1f1b": [7, 5, 3, 1],
            "interleaved": [11, 9, 7, 5],
            "zero_bubble": [7, 6, 5, 4],
        }


@pytest.mark.parametrize("kind", KINDS)
def test_cost_sends_each_microbatch_once_over_each_hop(kind):
    assert [sum(counts) for counts in sends(generate(kind, 4, 6, 1)).values()] == [(4 - 1) * 6] * 2
    assert [sum(counts) for counts in sends(generate(kind, 4, 6, 2)).values()] == [(8 - 1) * 6] * 2
    assert sends(generate(kind, 1, 6, 4)) == {"F": [0], "B": [0]}  # chunks of one stage are on one device


def test_cost_of_sends_with_no_work_beside_them():
    """By hand: of two stages and three microbatches 1f1b makes F0 to F2 in ticks 0 to 2, with no B in 0, and B0 to B2 in ticks
    1 to 3, with no F behind 3."""
    assert sends_alone(generate("1f1b", 2, 3)) == (1 + 1) / 6
    assert sends_alone(generate("gpipe", 2, 3)) == 1.0
    assert sends_alone(generate("1f1b", 4, 16)) == sends_alone(generate("zero_bubble", 4, 16)) == 12 / 96
    assert sends_alone(generate("interleaved", 1, 4, 2)) == 0.0


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(1, 3, 1), (2, 4, 1), (4, 3, 1), (4, 16, 1), (4, 8, 2), (8, 32, 1)]
)
def test_no_other_place_of_weight_gradients_makes_a_step_of_equal_stages_shorter(stages, microbatches, chunks):
    """As many of them as there are take as many ticks if all stages are busy in each; and in those of zero_bubble they are."""
    table = generate("zero_bubble", stages, microbatches, chunks)
    busy = collections.Counter(tick for key, tick in table.when.items() if key.slot == "W")
    assert len(busy) == microbatches * chunks and set(busy.values()) == {stages}
