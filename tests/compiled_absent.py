"""What compilers for chips that are not here made of a kernel in an earlier run of the tests.

An outcome is looked up by all that decides it: the whole text of the program, the chips, the versions of the compilers and the
variables that they read. Kept are outcomes alone, of programs that were compiled, in the folder that JSHARD_TESTS_ABSENT names
(`compiled_before.ABSENT`, which a change of what starts the compilers makes anew); without it everything is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jshard.inspect.plan.cache import COMPILERS, version

FOLDER = "JSHARD_TESTS_ABSENT"
READ = ("XLA_", "LIBTPU_", "TPU_", "MOSAIC_", "CUDA", "NVIDIA_")  # variables that begin so are read by compilers
HERE = sys.prefix  # what a plugin sets once it is imported names a folder of this environment, whose versions are told


def outcome(
    program: jax.stages.Lowered, chips: Any, compiled: Callable[[], Any], *, sound: Callable[[Any], Any]
) -> Any:
    """What `compiled()` returns, which is JSON, or has returned for this program and these chips. What is not `sound` is not kept."""
    if FOLDER not in os.environ:
        return compiled()
    kept = Path(os.environ[FOLDER], f"{key(program, chips)}.json")
    if kept.exists():
        return json.loads(kept.read_text())
    made = compiled()
    if sound(made):
        _write(kept, json.dumps(made))
    return made


def key(program: jax.stages.Lowered, chips: Any) -> str:
    words = [program.as_text(), json.dumps(chips, sort_keys=True)]
    words += [f"{name} {version(name)}" for name in COMPILERS]
    told = {name: value for name, value in os.environ.items() if name.startswith(READ) and not value.startswith(HERE)}
    words.append(json.dumps(told, sort_keys=True))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _write(kept: Path, text: str) -> None:
    """In one move, so that nobody reads half of it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, kept)
