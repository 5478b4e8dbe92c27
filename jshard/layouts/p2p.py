"""Transfers of array parts between processes, in blocks of bounded size. A block goes through one device of each
process, by collective-permutes, available on every backend. Nothing listens on a port, and nothing is pickled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jshard.errors import JShardError
from jshard.layouts.index_ranges import Box, Device, blocks, word_count
from jshard.layouts.layout import Layout
from jshard.runs import events

Where = Sharding | str  # or words: the host of process 0
EVERYONE = ("tpu",)  # platforms with all processes in every program: others run transfers of two processes
NOTE = 4096  # bytes of a process's note on its call


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A part on process `source`, wanted by the processes `targets`."""

    box: Box
    source: int
    targets: tuple[int, ...]


def parcels_of(box: Box, having: Sequence[int], wanting: Sequence[int]) -> Iterator[Parcel]:
    """Yield a part as parcels, from a process with it to the processes without it. A local part stays."""
    targets = tuple(process for process in wanting if process not in having)
    if targets:
        yield Parcel(box, having[0], targets)
    me = jax.process_index()
    if me in wanting and me in having and not (targets and me == having[0]):
        yield Parcel(box, me, ())


def without_mesh() -> Any:
    """Return a context without the user's mesh, for programs of single devices: `with without_mesh():`."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@functools.lru_cache
def doors_of(platform: str) -> Mesh:
    """Return a mesh of the first device of each process: its mesh index is the process index."""
    first: dict[int, Device] = {}
    for device in jax.devices(platform):
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[each] for each in sorted(first)]), ("process",), axis_types=(AxisType.Auto,))


def carry(
    parcels: Iterable[Parcel],
    doors: Mesh,
    itemsize: int,
    take: Callable[[Box], Any],
    keep: Callable[[Box, Any], None],
) -> None:
    """Send each parcel block by block, and keep it at its source and its targets. `take` returns a
    block as words, and `keep` stores a block given as words. All processes call it with the same
    parcels, except for parcels without targets, which stay in place."""
    me, parcels = jax.process_index(), list(parcels)
    everyone = doors.devices.flat[0].platform in EVERYONE
    nothing: dict[int, jax.Array] = {}
    going: list[jax.Array] = []
    for turn in itertools.zip_longest(*(blocks(parcel.box, itemsize) for parcel in parcels)):
        for parcel, block in zip(parcels, turn, strict=True):
            if block is None:
                continue
            words = take(block) if me == parcel.source else None
            if parcel.targets and (everyone or me == parcel.source or me in parcel.targets):
                count = word_count(block, itemsize)
                if words is None and count not in nothing:
                    nothing[count] = jnp.zeros(count, np.uint32, device=doors.local_devices[0])
                program, mesh = _sending(doors, parcel.source, parcel.targets, everyone=everyone)
                arrived = program(_at_doors(nothing[count] if words is None else words, mesh))
                if me in parcel.targets:
                    words = arrived.addressable_data(0)
                going = [*going[-1:], arrived]  # prepare at most the next block meanwhile
                jax.block_until_ready(going[0])
            if words is not None:
                keep(block, words)


def _at_doors(mine: Any, doors: Mesh) -> jax.Array:
    here = jax.device_put(mine, doors.local_devices[0])
    split = NamedSharding(doors, PartitionSpec("process"))
    return jax.make_array_from_single_device_arrays((doors.size * mine.size,), split, [here])


@functools.lru_cache(maxsize=4096)
def _sending(doors: Mesh, source: int, targets: tuple[int, ...], *, everyone: bool) -> tuple[Any, Mesh]:
    """Return a program from a source to targets, and its mesh. Receivers send on, so senders double."""
    processes = list(range(doors.size)) if everyone else [source, *targets]
    mesh = Mesh(doors.devices[processes], doors.axis_names, axis_types=doors.axis_types)
    source, targets = processes.index(source), tuple(map(processes.index, targets))

    def sending(x: jax.Array) -> jax.Array:
        having, waiting = [source], list(targets)
        while waiting:
            pairs = list(zip(having, waiting, strict=False))
            now = [target for _, target in pairs]
            arrived = lax.ppermute(x, "process", pairs)
            x = jnp.where(jnp.isin(lax.axis_index("process"), np.array(now)), arrived, x)
            having, waiting = having + now, waiting[len(now) :]
        return x

    spec = PartitionSpec("process")
    return jax.jit(jax.shard_map(sending, mesh=mesh, in_specs=spec, out_specs=spec)), mesh


def tell(doors: Mesh, call: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchange notes on a call: every process receives the notes of all."""
    if doors.size < 2:
        return [call]
    note = json.dumps(call).encode()
    assert len(note) <= NOTE, call
    notes = _telling(doors)(_at_doors(np.frombuffer(note.ljust(NOTE), np.uint8), doors))
    return [json.loads(each.tobytes()) for each in np.asarray(notes)]


