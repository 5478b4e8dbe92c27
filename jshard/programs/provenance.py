"""Why a collective stands in a program. Whoever asks for it says so in a name scope, which JAX keeps in its jaxprs and XLA in
the metadata of what it compiles; here both are read back."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax._src import source_info_util

from jshard.errors import Location
from jshard.programs.jaxprs import Eqn

PHASES = ("forward", "backward", "update")  # in the order of a training step
FIELDS = frozenset(
    ("signal", "claim", "phase", "key", "reason", "chosen", "again", "times", "each", "turns", "program")
)
GUARD = re.compile(r"jshard\[([^\]]*)\]")  # `jshard[signal=up]`; what a user types in a scope is left alone
OP_NAME = re.compile(r'op_name="([^"]*)"')
JOINED = re.compile(r"((?:.*?/)?)\((.*)\)")
Part = tuple[str, str]  # what JAX put on the name stack, a "scope" or a "transform", and its name


def scope(**fields: str):
    """Say who asks for the collectives traced inside: `with scope(key="sequence"):`.

    `signal` is nested into the signals around (`decoder/attn` is two); `claim` is a signal too, which counts where no `signal`
    stands, the innermost alone; `key` is the key of the innermost one; `phase` is backward or update, where no transformation
    of JAX tells; `reason` is redistribute; `chosen` is the strategy that jshard
    took by itself, in words; `again` is remat around what is computed a second time and differentiated there;
    `times` and `turns`, of a branch in a loop, are how often each device takes it in all turns, a number for each stage
    where they differ, and in how many any does;
    `program` is the number of the partitioned program that is called;
    `times` and `each`, of a send in a loop, how often it is asked for in all turns, by all devices and by the one most often.
    """
    assert fields.keys() <= FIELDS, fields
    words = ",".join(f"{field}={quote(word, safe=' =*+')}" for field, word in fields.items())
    return jax.named_scope(f"jshard[{words}]")


def placed_in(stack: Any, signal: str) -> Any:
    """Add the signal that claims the nearest parameter to the name stack of an equation."""
    with source_info_util.user_context(None, name_stack=stack), scope(claim=signal):
        return source_info_util.current_name_stack()


def said(stack: Sequence[Any], field: str) -> str:
    """The last word that a name stack has for a field."""
    return next((words[field] for each in reversed(stack) if field in (words := _fields(each.name))), "")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a collective, or another operation, stands where it does."""

    path: tuple[str, ...] = ()  # the signals around it, outermost first
    phase: str = "forward"  # forward, backward, update
    key: str = ""  # of the innermost signal: the one that asks
    redistributed: bool = False  # it brings an array to where a signal wants it
    remat: bool = False  # it runs a second time, for the backward pass
    chosen: str = ""  # the strategy it is part of, with its price, where jshard took one by itself
    asked: bool = True  # whether a signal asked for it, as far as that is known
    place: Location | None = None  # the line of the configuration that asks
    claimed: bool = dataclasses.field(default=False, compare=False)  # the path is a claim's: no signal stands around
    source: str = dataclasses.field(default="", compare=False)  # the line of the program: model.py:12

    @property
    def signal(self) -> str:
        """`decoder/attn`; "-" under none."""
        return "/".join(self.path) or "-"

    @property
    def words(self) -> list[str]:
        """What a table says in brackets."""
        chosen = [f"chosen {self.chosen.partition(',')[0]}"] if self.chosen else []
        return [*chosen, *["redistribute"] * self.redistributed, *["remat"] * self.remat]

    def is_like(self, other: Cause) -> bool:
        """Whether both stand under the same signals, in the same phase."""
        return (self.path, self.phase) == (other.path, other.phase)

    def inside(self, stack: Sequence[Any], *, checkpoint: bool = False) -> Cause:
        """Add what an equation's name stack says. `checkpoint`: the equation stands directly in a jax.checkpoint, whose
        scope JAX adds only when it lowers."""
        if not stack:
            return self
        parts = tuple(("transform" if type(each).__name__ == "Transform" else "scope", each.name) for each in stack)
        return self._with(_read((("scope", "checkpoint"), *parts) if checkpoint else parts))

    def _with(self, inner: Cause) -> Cause:
        named = (*(() if self.claimed else self.path), *(() if inner.claimed else inner.path))
        path = named or inner.path or self.path
        return dataclasses.replace(
            self,
            path=path,
            claimed=bool(path) and not named,
            phase=latest((self.phase, inner.phase)),
            key=inner.key if inner.path or inner.key else self.key,  # a key is one of the signal it is written under
            redistributed=self.redistributed or inner.redistributed,
            remat=self.remat or inner.remat,
            chosen=inner.chosen or self.chosen,
        )


