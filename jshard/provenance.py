"""Why a collective stands in a program. Whoever asks for it says so in a name scope, which JAX keeps in its jaxprs and XLA in
the metadata of what it compiles; here both are read back."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax._src import source_info_util

from jshard.errors import Place

PHASES = ("forward", "backward", "update")  # in the order of a training step
FIELDS = frozenset(("signal", "phase", "key", "reason", "chosen"))
GUARD = re.compile(r"jshard\[([^\]]*)\]")  # `jshard[signal=up]`; what a user types in a scope is left alone
OP_NAME = re.compile(r'op_name="([^"]*)"')
JOINED = re.compile(r"((?:.*?/)?)\((.*)\)")
Part = tuple[str, str]  # what JAX put on the name stack, a "scope" or a "transform", and its name


def scope(**fields: str):
    """Say who asks for the collectives traced inside: `with scope(key="sequence"):`.

    `signal` is nested into the signals around (`decoder/attn` is two); `key` is the key of the innermost one; `phase` is
    backward or update, where no transformation of JAX tells; `reason` is redistribute; `chosen` is the strategy that jshard
    took by itself, in words.
    """
    assert fields.keys() <= FIELDS, fields
    words = ",".join(f"{field}={quote(word, safe=' =*+')}" for field, word in fields.items())
    return jax.named_scope(f"jshard[{words}]")


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
    place: Place | None = None  # the line of the configuration that asks
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
        return dataclasses.replace(
            self,
            path=(*self.path, *inner.path),
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
    remat = False

    def close() -> None:
        # a transposed checkpoint repeats the stack it was called under
        if segment and path[-len(segment) :] != segment:
            path.extend(segment)
        segment.clear()

    for before, (kind, name) in zip((("", ""), *parts), parts, strict=False):
        if kind == "transform":
            close()
            phases |= {"backward"} if name == "transpose" else set()
            continue
        remat |= name == "rematted_computation" and before == ("scope", "checkpoint")
        fields = _fields(name)
        if "signal" in fields:
            segment += fields["signal"].split("/")
            last.pop("key", None)
        phases |= {fields["phase"]} & set(PHASES) if "phase" in fields else set()
        last |= fields
    close()
    key, redistributed, chosen = last.get("key", ""), last.get("reason") == "redistribute", last.get("chosen", "")
    return Cause(tuple(path), latest(phases), key, redistributed, remat, chosen)


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

_INSIDE = (str(Path(__file__).parent), str(Path(jax.__file__).parent), "/flax/")


def source_of(eqn: Any) -> str:
    """`model.py:12`: the innermost line of the program that is not jshard's, JAX's or Flax's."""
    for frame in source_info_util.summarize(eqn.source_info, num_frames=50).splitlines()[::-1]:
        found = re.match(r"(.+?):(\d+)", frame.strip())
        if found and not any(inside in found[1] for inside in _INSIDE):
            return f"{Path(found[1]).name}:{found[2]}"
    return ""
