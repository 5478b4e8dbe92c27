"""The provenance of collectives: who asked for each, and why. The caller writes it to a name scope.
JAX keeps the scope in jaxprs, and XLA in the metadata of compiled programs; both are read here."""

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
GUARD = re.compile(r"jshard\[([^\]]*)\]")  # `jshard[signal=up]`; other scopes are the user's
OP_NAME = re.compile(r'op_name="([^"]*)"')
JOINED = re.compile(r"((?:.*?/)?)\((.*)\)")
Part = tuple[str, str]  # an entry of JAX's name stack: "scope" or "transform", and its name


def scope(**fields: str):
    """Mark the collectives traced inside with their cause: `with scope(key="sequence"):`.

    `signal` nests in the signals around (`decoder/attn` is two). `claim` is a signal that counts only
    without a `signal` around, and only the innermost counts. `key` is the key of the innermost signal.
    `phase` is backward or update, if no transformation of JAX shows it. `reason` is redistribute.
    `chosen` is the strategy chosen by jshard itself, in words. `again` is remat, around recomputation
    that is differentiated there. `program` is the number of the partitioned program being called.
    `times` and `turns`, of a branch in a loop, are how often each device takes it in all turns (a
    number for each stage if they differ) and in how many turns any device does. `times` and `each`, of
    a send in a loop, are how often it runs in all turns: on all devices, and on the busiest device.
    """
    assert fields.keys() <= FIELDS, fields
    words = ",".join(f"{field}={quote(word, safe=' =*+')}" for field, word in fields.items())
    return jax.named_scope(f"jshard[{words}]")


def placed_in(stack: Any, signal: str) -> Any:
    """Add the signal that claims the nearest parameter to an equation's name stack."""
    with source_info_util.user_context(None, name_stack=stack), scope(claim=signal):
        return source_info_util.current_name_stack()


def said(stack: Sequence[Any], field: str) -> str:
    """Return the last word for a field in a name stack, or ""."""
    return next((words[field] for each in reversed(stack) if field in (words := _fields(each.name))), "")


@dataclasses.dataclass(frozen=True)
class Cause:
    """The cause of a collective or another operation: signals, phase, key and line."""

    path: tuple[str, ...] = ()  # the signals around it, outermost first
    phase: str = "forward"  # forward, backward, update
    key: str = ""  # the responsible key of the innermost signal
    redistributed: bool = False  # it moves an array to the layout of a signal
    remat: bool = False  # it runs again, for the backward pass
    chosen: str = ""  # its strategy, with the price, if jshard chose it
    asked: bool = True  # whether a signal asked for it, if known
    place: Location | None = None  # its line of the configuration
    claimed: bool = dataclasses.field(default=False, compare=False)  # the path is of a claim: no signal is around
    source: str = dataclasses.field(default="", compare=False)  # the line of the program: model.py:12

    @property
    def signal(self) -> str:
        """The signals as `decoder/attn`, or "-" without any."""
        return "/".join(self.path) or "-"

    @property
    def words(self) -> list[str]:
        """The words in brackets for a table."""
        chosen = [f"chosen {self.chosen.partition(',')[0]}"] if self.chosen else []
        return [*chosen, *["redistribute"] * self.redistributed, *["remat"] * self.remat]

    def is_like(self, other: Cause) -> bool:
        """Return whether both are under the same signals, in the same phase."""
        return (self.path, self.phase) == (other.path, other.phase)

    def inside(self, stack: Sequence[Any], *, checkpoint: bool = False) -> Cause:
        """Return the cause extended by an equation's name stack. `checkpoint`: the equation is
        directly in a jax.checkpoint, whose scope JAX adds only when lowering."""
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
            key=inner.key if inner.path or inner.key else self.key,  # a key belongs to its signal
            redistributed=self.redistributed or inner.redistributed,
            remat=self.remat or inner.remat,
            chosen=inner.chosen or self.chosen,
        )


def latest(phases: Iterable[str]) -> str:
    """Return the latest phase in name stacks: an update is neither forward nor backward."""
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


# -- causes in XLA's metadata --


def op_name(text: str) -> str:
    """Return the origin of an instruction in the program, from the metadata in its text."""
    found = OP_NAME.search(text)
    return found[1] if found else ""


