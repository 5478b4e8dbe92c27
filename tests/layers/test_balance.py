"""How many layers each stage has, by what a layer costs and what is before and behind the layers."""

from __future__ import annotations

import itertools

import pytest

from jshard.errors import JShardError, Location
from jshard.layers.balance import Costs, balanced, in_ranges
from jshard.schedules import generate
from jshard.signals.signal import Signal

BLOCKS = Signal("blocks", Location("a.yaml", 3))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 3), (2, 1), (0, 9), (1.5, 0.5)])
@pytest.mark.parametrize("depth", [4, 7, 9])
def test_balance_has_the_least_most_flop_of_all_places_and_then_the_shortest_longest(stages, first, last, depth):
    counts, _ = balanced(BLOCKS, Costs(depth, first, 1.0, last, 8), generate("1f1b", stages, 4))

    def cost(counts):
        beside = [first * (n == 0) + last * (n == stages - 1) for n in range(stages)]
        return max(map(sum, zip(counts, beside, strict=True))), max(counts)

    every = [each for each in itertools.product(range(1, depth + 1), repeat=stages) if sum(each) == depth]
    assert counts in every and cost(counts) == min(map(cost, every))


@pytest.mark.parametrize(
    ("costs", "schedule", "counts", "words"),
    [
        (Costs(4, 0, 1.0, 0, 8), "1f1b", (2, 2),
         "stages of 2, 2 layers, 2 FLOP, 2 FLOP of a microbatch forward: a layer has 1 FLOP, before them are 0 FLOP, after them 0 "
         "FLOP; in use a device has room for 2 layers, 16 B of parameters, in each chunk; stage: equal has as many, and sends no "
         "parameters"),
        (Costs(5, 1.5e9, 1e9, 0, 1024), "1f1b", (2, 3),
         "stages of 2, 3 layers, 3.50 GFLOP, 3.00 GFLOP of a microbatch forward: a layer has 1.00 GFLOP, before them are 1.50 GFLOP, "
         "after them 0 FLOP; in use a device has room for 3 layers, 3.00 KiB of parameters, in each chunk"),
        (Costs(6, 0, 1.0, 2, 8), "interleaved", (2, 2, 1, 1),
         "chunks, one of each stage in turn, of 2, 2, 1, 1 layers, 2 FLOP, 2 FLOP, 1 FLOP, 3 FLOP of a microbatch forward: a layer "
         "has 1 FLOP, before them are 0 FLOP, after them 2 FLOP; in use a device has room for 2 layers, 16 B of parameters, in each "
         "chunk"),
    ],
    ids=["equal", "first", "last"],
)  # fmt: skip
def test_balance_says_why(costs, schedule, counts, words):
    assert balanced(BLOCKS, costs, generate(schedule, 2, 4)) == (counts, f"blocks: {words}")


def test_too_few_layers_and_ranges_that_do_not_fit_are_one_sentence():
    table = generate("interleaved", 2, 4)
    with pytest.raises(JShardError) as error:
        balanced(BLOCKS, Costs(3, 0, 1.0, 0, 8), table)
    assert str(error.value) == (
        'signal "blocks" (a.yaml:3) says stage: balance (a.yaml:3), and 3 layers are too few for 4 chunks on 2 stages; use 4 layers '
        "or more"
    )
    for ranges, sentence in (
        ("0..2: 0, 3..5: 1", 'signal "blocks" (a.yaml:3) says stage (a.yaml:3) for layers 0 to 5, and the stack has 8; end with '
         "layer 7"),
        ("0..5: 0, 6..8: 1", 'signal "blocks" (a.yaml:3) says stage (a.yaml:3) for layers 0 to 8, and the stack has 8; end with '
         "layer 7"),
        ("0..3: 1, 4..7: 0", 'signal "blocks" (a.yaml:3) says stage (a.yaml:3) for layers on stages 1, 0, one after the other, and '
         "jshard.pipeline (a.yaml:1) goes through stages 0, 1, 0, 1; write 4 ranges, on these stages in order"),
        ("0..2: 0, 3..7: 1", 'signal "blocks" (a.yaml:3) says stage (a.yaml:3) for layers on stages 0, 1, one after the other, and '
         "jshard.pipeline (a.yaml:1) goes through stages 0, 1, 0, 1; write 4 ranges, on these stages in order"),
    ):  # fmt: skip
        with pytest.raises(JShardError) as error:
            in_ranges(ranges, 8, BLOCKS, table, Location("a.yaml", 1))
        assert str(error.value) == sentence
    assert in_ranges("0..2: 0, 3..3: 1, 4..5: 0, 6..7: 1", 8, BLOCKS, table, Location("a.yaml", 1)) == (3, 1, 2, 2)
