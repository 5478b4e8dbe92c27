"""What being watched costs a step, measured on whole runs: steps with and without it, by turns, in the same processes.

python -m benchmarks.watchdog                    two processes, steps of 2 to 20 ms
python -m benchmarks.watchdog -n 4 --rounds 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jshard
from benchmarks.quartiles import quartiles

ROOT = Path(__file__).parent.parent
SIZES = (128, 512)  # of the square matrices that a step multiplies
LAYERS = 8
PAUSE = 0.05  # seconds between two steps that are told of and not done
BLOCK = 2.0  # seconds of steps that are watched, or not: a note to the others comes so often
SETTLE = 0.5  # seconds in which the first note is written, which is no step's cost


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watchdog", description=__doc__)
    parser.add_argument("-n", type=int, default=2, dest="count", help="processes")
    parser.add_argument("--rounds", type=int, default=15, help="so many times with and without")
    parser.add_argument("--block", type=float, default=BLOCK, help="seconds of steps between two turns")
    chosen = parser.parse_args(words)
    if "JAX_PROCESS_ID" in os.environ:
        return measure(chosen.rounds, chosen.block, chosen.count)
    own = ["-n", str(chosen.count), "--rounds", str(chosen.rounds), "--block", str(chosen.block)]
    command = [sys.executable, "-m", "jshard", "launch", "-n", str(chosen.count), "-m", "benchmarks.watchdog", *own]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def measure(rounds: int, block: float, count: int) -> int:
    """In each process; the first says what came out."""
    membership = jshard.init(devices=count)
    from jshard.launch.initialize import unwatch
    from jshard.launch.watchdog import watch

    assert membership is not None
    unwatch()
    leads = membership.rank == 0
    still = worked_in(4 * block)
    stop = watch(membership, jshard.pulse(), 300.0)
    watching = worked_in(4 * block)
    stop()
    if leads:
        print(
            f"a second of being watched takes {1000 * (watching - still):.1f} ms of processor time, of two threads beside the "
            f"training; a step takes {1e6 * told(10_000):.1f} us more"
        )
        print(f"{count} processes, {rounds} turns of {block:g} s each with and without, medians")
        print("matrices   unwatched     watched   ratio  quartiles of turns   the same of processor time")
    for size in SIZES:
        step = stepping(size, count)
        unwatched, watched = [], []
        steps = max(8, round(block / timed(step, 8)[0]))
        steps = agreed(steps)  # all do as many
        timed(step, steps)
        for turn in range(2 * rounds):
            if turn % 2 == (turn // 2) % 2:  # which comes first changes too
                unwatched.append(timed(step, steps))
            else:
                stop = watch(membership, jshard.pulse(), 300.0)
                watched.append(timed(step, steps, watched=True))
                jshard.pulse().results.clear()
                stop()
        (low, ratio, high), (least, worked, most) = (
            quartiles([a[which] / b[which] for a, b in zip(watched, unwatched, strict=True)]) for which in (0, 1)
        )
        if leads:
            plain, seen = (1000 * statistics.median(wall for wall, _ in each) for each in (unwatched, watched))
            said = f"{ratio:.3f}  {low:.3f} to {high:.3f}     {worked:.3f}  {least:.3f} to {most:.3f}"
            print(f"{size:4} x {size:<4} {plain:6.2f} ms   {seen:6.2f} ms   {said}")
    return 0


def worked_in(seconds: float) -> float:
    """Processor time of this process in each second, while it tells of a step now and then and sleeps: one that tells of none
    asks what the others do, which costs more."""

    began = time.process_time()
    for step in range(1, round(seconds / PAUSE) + 1):
        jshard.pulse().at("step", step)
        time.sleep(PAUSE)
    return (time.process_time() - began) / seconds


def told(steps: int) -> float:
    """Processor time that each step pays for being told, as `jshard train` does."""
    from jshard.launch.heartbeat import Pulse

    say, began = Pulse(), time.process_time()
    for number in range(steps):
        say.at("step", number)
        say.waits(number, None)
    return (time.process_time() - began) / steps


def stepping(size: int, count: int) -> Callable[[], object]:
    """A step: matrix products, and a sum over all processes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((count,), ("data",))
    x = jax.make_array_from_callback((count * size, size), NamedSharding(mesh, P("data")), lambda part: rows(size))

    def body(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(LAYERS):
            y = jnp.tanh(y @ x)
        return jax.lax.psum(y.sum(), "data")

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P()))
    return lambda: program(x)


def rows(size: int):
    import numpy as np

    return np.random.default_rng(0).normal(size=(size, size)).astype(np.float32) / size


def agreed(steps: int) -> int:
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(steps)))


def timed(step: Callable[[], object], steps: int, *, watched: bool = False) -> tuple[float, float]:
    """Seconds of a step, and of this processor's time in it, of so many that are dispatched and waited for one by one;
    those that are `watched` are told as `jshard train` does."""
    import jax

    say = jshard.pulse()
    time.sleep(SETTLE)
    jax.block_until_ready(step())
    began, worked = time.perf_counter(), time.process_time()
    for number in range(1, steps + 1):
        if watched:
            say.at("step", number)
        result = step()
        if watched:
            say.waits(number, result)
        jax.block_until_ready(result)
    return (time.perf_counter() - began) / steps, (time.process_time() - worked) / steps


if __name__ == "__main__":
    sys.exit(main())