def causes(op_name: str) -> tuple[Cause, ...]:
    """Read the `op_name` of an HLO instruction: several causes if XLA joined instructions."""
    return tuple(_read(tuple(_parts(each))) for each in split(op_name))


def cause(op_name: str) -> Cause:
    """Return the only cause of an `op_name`, or a cause without a signal if there are several."""
    found = set(causes(op_name))
    return found.pop() if len(found) == 1 else Cause()


def often(times: str) -> list[Fraction]:
    """Read `times`: a number, or a number for each stage. A loop may take a branch less often on a stage."""
    return [Fraction(word) for word in times.split()]


def taken(op_name: str) -> tuple[Fraction, int] | None:
    """Return how often the busiest device takes a branch in all turns of its loop, and in how many
    turns any does. Return None if the scope directly around the branch has no counts."""
    *_, (_, around), _ = (("", ""), ("", ""), *_parts(op_name))
    if "turns" not in (words := _fields(around)):
        return None
    return max(often(words["times"])), int(words["turns"])


def operation(op_name: str) -> str:
    """Return the primitive of an instruction: `dot_general`, or several if XLA joined instructions."""
    return "+".join(dict.fromkeys(each.rpartition("/")[2] for each in split(op_name)))


@functools.lru_cache(maxsize=65536)
def split(op_name: str) -> tuple[str, ...]:
    """Return the name stacks joined by XLA into one: `what/is/(common:of:them)`."""
    found = JOINED.fullmatch(op_name)
    return tuple(found[1] + part for part in found[2].split(":")) if found else (op_name,)


def _parts(op_name: str) -> Iterator[Part]:
    """Yield the entries of a name stack: `transpose(jvp(up))` is two transformations and a scope."""
    for word in op_name.split("/"):
        *outer, name = word.split("(")
        yield from (("transform", each) for each in outer if each not in ("jit", "pjit"))
        yield "scope", name.rstrip(")")


# -- the user's own line --

_FOLDERS = (f"{Path(__file__).parents[1]}/", f"{Path(jax.__file__).parent}/")
_INSIDE = ("/flax/", "<frozen ", "/bin/jshard", "/contextlib.py")
_LIBRARIES = (
    "/qwix/",
    "/optax/",
    "/einops/",
    "/equinox/",
    "/jaxtyping/",
)  # stepped over where the user's line is behind


@functools.cache
def _folders(shortened: str | None) -> tuple[str, ...]:
    """Return the folders of jshard and JAX, also as shortened by JAX's option for file names."""
    return (*_FOLDERS, *(re.sub(shortened, "", folder) for folder in _FOLDERS if shortened))


def source_of(eqn: Eqn) -> str:
    """Return `model.py:12`: the innermost line of an equation outside jshard, JAX and Flax."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return own_line((frame.file_name, frame.start_line) for frame in frames)


def line_here() -> str:
    """Return `model.py:12`: the innermost running line outside jshard, JAX and Flax."""
    return own_line((each.f_code.co_filename, each.f_lineno) for each in _running(sys._getframe(1)))


def is_inside(names: Collection[str]) -> bool:
    """Return whether a function with one of these names is running."""
    return any(frame.f_code.co_name in names for frame in _running(sys._getframe(1)))


def _running(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def own_line(frames: Iterable[Sequence[Any]]) -> str:
    """Return `model.py:12` for the user's first line in these frames, innermost first; else a library's line, or ""."""
    folders = _folders(jax.config.values["jax_hlo_source_file_canonicalization_regex"])
    of_library = ""
    for file, line in frames:
        if file.startswith(folders) or any(inside in file for inside in _INSIDE):
            continue
        where = f"{Path(file).name}:{line}"
        if not any(library in file for library in _LIBRARIES):
            return where
        of_library = of_library or where
    return of_library


class StackFrames:
    """The program lines of a compiled text's instructions, from the tables above it."""

    def __init__(self, text: str):
        tables = ("FileNames", "FileLocations", "StackFrames")
        self.files, self.locations, self.frames = (_table(text, name) for name in tables)
        # XLA counts parents from 1, and a root frame is its own parent
        self.offset = 1 if self.frames.get("1", "").endswith("parent_frame_id=1}") else 0

    def source(self, text: str) -> str:
        """Return `model.py:12`: the innermost line of an instruction outside jshard, JAX and Flax."""
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
