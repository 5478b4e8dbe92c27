"""Trust in the code named by a configuration: all modules, or jshard, flax, optax and a folder."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from jshard.errors import JShardError, shown_path
from jshard.runs.names import CONFIGURATION, MANIFEST

OURS = ("jshard.layers", "flax.linen", "flax.nnx", "optax")  # none of these writes a file or starts a process


class Untrusted(JShardError):
    """An error for code outside the user's trust."""

    def __init__(self, fault: str):
        super().__init__(fault, hint="add --trust to run it")


@dataclasses.dataclass(frozen=True)
class Trust:
    """The modules for a configuration to run: all, or `OURS` and the modules in `folder`."""

    everything: bool = True
    folder: Path | None = None

    @classmethod
    def beside(cls, path: str) -> Trust:
        """Trust the folder of a YAML file that the user typed, but no folder of a copy in a run or a checkpoint."""
        file = Path(path)
        is_copy = file.name == CONFIGURATION or (file.parent / MANIFEST).exists()
        return cls(everything=False, folder=None if is_copy else file.parent)

    def check(self, label: str, name: str) -> None:
        """Raise an error if the module `name` may not run. It is not imported; `label` begins the error."""
        if self.everything or is_ours(name):
            return
        for spec in specs_of(name):
            if spec.origin is None or (spec.has_location and self._holds(spec.origin)):
                continue  # a folder without __init__.py runs nothing
            where = f"is in {shown_path(spec.origin)}" if spec.has_location else "is part of Python"
            scope = "named by a copy in a run" if self.folder is None else f"outside of {self.folder}"
            raise Untrusted(f"{label} {name} {where}, and no file {scope} may run")

    def _holds(self, file: str) -> bool:
        return self.folder is not None and Path(file).resolve().is_relative_to(self.folder.resolve())


EVERYTHING = Trust()


def is_ours(name: str) -> bool:
    """Return whether every configuration may run a module."""
    return name == "jshard" or f"{name}.".startswith(tuple(f"{each}." for each in OURS))


def specs_of(name: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module's parent packages and of itself, without importing any."""
    spec, parts = None, name.split(".")
    for end, part in enumerate(parts, 1):
        if spec is None:
            here = [os.getcwd(), *sys.path]
            spec = next(filter(None, (finder.find_spec(part, here) for finder in sys.meta_path)), None)
        else:
            spec = PathFinder.find_spec(part, [*(spec.submodule_search_locations or ())])
        if spec is None:
            missing = ".".join(parts[:end])
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        yield spec
