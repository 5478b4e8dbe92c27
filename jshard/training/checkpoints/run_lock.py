"""The lock on a run's folders: the first process locks a file there, and the kernel releases it when the process ends."""

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

DYING = 5.0  # seconds to wait for a killed process to end


@contextlib.contextmanager
def locked(folders: Mapping[Path, str]) -> Iterator[None]:
    """Lock folders, given with the openings of their error messages; all processes wait for the first to lock them."""
    with contextlib.ExitStack() as stack:
        for folder, label in folders.items() if jax.process_index() == 0 else ():
            with refused(f"{label} can't be written to", hint="make it writable, or name another output"):
                folder.mkdir(parents=True, exist_ok=True)
                _lock(stack.enter_context((folder / LOCK).open("ab+", buffering=0)), label)
        multihost_utils.sync_global_devices("jshard has locked its folders")
        yield


def _lock(file: FileIO, label: str) -> None:
    """Lock a file, and write the owner into it. fcntl's locks work on NFS. Unlike flock's, they are
    not inherited by child processes, which may outlive this process."""
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
            says = (
                f"this file system locks no files ({reason(error)}): make sure that no other run writes to its folder"
            )
            print(says, file=sys.stderr, flush=True)
        break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
