"""What a training step of a decoder costs in a pipeline, by each schedule, against tensor parallel and one device: eight
layers in four stages, the same weights and batch, losses compared. Forward, backward and update, one step of each in turn.
A stage keeps what F made for the backward; with "again" behind the schedule it computes that again (`remat: chunk`).

python -m benchmarks.stages [--quick] [--rounds 10] [--microbatches 8 16 32] [--schedules 1f1b,gpipe]

Pretend devices share the cores of this machine, so a stage that waits costs nothing here: how long a step takes says what is
computed, and what the machinery adds, and `idle` which share of it stages of their own devices would wait. The first number
of microbatches is timed. `python -m benchmarks.processes
--layouts pipeline` has the same in four processes, beside torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import jshard
from benchmarks import decoder
from jshard.schedules import KINDS, Cost, generate

SIZES = {**decoder.SIZES, "depth": 8, "width": 256, "hidden": 768, "qk_norm": False}
QUICK = {**decoder.QUICK, "depth": 8}
ONE, TENSOR = "one device", "tensor parallel"
DEVICES, LENGTH = 4, 128


def configured(kind: str, devices: int, microbatches: int) -> dict[str, Any]:
    if kind == TENSOR:
        return decoder.configured("tensor", devices)
    schedule, _, again = kind.partition(" ")
    asked = {"pipeline": {"axis": "stage", "schedule": schedule}, "train": {"microbatches": microbatches}}
    remat = {"remat": "chunk"} if again else {}
    placed = {"blocks": {"stage": "equal", "match": ["blocks/**"], **remat}, "rest": {"match": ["**"]}}
    return {"jshard": {"mesh": {"stage": devices}, **asked}, **placed}


def variant(
    kind: str, sizes: Mapping[str, Any], rows: int, length: int, microbatches: int, devices: int = DEVICES
) -> decoder.Variant:
    """A training step by a schedule, or by tensor parallel, or on one device; in a pipeline the rows are in microbatches."""
    import jax
    import optax
    from flax import nnx

    from jshard.layers.gradients import accumulated

    tokens, tx = decoder.drawn_tokens(sizes, rows, length), optax.adamw(1e-3)
    if kind == ONE:
        jshard.unload()
        model = decoder.model(sizes)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return decoder.stepping(model, optimizer, nnx.value_and_grad(decoder.value_of), tokens)
    jshard.load(configured(kind, devices, microbatches))
    if kind == TENSOR:
        differentiated = nnx.value_and_grad(jshard.shard(decoder.value_of))
    else:
        differentiated, tokens = accumulated(decoder.value_of), tokens.reshape(microbatches, -1, length)
    model = jshard.shard(decoder.model(sizes), jax.ShapeDtypeStruct(tokens.shape[-2:], tokens.dtype))
    return decoder.stepping(model, jshard.Optimizer(model, tx), differentiated, tokens)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stages", description="What a decoder's training step costs in a pipeline."
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--schedules", default=",".join(KINDS), help="some of them, with commas between")
    asked = parser.parse_args(arguments)

    jshard.pretend(DEVICES)
    sizes, each, length = (QUICK, 1, 8) if asked.quick else (SIZES, 1, LENGTH)
    count, rounds = asked.microbatches[0], 3 if asked.quick else asked.rounds
    print(
        f"a decoder of {sizes}, {count} microbatches of {each} x {length} tokens, {DEVICES} stages, on pretend devices"
    )
    kinds = [each for kind in asked.schedules.split(",") for each in (kind, f"{kind} again")]
    steps = {kind: variant(kind, sizes, count * each, length, count) for kind in (ONE, TENSOR, *kinds)}
    decoder.agree(steps, ONE)
    found = decoder.measure(steps, rounds)
    print(f"all variants agree on the losses\n{decoder.table(steps, found, ONE, 'over one device')}")
    print("\ntrace, and first step with compiling, in processor time, by microbatches; and how much stages wait then")
    for kind in kinds:
        for count in asked.microbatches:
            made = steps[kind] if count == asked.microbatches[0] else variant(kind, sizes, count * each, length, count)
            idle = Cost(generate(kind.partition(" ")[0], DEVICES, count)).lock_step.idle
            print(f"{kind:18}{count:>4}{made.traced:>9.2f} s{made.first:>7.1f} s{idle:>9.1%} idle", flush=True)


if __name__ == "__main__":
    main()
