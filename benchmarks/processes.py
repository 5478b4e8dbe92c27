"""What a training step costs over several processes of this machine: jshard against the same step by bare JAX, and against
torch where it is installed (`pip install torch`). Same weights, same batch, losses compared. Two layers under tensor and data
parallel, the decoder of `benchmarks.decoder` under tensor parallel and FSDP, beside DTensor and FSDP2 as in torchtitan, and
that of `benchmarks.stages` in a pipeline, beside torch.distributed.pipelining.

python -m benchmarks.processes [--quick] [--processes 4] [--rounds 15] [--layouts tensor data decoder pipeline]
    [--optimizer sgd]

Two sets of processes, one of JAX and one of torch, take turns step by step, so that both see the same machine; who waits
for a turn sleeps. A time is that of one step, from the call until its loss is there, in the process that was last; processor
time is that of all processes together, which other work on the machine changes less. All have one thread for operations.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from benchmarks import decoder, stages
from benchmarks.quartiles import quartiles
from jshard.hardware.host import free_port

CASES = {  # features, batch
    "784-256-10, batch 256": ((784, 256, 10), 256),
    "784-256-10, batch 2,048": ((784, 256, 10), 2048),
    "1024-4096-1024, batch 256": ((1024, 4096, 1024), 256),
}
DEEP = {
    "8 layers of 1024, batch 256": ((1024,) * 9, 256)
}  # under data parallel, where sums may leave before the last is there
QUICK = {"16-32-8, batch 32": ((16, 32, 8), 32)}
DECODER = {**decoder.SIZES, "qk_norm": False, "unroll": decoder.SIZES["depth"]}
ROWS, LENGTH = 4, 256
HAND, JSHARD, TOGETHER = "shard_map by hand", "jshard by layers", "jshard.value_and_grad"
TENSOR, SEQUENCE, FSDP2, KEPT = "DTensor", "DTensor, sequence too", "FSDP2", "FSDP2, kept"
THEIRS = {"tensor": (TENSOR,), "data": ("DDP",)}
PLANS = {
    "tensor": (TENSOR, SEQUENCE),
    "fsdp": (FSDP2, KEPT),
    "pipeline": ("torch's 1F1B",),
}  # of decoders, and what is torch's
NO_TORCH = "torch is not installed here, so DTensor, DDP and FSDP2 are left out; type: pip install torch"
LAYOUTS = (*THEIRS, "decoder", "pipeline")
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
        if "layout" in asked or "plan" in asked:
            steps.clear()  # their memory is free before the next are made
        if "plan" in asked:
            steps = variants.decoder_steps(asked["plan"], asked["sizes"], asked["rows"], asked["length"])
            told: Any = list(steps)
        elif "layout" in asked:
            steps = variants.steps(asked["layout"], *numbers(asked["features"], asked["batch"]), asked["optimizer"])
            told = list(steps)
        else:
            told = timed(steps[asked["variant"]], asked["steps"])
        print(json.dumps({"told": told}), flush=True)
    variants.leave()


def timed(step: Step, count: int) -> list[tuple[float, float, float]]:
    """Seconds, loss and seconds of processor time of each of `count` steps."""
    found = []
    for _ in range(count):
        begin, busy = time.perf_counter(), time.process_time()
        loss = float(step())
        found.append((time.perf_counter() - begin, loss, time.process_time() - busy))
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


@dataclasses.dataclass
class Found:
    """Seconds of each variant by round, those of processor time, and by how much its losses differ from those of the first."""

    seconds: dict[str, list[float]]
    busy: dict[str, list[float]]
    differences: dict[str, float]


def compared(sets: Sequence[Processes], rounds: int, warm: int = 1, **case: Any) -> Found:
    """Time all variants in turn, after three steps of each in which their losses have to agree; a turn is `warm` steps, as
    another variant had the caches, and one that counts."""
    of: dict[str, Processes] = {}
    for each in sets:
        of.update(dict.fromkeys(each.ask(**case)[0], each))
    losses = {name: _losses(each.ask(variant=name, steps=3)) for name, each in of.items()}
    names = list(of)
    found = Found({name: [] for name in names}, {name: [] for name in names}, agree(losses))
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            by_rank = of[name].ask(variant=name, steps=warm + 1)
            found.seconds[name].append(max(steps[-1][0] for steps in by_rank))
            found.busy[name].append(sum(steps[-1][2] for steps in by_rank))
    return found


def _losses(by_rank: list[list[tuple[float, float, float]]]) -> list[float]:
    """Of each step, the mean over processes: some tell the loss of all rows, some of their own, and some know none."""
    steps = ([loss for _, loss, _ in step if loss == loss] for step in zip(*by_rank, strict=True))
    return [statistics.mean(losses) for losses in steps]


def agree(losses: dict[str, list[float]]) -> dict[str, float]:
    """The greatest difference of each variant's losses from those of the first; an error unless all fall, and alike."""
    first = next(iter(losses))
    expected = losses[first]
    if sorted(expected, reverse=True) != expected:
        raise AssertionError(f"the losses do not fall: {expected}")
    found = {name: max(abs(a - b) for a, b in zip(each, expected, strict=True)) for name, each in losses.items()}
    for name, difference in found.items():
        if not difference <= 1e-5 * expected[0]:
            raise AssertionError(f"{name} has the losses {losses[name]}, and {first} {expected}")
    return found


