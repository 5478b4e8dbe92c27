"""Checkpoints: folders named by their step, written during training, and renamed into place once complete.

runs/digits/checkpoints/20/checkpoint.json     the manifest: shapes, dtypes, and a checksum of every file
runs/digits/checkpoints/20/configuration.yaml  the configuration of the run
runs/digits/checkpoints/20/arrays/             model, optimizer and random state, by orbax
runs/digits/checkpoints/40.partial/            an unfinished checkpoint, also after its process has ended
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jshard.errors import FULL, JShardError, reason, refused
from jshard.layouts.gathering import kind, raw, typed
from jshard.layouts.paths import keys_of
from jshard.runs import events
from jshard.runs.names import CONFIGURATION
from jshard.training.checkpoints.arrays import like_raw, load, not_finite, prepare, save, warn_of_not_finite
from jshard.training.checkpoints.manifest import Damaged, Manifest, flush
from jshard.training.data.sources import positions
from jshard.training.settings import Policy

ARRAYS = "arrays"
SHOWN = 3  # faults of a checkpoint that does not fit; the others are counted


def steps_in(folder: Path) -> list[int]:
    """List the saved steps in a folder, the earliest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint; `run` is the words to type after `jshard resume`."""

    folder: Path
    step: int
    run: str
    whole: Manifest | None = dataclasses.field(default=None, compare=False)  # set after all checksums match

    @classmethod
    def find(cls, folder: Path, which: str, run: str) -> Checkpoint:
        """Find a checkpoint in a folder; `which` is "latest", "previous" or a step. The first process decides for all."""
        step = int(multihost_utils.broadcast_one_to_all(np.int32(cls._found(folder, which))))
        return cls(folder / str(step), step, run)

    @classmethod
    def newest_whole(cls, folder: Path, run: str) -> Checkpoint | None:
        """Find the newest checkpoint with matching checksums on all processes; None in a folder
        without checkpoints. A damaged checkpoint is skipped and reported."""
        found, step = None, np.iinfo(np.int32).max
        while True:
            here = max((earlier for earlier in steps_in(folder) if earlier < step), default=-1)
            if (step := int(multihost_utils.broadcast_one_to_all(np.int32(here)))) < 0:
                break
            found = cls(folder / str(step), step, run)
            try:
                found = dataclasses.replace(found, whole=found._checked())
            except (Damaged, OSError) as error:
                fault = error if isinstance(error, Damaged) else f"can't be read: {reason(error)}"
                print(f"{found} {fault}; an earlier checkpoint is tried", file=sys.stderr, flush=True)
            if np.all(multihost_utils.process_allgather(np.bool_(found.whole is not None))):
                return found
        if found is None:
            return None
        raise JShardError(f"all checkpoints in {folder} are damaged", hint=_ANEW)

    @staticmethod
    def _found(folder: Path, which: str) -> int:
        steps = steps_in(folder)
        if not steps:
            partial = [path.name for path in folder.glob("*.partial")] if folder.is_dir() else []
            only = f" but {partial[0]}, an unfinished checkpoint" if partial else ""
            raise JShardError(f"there is no checkpoint in {folder}{only}", hint="type: jshard train")
        if which == "latest":
            return steps[-1]
        if which == "previous":
            if len(steps) == 1:
                raise JShardError(f"{folder} holds one checkpoint, of step {steps[0]}, and no earlier one", hint=_ANEW)
            return steps[-2]
        if not which.isdecimal() or int(which) not in steps:
            saved = ", ".join(map(str, steps))
            raise JShardError(
                f'{folder} holds no checkpoint "{which}"', hint=f"use --from latest, previous or a step of {saved}"
            )
        return int(which)

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} ({self.folder})"

    def manifest(self) -> Manifest:
        """Return the manifest after comparing every file with its checksum; raise an error for a damaged checkpoint."""
        try:
            with refused(f"{self} can't be read", hint="make it readable, or start anew"):
                return self.whole or self._checked()
        except Damaged as damage:
            earlier = [step for step in steps_in(self.folder.parent) if step < self.step]
            hint = f"type: jshard resume {self.run} --from {earlier[-1]}" if earlier else _ANEW
            raise JShardError(f"{self} {damage}", hint=hint) from None

    def _checked(self) -> Manifest:
        """Compare every file with its checksum; the processes share the files."""
        manifest = Manifest.read(self.folder)
        mine = itertools.islice(manifest.files.items(), jax.process_index(), None, jax.process_count())
        dataclasses.replace(manifest, files=dict(mine)).check_files(self.folder)
        return manifest

    def restore(self, state: object, needed_by: str) -> tuple[Any, Manifest]:
        """Return `state` with the saved values, in its present shardings; the arrays of `state` are deleted first."""
        manifest = self.manifest()
        arrays = named(state)
        self._check_fits(manifest, arrays, needed_by)
        like = {name: like_raw(array) for name, array in arrays.items()}
        kinds = {name: kind(array) for name, array in arrays.items()}
        leaves, tree = jax.tree.flatten(state)
        for leaf in leaves:
            leaf.delete()
        read = load(self.folder / ARRAYS, like)
        restored = jax.tree.unflatten(tree, [typed(read[name], kinds[name]) for name in arrays])
        shards = {
            name: leaf.addressable_shards for name, leaf in named([nnx.filter_state(restored[0], nnx.Param)]).items()
        }
        counts = {
            name: sum(not_finite(np.asarray(shard.data)) for shard in parts if shard.replica_id == 0)
            for name, parts in shards.items()
        }
        warn_of_not_finite(str(self), counts)
        return restored, manifest

    def _check_fits(self, manifest: Manifest, arrays: Mapping[str, jax.Array], needed_by: str) -> None:
        faults = []
        for name, array in arrays.items():
            here = (array.shape, str(array.dtype))
            if name not in manifest.arrays:
                faults.append(f"{self} has no {name}, which {needed_by} needs")
            elif (saved := manifest.arrays[name]) != here:
                was, wanted = (f"{dtype}{list(shape)}" for shape, dtype in (saved, here))
                faults.append(f"{name} is {was} in {self}, and {wanted} by {needed_by}")
        faults += [f"{self} has {name}, which {needed_by} has not" for name in manifest.arrays if name not in arrays]
        if faults:
            more = f", and {len(faults) - SHOWN} more of this kind" if len(faults) > SHOWN else ""
            hint = f"use the model and the optimizer of {self.folder / CONFIGURATION}"
            shown = faults[:SHOWN]
            shown[-1] += more
            raise JShardError.of(JShardError(fault, hint=hint) for fault in shown)


_ANEW = "type: jshard train, with another output"


def refusal(error: BaseException) -> OSError:
    """Return an error as an `OSError`; orbax hides the error number in a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error
    number = str(error).rpartition("os_error_code='")[2].partition("'")[0]
    if number.isdecimal():
        return OSError(int(number), os.strerror(int(number)))
    return OSError(None, " ".join(str(error).split())[:300])


