"""Errors for a user's mistakes: a sentence each, with something to type at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import os
from collections.abc import Iterable, Iterator

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk or quota: a retry makes no room


@dataclasses.dataclass(frozen=True)
class Location:
    """The place of a fact: `configs/mlp.yaml:4`, or only a source (`the command line`) without lines."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class JShardError(ValueError):
    """A mistake of the user's: `fault; hint`. The hint is required."""

    def __init__(self, fault: str, *, hint: str):
        self.faults: tuple[str, ...] = (printable(f"{fault}; {hint}"),)
        super().__init__(self.faults[0])

    def _render_traceback_(self) -> list[str]:
        """Return the text for IPython: the sentence, without a stack of frames."""
        return [f"{type(self).__name__}: {fault}" for fault in self.faults]

    def add_note(self, note: str) -> None:
        """Ignore JAX's note on hidden frames: the sentence is all the user sees."""

    @classmethod
    def of(cls, errors: Iterable[JShardError]) -> JShardError:
        """Join several errors into a single error, a line each, in order and without repeats."""
        return cls.saying(*dict.fromkeys(fault for error in errors for fault in error.faults))

    def at(self, label: str, *sources: str) -> JShardError:
        """Return the error with `label` before each fault without a place in `sources`."""
        faults = [fault if any(each in fault for each in sources) else f"{label}: {fault}" for fault in self.faults]
        return self if faults == [*self.faults] else self.saying(*faults).with_traceback(self.__traceback__)

    @classmethod
    def saying(cls, *faults: str) -> JShardError:
        """Make an error of whole sentences with hints, as received from another process or thread."""
        made = cls.__new__(cls)
        made.faults = tuple(printable(fault, keep="\n") for fault in faults)
        ValueError.__init__(made, "\n".join(made.faults))
        return made


def reason(error: OSError) -> str:
    """Return the operating system's reason in its own words."""
    return (error.strerror or "unknown reason").lower()


def in_a_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message: `ValueError: no such axis`."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


@contextlib.contextmanager
def refused(fault: str, *, hint: str) -> Iterator[None]:
    """Turn the system's refusal of a file into a JShardError: `fault: permission denied; hint`."""
    try:
        yield
    except OSError as error:
        raise JShardError(f"{fault}: {reason(error)}", hint=hint) from error


def did_you_mean(word: object, known: Iterable[str], otherwise: str) -> str:
    """Return a hint with the nearest known word, or `otherwise`."""
    close = nearest(str(word), known)
    return f"did you mean {quoted(close)}?" if close else otherwise


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the nearest known word, or None."""
    names = [*map(str, known)]
    return next(
        iter(difflib.get_close_matches(word, names, 1) or difflib.get_close_matches(word.lower(), names, 1)), None
    )


def shown_path(file: str) -> str:
    """Shorten the path of a file inside the current folder."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def printable(text: str, keep: str = "") -> str:
    """Escape characters with an effect on a terminal, as ESC, BEL, line ends or changes of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def multiples(size: int, of: int) -> str:
    """Return the multiples of `of` next to `size`: "24 or 32", or only "8" at the lower end."""
    below, above = size // of * of, -(-size // of) * of
    return f"{below} or {above}" if below else f"{above}"


def kind_of(value: object) -> str:
    """Return the kind of a value: `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def quoted(text: str, longest: int = 60) -> str:
    """Return a user's word in double quotes, on a single line and cut when it is long."""
    shown = printable(text[:longest].replace("\\", "\\\\"))
    return f'"{shown}..."' if len(text) > longest else f'"{shown}"'
