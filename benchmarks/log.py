"""What the log costs a training step: the loop with the log on and off, against the same loop without a word of it.

python -m benchmarks.log [--quick] [--rounds 40] [--devices 4]

All run in one process, some steps each in turn, from the same weights on the same batches; their losses are compared bit by
bit. `bare, again` is the bare loop a second time: how far its ratio is from 1.00 is the noise of the run. "off" is what every
run pays that asks for no log: a question at each step, and three looks at a clock.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import jshard
from benchmarks.quartiles import quartiles

HIDDEN = {"digits, 64-256-10, batch 64": (64, 256, 64), "784-1024-10, batch 1,024": (784, 1024, 1024)}
QUICK = {"16-32-10, batch 32": (16, 32, 32)}
CONFIGURATION = {
    "jshard": {"train": {"model": "benchmarks.log:Model", "data": "benchmarks.log:data", "steps": 10**6}},
    "layer1": {"row": "data", "column": "tensor"},
    "layer2": {"row": "data", "reduction": "tensor"},
    "objective": {"row": "data"},
}
BARE = "bare"
STEPS = 25  # of each in its turn


def Model(features: int, hidden: int, *, rngs: Any) -> Any:
    from flax import nnx

    class MLP(nnx.Module):
        def __init__(self) -> None:
            with jshard.signal("layer1"):
                self.up = jshard.Linear(features, hidden, rngs=rngs)
            with jshard.signal("layer2"):
                self.down = jshard.Linear(hidden, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            with jshard.signal("layer1"):
                x = nnx.relu(self.up(x))
            with jshard.signal("layer2"):
                return self.down(x)

    return MLP()


def data(features: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    pair = draw.normal(size=(4096, features)).astype(np.float32), draw.integers(0, 10, 4096).astype(np.int32)
    return {"train": pair, "test": pair}


def experiment(features: int, hidden: int, batch: int, devices: int) -> Any:
    from jshard.training.experiments.experiment import Experiment

    train: dict[str, Any] = {**CONFIGURATION["jshard"]["train"], "batch": batch}
    train["model"] = {"path": train["model"], "features": features, "hidden": hidden}
    train["data"] = {"path": train["data"], "features": features}
    settings = {"mesh": {"data": 2, "tensor": devices // 2}, "train": train}
    return Experiment.build(jshard.load({**CONFIGURATION, "jshard": settings}), jshard.mesh())


def bare(made: Any) -> Iterator[Any]:
    """The loop without timing and telling: what `jshard.training.experiments.loop.run` would be if there were no log."""
    from jshard.training.data.batches import read_ahead
    from jshard.training.experiments.loop import IN_FLIGHT

    step = made.step()
    waiting: collections.deque[Any] = collections.deque()
    batches = (made.placement.place(each.size, each.x, each.y) for each in made.data.read(None, made.placement.rows))
    with read_ahead(batches, made.ahead) as read:
        for batch in read:
            loss = step(*batch)
            waiting.append(loss)
            while len(waiting) > IN_FLIGHT:
                if math.isnan(float(waiting.popleft())):
                    raise AssertionError("the loss is NaN")
            yield loss


def told(made: Any) -> Iterator[Any]:
    """The loop as it is, and each step told as training does."""
    from jshard.training.experiments.loop import run
    from jshard.training.experiments.run_events import Course

    course = Course(made)
    step = made.step()
    for taken in run(step, made.data, made.placement, steps=made.settings["steps"], ahead=made.ahead):
        course.step(taken)
        yield taken.loss


def logged(made: Any, folder: Path) -> Iterator[Any]:
    """The same, heard by a log while it is this loop's turn."""
    from jshard.runs import events
    from jshard.training.telemetry.log import Log

    log = Log(folder, label="the log", goes_on=False)
    log.deafen()
    try:
        steps = told(made)
        while True:
            stop = events.listen(log.hear)
            losses = [next(steps) for _ in range(STEPS)]
            stop()
            yield from losses
    finally:
        log.close()


