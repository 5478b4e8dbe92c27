"""The entries of a ledger: a collective, a chosen strategy, an unused signal, each with its cause."""

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
    """The columns of an entry for its cause."""

    cause: Cause
    mesh_axes: tuple[str, ...]
    branches: tuple[str, ...]
    count: int

    def once(self, **more: object) -> Hashable:
        """Return the entry without its count, as a key for comparison."""
        entry: Any = self
        return dataclasses.replace(entry, count=None, **more)

    def plus(self, other: Any) -> Self:
        """Return the entry with the count of an equal entry added."""
        entry: Any = self
        return dataclasses.replace(entry, count=self.count + other.count)

    @property
    def axis(self) -> str:
        """The mesh axes, in words."""
        return ", ".join(self.mesh_axes)

    @property
    def place(self) -> Location | None:
        """The line of the configuration behind the entry."""
        return self.cause.place

    @property
    def signal(self) -> str:
        """The path of the signal, `decoder/attn`, or "-" outside every signal."""
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
        """The mechanism, in words: redistribute, remat, branch 1 of 2."""
        return ", ".join((*self.cause.words, *self.branches))

    def document(self) -> dict[str, Any]:
        """Return the columns and the facts of the cause as JSON values."""
        fields = document_of(self)
        facts = fields.pop("cause")
        del facts["path"], facts["asked"]
        return {**facts, **fields, "signal": self.signal, "via": self.via}


@dataclasses.dataclass(frozen=True)
class Line(Caused):
    """A collective, run `count` times. `payload` and `wire` are the bytes of one run; `total` of all runs on a device."""

    cause: Cause
    collective: str  # a name in COLLECTIVES
    primitive: str
    mesh_axes: tuple[str, ...]
    group: int
    count: int
    count_known: bool  # False inside a while loop: its trips are unknown, and `count` is of one trip
    payload: int
    dtype: str
    shape: tuple[int, ...]
    branches: tuple[str, ...] = ()  # of the surrounding conds: branch 1 of 2
    typed: bool = False  # whether the types of an explicit mesh ask for it
    kernel: str = ""  # the algorithm, where a kernel declares the collective
    declared: int | None = None  # bytes on the wire of one run, as the kernel declares them
    each: int | None = None  # the most runs on one device, where devices differ: pipeline stages
    compiler: str = ""  # the compiler whose partitioner added it for `primitive`: XLA for CPU

    @property
    def wire(self) -> int:
        """Bytes on the wire per device and run."""
        return COLLECTIVES[self.collective].wire(self.payload, self.group) if self.declared is None else self.declared

    @property
    def total(self) -> int:
        """Bytes on the wire per device of all runs."""
        return self.runs * self.wire

    @property
    def runs(self) -> int:
        """The number of runs on a device."""
        return self.count if self.each is None else self.each

    def once(self, **more: object) -> Hashable:
        return super().once(each=type(self.each), **more)

    def plus(self, other: Any) -> Self:
        each = None if self.each is None and other.each is None else self.runs + other.runs
        return dataclasses.replace(super().plus(other), each=each)

    @property
    def asked(self) -> bool:
        """True if a signal asks for it, as far as jshard knows."""
        return self.cause.asked

    @property
    def via(self) -> str:
        """The mechanism, in words: redistribute, remat, branch 1 of 2, sharding in types, no signal asked."""
        if self.compiler:
            caused = " at ".join(filter(None, (self.primitive, self.source)))
            return ", ".join(filter(None, (super().via, caused, f"added by {self.compiler}")))
        kernel = f"kernel {self.kernel}, as it declares" if self.kernel else ""
        more = "sharding in types" * self.typed, kernel, "no signal asked" * (not self.asked)
        sends = f"{self.each:,} by a stage" if self.each is not None else ""
        return ", ".join(filter(None, (super().via, *more, sends)))

    @property
    def line(self) -> str:
        """The line of the configuration; for a collective of the compiler without one, the line of the program."""
        return str(self.place or (self.compiler and self.source) or "-")

    def cells(self) -> tuple[str, ...]:
        """Return the line as cells of a table."""
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
    """A pipeline schedule of the program. `layers` gives the layers of each stage in words,
    where stages differ. `kept` is the bytes that a device keeps of a microbatch for the backward
    pass of a chunk (0 where it keeps only the input); `left` the bytes that B leaves for W."""

    mesh_axis: str
    table: Table
    layers: str = ""
    kept: int = 0
    left: int = 0

    @property
    def keeps(self) -> str:
        """The memory reserved on a device for microbatches, in words; "" where each chunk is recomputed."""
        plan = steps(self.table)
        room = [(plan.kept, self.kept, "from F"), (plan.left, self.left, "from B for W")]
        parts = [f"{count} x {size(each)} {what}" for count, each, what in room if each]
        total = size(sum(count * each for count, each, _ in room))
        return f"kept for backwards on each device: {', '.join(parts)}: {total}" if parts else ""

    @property
    def says(self) -> list[str]:
        """The schedule with its idle share, the layers of its stages, and the memory for microbatches."""
        return [str(Cost(self.table)), *filter(None, (self.layers, self.keeps))]

    def document(self) -> dict[str, Any]:
        return {"mesh_axis": self.mesh_axis, "name": self.table.name, "table": self.table.text(), "says": self.says}


@dataclasses.dataclass(frozen=True)
class Left(Caused):
    """An operation left to the compiler: it moves an unknown number of bytes over these mesh
    axes, and no signal asks for it. `jshard plan` compiles the program and reads the bytes."""

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
    """Add up the counts of entries with equal `key`; each sum takes the position of the first entry."""
    sums: dict[Hashable, Counted] = {}
    for entry in entries:
        same = key(entry)
        sums[same] = sums[same].plus(entry) if same in sums else entry
    return list(sums.values())


@dataclasses.dataclass(frozen=True)
class ChosenStrategy:
    """A strategy chosen by jshard, as no signal names any, and the bytes of its forward pass on the wire."""

    place: Location | None
    signal: str
    words: str  # row=data, 0 B on the wire per device
    source: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        asked = f"{self.place or '-'}  {self.signal}  chosen: {self.words}"
        return f"{asked}  ({self.source})" if self.source else asked


@dataclasses.dataclass(frozen=True)
class Unused:
    """A signal of the configuration with no part of the program under it."""

    place: Location | None
    signal: str

    def __str__(self) -> str:
        return f"{self.place or '-'}  {self.signal}  unused: nothing in this program is under it"


def document_of(entry: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, nested dataclasses included, as JSON values."""
    return {field.name: _plain(getattr(entry, field.name)) for field in dataclasses.fields(entry)}


def _plain(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Location):
        return str(value)
    return document_of(value) if dataclasses.is_dataclass(value) else value
