"""One run writes to a folder at a time: its first process locks a file there, and the kernel unlocks it when that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jshard.errors import JShardError, reason, refused
from jshard.run_names import LOCK

DYING = 5.0  # seconds that a process which was killed has to end in


@contextlib.contextmanager
def locked(folders: Mapping[Path, str]) -> Iterator[None]:
    """Lock folders, each with the opening of a sentence about it. No process goes on before the first has all of them."""
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            for folder, label in folders.items():
                stack.enter_context(_locked(folder, label))
        multihost_utils.sync_global_devices("jshard has locked its folders")
        yield


@contextlib.contextmanager
def _locked(folder: Path, label: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with refused(f"{label} can't be written to", hint="make it writable, or name another output"):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("a+"))
            deadline = time.monotonic() + DYING
            while (fault := _refusal(file.fileno())) is not None and time.monotonic() < deadline:
                time.sleep(0.1)
            if fault is not None:
                file.seek(0)
                hint = "wait until it ends, or name another output"
                raise JShardError(f"{label} another run writes to: {file.read()}", hint=hint) from fault
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
        yield


def _refusal(file: int) -> OSError | None:
    """Lock a file; return why another process has to be waited for. By fcntl: its locks hold on NFS, and children of the
    process, which may outlive it, don't inherit them as those of flock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return error
        says = f"this file system locks no files ({reason(error)}): see that no other run writes to its folder"
        print(says, file=sys.stderr, flush=True)
    return None
