"""What reading ahead saves: steps of 20 ms on batches that take 20 ms to make, by the time of the slower of both.

python -m benchmarks.loader
python -m benchmarks.loader --make 5 --step 20 --count 200
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import numpy as np

import jshard

BATCH = 8


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--make", type=float, default=20, help="milliseconds that a batch takes to make")
    parser.add_argument("--step", type=float, default=20, help="milliseconds of a step")
    parser.add_argument("--count", type=int, default=100, help="so many steps")
    chosen = parser.parse_args(words)
    slower = max(chosen.make, chosen.step)
    for ahead in (0, 2):
        took = measure(chosen.make / 1e3, chosen.step / 1e3, chosen.count, ahead) * 1e3 / chosen.count
        print(
            f"ahead {ahead}: {took:.1f} ms a step, {took / slower:.2f}x the slower of {chosen.make:g} and {chosen.step:g} ms"
        )


def measure(make: float, step: float, count: int, ahead: int) -> float:
    """The seconds of so many steps."""

    def made() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            time.sleep(make)
            yield np.zeros((BATCH, 16), np.float32), np.zeros(BATCH, np.int32)

    since = time.perf_counter()
    for _ in jshard.batches(made, batch=BATCH, steps=count, ahead=ahead):
        time.sleep(step)
    return time.perf_counter() - since


if __name__ == "__main__":
    main()
