"""How far training is: a bar with loss and examples a second on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REDRAW = 0.25  # seconds; reading a loss waits for its step, so it is not done at each


class Rate:
    """Examples a second from one reading to the next."""

    def __init__(self, batch: int):
        self.batch = batch
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from here: what passed until now, compiling or evaluating, is no training."""
        self.step, self.since = step, time.perf_counter()

    def read(self, step: int) -> float:
        steps, seconds = step - self.step, time.perf_counter() - self.since
        self.restart(step)
        return steps * self.batch / seconds if seconds else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since


class Bar:
    """The bar; on anything but a terminal only what is said."""

    def __init__(self, steps: int, batch: int, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.rate = Rate(batch)
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
        self.draws = self.console.is_terminal  # else each figure is a line
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.draws)
        self.task = self.bar.add_task("compiling", total=steps)

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *reason: Any) -> None:
        self.bar.stop()

    def begin(self, step: int) -> None:
        """Before each step."""

    def show(self, step: int, loss: jax.Array) -> None:
        """After each step, also one that has only been dispatched."""
        if self.draws and self.rate.seconds > REDRAW:
            self.show_figures(step, figures(float(loss), self.rate.read(step)))

    def show_figures(self, step: int, says: str) -> None:
        self.bar.update(self.task, completed=step, description=says)

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text)


def silent() -> Console:
    """A console that nobody reads."""
    return Console(quiet=True, force_terminal=False)


def in_words(accuracy: float) -> str:
    return f"test accuracy {100 * accuracy:.1f} %"


def say_result(accuracy: float | None) -> None:
    """The last line of a training; why there is none was said when it began."""
    if accuracy is not None:
        print(in_words(accuracy))


def figures(loss: float, rate: float) -> str:
    return f"loss {loss:.4f}   {rate:,.0f} examples/s"
