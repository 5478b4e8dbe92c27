"""Train an experiment, and say how it goes."""

from __future__ import annotations

import jax

from jshard.train.experiment import Experiment
from jshard.train.loop import Step, evaluate, run
from jshard.train.progress import Bar, Rate, figures, silent
from jshard.train.record import Record


def train(experiment: Experiment, bar: Bar | None = None) -> float:
    """Trains, with a progress bar, and returns the test accuracy. What each figure was goes into the output folder. Of
    several processes the first speaks and writes."""
    steps, batch, log = experiment.steps, experiment.batch, experiment.log
    step = Step(experiment.model, experiment.optimizer, experiment.loss)
    leads = jax.process_index() == 0
    record = Record(experiment.output if leads else None, experiment.configuration)
    rate, accuracy = Rate(batch), 0.0
    bar = bar or Bar(steps, batch, None if leads else silent())
    with bar:
        for number, loss in run(
            step, experiment.data, experiment.placement, batch=batch, steps=steps, seed=experiment.seed
        ):
            if number == 1:
                loss.block_until_ready()
                rate.restart(1)
            bar.show(number, loss)
            if number % log == 0 or number == steps:
                value, speed = float(loss), rate.read(number)
                record.write(step=number, loss=value, examples_per_second=round(speed))
                bar.show_figures(number, figures(value, speed))
                if not bar.console.is_terminal:
                    bar.say(f"step {number}/{steps}   {figures(value, speed)}")
            if number % experiment.evaluation == 0 or number == steps:
                accuracy = evaluate(step, experiment.test, experiment.placement, batch)
                record.write(step=number, test_accuracy=accuracy)
                if number != steps:
                    bar.say(f"step {number}/{steps}   test accuracy {100 * accuracy:.1f} %")
                rate.restart(number)
    step.into(experiment.model, experiment.optimizer)
    return accuracy
