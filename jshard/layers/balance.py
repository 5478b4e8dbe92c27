"""The number of stacked layers on each stage of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

from jshard.errors import JShardError, Location
from jshard.printing.units import operations, size
from jshard.schedules import Table
from jshard.signals.signal import Signal


class Costs(NamedTuple):
    """The FLOPs of a microbatch's forward pass: before the layers, in a layer, and after them with
    the loss. `bytes_each` are the bytes of a layer's parameters."""

    depth: int
    first: float
    layer: float
    last: float
    bytes_each: int


def balanced(signal: Signal, costs: Costs, table: Table) -> tuple[tuple[int, ...], str]:
    """Divide layers among chunks to minimize the FLOPs of the most expensive chunk, then the most
    layers in a chunk. Every device has room for the longest chunk. Returns the number of layers of
    each chunk, and a sentence with the reason."""
    chunks = table.virtual_stages
    if costs.depth < chunks:
        raise JShardError(
            f"{signal} says stage: balance ({signal.at('stage')}), and {costs.depth} layers are too few for "
            f"{chunks} chunks on {table.stages} stages",
            hint=f"use {chunks} layers or more",
        )
    beside = [0.0] * chunks
    beside[0] += costs.first
    beside[-1] += costs.last
    counts = [1] * chunks
    for _ in range(costs.depth - chunks):
        least = min(range(chunks), key=lambda n: (beside[n] + counts[n] * costs.layer, counts[n]))
        counts[least] += 1
    flops = [count * costs.layer + more for count, more in zip(counts, beside, strict=True)]
    room = size(max(counts) * costs.bytes_each)
    words = (
        f"{signal.name}: {spelled(counts, table)}, {', '.join(map(operations, flops))} of a microbatch forward: a layer has "
        f"{operations(costs.layer)}, before them are {operations(costs.first)}, after them {operations(costs.last)}; in use a "
        f"device has room for {max(counts)} layers, {room} of parameters, in each chunk"
    )
    if min(counts) >= max(counts):
        words += "; stage: equal has as many, and sends no parameters"
    return tuple(counts), words


def spelled(counts: tuple[int, ...] | list[int], table: Table) -> str:
    """Describe the number of layers of each stage, or of each chunk in order."""
    what = "stages" if table.virtual_stages <= table.stages else "chunks, one of each stage in turn,"
    return f"{what} of {', '.join(map(str, counts))} layers"


def in_ranges(ranges: str, depth: int, signal: Signal, table: Table, pipeline: Location) -> tuple[int, ...]:
    """Parse "0..5: 0, 6..11: 1" for a stack of `depth` layers; return the number of layers of each chunk."""
    about = f"{signal} says stage ({signal.at('stage')})"
    counts, stages = [], []
    for part in ranges.split(", "):
        layers, _, stage = part.partition(": ")
        first, _, last = layers.partition("..")
        counts.append(int(last) - int(first) + 1)
        stages.append(int(stage))
    if sum(counts) != depth:
        raise JShardError(
            f"{about} for layers 0 to {sum(counts) - 1}, and the stack has {depth}",
            hint=f"end with layer {depth - 1}",
        )
    chunks = table.virtual_stages
    expected = [n % table.stages for n in range(chunks)]
    if stages != expected:
        raise JShardError(
            f"{about} for layers on stages {', '.join(map(str, stages))}, one after the other, and jshard.pipeline "
            f"({pipeline}) goes through stages {', '.join(map(str, expected))}",
            hint=f"write {chunks} ranges, on these stages in order",
        )
    return tuple(counts)
