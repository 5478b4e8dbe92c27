"""One run writes to a folder at a time: its first process locks a file there, and the kernel unlocks it when that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jshard.errors import JShardError, reason, refused
from jshard.runs.names import LOCK

DYING = 5.0  # seconds that a process which was killed has to end in


@contextlib.contextmanager
def locked(folders: Mapping[Path, str]) -> Iterator[None]:
    """Lock folders, each with the opening of a sentence about it. No process goes on before the first has all of them."""
    with contextlib.ExitStack() as stack:
        for folder, label in folders.items() if jax.process_index() == 0 else ():
            with refused(f"{label} can't be written to", hint="make it writable, or name another output"):
                folder.mkdir(parents=True, exist_ok=True)
                _lock(stack.enter_context((folder / LOCK).open("ab+", buffering=0)), label)
        multihost_utils.sync_global_devices("jshard has locked its folders")
        yield


def _lock(file: FileIO, label: str) -> None:
    """Lock a file, and write into it who has it. By fcntl: its locks hold on NFS, and children of the process, which may
    outlive it, don't inherit them as those of flock."""
    deadline = time.monotonic() + DYING
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            hint = "wait until it ends, or name another output"
            raise JShardError(f"{label} another run writes to: {file.read().decode()}", hint=hint) from error
        except OSError as error:
            says = f"this file system locks no files ({reason(error)}): see that no other run writes to its folder"
            print(says, file=sys.stderr, flush=True)
        break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
