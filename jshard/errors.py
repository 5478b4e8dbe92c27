"""What a user got wrong, told in one sentence that ends in something to type."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a fact was written: `configs/mlp.yaml:4`, or only a source (`the command line`) when there are no lines."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class JShardError(ValueError):
    """A mistake of the user's: `fault; hint`. The hint is required, so that it can't be forgotten."""

    def __init__(self, fault: str, *, hint: str):
        self.faults: tuple[str, ...] = (f"{fault}; {hint}",)
        super().__init__(self.faults[0])

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence, and no stack of frames."""
        return [f"{type(self).__name__}: {fault}" for fault in self.faults]

    @classmethod
    def of(cls, errors: Iterable[JShardError]) -> JShardError:
        """One error for several, a line each, in the order given and without repeats."""
        faults = tuple(dict.fromkeys(fault for error in errors for fault in error.faults))
        joined = cls.__new__(cls)
        joined.faults = faults
        ValueError.__init__(joined, "\n".join(faults))
        return joined


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: the known word that `word` was most likely meant to be, or `otherwise`."""
    close = nearest(str(word), known)
    return f'did you mean "{close}"?' if close else otherwise


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be."""
    close = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.6)
    return close[0] if close else None
