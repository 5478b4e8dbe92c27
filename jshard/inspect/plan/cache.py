"""A cache of compilations, by program, job and versions of the compilers."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

from jshard.inspect.plan.aot import Compiled, Exported

KEPT = 200  # plans; older ones are deleted
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")


def folder() -> Path:
    """Return `JSHARD_CACHE`, or this system's folder for caches."""
    named = os.environ.get("JSHARD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jshard" / "plans"


def key(export: Exported) -> str:
    """Return a hash of all inputs of a compilation, without the lines of the source."""
    words = [export.job, os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")]
    words += [f"{name} {version(name)}" for name in COMPILERS]
    return hashlib.sha256(b"\0".join([export.meaning, *map(str.encode, words)])).hexdigest()[:40]


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def load(found: str) -> Compiled | None:
    path = folder() / f"{found}.json.gz"
    if not path.exists():
        return None
    try:
        compiled = Compiled.from_json(gzip.decompress(path.read_bytes()).decode())
    except (OSError, EOFError, ValueError, TypeError, KeyError):  # truncated, or of another jshard
        path.unlink(missing_ok=True)
        return None
    os.utime(path)
    return compiled


def store(found: str, compiled: Compiled) -> None:
    """Write a compilation beside its place and move it there: readers never see half of it."""
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
        file.write(gzip.compress(compiled.to_json().encode(), mtime=0))
    os.replace(file.name, where / f"{found}.json.gz")
    plans = sorted(where.glob("*.json.gz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in plans[KEPT:]:
        old.unlink(missing_ok=True)