Times = tuple[float, float]


def turn(loop: Iterator[Any]) -> tuple[Times, list[float]]:
    """Seconds of each of some steps, all of them done, by the clock and of processor time; and their losses."""
    start, worked = time.perf_counter(), time.process_time()
    losses = list(itertools.islice(loop, STEPS))
    losses[-1].block_until_ready()
    taken = (time.perf_counter() - start) / STEPS, (time.process_time() - worked) / STEPS
    return taken, list(map(float, losses))


def measure(case: tuple[int, int, int], devices: int, rounds: int, folder: Path) -> dict[str, list[Times]]:
    """What a step of each loop takes by turn; an error when their losses are not the same to the last bit."""
    loops: dict[str, Callable[[], Iterator[Any]]] = {
        BARE: lambda: bare(experiment(*case, devices)),
        "bare, again": lambda: bare(experiment(*case, devices)),
        "log off": lambda: told(experiment(*case, devices)),
        "log on": lambda: logged(experiment(*case, devices), folder),
    }
    found: dict[str, list[Times]] = {name: [] for name in loops}
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(contextlib.closing(make())) for name, make in loops.items()}  # type: ignore[type-var]  # the loops are generators, which close
        for loop in running.values():
            turn(loop)  # compiles
        names = list(loops)
        for number in range(rounds):
            losses = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds, losses[name] = turn(running[name])
                found[name].append(seconds)
            if any(each != losses[BARE] for each in losses.values()):
                raise AssertionError(f"the losses differ: {losses}")
    return found


def table(found: dict[str, list[Times]]) -> str:
    """Medians, and the medians of the ratios of neighbours in time with their middle half; processor time, of all threads,
    says the same where others use the machine too."""
    lines = [
        f"{'':14}{'a step':>10}{'over bare':>11}{'middle half':>15}{'processor time over bare':>28}{'middle half':>15}"
    ]
    for name, taken in found.items():
        cells = [f"{1e3 * statistics.median(clock for clock, _ in taken):>7.2f} ms"]
        for which, width in ((0, 11), (1, 28)):
            ratios = [mine[which] / bare[which] for mine, bare in zip(taken, found[BARE], strict=True)]
            low, middle, high = quartiles(ratios)
            cells.append(f"{middle:>{width}.3f}{f'{low:.2f} - {high:.2f}':>15}")
        lines.append(f"{name:14}{''.join(cells)}")
    return "\n".join(lines)


def hot(rounds: int = 200_000) -> str:
    """What is added to the way of a step, in microseconds: with the log off, and with it on."""
    from jshard.runs import events
    from jshard.training.experiments.loop import DispatchedStep
    from jshard.training.experiments.run_events import Course

    taken = DispatchedStep(1, None, {}, lambda: None, 0.0, 0.0)  # type: ignore[arg-type]  # its loss is not read here
    course = Course.__new__(Course)
    course.batch, course.last, course.since, course.seconds_at_peak = 64, 0, 0.0, None
    heard: collections.deque[Any] = collections.deque(maxlen=1000)

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            course.step(taken)
        return 1e6 * (time.perf_counter() - start) / rounds

    off = min(timed() for _ in range(3))
    stop = events.listen(lambda what, told: heard.append((what, time.time(), time.monotonic(), told)))
    on = min(timed() for _ in range(3))
    stop()
    return f"on the way of a step: {off:.2f} us with the log off, {on:.2f} us with it on"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log", description="What the log costs a training step.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--devices", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args(arguments)

    jshard.pretend(asked.devices)
    sys.modules.setdefault("benchmarks.log", sys.modules[__name__])
    print(hot(20_000 if asked.quick else 200_000))
    for name, case in (QUICK if asked.quick else HIDDEN).items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(case, asked.devices, 4 if asked.quick else asked.rounds, Path(folder))
            lines = sum(len(path.read_text().splitlines()) for path in Path(folder).iterdir())
        print(f"\n{name}: the same losses bitwise; {lines:,} lines written\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