def latest(phases: Iterable[str]) -> str:
    """Of the phases that name stacks tell, the one that holds: an update is neither forward nor backward."""
    return max(phases, key=PHASES.index, default=PHASES[0])


@functools.lru_cache(maxsize=65536)
def _read(parts: tuple[Part, ...]) -> Cause:
    path: list[str] = []
    segment: list[str] = []  # the signals since the last transformation
    last: dict[str, str] = {}  # the last of each field
    phases: set[str] = set()
    remat = again = False

    def close() -> None:
        # A transposed checkpoint repeats the stack it was called under, of one segment or of all until here.
        path.extend(segment)
        for count in range(len(segment) or len(path), len(path)):
            if path[-count:] == path[-2 * count : -count]:
                del path[-count:]
                break
        segment.clear()

    for before, (kind, name) in zip((("", ""), *parts), parts, strict=False):
        if kind == "transform":
            close()
            phases |= {"backward"} if name == "transpose" else set()
            again &= name != "transpose"
            continue
        remat |= name == "rematted_computation" and before == ("scope", "checkpoint")
        fields = _fields(name)
        if "signal" in fields:
            segment += fields["signal"].split("/")
        if "signal" in fields or "claim" in fields:
            last.pop("key", None)
        phases |= {fields["phase"]} & set(PHASES) if "phase" in fields else set()
        again |= "again" in fields
        last |= fields
    close()
    key, redistributed, chosen = last.get("key", ""), last.get("reason") == "redistribute", last.get("chosen", "")
    claimed = not path and "claim" in last
    found = Cause(
        tuple(last["claim"].split("/") if claimed else path), latest(phases), key, redistributed, remat or again, chosen
    )
    return dataclasses.replace(found, claimed=claimed)


def _fields(name: str) -> dict[str, str]:
    found = GUARD.fullmatch(name)
    pairs = (pair.partition("=") for pair in found[1].split(",")) if found else ()
    return {field: unquote(word) for field, _, word in pairs if field in FIELDS and word}


# -- what XLA keeps of it --


def op_name(text: str) -> str:
    """Where in the program an instruction comes from, as the metadata in its text says."""
    found = OP_NAME.search(text)
    return found[1] if found else ""


def causes(op_name: str) -> tuple[Cause, ...]:
    """Read the `op_name` of an HLO instruction: one cause, or several where XLA joined instructions."""
    return tuple(_read(tuple(_parts(each))) for each in split(op_name))


def cause(op_name: str) -> Cause:
    """The cause that all of an `op_name` agrees on; one under no signal where it names several."""
    found = set(causes(op_name))
    return found.pop() if len(found) == 1 else Cause()


def often(times: str) -> list[Fraction]:
    """Read `times`: one number, or one for each stage. A loop that runs several times may take a branch less often in one."""
    return [Fraction(word) for word in times.split()]


def taken(op_name: str) -> tuple[Fraction, int] | None:
    """How often the device that does so most takes a branch in all turns of the loop around, and in how many turns any does,
    where the scope directly around it says so."""
    *_, (_, around), _ = (("", ""), ("", ""), *_parts(op_name))
    if "turns" not in (words := _fields(around)):
        return None
    return max(often(words["times"])), int(words["turns"])


