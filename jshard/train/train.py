"""Train an experiment, and say how it goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax

from jshard.errors import JShardError
from jshard.train.checkpoint import Checkpoint, Saver, steps_in
from jshard.train.data_position import own_position
from jshard.train.experiment import Experiment
from jshard.train.loop import NotANumber, Taken, check_parameters, evaluate, run
from jshard.train.metrics import Record, written
from jshard.train.nan_batch import suspect
from jshard.train.nan_replay import maker
from jshard.train.on_demand_trace import TraceRequest
from jshard.train.preemption import Notice, Preempted
from jshard.train.progress import Bar, Rate, figures, in_words, silent
from jshard.train.run_events import RESTART, Course, course
from jshard.train.settings import LEARNING_RATE


def train(experiment: Experiment, bar: Bar | None = None, *, resume: Checkpoint | None = None) -> float | None:
    """Trains, with a progress bar, and returns the test accuracy, if there are test data. What each figure was goes into
    the output folder. Of several processes the first speaks and writes.

    With `resume` it goes on from there; started again by `jshard launch --restarts`, from the last checkpoint that there
    is by now. SIGTERM ends it behind a step that all processes agree on: it saves, if the
    configuration says where, and raises `Preempted`, by which Python ends with the code 143."""
    if RESTART in os.environ:
        resume = last_saved(experiment) or resume
    leads = jax.process_index() == 0
    bar = bar or Bar(experiment.steps, experiment.batch, None if leads else silent())
    with bar, course(experiment, goes_on=resume is not None) as told:
        return _Training(experiment, bar, resume, told).run()


def last_saved(experiment: Experiment) -> Checkpoint | None:
    """The checkpoint that a run of this experiment would go on from; None where nothing is saved."""
    policy = experiment.checkpoint
    if policy is None or not steps_in(policy.folder):
        return None
    return Checkpoint.find(policy.folder, "latest", policy.run)


class _Training:
    def __init__(self, experiment: Experiment, bar: Bar, resume: Checkpoint | None, told: Course):
        self.experiment, self.bar, self.told, self.resumed = experiment, bar, told, resume
        self.step = experiment.step()
        self.done, self.position = 0, None
        if resume is not None:
            self._go_on_from(resume)
        policy, configuration = experiment.checkpoint, experiment.configuration
        self.saver = None if policy is None else Saver(policy, written(configuration), bar.say)
        if self.saver is not None:
            self.saver.begin(resume)
        leads = jax.process_index() == 0
        self.record = Record(
            experiment.output if leads else None, configuration, self.done, tensorboard=experiment.tensorboard
        )
        self.test = experiment.evaluated_on(self.step, bar.say)
        self.rate, self.accuracy = Rate(experiment.batch), None

    def _go_on_from(self, resume: Checkpoint) -> None:
        steps = self.experiment.steps
        self.step.state, manifest = resume.restore(self.step.state, self.experiment.configuration.source)
        self.done, self.position = manifest.step, own_position(manifest.position, resume)
        if self.done >= steps:
            more = f"type: jshard resume {resume.run} steps={2 * self.done}"
            raise JShardError(
                f"{resume} has trained {self.done} of {steps} steps, so there is nothing to do", hint=more
            )
        self.told.resumed(self.done, resume.folder)
        self.bar.say(f"resumed from step {self.done}: {resume.folder}")

    def run(self) -> float | None:
        experiment, first = self.experiment, self.done + 1
        stepped = TraceRequest(self.step, experiment.output, self.done)
        taken = run(
            stepped,
            experiment.data,
            experiment.placement,
            steps=experiment.steps,
            ahead=experiment.ahead,
            done=self.done,
            position=self.position,
            begins=self.bar.begin,
            check=experiment.check_read(self.step),
        )
        record = contextlib.closing(self.record)
        with (
            record,
            self._save_ended(),
            self._number_told(),
            Notice() if self._stops() else contextlib.nullcontext() as notice,
        ):
            with contextlib.closing(taken), stepped:
                for each in taken:
                    self.told.step(each)
                    if each.number == first:
                        each.loss.block_until_ready()
                        self.rate.restart(first)
                    self._show(each)
                    self._save(each)  # first, so that nothing is lost by what goes wrong in an evaluation
                    self._evaluate(each.number)
                    if notice is not None and notice.reached(each.number) and each.number != experiment.steps:
                        self._stop(each)
        self.step.into(experiment.model, experiment.optimizer)
        return self.accuracy

    def _show(self, taken: Taken) -> None:
        experiment, bar, number, steps = self.experiment, self.bar, taken.number, self.experiment.steps
        bar.show(number, taken.loss)
        if number % experiment.log == 0 or number == steps:
            taken.settle()
            value, speed = float(taken.loss), self.rate.read(number)
            self.record.write(step=number, loss=value, examples_per_second=round(speed))
            bar.show_figures(number, figures(value, speed))
            if not bar.draws:
                bar.say(f"step {number}/{steps}   {figures(value, speed)}")

    def _evaluate(self, number: int) -> None:
        experiment, steps = self.experiment, self.experiment.steps
        if self.test is None or (number % experiment.evaluation and number != steps):
            return
        self.told.evaluates(self.step, self.test)
        self.accuracy = evaluate(self.step, self.test, experiment.placement, experiment.batch)
        self.record.write(step=number, test_accuracy=self.accuracy)
        self.told.evaluated(number, self.accuracy)
        if number != steps:
            self.bar.say(f"step {number}/{steps}   {in_words(self.accuracy)}")
        self.rate.restart(number)

    # -- saving, and stopping --

    def _stops(self) -> bool:
        """Whether SIGTERM is heard. One process that saves nothing has nothing to do before it ends."""
        return self.saver is not None or jax.process_count() > 1

    def _save(self, taken: Taken) -> None:
        if self.saver is not None:
            self.saver.look()
            self.told.saved(self.saver.saved, self.saver.policy.folder)
            if self.saver.due(taken.number, self.experiment.steps):
                self._save_now(self.saver, taken)

    def _save_now(self, saver: Saver, taken: Taken) -> None:
        taken.settle()
        check_parameters(self.step.state, taken.number)
        self.told.saving(taken.number, saver.policy.folder)
        saver.save(taken.number, self.step.state, taken.position)
        self.told.restart()

    def _stop(self, taken: Taken) -> None:
        if self.saver is None:
            self.bar.say(f"SIGTERM: stopped at step {taken.number}; nothing is saved, as no checkpoint is configured")
            raise Preempted(taken.number)
        if self.saver.last != taken.number:
            self._save_now(self.saver, taken)
        self.saver.end()
        run = self.saver.policy.run
        self.bar.say(f"SIGTERM: stopped at step {taken.number}; go on by: jshard resume {run}")
        raise Preempted(taken.number)

    @contextlib.contextmanager
    def _save_ended(self) -> Iterator[None]:
        """However training ends, what is being saved is saved to its end."""
        if self.saver is None:
            yield
            return
        try:
            yield
            self.saver.end()
            self.told.saved(self.saver.saved, self.saver.policy.folder)
        except BaseException:
            self.saver.settle()
            raise
        finally:
            self.saver.close()

    @contextlib.contextmanager
    def _number_told(self) -> Iterator[None]:
        try:
            yield
        except NotANumber as fault:
            raise self._without_number(fault) from None

    def _without_number(self, fault: NotANumber) -> JShardError:
        """All processes come here, for the same step."""
        experiment, told = self.experiment, str(fault)
        said: Any = experiment.configuration.train.get("optimizer", {})
        rate = said.get("learning_rate", LEARNING_RATE) if isinstance(said, dict) else LEARNING_RATE
        less = f"optimizer.learning_rate={rate / 10:g}"
        attempt, resume = f"try {less}", f"type: jshard resume {{run}} {less}"
        if self.saver is not None:
            self.saver.wait()
        whose = [suspect(experiment.data, position, experiment.placement.rows) for position in fault.read]
        if any(whose):
            data: Any = experiment.configuration.train["data"]
            told += f", and so are {whose[0]}"
            attempt = f"fix what {data if isinstance(data, str) else data['path']} returns"
            resume = f"{attempt}, then type: jshard resume {{run}}"
        elif made := self._maker(fault.step):
            told += f": {made}"
        if self.saver is None:
            return JShardError(
                f"{told}, and nothing was saved", hint=f"{attempt}, and write checkpoint: 100 under jshard.train"
            )
        if self.saver.saved is None:
            return JShardError(f"{told}, and no checkpoint was saved before", hint=attempt)
        good = f"the last good checkpoint is that of step {self.saver.saved}"
        where = self.saver.policy.folder / str(self.saver.saved)
        return JShardError(f"{told}; {good} ({where})", hint=resume.format(run=self.saver.policy.run))

    def _maker(self, step: int) -> str:
        """What makes the NaN of this step. Whatever keeps that from being found is said, and ends nothing."""
        saver, since = self.saver, self.resumed
        if saver is not None and saver.saved is not None:
            since = Checkpoint(saver.policy.folder / str(saver.saved), saver.saved, saver.policy.run)
        self.step.state = None  # the devices may not hold two
        try:
            return maker(self.experiment, step, since, self.bar.say, self.bar.begin)
        except Exception as error:
            self.bar.say(f"what makes the NaN can't be looked for: {type(error).__name__}: {error}")
            return ""
