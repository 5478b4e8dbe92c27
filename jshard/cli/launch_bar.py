"""The one progress bar of several processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class LaunchBar:
    """Drawn once the first process has said how many steps there are; what any of them prints goes above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False)
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
        self.task: TaskID | None = None

    def show(self, facts: Mapping[str, Any]) -> None:
        if not facts.get("of"):
            return
        if self.task is None:
            self.task = self.bar.add_task("compiling", total=facts["of"])
            self.bar.start()
        self.bar.update(self.task, completed=facts["done"], description=facts["says"] or "compiling")

    def say(self, text: str) -> None:
        self.console.print(text)

    def stop(self) -> None:
        self.bar.stop()
