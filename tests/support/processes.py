"""Several real processes of one script, joined on this machine's loopback; nothing is left behind.

A test calls `run(script, 4)`; the script calls `join()` before it uses JAX.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from jshard.hardware.host import free_port
from jshard.launch.worker import without_chatter

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Finished:
    """What one process printed and how it ended."""

    code: int
    stdout: str
    stderr: str


def run(
    script: str | Path,
    count: int,
    *words: object,
    devices: int = 1,
    timeout: float = 180,
    environment: Mapping[str, str] | None = None,
    fails: bool = False,
    hashes: bool = False,
) -> list[Finished]:
    """`count` processes of `script words...`, with `devices` CPU devices each, by rank. When one fails, or time is up, the
    others are ended; unless the test says that it `fails`, its words are in the assertion. With `hashes` each is a new one, by
    another seed of hashes."""
    if hashes:
        environment = {"PYTHONHASHSEED": "random", "JSHARD_TESTS_FRESH": "1", **(environment or {})}
    address = f"127.0.0.1:{free_port()}"
    started = [
        _Started(script, words, {**_variables(address, count, rank, devices), **(environment or {})})
        for rank in range(count)
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(each.process.poll() is None for each in started) and time.monotonic() < deadline:
            if any(each.process.poll() for each in started):
                deadline = min(deadline, time.monotonic() + 5)  # the others may still say why
            time.sleep(0.02)
    finally:
        done = [each.end() for each in started]
    told = "\n".join(
        f"-- process {rank} ended with {each.code} --\n{each.stdout}{each.stderr}" for rank, each in enumerate(done)
    )
    assert fails or not any(each.code for each in done), told
    return done


def join() -> None:
    """Inside the script: joins the other processes, listening on loopback only."""
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


def _variables(address: str, count: int, rank: int, devices: int) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PJRT_NPROC": os.environ.get("PJRT_NPROC", "32"),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


class _Started:
    """One process in a session of its own, so that its children end with it; it prints to files, which never fill up."""

    def __init__(self, script: str | Path, words: tuple[object, ...], variables: Mapping[str, str]):
        self.stdout, self.stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, words)],
            stdout=self.stdout,
            stderr=self.stderr,
            env={**os.environ, **variables},
            start_new_session=True,
        )

    def end(self) -> Finished:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            pass
        code = self.process.wait()
        printed = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            printed.append("".join(f"{line.decode()}\n" for line in without_chatter(file)))
            file.close()
        return Finished(code, *printed)
