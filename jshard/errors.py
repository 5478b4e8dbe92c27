"""What a user got wrong, told in one sentence that ends in something to type."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import os
from collections.abc import Iterable, Iterator

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what one may use of it: no further attempt makes room


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a fact was written: `configs/mlp.yaml:4`, or only a source (`the command line`) when there are no lines."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class JShardError(ValueError):
    """A mistake of the user's: `fault; hint`. The hint is required, so that it can't be forgotten."""

    def __init__(self, fault: str, *, hint: str):
        self.faults: tuple[str, ...] = (printable(f"{fault}; {hint}"),)
        super().__init__(self.faults[0])

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence, and no stack of frames."""
        return [f"{type(self).__name__}: {fault}" for fault in self.faults]

    def add_note(self, note: str) -> None:
        """Leave out JAX's remark on the frames that it hides: the sentence is all that is shown."""

    @classmethod
    def of(cls, errors: Iterable[JShardError]) -> JShardError:
        """One error for several, a line each, in the order given and without repeats."""
        return cls.saying(*dict.fromkeys(fault for error in errors for fault in error.faults))

    def at(self, label: str, *sources: str) -> JShardError:
        """The same with `label` before each fault that names no place in these sources; itself where all do."""
        faults = [fault if any(each in fault for each in sources) else f"{label}: {fault}" for fault in self.faults]
        return self if faults == [*self.faults] else self.saying(*faults).with_traceback(self.__traceback__)

    @classmethod
    def saying(cls, *faults: str) -> JShardError:
        """Make an error of whole sentences, each with its hint, as another process or thread has told them."""
        made = cls.__new__(cls)
        made.faults = tuple(printable(fault, keep="\n") for fault in faults)
        ValueError.__init__(made, "\n".join(made.faults))
        return made


def reason(error: OSError) -> str:
    """Say why the system refused, in its own words."""
    return (error.strerror or "unknown reason").lower()


@contextlib.contextmanager
def refused(fault: str, *, hint: str) -> Iterator[None]:
    """Turn the system's refusal of a file into a JShardError: `fault: permission denied; hint`."""
    try:
        yield
    except OSError as error:
        raise JShardError(f"{fault}: {reason(error)}", hint=hint) from error


def did_you_mean(word: object, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: the known word that `word` was most likely meant to be, or `otherwise`."""
    close = nearest(str(word), known)
    return f"did you mean {quoted(close)}?" if close else otherwise


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that `word` was most likely meant to be."""
    names = [*map(str, known)]
    return next(
        iter(difflib.get_close_matches(word, names, 1) or difflib.get_close_matches(word.lower(), names, 1)), None
    )


def shown_path(file: str) -> str:
    """Shorten the path of a file that is inside this folder."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def printable(text: str, keep: str = "") -> str:
    """Escape every character that a terminal obeys or hides, as ESC, BEL, the end of a line or a change of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def multiples(size: int, of: int) -> str:
    """Return the multiples of `of` next to `size`: "24 or 32", or "8", below which there is none."""
    below, above = size // of * of, -(-size // of) * of
    return f"{below} or {above}" if below else f"{above}"


def kind_of(value: object) -> str:
    """What a value is: `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def quoted(text: str, longest: int = 60) -> str:
    """A user's word on one line, in double quotes, cut when it is long."""
    shown = printable(text[:longest].replace("\\", "\\\\"))
    return f'"{shown}..."' if len(text) > longest else f'"{shown}"'
