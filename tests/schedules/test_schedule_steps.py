"""The numbers that a loop over a table reads, held against stages that move names about as the loop moves arrays."""

from __future__ import annotations

import pytest

from jshard.schedules import KINDS, generate
from jshard.schedules.cost import gradients_kept, inputs_kept
from jshard.schedules.steps import NONE, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(1, 2, 1), (1, 3, 3), (2, 4, 1), (3, 5, 2), (4, 8, 2)])
def test_steps_read_what_belongs_to_each_operation(kind, stages, microbatches, chunks):
    table = generate(kind, stages, microbatches, chunks)
    plan, last = steps(table), stages * chunks - 1
    inputs = [[None] * plan.inputs for _ in range(stages)]
    gradients = [[None] * plan.gradients for _ in range(stages)]
    done, made, hops = [], {"F": {}, "B": {}, "W": {}}, {"F": 1, "B": -1, "W": 0}
    for tick in range(table.ticks):
        at = lambda name, stage: plan.columns[name][tick][stage]  # noqa: B023

        def arrive(slot, buffer):
            for stage in range(stages):
                if (place := at(f"{slot}_arrives", stage)) != NONE:  # noqa: B023
                    buffer[stage][place] = made[slot][(stage - hops[slot]) % stages]

        for slot, hop in hops.items():
            if slot == "B":  # of the tick before
                arrive("B", gradients)
            made[slot] = {}
            for stage in range(stages):
                microbatch, chunk = at(f"{slot}_microbatch", stage), at(f"{slot}_chunk", stage)
                if microbatch == NONE:
                    continue
                virtual = chunk * stages + stage
                place = at(f"{slot}_input", stage)
                assert (place == NONE) == (virtual == 0)
                assert place == NONE or inputs[stage][place] == (microbatch, virtual)
                place = at(f"{slot}_gradient", stage)
                if slot == "B" and virtual == last:
                    assert place == NONE
                    if table.splits_weights:
                        gradients[stage][at("B_loss", stage)] = microbatch, virtual
                elif slot != "F":
                    assert gradients[stage][place] == (microbatch, virtual)
                made[slot][stage] = (microbatch, virtual + hop)
                done.append((slot, microbatch, virtual))
        arrive("F", inputs)
    assert len(done) == len({*done}) == len(table.when)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_as_many_places_as_are_ever_needed_at_once(kind):
    table = generate(kind, 4, 16)
    plan = steps(table)
    inputs = [max(ticks) for ticks in inputs_kept(table)]
    assert plan.inputs == (max(inputs[1:]) if table.virtual_stages == 4 else plan.inputs)  # stage 0 reads the batch
    assert plan.inputs <= max(inputs) and plan.gradients <= max(map(max, gradients_kept(table)))
