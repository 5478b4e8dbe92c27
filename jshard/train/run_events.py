"""The course of a training run, told as events: how it begins, what a step runs, each step, and how it ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np

from jshard import events
from jshard.inspect.ledger import explain
from jshard.run_names import RESTART
from jshard.train.data import Examples
from jshard.train.experiment import Experiment
from jshard.train.log import Log, how, tell_program
from jshard.train.loop import Step, Taken
from jshard.train.run_metadata import facts

PROGRAM, EVALUATION = "the training step", "the evaluation"


@contextlib.contextmanager
def course(experiment: Experiment, *, goes_on: bool) -> Iterator[Course]:
    """What is told goes into the log that the configuration asks for, behind what is there if the run goes on."""
    with contextlib.ExitStack() as stack:
        if experiment.ran is not None:
            said = (
                f'jshard.train.log ({experiment.configuration.train_places["log"]}) writes to "{experiment.ran}", which'
            )
            log = Log(experiment.ran, said=said, goes_on=goes_on or RESTART in os.environ)
            stack.callback(log.close)
        told = Course(experiment)
        if events.tell is not None:
            events.tell("begin", **facts(steps=experiment.steps, batch=experiment.batch))
            if experiment.apart is None:
                tell_program(PROGRAM, experiment.explain())
        try:
            yield told
        except BaseException as error:
            told.ended(how(error))
            raise
        told.ended("finished")


class Course:
    """Each call is an event where somebody listens, and a question where nobody does."""

    def __init__(self, experiment: Experiment):
        self.experiment, self.batch, self.last = experiment, experiment.batch, 0
        self.has_evaluated = False
        self.since: float | None = None
        self.kept: int | None = None

    def step(self, taken: Taken) -> None:
        """A step has been dispatched."""
        if events.tell is None:
            return
        now, self.last = time.perf_counter(), taken.number
        figures = {"step": taken.number, "fed": taken.fed, "called": taken.called, "loss": taken.loss}
        if self.since is None:
            events.tell("compiled", program=PROGRAM, step=taken.number, seconds=taken.called)
            events.tell("step", seconds=taken.fed + taken.called, **figures)
        else:
            seconds = now - self.since
            events.tell("step", seconds=seconds, examples_per_second=round(self.batch / seconds, 1), **figures)
        self.since = now

    def evaluates(self, step: Step, test: Examples) -> None:
        """An evaluation begins: the first tells what its program runs."""
        if events.tell is not None and not self.has_evaluated:
            self.has_evaluated, made = True, self.experiment
            batch = made.placement.shapes(made.batch, *test.take(np.arange(1)))
            tell_program(EVALUATION, explain(step.hits, step.state, *batch, backward=False))

    def restart(self) -> None:
        """What passed until now, evaluating or saving, is no part of the next step."""
        self.since = time.perf_counter()

    def evaluated(self, step: int, accuracy: float) -> None:
        if events.tell is not None:
            events.tell("evaluated", step=step, accuracy=accuracy)
        self.restart()

    def resumed(self, step: int, folder: object) -> None:
        self.last = step
        if events.tell is not None:
            events.tell("resumed", step=step, folder=str(folder))

    def saving(self, step: int, folder: object) -> None:
        if events.tell is not None:
            events.tell("saving", step=step, folder=str(folder))
        self.restart()

    def saved(self, step: int | None, folder: object) -> None:
        """Told once of each checkpoint that is in place."""
        if step is not None and step != self.kept:
            self.kept = step
            if events.tell is not None:
                events.tell("saved", step=step, folder=str(folder))

    def ended(self, how: str) -> None:
        if events.tell is not None:
            events.tell("ended", step=self.last, how=how)
