"""The numbers that a loop over a table reads, held against stages that move names about as the loop moves arrays."""

from __future__ import annotations

import pytest

from jshard.schedules import KINDS, generate
from jshard.schedules.cost import gradients_kept, inputs_kept
from jshard.schedules.steps import NONE, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(1, 2, 1), (1, 3, 3), (2, 4, 1), (3, 5, 2), (4, 8, 2)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_steps_read_what_belongs_to_each_operation(kind, stages, microbatches, chunks, recomputes):
    table = generate(kind, stages, microbatches, chunks)
    plan, last = steps(table, recomputes=recomputes), stages * chunks - 1
    places = (plan.inputs, plan.gradients, plan.kept, plan.left, plan.outputs)
    inputs, gradients, kept, left, outputs = ([[None] * count for _ in range(stages)] for count in places)
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
                if slot == "F" or recomputes:
                    assert place == NONE or inputs[stage][place] == (microbatch, virtual)
                for ends, buffer, there in (("BW", kept, "kept"), ("W", left, "left"), ("B", outputs, "output")):
                    if slot in ends and (there != "output" or virtual == last):
                        assert buffer[stage][at(f"{slot}_{there}", stage)] == (microbatch, virtual)
                if slot == "F":
                    kept[stage][at("F_kept", stage)] = microbatch, virtual
                    assert (at("F_output", stage) == NONE) == (virtual != last)
                    if virtual == last:
                        outputs[stage][at("F_output", stage)] = microbatch, virtual
                if slot == "B" and table.splits_weights:
                    left[stage][at("B_left", stage)] = microbatch, virtual
                place = NONE if slot == "F" else at(f"{slot}_gradient", stage)
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
    plan = steps(table, recomputes=True)
    inputs = [max(ticks) for ticks in inputs_kept(table)]
    assert plan.inputs == (max(inputs[1:]) if table.virtual_stages == 4 else plan.inputs)  # stage 0 reads the batch
    assert plan.inputs <= max(inputs) and plan.gradients <= max(map(max, gradients_kept(table)))
    plan = steps(table)
    assert plan.kept == max(inputs) and (plan.inputs, plan.outputs) == (1, 16 if kind == "gpipe" else 1)
    assert plan.left == (4 if kind == "zero_bubble" else 0)