def operation(op_name: str) -> str:
    """The primitive that an instruction comes from: `dot_general`, or several where XLA joined instructions."""
    return "+".join(dict.fromkeys(each.rpartition("/")[2] for each in split(op_name)))


@functools.lru_cache(maxsize=65536)
def split(op_name: str) -> tuple[str, ...]:
    """The name stacks that XLA joined into one: `what/is/(common:of:them)`."""
    found = JOINED.fullmatch(op_name)
    return tuple(found[1] + part for part in found[2].split(":")) if found else (op_name,)


def _parts(op_name: str) -> Iterator[Part]:
    """The name stack behind its text, in which `transpose(jvp(up))` is two transformations and a scope, but `jit(f)` a call."""
    for word in op_name.split("/"):
        *outer, name = word.split("(")
        yield from (("transform", each) for each in outer if each not in ("jit", "pjit"))
        yield "scope", name.rstrip(")")


# -- the user's own line --

_FOLDERS = (f"{Path(__file__).parents[1]}/", f"{Path(jax.__file__).parent}/")
_INSIDE = ("/flax/", "<frozen ", "/bin/jshard", "/contextlib.py")


@functools.cache
def _folders(shortened: str | None) -> tuple[str, ...]:
    """jshard's and JAX's, and what JAX makes of their names where it is told to shorten those of files."""
    return (*_FOLDERS, *(re.sub(shortened, "", folder) for folder in _FOLDERS if shortened))


def source_of(eqn: Eqn) -> str:
    """`model.py:12`: the innermost line of the program that is not jshard's, JAX's or Flax's."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return own_line((frame.file_name, frame.start_line) for frame in frames)


def line_here() -> str:
    """`model.py:12`: the innermost line of the running program that is not jshard's, JAX's or Flax's."""
    return own_line((each.f_code.co_filename, each.f_lineno) for each in _running(sys._getframe(1)))


def is_inside(names: Collection[str]) -> bool:
    """Tell whether a function of one of these names is running."""
    return any(frame.f_code.co_name in names for frame in _running(sys._getframe(1)))


def _running(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def own_line(frames: Iterable[Sequence[Any]]) -> str:
    """Return `model.py:12` for the first of these files and lines, innermost first, that is the user's; "" where none is."""
    folders = _folders(jax.config.values["jax_hlo_source_file_canonicalization_regex"])
    own = (
        (file, line)
        for file, line in frames
        if not file.startswith(folders) and not any(inside in file for inside in _INSIDE)
    )
    return next((f"{Path(file).name}:{line}" for file, line in own), "")


class StackFrames:
    """The lines of the program behind the instructions of a compiled text, by the tables above it."""

    def __init__(self, text: str):
        tables = ("FileNames", "FileLocations", "StackFrames")
        self.files, self.locations, self.frames = (_table(text, name) for name in tables)
        # XLA counts the parents from one, and a frame without one has the first: a root's own number
        self.offset = 1 if self.frames.get("1", "").endswith("parent_frame_id=1}") else 0

    def source(self, text: str) -> str:
        """`model.py:12`: the innermost line behind an instruction that is not jshard's, JAX's or Flax's."""
        found = re.search(r"\bstack_frame_id=(\d+)", text)
        if found is None:
            found = re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', text)
            return own_line([found.groups()] if found else ())
        return own_line(self._outwards(int(found[1])))

    def _outwards(self, number: int) -> Iterator[tuple[str, str]]:
        while frame := self.frames.get(str(number)):
            location, parent = re.findall(r"_id=(\d+)", frame)
            fields = dict(re.findall(r"(\w+)=(\d+)", self.locations[location]))
            yield self.files[fields["file_name_id"]].strip('"'), fields["line"]
            number = int(parent) - self.offset


def _table(text: str, name: str) -> dict[str, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    return dict(line.split(" ", 1) for line in found[1].splitlines()) if found else {}
