"""The events of a training run: its begin, the collectives of a step, each step, and its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import numpy as np

from jshard.inspect.ledger import Traced, ledger_of
from jshard.runs import events
from jshard.runs.names import restarts
from jshard.training.data.sources import Selectable
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.figures import tokens_in
from jshard.training.experiments.loop import DispatchedStep, TrainingStep
from jshard.training.telemetry.log import Log, facts, how, tell_program

PROGRAM, EVALUATION = "the training step", "the evaluation"


@contextlib.contextmanager
def run_events(experiment: Experiment, *, goes_on: bool) -> Iterator[Course]:
    """Report the events of a run, and log them if configured; a resumed run appends to its log."""
    settings, course = experiment.settings, Course(experiment)
    with contextlib.ExitStack() as stack:
        if (folder := settings.ran()) is not None:
            label = f'{settings.label("log")} writes to "{folder}", which'
            log = Log(folder, label=label, goes_on=goes_on or restarts() > 0)
            stack.callback(log.close)
        if events.listeners:
            events.tell("begin", **facts(steps=settings["steps"], batch=settings["batch"], **_tokens(experiment)))
            if experiment.apart is None:
                tell_program(PROGRAM, experiment.asked)
        try:
            yield course
        except BaseException as error:
            events.tell("ended", step=course.last, how=how(error))
            raise
        events.tell("ended", step=course.last, how=how(None))


def _tokens(experiment: Experiment) -> dict[str, int | bool]:
    """Return the tokens of a step, and `likelihood`: True if exp(loss) is a perplexity. Empty without tokens."""
    count = experiment.settings["batch"] * tokens_in(experiment.data.example()[1])
    return {"tokens": count, "likelihood": experiment.loss.written is None} if count else {}


class Course:
    """The reporter of a run's steps and evaluations; set `seconds_at_peak` if the chip's peak is known."""

    def __init__(self, experiment: Experiment):
        self.experiment, self.batch, self.last = experiment, experiment.settings["batch"], 0
        self.has_evaluated = False
        self.since: float | None = None
        self.seconds_at_peak: float | None = None

    def step(self, taken: DispatchedStep) -> None:
        """Report a dispatched step."""
        if not events.listeners:
            return
        now, self.last = time.perf_counter(), taken.number
        figures = {"step": taken.number, "fed": taken.fed, "called": taken.called, "loss": taken.loss}
        if self.seconds_at_peak is not None:
            figures["seconds_at_peak"] = self.seconds_at_peak
        if self.since is None:
            events.tell("compiled", program=PROGRAM, step=taken.number, seconds=taken.called)
            events.tell("step", seconds=taken.fed + taken.called, **figures)
        else:
            seconds = now - self.since
            events.tell("step", seconds=seconds, examples_per_second=round(self.batch / seconds, 1), **figures)
        self.since = now

    def restart(self) -> None:
        """Restart the clock, so that evaluating or saving does not count for the next step."""
        self.since = time.perf_counter()

    def resumed(self, step: int, folder: object) -> None:
        self.last = step
        events.tell("resumed", step=step, folder=str(folder))

    def evaluates(self, step: TrainingStep, test: Selectable) -> None:
        """Report the collectives of the evaluation's program, once."""
        if events.listeners and not self.has_evaluated:
            self.has_evaluated = True
            batch = self.experiment.placement.shapes(self.batch, *test.take(np.arange(1)))
            traced = Traced(step.scores, (step.state, *batch), {})
            tell_program(EVALUATION, ledger_of(traced, traced.nodes, backward=False))

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        events.tell("evaluated", step=step, **figures)
        self.restart()
