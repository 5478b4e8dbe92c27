"""`jshard.diff(a, b)`: compare two configurations, or two commits; a separate process and folder explains each."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan import Plan, Topology
from jshard.inspect.plan.aot import check_installed
from jshard.inspect.plan.difference import Difference, Outcome, compare
from jshard.signals.config import load_configuration
from jshard.signals.schema import IMPORT_PATH

PACKAGE = str(Path(__file__).parents[2])
EXPLAIN = ["explain"]
NONE = "none"  # a topology: compile nothing, even where the configurations name a topology
PathOrText = str | os.PathLike[str]


def diff(
    old: PathOrText | Ledger | Plan, new: PathOrText | Ledger | Plan, *, overrides: Sequence[str] = (),
    topology: str | None = None, configs: Sequence[str] = (), args: Sequence[str] = (),
    trust: bool = True,
) -> Difference:  # fmt: skip
    """Compare the collectives, wire bytes and memory of two training steps, by the YAML lines of both.

    Each of `old` and `new` is one of three kinds:

    - A configuration with an experiment: a path, or `git:REVISION:path`, which also uses the models of that revision.
    - A `Ledger` or `Plan`, returned by `jshard.explain` or `jshard.plan`.
    - `module:function` or `git:REVISION:module:function`, with `args` such as `float32[64,784]`, and the configuration of
      each side in `configs`.

    `overrides` change the new configuration, as on the command line. With a `topology`, given here or in the
    configurations, both sides are compiled for it as by `jshard.plan`, and the compiled programs are compared; "none"
    compiles nothing. Without a topology the requested collectives are compared. If they and the memory are equal, the
    texts compiled for pretend devices decide whether the programs are equal; for two ledgers this is not possible.
    Without `trust` a configuration runs only code of its own folder, jshard, flax and optax.
    """
    kinds = [_kind(old), _kind(new)]
    if isinstance(old, Ledger | Plan) and isinstance(new, Ledger | Plan) and kinds[0] == kinds[1] and topology is None:
        difference = compare(Outcome.of(old.to_json(), "old"), Outcome.of(new.to_json(), "new"))
        if difference.is_open and isinstance(old, Plan) and isinstance(new, Plan):
            return difference.proven(old.text_of_program, new.text_of_program)
        return difference
    if kinds != ["a path", "a path"]:
        if kinds[0] == kinds[1]:
            raise JShardError(
                f"jshard.diff is given {kinds[0]} twice and the topology {topology}",
                hint="give two paths: only a configuration or a function can be compiled",
            )
        raise JShardError(
            f"jshard.diff is given {kinds[0]} and {kinds[1]}", hint="give two paths, two ledgers or two plans"
        )
    assert not isinstance(old, Ledger | Plan) and not isinstance(new, Ledger | Plan)
    known = configs or [os.environ.get("JSHARD_CONFIG") or ""]
    with (
        _side(os.fspath(old), (), known[0], args, trust) as before,
        _side(os.fspath(new), overrides, known[-1], args, trust) as after,
    ):
        sides = before, after
        commands = _commands(sides, topology)
        difference = compare(*_outcomes(sides, [[*words, "--json"] for words in commands]))
        if difference.is_open:
            return difference.proven(*_output(sides, [[*words, "--program"] for words in commands]))
        return difference


def _kind(side: object) -> str:
    return "a ledger" if isinstance(side, Ledger) else "a plan" if isinstance(side, Plan) else "a path"


def _commands(sides: tuple[_Side, _Side], topology: str | None) -> list[list[str]]:
    """Return a command for each side: plan for the given topology or for its configuration's, else
    explain. If only one configuration names a topology, it holds for both sides."""
    old, new = (side.topology() for side in sides) if topology is None else (topology, topology)
    names = [name for name in (old or new, new or old) if name is not None and name != NONE]
    for name in names:
        check_installed(Topology.of(name))
    return [["plan", "--topology", name] for name in names] or [EXPLAIN, EXPLAIN]


@dataclasses.dataclass(frozen=True)
class _Side:
    """The words typed after a command for a side, and the command's working folder."""

    label: str
    folder: str
    config: str
    overrides: tuple[str, ...]
    words: list[str]
    revision: str = ""

    def topology(self) -> str | None:
        """Return the topology of the configuration, or None. It is None for a faulty configuration
        too: the side's process reports the fault."""
        try:
            return load_configuration(os.path.join(self.folder, self.config), self.overrides).topology
        except JShardError:
            return None


