"""Train an experiment, and say how it goes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.errors import JShardError
from jshard.printing.units import perplexity
from jshard.runs.names import restarts
from jshard.training.checkpoints.checkpoint import Checkpoint, Saver
from jshard.training.checkpoints.run_lock import locked
from jshard.training.data.sources import own_position
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.figures import Figures
from jshard.training.experiments.loop import DispatchedStep, NotANumber, evaluate, holds_nan, run
from jshard.training.experiments.nan_cause import maker, suspect
from jshard.training.experiments.run_events import Course, run_events
from jshard.training.experiments.trace import TraceRequest
from jshard.training.preemption import Notice, Preempted
from jshard.training.settings import LOG, Settings
from jshard.training.telemetry.metrics import Record, written
from jshard.training.telemetry.progress import Bar, Rate, figures_in_words, in_words, silent


def train(experiment: Experiment, bar: Bar | None = None, *, resume: Checkpoint | None = None) -> dict[str, float]:
    """Train, with a progress bar, and return the last loss and the figures of the last evaluation, if there are test data. What
    each figure was goes into the output folder. Of several processes the first speaks and writes.

    With `resume` it goes on from there; started again by `jshard launch --restarts` or by a scheduler, from the newest
    whole checkpoint that there is by now. SIGTERM ends it behind a step that all processes agree on: it saves, if the
    configuration says where, and raises `Preempted`, by which Python ends with the code 143."""
    if resume is None and restarts():
        resume = last_saved(experiment)
    leads = jax.process_index() == 0
    bar = bar or Bar(experiment.settings["steps"], None if leads else silent())
    with locked(_folders(experiment.settings)), bar, run_events(experiment, goes_on=resume is not None) as course:
        return _Training(experiment, bar, resume, course).run()


def _folders(settings: Settings) -> dict[Path, str]:
    """List the folders that a run writes to, with the opening of a sentence about each."""
    policy, output, folders = settings.checkpoint(), settings["output"], dict[Path, str]()
    if output is not None:
        folders[Path(output)] = f'{settings.label("output")} is "{output}", which'
    if policy is not None and (output is None or not policy.folder.resolve().is_relative_to(Path(output).resolve())):
        folders[policy.folder] = policy.label
    return folders


def last_saved(experiment: Experiment) -> Checkpoint | None:
    """Find the newest whole checkpoint of this experiment; None where nothing is saved."""
    policy = experiment.settings.checkpoint()
    return None if policy is None else Checkpoint.newest_whole(policy.folder, policy.run)


class _Training:
    def __init__(self, experiment: Experiment, bar: Bar, resume: Checkpoint | None, course: Course):
        self.experiment, self.bar, self.course, self.resumed = experiment, bar, course, resume
        settings, configuration = experiment.settings, experiment.configuration
        self.steps, self.log_every = settings["steps"], settings.table("log").get("every", LOG)
        self.evaluate_every = settings.table("evaluation").get("every", self.steps)
        self.step = experiment.step()
        self.done, self.position = 0, None
        if resume is not None:
            self._go_on_from(resume)
        policy, leads = settings.checkpoint(), jax.process_index() == 0
        self.saver = None if policy is None else Saver(policy, written(configuration), bar.say)
        if self.saver is not None:
            self.saver.begin(resume)
        output = settings["output"] if leads else None
        self.record = Record(output, configuration, self.done, tensorboard=settings.tensorboard())
        self.test = experiment.evaluated_on(bar.say)
        self.rate, self.evaluated = Rate(), dict[str, float]()
        self.figures = Figures(experiment, self.step)
        course.seconds_at_peak = self.figures.seconds_at_peak
        if opening := self.figures.opening():
            bar.say(opening)

    def _go_on_from(self, resume: Checkpoint) -> None:
        self.step.state, manifest = resume.restore(self.step.state, self.experiment.configuration.source)
        self.done, self.position = manifest.step, own_position(manifest.position, resume)
        if self.done > self.steps or (self.done == self.steps and not restarts()):
            raise JShardError(
                f"{resume} has trained {self.done} of {self.steps} steps, so there is nothing to do",
                hint=f"type: jshard resume {resume.run} steps={2 * self.done}",
            )
        self.course.resumed(self.done, resume.folder)
        self.bar.say(f"resumed from step {self.done}: {resume.folder}")

    def run(self) -> dict[str, float]:
        experiment, first = self.experiment, self.done + 1
        stepped = TraceRequest(self.step, experiment.settings["output"], self.done)
        taken = run(
            stepped,
            experiment.data,
            experiment.placement,
            steps=self.steps,
            ahead=experiment.ahead,
            since=(self.done, self.position),
            begins=self.bar.begin,
            check=experiment.check_read(self.step),
        )
        try:
            with (
                contextlib.closing(self.record),
                self.saver or contextlib.nullcontext(),
                Notice(saves=self.saver is not None) as notice,
                contextlib.closing(taken),
                stepped,
            ):
                if self.done:
                    self._catch_up()
                for each in taken:
                    self.course.step(each)
                    if each.number == first:
                        each.loss.block_until_ready()
                        self.rate.restart(first)
                    self._show(each)
                    self._save(each)  # first, so that nothing is lost by what goes wrong in an evaluation
                    self._evaluate(each.number)
                    if notice.reached(each.number) and each.number != self.steps:
                        self._stop(each)
        except NotANumber as fault:
            raise self._without_number(fault) from None
        self.step.into(experiment.model, experiment.optimizer)
        return {"loss": self.loss, **self.evaluated}

    def _show(self, taken: DispatchedStep) -> None:
        bar, number = self.bar, taken.number
        bar.show(number, taken.loss, self.figures)
        if number % self.log_every == 0 or number == self.steps:
            taken.settle()
            self.loss = float(taken.loss)
            found = self.figures(number, self.loss, self.rate.read(number))
            bar.show_figures(number, found)
            if not bar.draws:
                bar.say(f"step {number}/{self.steps}   {figures_in_words(found)}")
            found.pop("seconds_left", None)
            self.record.write(step=number, **found)

    def _catch_up(self) -> None:
        """Evaluate behind the step that the run goes on from, where it ended before that was written, and at its end."""
        kept, is_over = self.record.kept, self.done == self.steps
        has = any(name.startswith("test_") for name in kept)
        told = np.array([has or not (kept or is_over), kept.get("loss", math.nan)], np.float32)
        told, self.loss = map(float, multihost_utils.broadcast_one_to_all(told))
        if is_over or not told:
            self._evaluate(self.done, is_written=bool(told))

    def _evaluate(self, number: int, *, is_written: bool = False) -> None:
        if self.test is None or (number % self.evaluate_every and number != self.steps):
            return
        self.course.evaluates(self.step, self.test)
        found = evaluate(self.step, self.test, self.experiment.placement, self.experiment.settings["batch"])
        if self.figures.is_likelihood:
            found = {"test_loss": found["test_loss"], "test_perplexity": perplexity(found["test_loss"]), **found}
        self.evaluated = found
        if not is_written:
            self.record.write(step=number, **found)
        self.course.evaluated(number, found)
        if number != self.steps:
            self.bar.say(f"step {number}/{self.steps}   {'   '.join(in_words(found))}")
        self.rate.restart(number)

    # -- saving, and stopping --

    def _save(self, taken: DispatchedStep) -> None:
        if self.saver is not None:
            self.saver.look()
            if self.saver.due(taken.number, self.steps):
                self._save_now(self.saver, taken)

    def _save_now(self, saver: Saver, taken: DispatchedStep) -> None:
        taken.settle()
        if holds_nan(self.step.state):  # which the loss of the next step would only tell
            raise NotANumber(taken.number, "a parameter behind")
        saver.save(taken.number, self.step.state, taken.position)
        self.course.restart()

    def _stop(self, taken: DispatchedStep) -> None:
        says = "nothing is saved, as no checkpoint is configured"
        if self.saver is not None:
            if self.saver.last != taken.number:
                self._save_now(self.saver, taken)
            self.saver.end()
            says = f"go on by: jshard resume {self.saver.policy.run}"
        self.bar.say(f"SIGTERM: stopped at step {taken.number}; {says}")
        raise Preempted(taken.number)

    def _without_number(self, fault: NotANumber) -> JShardError:
        """Make the error of a NaN. All processes come here, for the same step."""
        experiment, fault_words = self.experiment, str(fault)
        chain = experiment.chain
        less = f"{chain.key}={chain.peak / 10:g}" if chain.peak is not None else ""
        attempt = f"try {less}" if less else "lower the learning rate"
        resume = f"type: jshard resume {{run}} {less}" if less else f"{attempt}, then type: jshard resume {{run}}"
        whose = [suspect(experiment.data, position, experiment.placement.rows) for position in fault.read]
        if any(whose):
            fault_words += f", and so are {whose[0]}"
            attempt = f"fix what {experiment.loss.data.path} returns"
            resume = f"{attempt}, then type: jshard resume {{run}}"
        elif made := self._maker(fault.step):
            fault_words += f": {made}"
        if self.saver is None:
            return JShardError(
                f"{fault_words}, and nothing was saved", hint=f"{attempt}, and write checkpoint: 100 under jshard.train"
            )
        if (good := self.saver.saved) is None:
            return JShardError(f"{fault_words}, and no checkpoint was saved before", hint=attempt)
        where = f"the last good checkpoint is that of step {good.step} ({good.folder})"
        return JShardError(f"{fault_words}; {where}", hint=resume.format(run=self.saver.policy.run))

    def _maker(self, step: int) -> str:
        """Find what makes the NaN of this step. Whatever keeps that from being found is said, and ends nothing."""
        since = (self.saver and self.saver.saved) or self.resumed
        self.step.state = None  # the devices may not hold two
        try:
            return maker(self.experiment, step, since, self.bar.say, self.bar.begin)
        except Exception as error:
            self.bar.say(f"what makes the NaN can't be looked for: {type(error).__name__}: {error}")
            return ""
