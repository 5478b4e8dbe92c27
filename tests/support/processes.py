"""Several real processes of one script, joined on this machine's loopback; nothing is left behind.

A test calls `run(script, 4)`; the script calls `join()` before it uses JAX.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from jshard.hardware.host import free_port
from jshard.launch.worker import without_chatter

ROOT = Path(__file__).parents[2]


class Finished(NamedTuple):
    """The exit status of one process, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run(
    script: str | Path,
    count: int,
    *words: object,
    devices: int = 1,
    timeout: float = 180,
    fails: bool = False,
    hashes: bool = False,
) -> list[Finished]:
    """Run `count` processes of `script words...`, with `devices` CPU devices each; return them by rank. When one fails, or time
    is up, the others are ended; unless the test says that it `fails`, their output is in the assertion. With `hashes` each is a
    new one, by another seed of hashes."""
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **({"PYTHONHASHSEED": "random", "JSHARD_TESTS_FRESH": "1"} if hashes else {}),
    }
    printed = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in range(count)]  # which never fill up
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, words)], stdout=stdout, stderr=stderr,
            env={**variables, "JAX_PROCESS_ID": str(rank)}, start_new_session=True,
        ) for rank, (stdout, stderr) in enumerate(printed)
    ]  # fmt: skip
    deadline = time.monotonic() + timeout
    try:
        while any(each.poll() is None for each in started) and time.monotonic() < deadline:
            if any(each.poll() for each in started):
                deadline = min(deadline, time.monotonic() + 5)  # the others may still say why
            time.sleep(0.02)
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and its children too
                os.killpg(each.pid, signal.SIGKILL)
    done = [Finished(each.wait(), *map(_text, files)) for each, files in zip(started, printed, strict=True)]
    assert fails or not any(each.code for each in done), "\n".join(
        f"-- process {rank} ended with {each.code} --\n{each.stdout}{each.stderr}" for rank, each in enumerate(done)
    )
    return done


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return "".join(f"{line.decode()}\n" for line in without_chatter(file))


def join() -> None:
    """Join the other processes from inside the script, listening on loopback only."""
    import jax

    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    jax.distributed.initialize(
        address,
        int(os.environ["JAX_NUM_PROCESSES"]),
        int(os.environ["JAX_PROCESS_ID"]),
        coordinator_bind_address=address,
        initialization_timeout=60,
        shutdown_timeout_seconds=20,
    )