@contextlib.contextmanager
def _side(label: str, overrides: Sequence[str], config: str, args: Sequence[str], trust: bool) -> Iterator[_Side]:
    revision, _, target = label.removeprefix("git:").partition(":") if label.startswith("git:") else ("", "", label)
    if label.startswith("git:") and not (revision and target):
        raise JShardError(f"{label} is not git:REVISION:path", hint="write it like git:HEAD~1:configs/digits.yaml")
    is_function = IMPORT_PATH.parse(target) is not None
    if is_function and not config:
        raise JShardError(
            f'the function "{target}" has no configuration',
            hint="add --config configs/mlp.yaml, or set JSHARD_CONFIG",
        )
    options = ["--config", config, *(["--args", *args] if args else [])] if is_function else ["--trust"] * trust
    config = config if is_function else target
    with _unpacked(revision, label) if revision else contextlib.nullcontext(os.getcwd()) as folder:
        if revision and not os.path.isfile(os.path.join(folder, config)):
            raise JShardError(f"{config} is not there at {revision}", hint=f"see git ls-tree -r {revision} --name-only")
        yield _Side(label, folder, config, tuple(overrides), [target, *overrides, *options], revision)


@contextlib.contextmanager
def _unpacked(revision: str, label: str) -> Iterator[str]:
    """Unpack a revision into a temporary folder; yield its counterpart of the current folder."""
    with tempfile.TemporaryDirectory() as folder:
        top, prefix = (_git("rev-parse", f"--show-{each}").decode().strip() for each in ("toplevel", "prefix"))
        archive = _git("-C", top, "archive", "--format=tar", revision, label=label)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield os.path.join(folder, prefix)


def _git(*words: str, label: str = "git") -> bytes:
    done = subprocess.run(["git", *words], capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason is given"]
        reason = lines[0].removeprefix("fatal: ")
        raise JShardError(f"{label} can't be read: {reason}", hint="name a revision that git log shows")
    return done.stdout


def _outcomes(sides: Sequence[_Side], commands: Sequence[list[str]]) -> Iterator[Outcome]:
    """Parse the JSON output of a jshard command for each side, with the revision in front of every place."""
    for side, text in zip(sides, _output(sides, commands), strict=True):

        def named(fields: dict[str, Any], revision: str = side.revision) -> dict[str, Any]:
            return {**fields, "place": f"{revision}:{fields['place']}"} if fields.get("place") else fields

        text = json.dumps(json.loads(text, object_hook=named)) if side.revision else text
        yield Outcome.of(text, side.label)


def _output(sides: Sequence[_Side], commands: Sequence[list[str]]) -> list[str]:
    """Run a jshard command for each side, both at once, and return the printed texts."""
    path = os.pathsep.join(filter(None, (PACKAGE, os.environ.get("PYTHONPATH", ""))))
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "jshard", command, *side.words, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=side.folder, env={**os.environ, "PYTHONPATH": path},
        )
        for side, (command, *options) in zip(sides, commands, strict=True)
    ]  # fmt: skip
    ends = [process.communicate() for process in processes]
    for side, process, (out, err) in zip(sides, processes, ends, strict=True):
        if process.returncode and not out:  # a plan that does not fit in memory also exits with 1
            raise _fault(side, err)
    return [out for out, _ in ends]


def _fault(side: _Side, err: str) -> JShardError:
    """Return the error of the other process, made from its last printed sentences."""
    lines = [line for line in err.splitlines() if line.strip() and "pretending" not in line]
    if "Traceback (most recent call last):" in lines or not lines:
        lines = [f"{lines[-1] if lines else 'it ended without a word'}; type: jshard explain {shlex.join(side.words)}"]
    where = f"at {side.revision}, " if side.revision else ""
    return JShardError.saying(*dict.fromkeys(f"{where}{line}" for line in lines))
