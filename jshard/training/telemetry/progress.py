"""How far training is: a bar with loss and examples a second on a terminal, a line now and then elsewhere."""

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
REDRAW = 0.25  # seconds; reading a loss waits for its step, so it is not done at each


class Rate:
    """Steps a second from one reading to the next."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from here: what passed until now, compiling or evaluating, is no training."""
        self.step, self.since = step, time.perf_counter()

    def read(self, step: int) -> float:
        steps, seconds = step - self.step, time.perf_counter() - self.since
        self.restart(step)
        return steps / seconds if seconds else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since


class Bar:
    """The bar; on anything but a terminal only what is said."""

    def __init__(self, steps: int, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.rate = Rate()
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}")
        self.draws = self.console.is_terminal  # else each figure is a line
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
        """Hear of each step before it is dispatched."""

    def show(self, step: int, loss: jax.Array, figures: Figures) -> None:
        """Show each step once it is dispatched."""
        if self.draws and self.rate.seconds > REDRAW:
            self.show_figures(step, figures(step, float(loss), self.rate.read(step)))

    def show_figures(self, step: int, found: Mapping[str, float]) -> None:
        """Show them in the bar, which says itself how much time is left."""
        says = figures_in_words({name: figure for name, figure in found.items() if name != "seconds_left"})
        self.show_words(step, says)

    def show_words(self, step: int, says: str) -> None:
        self.bar.update(self.task, completed=step, description=says)

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(printable(text, keep="\n"))


class LaunchBar(Bar):
    """The one bar of several processes: drawn once the first has said how many steps there are."""

    def __init__(self) -> None:
        super().__init__(0, Console(highlight=False, soft_wrap=True, markup=False))

    def update(self, facts: Mapping[str, Any]) -> None:
        """Show what the first process says of itself."""
        if facts.get("of"):
            says = facts["says"] or "compiling"
            self.bar.update(self.task, total=facts["of"], completed=facts["done"], description=says)
            self.bar.start()


@contextlib.contextmanager
def byte_bar(label: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Draw how many bytes are done, on a terminal and while it goes on; on nothing else."""
    console = console or Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


def silent() -> Console:
    """Make a console that nobody reads."""
    return Console(quiet=True, force_terminal=False)


def in_words(evaluated: Mapping[str, float]) -> list[str]:
    """Write each figure of an evaluation, the accuracy last."""
    forms = {"test_accuracy": "test accuracy {:.1%}", "test_loss": "test loss {:.4f}"}
    named = {name: each for name, each in evaluated.items() if name.startswith("test_")}
    words = (forms.get(name, name.replace("_", " ") + " {:.4g}").format(each) for name, each in named.items())
    return [each.replace("%", " %") for each in words]


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


def figures_in_words(found: Mapping[str, float]) -> str:
    """Write the figures of a step on one line; tokens say how many examples there are."""
    told = {name: figure for name, figure in found.items() if name in FORMS}
    if "tokens_per_second" in told:
        del told["examples_per_second"]
    return "   ".join(FORMS[name](figure) for name, figure in told.items())
