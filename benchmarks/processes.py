"""What a training step costs over several processes of this machine: jshard against the same step by bare JAX, and against
torch where it is installed (`pip install torch`). Tensor and data parallel; same weights, same batch, losses compared.

python -m benchmarks.processes [--quick] [--processes 4] [--rounds 15] [--layouts tensor data] [--optimizer sgd]

Two sets of processes, one of JAX and one of torch, take turns step by step, so that both see the same machine; who waits
for a turn sleeps. A time is that of one step, from the call until its loss is there, in the process that was last.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jshard.host import free_port

CASES = {  # features, batch
    "784-256-10, batch 256": ((784, 256, 10), 256),
    "784-256-10, batch 2,048": ((784, 256, 10), 2048),
    "1024-4096-1024, batch 256": ((1024, 4096, 1024), 256),
}
DEEP = {
    "8 layers of 1024, batch 256": ((1024,) * 9, 256)
}  # under data parallel, where sums may leave before the last is there
QUICK = {"16-32-8, batch 32": ((16, 32, 8), 32)}
HAND, JSHARD, TOGETHER = "shard_map by hand", "jshard by layers", "jshard.value_and_grad"
THEIRS = {"tensor": "DTensor", "data": "DDP"}
NO_TORCH = "torch is not installed here, so DTensor and DDP are left out; type: pip install torch"
RATE = 0.05  # the learning rate of all
Step = Callable[[], Any]  # trains one step; float() of what it returns waits for the loss


def numbers(features: Sequence[int], batch: int) -> tuple[list[Any], Any, Any]:
    """Kernel and bias of both layers, x and y: the same in every process and every variant."""
    import numpy as np

    draw = np.random.default_rng(0)
    weights = []
    for inputs, outputs in zip(features, features[1:], strict=False):
        kernel = draw.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        weights.append((kernel.astype(np.float32), np.zeros(outputs, np.float32)))
    x = draw.normal(size=(batch, features[0])).astype(np.float32)
    return weights, x, draw.integers(0, features[-1], size=batch).astype(np.int32)


# -- one process: reads what to do, a line each, and answers by a line --


def work(library: str, rank: int, processes: int, address: str) -> None:
    variants = importlib.import_module(f"benchmarks.processes_{library}")
    variants.join(rank, processes, address)
    steps: dict[str, Step] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "layout" in asked:
            steps.clear()  # their memory is free before the next are made
            steps = variants.steps(asked["layout"], *numbers(asked["features"], asked["batch"]), asked["optimizer"])
            told: Any = list(steps)
        else:
            told = timed(steps[asked["variant"]], asked["steps"])
        print(json.dumps({"told": told}), flush=True)
    variants.leave()


def timed(step: Step, count: int) -> list[tuple[float, float]]:
    """Seconds and loss of each of `count` steps."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        loss = float(step())
        found.append((time.perf_counter() - begin, loss))
    return found


# -- the one that asks --


class Processes:
    """So many processes of one library, joined. `ask` puts one question to all, and returns their answers by rank."""

    def __init__(self, library: str, count: int):
        self.started = []
        address = f"127.0.0.1:{free_port()}"
        for rank in range(count):
            words = [sys.executable, "-m", "benchmarks.processes", "--one", library, str(rank), str(count), address]
            self.started.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
            )

    def ask(self, **question: Any) -> list[Any]:
        for each in self.started:
            assert each.stdin is not None
            each.stdin.write(json.dumps(question) + "\n")
            each.stdin.flush()
        return [self._answer(each) for each in self.started]

    @staticmethod
    def _answer(process: Any) -> Any:
        for line in process.stdout:
            if line.startswith('{"told"'):  # gloo speaks on the same stream
                return json.loads(line)["told"]
        raise RuntimeError(f"a process ended with {process.wait()} before it answered")

    def end(self) -> None:
        for each in self.started:
            each.stdin.close()
        deadline = time.monotonic() + 30
        for each in self.started:
            try:
                each.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            each.stdout.close()


@contextmanager
def started(libraries: Sequence[str], count: int) -> Iterator[list[Processes]]:
    sets: list[Processes] = []
    try:
        for library in libraries:
            sets.append(Processes(library, count))
        yield sets
    finally:
        for each in sets:
            each.end()


def compared(
    sets: Sequence[Processes], layout: str, case: tuple[Any, int], rounds: int, optimizer: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each variant by round, and by how much its losses differ from those by hand, after three steps of each in
    which they have to agree."""
    of: dict[str, Processes] = {}
    for each in sets:
        features, batch = case
        asked = each.ask(layout=layout, features=features, batch=batch, optimizer=optimizer)
        of.update(dict.fromkeys(asked[0], each))
    losses = {name: _losses(each.ask(variant=name, steps=3)) for name, each in of.items()}
    differences = agree(losses)
    names = list(of)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            by_rank = of[name].ask(variant=name, steps=2)  # the first warms the caches, which another variant had
            seconds[name].append(max(steps[-1][0] for steps in by_rank))
    return seconds, differences


def _losses(by_rank: list[list[tuple[float, float]]]) -> list[float]:
    """Of each step, the mean over processes: some tell the loss of all rows, some of their own."""
    return [statistics.mean(loss for _, loss in step) for step in zip(*by_rank, strict=True)]


def agree(losses: dict[str, list[float]]) -> dict[str, float]:
    """The greatest difference of each variant's losses from those by hand; an error unless all fall, and alike."""
    expected = losses[HAND]
    if sorted(expected, reverse=True) != expected:
        raise AssertionError(f"the losses do not fall: {expected}")
    found = {name: max(abs(a - b) for a, b in zip(each, expected, strict=True)) for name, each in losses.items()}
    for name, difference in found.items():
        if not difference <= 1e-5 * expected[0]:
            raise AssertionError(f"{name} has the losses {losses[name]}, and {HAND} {expected}")
    return found


def table(seconds: dict[str, list[float]], differences: dict[str, float], against: Sequence[str]) -> str:
    """Medians, the middle half, and the medians of the ratios to `against`, of neighbours in time."""
    against = [name for name in against if name in seconds]
    lines = [
        f"{'':28}{'median':>11}{'middle half':>19}" + "".join(f"{f'/ {name}':>21}" for name in against) + "   losses"
    ]
    for name, found in seconds.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(found, n=4))
        ratios = [statistics.median(a / b for a, b in zip(found, seconds[other], strict=True)) for other in against]
        cells = "".join(f"{ratio:>21.2f}" for ratio in ratios)
        off = f"{differences[name]:.0e}" if differences[name] else "same"
        lines.append(f"{name:28}{middle:>8.2f} ms{f'{low:.2f} - {high:.2f} ms':>19}{cells}   {off:>6}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layouts", nargs="+", choices=THEIRS, default=list(THEIRS))
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.one:
        library, rank, processes, address = asked.one
        return work(library, int(rank), int(processes), address)
    torch = importlib.util.find_spec("torch") is not None
    if not torch:
        print(NO_TORCH)
    with started(["jax", *(["torch"] if torch else [])], asked.processes) as sets:
        for layout in asked.layouts:
            deep = DEEP if layout == "data" else {}
            for name, case in (QUICK if asked.quick else CASES | deep).items():
                rounds = 3 if asked.quick else asked.rounds
                seconds, differences = compared(sets, layout, case, rounds, asked.optimizer)
                load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
                print(f"\n{layout} parallel, {asked.processes} processes, {asked.optimizer}, {name}; {load}")
                print(table(seconds, differences, (HAND, THEIRS[layout])), flush=True)


if __name__ == "__main__":
    main()