def table(found: Found, against: Sequence[str]) -> str:
    """Medians, the middle half, processor time, the medians of the ratios to `against`, of neighbours in time, and those of
    processor time."""
    against = [name for name in against if name in found.seconds]
    head = f"{'':28}{'median':>11}{'middle half':>19}{'processor':>12}"
    lines = [head + "".join(f"{f'/ {name}':>25}" for name in against) + "   losses"]
    for name, seconds in found.seconds.items():
        low, middle, high = (1e3 * each for each in quartiles(seconds))
        cells = "".join(
            f"{f'{ratio(seconds, found.seconds[other]):.2f}, {ratio(found.busy[name], found.busy[other]):.2f}':>25}"
            for other in against
        )
        busy = 1e3 * statistics.median(found.busy[name])
        off = f"{found.differences[name]:.0e}" if found.differences[name] else "same"
        lines.append(f"{name:28}{middle:>8.2f} ms{f'{low:.2f} - {high:.2f} ms':>19}{busy:>9.2f} ms{cells}   {off:>6}")
    return "\n".join(lines)


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all variants run and agree")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
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
        rounds = 3 if asked.quick else asked.rounds

        def tell(label: str, against: Sequence[str], **case: Any) -> None:
            found = compared(sets, rounds, **case)
            load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            print(f"\n{label}; {load}\n{table(found, against)}", flush=True)

        for layout in (each for each in THEIRS if each in asked.layouts):
            deep = DEEP if layout == "data" else {}
            for name, (features, batch) in (QUICK if asked.quick else CASES | deep).items():
                label = f"{layout} parallel, {asked.processes} processes, {asked.optimizer}, {name}"
                case = {"layout": layout, "features": features, "batch": batch, "optimizer": asked.optimizer}
                tell(label, (HAND, *THEIRS[layout]), **case)
        for plan in PLANS:
            if ("pipeline" if plan == "pipeline" else "decoder") not in asked.layouts:
                continue
            if plan == "pipeline":
                sizes, rows, length = (stages.QUICK, 8, 8) if asked.quick else (stages.SIZES, 8, stages.LENGTH)
            else:
                sizes, rows, length = (decoder.QUICK, 4, 8) if asked.quick else (DECODER, ROWS, LENGTH)
            label = f"a decoder of {sizes}, {rows} rows of {length} tokens, {plan}, {asked.processes} processes, adamw"
            case = {"plan": plan, "sizes": sizes, "rows": rows, "length": length, "warm": 0}
            tell(label, (stages.ONE if plan == "pipeline" else decoder.PLAIN, *PLANS[plan]), **case)


if __name__ == "__main__":
    main()
