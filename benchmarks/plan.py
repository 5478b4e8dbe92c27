"""How long a plan takes: a decoder of 6.7 billion parameters on 256 absent chips, by its compiler and then from the cache.

    python -m benchmarks.plan [--topology v5e:16x16] [--tensor 16] [--quick]

Each plan is made in a process of its own, from its start to its end, imports included. Nearly all of the first is XLA's own
work: it makes machine code of every fusion before it tells what the program needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

FIRST, AGAIN = "by its compiler", "from the cache"


def once(topology: str, tensor: int, *, quick: bool) -> str:
    """One plan, told in a sentence."""
    from jshard import load
    from jshard.inspect.plan import Topology, plan
    from jshard.inspect.plan.planning import mesh_on, moved_to
    from jshard.signals.active_config import configuration
    from tests.support import decoder

    size = decoder.TINY if quick else decoder.SEVEN_BILLION
    target = Topology.of(topology)
    load(decoder.configured(data=target.devices // tensor, tensor=tensor))
    present = configuration()
    assert present is not None
    with moved_to(mesh_on(target, present)):
        step, arguments = decoder.training_step(size)
        made = plan(step, *arguments, topology=topology)
    how = FIRST if not made.cached else AGAIN
    return (
        f"{size.parameters:,} parameters, {size.layers} layers, {made.topology}, {made.memory.verdict()}; planned {how}"
    )


def timed(arguments: list[str], cache: str) -> tuple[float, float, str]:
    """Seconds by the clock, seconds of processor time of it and all it started, and what it told."""
    before, began = os.times(), time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan", "--once", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JSHARD_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds, after = time.perf_counter() - began, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy, ran.stdout.strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description="How long a plan takes.")
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--tensor", type=int, default=16, help="devices that share a layer")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, to see that it runs")
    parser.add_argument("--once", action="store_true", help="one plan, and no times")
    asked = parser.parse_args(arguments)
    if asked.once:
        print(once(asked.topology, asked.tensor, quick=asked.quick))
        return
    given = ["--topology", asked.topology, "--tensor", str(asked.tensor), *["--quick"] * asked.quick]
    with tempfile.TemporaryDirectory() as cache:
        for _ in (FIRST, AGAIN):
            seconds, busy, told = timed(given, cache)
            print(f"{told} in {seconds:.1f} s, {busy:.1f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
