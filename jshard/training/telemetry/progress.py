"""The progress of training: a bar with loss and speed on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from jshard.errors import printable
from jshard.printing.units import duration, size

if TYPE_CHECKING:
    import jax

Figures = Callable[[int, float, float], Mapping[str, float]]  # of a step, its loss and steps per second
REDRAW = 0.25  # seconds; reading a loss waits for its step, so not every step is shown


class Rate:
    """Steps per second since the last reading."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restart the count, to leave out compilation or evaluation."""
        self.step, self.since = step, time.perf_counter()

    def read(self, step: int) -> float:
        steps, seconds = step - self.step, time.perf_counter() - self.since
        self.restart(step)
        return steps / seconds if seconds else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since


class Bar:
    """A progress bar; without a terminal, only the lines of `say` are printed."""

    def __init__(self, steps: int, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.rate = Rate()
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}")
        self.draws = self.console.is_terminal  # else figures are printed as lines
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.draws)
        self.task = self.bar.add_task("compiling", total=steps)

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.bar.stop()

    def begin(self, step: int) -> None:
        """Do nothing; a subclass may act before each step is dispatched."""

    def show(self, step: int, loss: jax.Array, figures: Figures) -> None:
        """Redraw the bar after a step is dispatched, at most every `REDRAW` seconds."""
        if self.draws and self.rate.seconds > REDRAW:
            self.show_figures(step, figures(step, float(loss), self.rate.read(step)))

    def show_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Show figures in the bar, without the time left: the bar has its own."""
        says = figures_in_words({name: figure for name, figure in figures.items() if name != "seconds_left"})
        self.show_words(step, says)

    def show_words(self, step: int, says: str) -> None:
        self.bar.update(self.task, completed=step, description=says)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(printable(text, keep="\n"))


class LaunchBar(Bar):
    """The shared bar of several processes, drawn once the first process has reported the number of steps."""

    def __init__(self) -> None:
        super().__init__(0, Console(highlight=False, soft_wrap=True, markup=False))

    def update(self, facts: Mapping[str, Any]) -> None:
        """Show the progress reported by the first process."""
        if facts.get("of"):
            says = facts["says"] or "compiling"
            self.bar.update(self.task, total=facts["of"], completed=facts["done"], description=says)
            self.bar.start()


@contextlib.contextmanager
def byte_bar(label: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Draw a bar of finished bytes while the context is open, on a terminal only."""
    console = console or Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


def silent() -> Console:
    """Return a console without output."""
    return Console(quiet=True, force_terminal=False)


def in_words(evaluated: Mapping[str, float]) -> list[str]:
    """Format each figure of an evaluation, the accuracy last."""
    forms = {"test_accuracy": "test accuracy {:.1%}", "test_loss": "test loss {:.4f}"}
    named = {name: figure for name, figure in evaluated.items() if name.startswith("test_")}
    words = (forms.get(name, name.replace("_", " ") + " {:.4g}").format(figure) for name, figure in named.items())
    return [word.replace("%", " %") for word in words]


FORMS: Mapping[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "perplexity": "perplexity {:,.4g}".format,
    "learning_rate": "learning rate {:.3g}".format,
    "examples_per_second": "{:,.0f} examples/s".format,
    "tokens_per_second": "{:,.0f} tokens/s".format,
    "share_of_peak": "{:.1%} of peak".format,
    "memory": lambda count: f"{size(count)} memory",
    "seconds_left": lambda seconds: f"{duration(seconds)} left",
}


def figures_in_words(figures: Mapping[str, float]) -> str:
    """Format the figures of a step as a line, with tokens per second in place of examples if known."""
    shown = {name: figure for name, figure in figures.items() if name in FORMS}
    if "tokens_per_second" in shown:
        del shown["examples_per_second"]
    return "   ".join(FORMS[name](figure) for name, figure in shown.items())
