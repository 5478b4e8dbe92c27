"""The figures of a run: speed in tokens, perplexity, share of the chip's peak, memory, time left."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jshard.kernels.chip import chip_called
from jshard.layers.pipeline.ticks import slot_p
from jshard.printing.units import operations, perplexity
from jshard.programs.flops import Flops, arithmetic_of
from jshard.programs.jaxprs import equations
from jshard.schedules import Cost, Table
from jshard.schedules.cost import percent
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import TrainingStep
from jshard.training.telemetry.log import memory


class Figures:
    """A function of a step's number, loss and speed, for the figures in the bar, the lines and the record."""

    def __init__(self, experiment: Experiment, step: TrainingStep):
        self.steps, self.examples = experiment.settings["steps"], experiment.settings["batch"]
        self.tokens = self.examples * tokens_in(experiment.data.example()[1])
        self.is_likelihood = bool(self.tokens) and experiment.loss.written is None
        self.learning_rate = experiment.chain.learning_rate
        device = jax.local_devices()[0]
        mesh = experiment.placement.mesh
        self.chip, self.devices = chip_called(device.device_kind, device.platform), 1 if mesh is None else mesh.size
        self.arithmetic: Flops | None = None
        self.table: Table | None = None  # the pipeline schedule
        self.layers = ""  # of each stage, in words
        if (self.tokens or self.chip.flops) and experiment.apart is None:
            traced = step.program.trace(step.state, *experiment.first_batch())  # kept for the first step
            self.arithmetic = arithmetic_of(traced.jaxpr, remat=False)
            slots = (eqn.params["slot"] for eqn in equations(traced.jaxpr) if eqn.primitive is slot_p)
            if (slot := next(slots, None)) is not None:
                self.table, self.layers = slot.table, slot.layers

    def __call__(self, number: int, loss: float, steps_per_second: float) -> dict[str, float]:
        figures = {"loss": loss}
        if self.is_likelihood:
            figures["perplexity"] = perplexity(loss)
        if (rate := self.learning_rate(number - 1)) is not None:
            figures["learning_rate"] = rate
        figures["examples_per_second"] = round(steps_per_second * self.examples)
        if self.tokens:
            figures["tokens_per_second"] = round(steps_per_second * self.tokens)
        if at_peak := self.seconds_at_peak:
            figures["share_of_peak"] = round(at_peak * steps_per_second, 4)
        if held := memory():
            figures["memory"] = held.get("device_memory", held.get("rss", 0))
        if steps_per_second and number < self.steps:
            figures["seconds_left"] = (self.steps - number) / steps_per_second
        return figures

    @property
    def seconds_at_peak(self) -> float | None:
        """The seconds for a step's products on a device at its stated peak; None if it has none."""
        if self.arithmetic is None or not self.chip.flops:
            return None
        return sum(count / self.chip.peak(dtype) for dtype, count in self.flops.items())

    @property
    def flops(self) -> dict[str, float]:
        """The FLOPs of a device by dtype; an even share if the compiler partitions the program."""
        assert self.arithmetic is not None
        parts = self.devices if self.arithmetic.at_most else 1
        return {dtype: count / parts for dtype, count in self.arithmetic.flops.items()}

    def opening(self) -> str | None:
        """Return a sentence on the tokens and FLOPs of a step; None for data without tokens."""
        if not self.tokens or self.arithmetic is None:
            return None
        count = operations(sum(self.flops.values()))
        on = f"on each of {self.devices} devices" if self.devices > 1 else "on one device"
        peak = f"no peak of {self.chip.name} is known"
        if self.chip.flops:
            rates = (f"{self.chip.peak(dtype) / 1e12:g} TFLOP/s in {dtype}" for dtype in self.flops)
            peak = f"{self.chip.name} does {' and '.join(rates)}"
        words = f"a step: {self.tokens:,} tokens, {count} in products {on}, without what remat computes again; {peak}"
        if self.table is None:
            return words
        idle = Cost(self.table).lock_step.idle  # counted in the share of the peak, a share of the whole step's time
        waits = f"each stage waits {percent(idle)} of it by {self.table.name}: at most {percent(1 - idle)} of the peak"
        return "; ".join(filter(None, (words, waits, self.layers)))


def tokens_in(targets: Any) -> int:
    """Return the number of tokens of a row of integer targets, or 0 for other targets."""
    is_sequence = isinstance(targets, np.ndarray) and targets.ndim == 2 and np.issubdtype(targets.dtype, np.integer)
    return targets.shape[1] if is_sequence else 0