def is_shared(op_name: str, x: jax.Array, to: str, doors: Mesh) -> bool:
    """Return whether `x` is a single array of all processes, and not an array of each process.
    Raise an error if it is neither, or if the destination `to` differs between processes."""
    if doors.size < 2:
        return True
    what = f"{x.dtype}{list(x.shape)} on {listed(x.sharding.device_set)}"
    calls = tell(doors, {"call": (what, to), "own": x.is_fully_addressable})
    owns = all(call["own"] for call in calls)
    for process, call in enumerate(calls):
        if call["call"][owns:] != calls[0]["call"][owns:]:
            one, other = (", ".join(filter(None, each["call"])) for each in (call, calls[0]))
            raise JShardError(
                f"process {process} called {op_name} with {one}, but process 0 with {other}",
                hint="call it with the same arrays in the same order on every process",
            )
    return not owns


def numbers_of(devices: Iterable[Device]) -> list[int]:
    """Return the numbers of devices in `jax.devices()`: ascending for a set, else in the given order."""
    ordered = sorted(devices, key=lambda device: device.id) if isinstance(devices, Set) else list(devices)
    number = {device: number for number, device in enumerate(jax.devices(ordered[0].platform))}
    return [number[device] for device in ordered]


def listed(devices: Iterable[Device]) -> str:
    """Return device numbers in a few words, different for different devices."""
    numbers = numbers_of(devices)
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"devices {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"device {numbers[0]}"
    if len(numbers) <= 16:
        return f"devices {', '.join(map(str, numbers))}"
    return (
        f"{len(numbers)} devices from {numbers[0]} to {numbers[-1]} (checksum {zlib.crc32(repr(numbers).encode()):x})"
    )


@functools.lru_cache(maxsize=64)
def _telling(doors: Mesh) -> Any:
    def telling(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "process", to="invarying")

    return jax.jit(jax.shard_map(telling, mesh=doors, in_specs=PartitionSpec("process"), out_specs=PartitionSpec()))


# -- events of transfers outside a program, only if somebody listens --


def moved(
    op_name: str, shape: Sequence[int], dtype: Any, source: Where, target: Where, *, by: str = "", moves: Sequence[str] = ()
) -> None:  # fmt: skip
    """Send the event of a transfer. `by` is the signal behind it; `moves` are its collectives and slices."""
    if events.listeners:
        events.tell(
            "moved", op_name=op_name, by=by, moves=list(moves), shape=list(shape), dtype=str(dtype),
            bytes=math.prod(shape) * dtype.itemsize,
            **{"from": _words(source, len(shape)), "to": _words(target, len(shape))},
            from_devices=_numbers(source), to_devices=_numbers(target),
        )  # fmt: skip


def where(x: object) -> Where:
    """Return the sharding of an array on devices."""
    return x.sharding if isinstance(x, jax.Array) else "the host"


def _words(where: Where, rank: int) -> str:
    """Return `[data, whole] on {data: 2, tensor: 4}`, with device numbers if some are unused."""
    if isinstance(where, str):
        return where
    devices = listed(where.device_set)
    if not isinstance(where, NamedSharding):
        return devices
    words = repr(Layout.from_sharding(where, rank)).removeprefix("Layout(").removesuffix(")")
    others = {*jax.devices(next(iter(where.device_set)).platform)} - where.device_set
    return f"{words}, {devices}" if others else words


def _numbers(where: Where) -> list[int] | None:
    return None if isinstance(where, str) else numbers_of(where.device_set)