def named(state: object) -> dict[str, Any]:
    """Return the arrays of (model, optimizer) by name: `model.up.kernel`."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        steps = keys_of(path)
        arrays[".".join(map(str, ("model" if steps[0] == 0 else "optimizer", *steps[1:])))] = leaf
    return arrays


def _renamed(path: Path, word: str) -> Path:
    """Rename the folder of a checkpoint to the first free name such as `20.aside-1`."""
    names = (path.with_name(f"{path.stem}.{word}-{n}") for n in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


class Saver:
    """A background writer of checkpoints; each process writes its own shards, and the first completes the folder."""

    def __init__(self, policy: Policy, configuration: str, say: Callable[[str], None]):
        self.policy, self.configuration, self.say = policy, configuration, say
        self.leads = jax.process_index() == 0
        self.last: int | None = None  # the last step saved or being saved
        self.saved: Checkpoint | None = None  # the last complete checkpoint
        self.refused: set[Path] = set()  # folders whose removal failed
        self.pending: concurrent.futures.Future[None] | None = None
        self.worker = concurrent.futures.ThreadPoolExecutor(1, "jshard saves")

    def begin(self, resumed: Checkpoint | None) -> None:
        """Prepare the folder: remove unfinished checkpoints, and set aside checkpoints after the resumed step."""
        folder, there = self.policy.folder, steps_in(self.policy.folder)
        here = resumed is not None and resumed.folder.parent.resolve() == folder.resolve()
        if resumed is not None and here:
            self.last, self.saved = resumed.step, resumed
        elif there:
            raise JShardError(
                f"{self.policy.label} already holds checkpoints, the last of step {there[-1]}",
                hint=f"type: jshard resume {self.policy.run}, or name another output",
            )
        prepare()
        if not self.leads:
            return
        with self._as_user_error("be written to"):
            folder.mkdir(parents=True, exist_ok=True)
            for stale in [*folder.glob("*.partial"), *folder.glob("*.removed*")]:
                if self._removed(stale):
                    self.say(f"removed {stale}, an unfinished checkpoint")
            trial = folder / "0.partial"
            trial.mkdir()
            trial.rmdir()
            for step in there:
                if resumed is not None and step > resumed.step:
                    aside = _renamed(folder / str(step), "aside")
                    self.say(f"set aside the checkpoint of step {step}, beyond step {resumed.step}: {aside}")
        self._prune()  # an earlier run may have ended between a save and its pruning

    def due(self, step: int, steps: int) -> bool:
        return step != self.last and (step % self.policy.every == 0 or step == steps)

    def save(self, step: int, state: object, position: Mapping[str, Any]) -> None:
        """Start to save. On return the state has been copied and may be donated."""
        self.wait()
        events.tell("saving", step=step, folder=str(self.policy.folder))
        arrays = named(state)
        manifest = Manifest(
            step, positions(position), {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
        )
        partial = self.policy.folder / f"{step}.partial"
        with self._as_user_error(f"save step {step}"):
            if self.leads:
                partial.mkdir()
                (partial / CONFIGURATION).write_text(self.configuration)
            written = save(partial / ARRAYS, {name: raw(array) for name, array in arrays.items()})
        self.last = step
        self.pending = self.worker.submit(self._finish, step, manifest, partial, written)

    def _finish(self, step: int, manifest: Manifest, partial: Path, written: Callable[[], None]) -> None:
        try:
            written()
            if self.leads:
                manifest.write(partial)
                partial.rename(self.policy.folder / str(step))
                flush(self.policy.folder)
        except BaseException:
            if self.leads:
                shutil.rmtree(partial, ignore_errors=True)  # makes room if the disk is full
            raise
        self._prune()

    def _prune(self) -> None:
        for old in steps_in(self.policy.folder)[: -self.policy.keep] if self.leads else ():
            self._removed(self.policy.folder / str(old))

    def _removed(self, path: Path) -> bool:
        """Remove a folder; a failure is reported once, and training continues."""
        if path in self.refused:
            return False
        try:
            path = path if ".removed" in path.name else _renamed(path, "removed")
            shutil.rmtree(path)
        except OSError as error:
            self.refused.add(path)
            self.say(f"{path} can't be removed: {reason(error)}; training goes on: remove it by hand")
            return False
        return True

    def look(self) -> None:
        """Report a finished or failed save, without waiting."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of a save in progress, and report it."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with self._as_user_error(f"save step {self.last}"):
            pending.result()
        assert self.last is not None
        self.saved = Checkpoint(self.policy.folder / str(self.last), self.last, self.policy.run)
        events.tell("saved", step=self.last, folder=str(self.policy.folder))
        self.say(f"saved step {self.last}: {self.saved.folder}")

    def end(self) -> None:
        """Wait for the saves of all processes: the first completes a checkpoint after the others are done."""
        self.wait()
        multihost_utils.sync_global_devices("jshard has saved")

    def __enter__(self) -> Saver:
        self.unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete a save in progress, also after an error."""
        try:
            self.end() if kind is None else self.wait()
        except JShardError as error:
            if kind is None:
                raise
            self.say(str(error))  # the fault that ended the training is the one to raise
        else:
            if kind is None and sys.unraisablehook == self._unraisable:  # after an error, writes may still run
                sys.unraisablehook = self.unraisable
        finally:
            self.worker.shutdown()

    def _unraisable(self, said: Any) -> None:
        """Suppress tensorstore's tracebacks after a failed save. orbax does not wait for the other
        writes of a failed save, and each that ends later prints a traceback."""
        if said.object is not None or str(said.exc_value) != "Event loop is closed":
            self.unraisable(said)

    @contextlib.contextmanager
    def _as_user_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, JShardError):
                raise
            refused = refusal(error)
            back = "" if self.saved is None else f", and the last checkpoint is that of step {self.saved.step}"
            hint = "make room" if refused.errno in FULL else "make it writable"
            go_on = (
                ", or name another output" if self.saved is None else f", then type: jshard resume {self.policy.run}"
            )
            fault = f"{self.policy.label} can't {what}: {reason(refused)}{back}"
            raise JShardError(fault, hint=hint + go_on) from refused
