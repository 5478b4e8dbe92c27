"""A configuration in words: one line for the mesh, one for the experiment, one for each signal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jshard.signals.config import Configuration
    from jshard.signals.signal import Signal

OUTPUTS = {
    "keep": "y stays split",
    "gather": "y is gathered by an all-gather",
    "sum": "y is summed by an all-reduce",
    "scatter": "y is summed and split by a reduce-scatter",
}


def mesh_in_words(configuration: Configuration) -> str:
    """`{data: 2, tensor: 4}`, as it is written."""
    mesh = configuration.mesh
    assert mesh is not None
    return "{" + ", ".join(f"{name}: {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True)) + "}"


def meaning(configuration: Configuration) -> list[tuple[str, str]]:
    """What a configuration says: places, and what each means."""
    return [
        *((str(configuration.mesh.place), f"mesh {_devices(configuration)}") for _ in "x" if configuration.mesh),
        *(
            (str(configuration.budget_place), f"at most {configuration.budget:,} B on each device")
            for _ in "x"
            if configuration.budget is not None
        ),
        *(
            (str(configuration.topology_place), f"plans are made for {configuration.topology}")
            for _ in "x"
            if configuration.topology is not None
        ),
        *((str(configuration.train_places.get("model", "")), text) for text in _experiment(configuration)),
        *(
            (str(signal.place), f"{signal.name}: {'; '.join(_words(signal, configuration))}")
            for signal in configuration.signals.values()
        ),
    ]


def aligned(said: list[tuple[str, str]]) -> list[str]:
    """One line for each, its place before it."""
    width = max((len(place) for place, _ in said), default=0)
    return [f"{place:{width}}  {text}" for place, text in said]


def _devices(configuration: Configuration) -> str:
    assert configuration.mesh is not None
    sizes = configuration.mesh.sizes
    count = "all devices" if -1 in sizes else "1 device" if math.prod(sizes) == 1 else f"{math.prod(sizes)} devices"
    return f"{mesh_in_words(configuration)} of {count}, {configuration.axis_types}"


def _experiment(configuration: Configuration) -> Iterator[str]:
    train = configuration.train
    if "model" in train:
        names = {key: _name(train[key]) for key in ("model", "data", "optimizer") if key in train}
        yield "experiment " + ", ".join(
            [f"{key} {name}" for key, name in names.items()]
            + [f"{key} {train[key]}" for key in ("batch", "steps", "seed") if key in train]
        )


def _name(component: object) -> object:
    if isinstance(component, dict):
        return component.get("path", component.get("name"))
    return component


def _words(signal: Signal, configuration: Configuration) -> Iterator[str]:
    if signal.shard is not None:
        yield _shard(signal)
    loops = {"rows": signal.row, "columns": signal.column, "reduction": signal.reduction}
    split = [f"{loop} over {' x '.join(names)}" for loop, names in loops.items() if names]
    if split:
        yield ", ".join(split)
    elif signal.shard is None:
        yield "replicated"
    output = signal.output or ("sum" if signal.reduction and not signal.sequence else None)
    if output is not None:
        yield OUTPUTS[output]
    if signal.sequence:
        yield f"activations between layers split by sequence over {' x '.join(signal.sequence)}"
    if signal.store:
        yield f"parameters and optimizer state rest split over {' x '.join(signal.store)}"
    if signal.store_optimizer:
        yield f"optimizer state rests split over {' x '.join(signal.store_optimizer)}"
    if signal.backward is not None:
        yield f'cotangents lie as "{signal.backward}" says'
    for what, dtype in (("kept", "param"), ("computed", "compute"), ("summed over devices", "reduce")):
        if (name := getattr(signal.dtype, dtype)) is not None:
            yield f"{what} in {name}"
    if signal.remat:
        yield "activations computed anew in backward"
    if signal.compile:
        back = signal if signal.backward is None else configuration.lookup((signal.backward,))
        elsewhere = (back.shard and back.shard.workers) != (signal.shard and signal.shard.workers)
        yield (
            "not compiled as one program, as the backward is on other workers"
            if elsewhere
            else ("each layer compiled as one program, its backward as another")
        )
    if signal.kernel:
        yield f"kernels: {', '.join(f'{op} {word}' for op, word in signal.kernel)}"
    for collective, count in signal.expect:
        yield f"at most {count} bytes on the wire" if collective == "bytes" else f"{count} {collective} expected"


def _shard(signal: Signal) -> str:
    shard = signal.shard
    assert shard is not None
    if shard.mesh:
        where = f"mesh axis {' x '.join(shard.mesh)}"
    elif shard.workers is None:
        where = "all workers"
    else:
        where = f"workers {', '.join(map(str, shard.workers))}"
    if shard.replicated or shard.axis is None:
        return f"whole on {where}"
    return f"axis {shard.axis} of every array over {where}"
