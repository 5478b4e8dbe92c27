"""The table and the model variables of a program on stages, for every way to cut it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers.partition import Microbatches, Program
from jshard.programs.jaxprs import Piece, pruned
from jshard.schedules import KINDS, Table, generate, load
from jshard.schedules.table import counted
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.config import Pipeline


class Scheduled(Microbatches):
    """A pipelined program: `run(xs)` equals that of `Microbatches`, by the table of `jshard.pipeline`."""

    of_data: Sequence[int] = ()  # the variables, by their place among them, that a call makes of its data

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        present = configuration()
        assert present is not None and present.pipeline is not None
        self.asked = present.pipeline
        if program.stage is None:
            says = next(signal for signal in present.signals.values() if signal.stage)
            raise JShardError(
                f"{says} says stage ({says.at('stage')}), and no parameter of the model is claimed by it",
                hint=f'write match: ["{says.name}/**"], with the path of a jshard.stack in the model',
            )
        self.stage, stages = program.stage, program.mesh.shape[program.stage.mesh_axis]
        self.table = self.meant = table_of(self.asked)
        if stages != self.table.stages:  # the one device that verify compares with has all chunks
            kind = "zero_bubble" if self.table.splits_weights else "1f1b"
            self.table = generate(kind, 1, self.table.microbatches, self.table.virtual_stages)

    @functools.cached_property
    def states(self) -> Piece:
        """Return the changes of a call to the model's variables, without its data."""
        kept = [False] + [number not in self.of_data for number in range(len(self.variables))]
        states = pruned(self.program.jaxpr, kept)
        if not {*self.parameters, *self.batch}.isdisjoint(states.inputs):
            raise JShardError(
                f"jshard.pipeline ({self.asked.place}) has several microbatches on their way, and the model keeps variables "
                "that its data change, as running statistics",
                hint="use layers that keep none, as nnx.LayerNorm",
            )
        return states

    def _states(self, xs: Sequence[Array]) -> tuple[list[Array], dict[int, Array]]:
        """The variables behind the last microbatch, and before each of them."""
        program, states = self.program, self.states
        numbers = [n for at, n in enumerate(self.variables) if at not in self.of_data]
        if not numbers:
            return [], {}

        def turn(variables: list[Array], _: None) -> tuple[list[Array], list[Array]]:
            known, run = dict(enumerate(xs)) | dict(zip(numbers, variables, strict=True)), program.running()
            outs = run.planned(states.jaxpr, [program.part(n, known[n]) for n in states.inputs], None)
            return [
                run.place(part, program.in_axes[n], None).x for part, n in zip(outs, numbers, strict=True)
            ], variables

        after, before = lax.scan(turn, [xs[n] for n in numbers], None, length=self.table.microbatches)
        return after, dict(zip(numbers, before, strict=True))


def table_of(asked: Pipeline) -> Table:
    """Make or read the table of a pipeline; a device standing for a mesh takes the mesh's table."""
    stages = mesh_to_choose_for().shape[asked.axis]
    if asked.schedule in KINDS:
        return generate(asked.schedule, stages, asked.microbatches, asked.chunks)
    table = load(asked.schedule)
    chunks = table.virtual_stages // table.stages
    for what, has, says in (
        ("stage", table.stages, stages), ("microbatch", table.microbatches, asked.microbatches),
        ("chunk", chunks, asked.chunks or chunks),
    ):  # fmt: skip
        if has != says:
            raise JShardError(
                f"jshard.pipeline ({asked.place}) has {counted(says, what)}, and its table {asked.schedule} has {has}",
                hint=f"write another table, or give the pipeline {counted(has, what)}",
            )
    return table
