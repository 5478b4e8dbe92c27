"""The training of an experiment, with progress, records, checkpoints and evaluations."""

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
    """Train, and return the last loss and the figures of the last evaluation.

    Figures are shown in a progress bar and written to the output folder, by the first process only. Training continues
    from `resume`; after a restart by `jshard launch --restarts` or a scheduler, from the newest complete checkpoint.
    After SIGTERM all processes stop after the same step, save if checkpoints are configured, and raise `Preempted`; Python
    then ends with code 143.
    """
    if resume is None and restarts():
        resume = last_saved(experiment)
    leads = jax.process_index() == 0
    bar = bar or Bar(experiment.settings["steps"], None if leads else silent())
    with locked(_folders(experiment.settings)), bar, run_events(experiment, goes_on=resume is not None) as course:
        return _Training(experiment, bar, resume, course).run()


def _folders(settings: Settings) -> dict[Path, str]:
    """Return the folders written to by a run, with the opening of an error message for each."""
    policy, output, folders = settings.checkpoint(), settings["output"], dict[Path, str]()
    if output is not None:
        folders[Path(output)] = f'{settings.label("output")} is "{output}", which'
    if policy is not None and (output is None or not policy.folder.resolve().is_relative_to(Path(output).resolve())):
        folders[policy.folder] = policy.label
    return folders


def last_saved(experiment: Experiment) -> Checkpoint | None:
    """Return the newest complete checkpoint of the experiment; None if there is none."""
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
                for step in taken:
                    self.course.step(step)
                    if step.number == first:
                        step.loss.block_until_ready()
                        self.rate.restart(first)
                    self._show(step)
                    self._save(step)  # before the evaluation, so that its failure loses nothing
                    self._evaluate(step.number)
                    if notice.reached(step.number) and step.number != self.steps:
                        self._stop(step)
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
            figures = self.figures(number, self.loss, self.rate.read(number))
            bar.show_figures(number, figures)
            if not bar.draws:
                bar.say(f"step {number}/{self.steps}   {figures_in_words(figures)}")
            figures.pop("seconds_left", None)
            self.record.write(step=number, **figures)

    def _catch_up(self) -> None:
        """Evaluate after the resumed step, if the earlier run did not record that or was complete."""
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
        figures = evaluate(self.step, self.test, self.experiment.placement, self.experiment.settings["batch"])
        if self.figures.is_likelihood:
            loss = figures["test_loss"]
            figures = {"test_loss": loss, "test_perplexity": perplexity(loss), **figures}
        self.evaluated = figures
        if not is_written:
            self.record.write(step=number, **figures)
        self.course.evaluated(number, figures)
        if number != self.steps:
            self.bar.say(f"step {number}/{self.steps}   {'   '.join(in_words(figures))}")
        self.rate.restart(number)

    # -- saving, and stopping --

    def _save(self, taken: DispatchedStep) -> None:
        if self.saver is not None:
            self.saver.look()
            if self.saver.due(taken.number, self.steps):
                self._save_now(self.saver, taken)

    def _save_now(self, saver: Saver, taken: DispatchedStep) -> None:
        taken.settle()
        if holds_nan(self.step.state):  # would show in a loss only at the next step
            raise NotANumber(taken.number, "a parameter behind")
        saver.save(taken.number, self.step.state, taken.position)
        self.course.restart()

    def _stop(self, taken: DispatchedStep) -> None:
        says = "nothing is saved, as no checkpoint is configured"
        if self.saver is not None:
            if self.saver.last != taken.number:
                self._save_now(self.saver, taken)
            self.saver.end()
            says = f"type: jshard resume {self.saver.policy.run}"
        self.bar.say(f"SIGTERM: stopped at step {taken.number}; {says}")
        raise Preempted(taken.number)

    def _without_number(self, fault: NotANumber) -> JShardError:
        """Return the error for a NaN, with its cause; all processes call this, for the same step."""
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
        """Return the cause of a step's NaN in words; a failure of the search is reported, not raised."""
        since = (self.saver and self.saver.saved) or self.resumed
        self.step.state = None  # devices may not have room for two states
        try:
            return maker(self.experiment, step, since, self.bar.say, self.bar.begin)
        except Exception as error:
            self.bar.say(f"the search for the cause of the NaN failed: {type(error).__name__}: {error}")
            return ""
