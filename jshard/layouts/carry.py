"""Parts of an array on their way between processes, a bounded block at a time: through one device of each process, by
collective-permutes, which every backend has. Nothing listens, nothing is pickled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jshard.errors import JShardError

Device = Any  # jax.Device, which type checkers don't take for a type
Box = tuple[tuple[int, int], ...]  # for each axis where it begins and where it ends

BLOCK = 2**20  # bytes; larger ones took more memory and little less time (docs/scatter.md)
EVERYONE = ("tpu",)  # where all processes take part in all programs: others let two talk while the rest goes on
NOTE = 4096  # bytes of what a process says of its call


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A part that process `source` has and the processes `targets` want."""

    box: Box
    source: int
    targets: tuple[int, ...]


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Box]:
    """Which part of an array each device holds, those of other processes too."""
    places = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        for device, index in places.items()
    }


def holders(boxes: dict[Device, Box]) -> dict[Box, tuple[int, ...]]:
    """The different parts, in the order of the devices, each with the processes that hold it."""
    found: dict[Box, set[int]] = {}
    for device, box in boxes.items():
        found.setdefault(box, set()).add(device.process_index)
    return {box: tuple(sorted(processes)) for box, processes in found.items()}


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(end - begin for begin, end in box)


def index(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """A part as an index into the whole, or into the part `origin` around it."""
    offsets = [begin for begin, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(box, offsets, strict=True))


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether a part lies in another."""
    return all(low <= begin and end <= high for (begin, end), (low, high) in zip(inner, outer, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """What two parts share, if anything."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def blocks(box: Box, itemsize: int) -> Iterator[Box]:
    """The part in blocks of at most `BLOCK` bytes, all of one shape, so that one program serves them: the last ones overlap
    those before. Of an array with no numbers there is none."""
    sizes = list(lengths(box))
    if 0 in sizes:
        return
    for axis in range(len(sizes)):
        row = math.prod(sizes[axis + 1 :]) * itemsize
        sizes[axis] = min(sizes[axis], max(1, BLOCK // row))
    starts = [
        [min(start, end - size) for start in range(begin, end, size)]
        for (begin, end), size in zip(box, sizes, strict=True)
    ]
    for corner in itertools.product(*starts):
        yield tuple((start, start + size) for start, size in zip(corner, sizes, strict=True))


def without_mesh() -> Any:
    """A context in which programs of single devices run, whatever mesh the user has set: `with without_mesh():`."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


# -- between processes --


@functools.lru_cache
def doors_of(platform: str) -> Mesh:
    """The first device of each process, in the order of the processes: mesh index is process index."""
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
    """Takes each parcel, block by block, at its source, and keeps it there and at its targets. `take` gives a block as
    words and `keep` gets it so. All processes call it with the same parcels, but for those without targets, which stay
    where they are."""
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
                going = [*going[-1:], arrived]  # the next block is made ready while one is going, and no more
                jax.block_until_ready(going[0])
            if words is not None:
                keep(block, words)


def word_count(block: Box, itemsize: int) -> int:
    """How many words of 32 bits a block travels as: a power of two, so that few programs serve all shapes and dtypes."""
    words = -(-math.prod(lengths(block)) * itemsize // 4)
    return max(256, 1 << (words - 1).bit_length())


def _at_doors(mine: Any, doors: Mesh) -> jax.Array:
    here = jax.device_put(mine, doors.local_devices[0])
    split = NamedSharding(doors, PartitionSpec("process"))
    return jax.make_array_from_single_device_arrays((doors.size * mine.size,), split, [here])


@functools.lru_cache(maxsize=4096)
def _sending(doors: Mesh, source: int, targets: tuple[int, ...], *, everyone: bool) -> tuple[Any, Mesh]:
    """From one to several, each that has it sending it on: as many rounds as it takes to double up to all. The program, and
    the doors that take part in it."""
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


def tell(doors: Mesh, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process says of the call it makes, told to all of them."""
    if doors.size == 1:
        return [said]
    note = json.dumps(said).encode()
    assert len(note) <= NOTE, said
    notes = _telling(doors)(_at_doors(np.frombuffer(note.ljust(NOTE), np.uint8), doors))
    return [json.loads(each.tobytes()) for each in np.asarray(notes.addressable_data(0)).reshape(-1, NOTE)]


def is_shared(deed: str, x: jax.Array, doors: Mesh) -> bool:
    """Whether `x` is one array of all processes, and not one of its own in each; an error when it is neither."""
    if doors.size == 1:
        return True
    devices, me = x.sharding.device_set, jax.process_index()
    what = f"{x.dtype}{list(x.shape)} on {listed(devices)}"
    calls = tell(doors, {"what": what, "own": all(device.process_index == me for device in devices)})
    other = next((process for process, said in enumerate(calls) if said["what"] != calls[0]["what"]), None)
    if other is None or all(said["own"] for said in calls):
        return other is None
    raise JShardError(
        f"process {other} called {deed} with {calls[other]['what']}, but process 0 with {calls[0]['what']}",
        mend="call it with the same arrays in the same order on every process",
    )


def listed(devices: Iterable[Device]) -> str:
    """Devices by number in `jax.devices()`, in a few words that differ when they do."""
    devices = list(devices)
    number = {device: number for number, device in enumerate(jax.devices(devices[0].platform))}
    numbers = sorted(number[device] for device in devices)
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"device {numbers[0]}" if len(numbers) == 1 else f"devices {numbers[0]} to {numbers[-1]}"
    if len(numbers) <= 16:
        return f"devices {', '.join(map(str, numbers))}"
    return (
        f"{len(numbers)} devices from {numbers[0]} to {numbers[-1]} (checksum {zlib.crc32(repr(numbers).encode()):x})"
    )


@functools.lru_cache(maxsize=64)
def _telling(doors: Mesh) -> Any:
    def telling(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "process", tiled=True, to="invarying")

    return jax.jit(jax.shard_map(telling, mesh=doors, in_specs=PartitionSpec("process"), out_specs=PartitionSpec()))


# -- on this process's devices --


class Filling:
    """An array whose parts on this process's devices come into being block by block."""

    def __init__(self, sharding: Sharding, shape: Sequence[int], dtype: Any):
        self.sharding, self.shape, self.dtype = sharding, tuple(shape), np.dtype(dtype)
        here = jax.process_index()
        boxes = boxes_of(sharding, shape)
        self.boxes = {device: box for device, box in boxes.items() if device.process_index == here}
        self.parts: dict[Device, jax.Array] = {}

    def put(self, block: Box, words: Any) -> None:
        """The block, as `carry` hands it on, into every part that has it."""
        for device, box in self.boxes.items():
            if is_inside(block, box):
                part = self.parts.pop(device) if device in self.parts else self._new(device)
                corner = tuple(each.start for each in index(block, box))
                self.parts[device] = _written(part, jax.device_put(words, device), corner, lengths(block))
        jax.block_until_ready(list(self.parts.values()))

    def finished(self) -> jax.Array:
        """The array."""
        parts = [self.parts.pop(device) if device in self.parts else self._new(device) for device in self.boxes]
        parts = [part if part.dtype == self.dtype else _as_numbers(part, self.dtype) for part in parts]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts, dtype=self.dtype)

    def _new(self, device: Device) -> jax.Array:
        held = _bits_dtype(self.dtype) if _is_widened(self.dtype, device) else self.dtype
        return jnp.zeros(lengths(self.boxes[device]), held, device=device)


def taking(x: jax.Array) -> Callable[[Box], jax.Array]:
    """What takes blocks, as `carry` wants them, from the parts of `x` on this process's devices."""
    boxes = boxes_of(x.sharding, x.shape)
    parts = {boxes[shard.device]: shard.data for shard in x.addressable_shards}

    def take(block: Box) -> jax.Array:
        box = next(box for box in parts if is_inside(block, box))
        corner = tuple(each.start for each in index(block, box))
        return _cut(parts[box], corner, lengths(block), word_count(block, x.dtype.itemsize))

    return take


def _is_widened(dtype: np.dtype, device: Device) -> bool:
    """Whether XLA writes such numbers by way of wider ones, as it does narrow floats on CPU, which changes NaNs. They are
    written as bits, and at the end a part is there twice for a moment."""
    return dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating) and device.platform == "cpu"


def _bits_dtype(dtype: Any) -> np.dtype:
    """Whole numbers of the same width."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind == "c" else np.dtype(f"uint{8 * dtype.itemsize}")


def _as_bits(x: jax.Array) -> jax.Array:
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    return x if x.dtype.kind == "c" else lax.bitcast_convert_type(x, _bits_dtype(x.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _as_numbers(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return lax.bitcast_convert_type(bits, dtype)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(part: jax.Array, words: jax.Array, corner: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    count, itemsize = math.prod(shape), part.dtype.itemsize
    if part.dtype.kind == "c":
        halves = words[: count * itemsize // 4].reshape(count, 2, -1)
        halves = lax.bitcast_convert_type(halves if itemsize == 16 else halves[..., 0], part.real.dtype)
        numbers = lax.complex(halves[:, 0], halves[:, 1])
    elif itemsize == 8:
        numbers = lax.bitcast_convert_type(words[: 2 * count].reshape(count, 2), part.dtype)
    elif part.dtype == bool:
        numbers = lax.bitcast_convert_type(words, np.uint8).reshape(-1)[:count] != 0
    else:  # one to a word, or several
        numbers = lax.bitcast_convert_type(words, part.dtype).reshape(-1)[:count]
    return lax.dynamic_update_slice(part, numbers.reshape(shape), corner)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(part: jax.Array, corner: tuple[int, ...], shape: tuple[int, ...], count: int) -> jax.Array:
    bits = lax.dynamic_slice(_as_bits(part), corner, shape).reshape(-1)
    if bits.dtype.kind == "c":
        bits = lax.bitcast_convert_type(jnp.stack([bits.real, bits.imag], -1).reshape(-1), _bits_dtype(part.real.dtype))
    several = max(1, 4 // bits.dtype.itemsize)
    if several > 1:
        bits = jnp.pad(bits, (0, -bits.size % several)).reshape(-1, several)
    words = lax.bitcast_convert_type(bits, np.uint32).reshape(-1)
    return jnp.pad(words, (0, count - words.size))
