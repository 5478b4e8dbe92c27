"""The entries of a ledger: what one collective, one choice, one signal comes to, and why it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Self, TypeVar

from jshard.errors import Location
from jshard.kernels.collectives import COLLECTIVES
from jshard.printing.units import size
from jshard.programs.provenance import Cause
from jshard.schedules import Cost, Table
from jshard.schedules.steps import steps


class Caused:
    """What an entry says of its cause, as columns."""

    cause: Cause
    mesh_axes: tuple[str, ...]
    branches: tuple[str, ...]
    count: int

    def once(self, **more: object) -> Hashable:
        """The entry without its count, to compare by."""
        entry: Any = self
        return dataclasses.replace(entry, count=None, **more)

    def plus(self, other: Any) -> Self:
        """The entry with the count of another that is alike."""
        entry: Any = self
        return dataclasses.replace(entry, count=self.count + other.count)

    @property
    def axis(self) -> str:
        return ", ".join(self.mesh_axes)

    @property
    def place(self) -> Location | None:
        """The line of the configuration that asked."""
        return self.cause.place

    @property
    def signal(self) -> str:
        """`decoder/attn`; "-" when it stands under none."""
        return self.cause.signal

    @property
    def phase(self) -> str:
        """forward, backward or update."""
        return self.cause.phase

    @property
    def source(self) -> str:
        """The line of the program: `model.py:12`."""
        return self.cause.source

    @property
    def via(self) -> str:
        """How it got here, in words: redistribute, remat, branch 1 of 2."""
        return ", ".join((*self.cause.words, *self.branches))

    def document(self) -> dict[str, Any]:
        """The columns, and the facts of the cause, as JSON has them."""
        fields = document_of(self)
        facts = fields.pop("cause")
        del facts["path"], facts["asked"]
        return {**facts, **fields, "signal": self.signal, "via": self.via}


@dataclasses.dataclass(frozen=True)
class Line(Caused):
    """One collective, `count` times. `payload` and `wire` are bytes of once; `total` of all times, on each device."""

    cause: Cause
    collective: str  # a name in COLLECTIVES
    primitive: str
    mesh_axes: tuple[str, ...]
    group: int
    count: int
    count_known: bool  # False inside a while loop, whose trips no program text tells: then count is that of one trip
    payload: int
    dtype: str
    shape: tuple[int, ...]
    branches: tuple[str, ...] = ()  # of the conds around: branch 1 of 2
    typed: bool = False  # the types of an explicit mesh ask for it
    kernel: str = ""  # the algorithm of a kernel that declares it
    declared: int | None = None  # bytes on the wire that such a kernel says of itself, once
    each: int | None = None  # the most that one device runs it, where `count` is of devices that differ: stages
    compiler: str = ""  # whose partitioner added it, for what stands in `primitive`: XLA for CPU

    @property
    def wire(self) -> int:
        """Bytes on the wire per device, once."""
        return COLLECTIVES[self.collective].wire(self.payload, self.group) if self.declared is None else self.declared

    @property
    def total(self) -> int:
        """Bytes on the wire per device, all times."""
        return self.runs * self.wire

    @property
    def runs(self) -> int:
        """How often one device runs it."""
        return self.count if self.each is None else self.each

    def once(self, **more: object) -> Hashable:
        return super().once(each=type(self.each), **more)

    def plus(self, other: Any) -> Self:
        each = None if self.each is None and other.each is None else self.runs + other.runs
        return dataclasses.replace(super().plus(other), each=each)

    @property
    def asked(self) -> bool:
        """Whether a signal asked for it, as far as that is known."""
        return self.cause.asked

    @property
    def via(self) -> str:
        """How it got here, in words: redistribute, remat, branch 1 of 2, sharding in types, no signal asked."""
        if self.compiler:
            caused = " at ".join(filter(None, (self.primitive, self.source)))
            return ", ".join(filter(None, (super().via, caused, f"added by {self.compiler}")))
        kernel = f"kernel {self.kernel}, as it declares" if self.kernel else ""
        more = "sharding in types" * self.typed, kernel, "no signal asked" * (not self.asked)
        sends = f"{self.each:,} by a stage" if self.each is not None else ""
        return ", ".join(filter(None, (super().via, *more, sends)))

    @property
    def line(self) -> str:
        return str(self.place or "-")

    def cells(self) -> tuple[str, ...]:
        """The line as the words of a table."""
        times = "" if self.count_known else "? x "
        return (
            self.line,
            self.signal,
            self.phase,
            self.collective,
            f"over {self.axis or '?'} ({self.group})",
            f"{times}{self.count:,} x {self.payload:,} B",
            self.dtype,
            f"{times}{self.total:,} B on the wire",
            f"({self.via})" if self.via else "",
        )

    def document(self) -> dict[str, Any]:
        return {**super().document(), "asked": self.asked, "wire": self.wire, "total": self.total}


@dataclasses.dataclass(frozen=True)
class Staged:
    """A table of stages that the program runs by, and how many layers each has, in words, where they are not equal. `kept` is
    in bytes what a device keeps of a microbatch for the backward of a chunk, 0 where of that only the input; `left` what B
    leaves W."""

    mesh_axis: str
    table: Table
    layers: str = ""
    kept: int = 0
    left: int = 0

    @property
    def keeps(self) -> str:
        """What of microbatches a device has room for, in words; "" where each chunk is computed again."""
        plan = steps(self.table)
        room = [(plan.kept, self.kept, "that F made"), (plan.left, self.left, "that B leaves W")]
        parts = [f"{count} x {size(each)} {what}" for count, each, what in room if each]
        total = size(sum(count * each for count, each, _ in room))
        return f"kept for backwards on each device: {', '.join(parts)}: {total}" if parts else ""

    @property
    def says(self) -> list[str]:
        """The schedule with its idle share, the layers of its stages, and what it keeps."""
        return [str(Cost(self.table)), *filter(None, (self.layers, self.keeps))]

    def document(self) -> dict[str, Any]:
        return {"mesh_axis": self.mesh_axis, "name": self.table.name, "table": self.table.text(), "says": self.says}


@dataclasses.dataclass(frozen=True)
class Left(Caused):
    """An operation that is left to the compiler: it can't be done without moving something over these mesh axes, nobody
    asked for it, and how many bytes it takes no program text tells. Compile it, and it can be read: `jshard plan`."""

    cause: Cause
    primitive: str  # rev, concatenate, slice
    mesh_axes: tuple[str, ...]
    count: int
    count_known: bool
    branches: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """`2 x concatenate over data (model.py:12)`"""
        times = f"{self.count:,} x " if self.count >= 2 else ""
        times = times if self.count_known else f"? x {times}"
        around = ", ".join(filter(None, (self.source, self.via)))
        return f"{times}{self.primitive} over {self.axis}" + (f" ({around})" if around else "")

    def __str__(self) -> str:
        return f"{self.place or '-'}  {self.signal}  {self.phase}  {self.words}: not asked for, decided by the compiler"


Counted = TypeVar("Counted", bound=Any)  # an entry, or another row that has `plus`


def joined(
    entries: Iterable[Counted], key: Callable[[Counted], Hashable] = lambda entry: entry.once()
) -> list[Counted]:
    """Add up the counts of entries of one `key`; each stands where the first of them does."""
    found: dict[Hashable, Counted] = {}
    for entry in entries:
        same = key(entry)
        found[same] = found[same].plus(entry) if same in found else entry
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class ChosenStrategy:
    """A strategy that jshard took by itself where no signal names one, and what its forward puts on the wire."""

    place: Location | None
    signal: str
    words: str  # row=data, 0 B on the wire per device
    source: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        asked = f"{self.place or '-'}  {self.signal}  chosen: {self.words}"
        return f"{asked}  ({self.source})" if self.source else asked


@dataclasses.dataclass(frozen=True)
class Unused:
    """A signal of the configuration that nothing in the program stands under."""

    place: Location | None
    signal: str

    def __str__(self) -> str:
        return f"{self.place or '-'}  {self.signal}  unused: nothing in this program is under it"


def document_of(entry: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of those inside it, as JSON has them."""
    return {field.name: _plain(getattr(entry, field.name)) for field in dataclasses.fields(entry)}


def _plain(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Location):
        return str(value)
    return document_of(value) if dataclasses.is_dataclass(value) else value
