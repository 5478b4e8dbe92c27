"""The table of the pipeline that the configuration asks for."""

from __future__ import annotations

from jshard.errors import JShardError
from jshard.schedules import KINDS, Table, generate, load
from jshard.schedules.table import counted
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.config import Pipeline


def present_table() -> Table | None:
    """The table of the pipeline that the loaded configuration asks for."""
    present = configuration()
    return None if present is None or present.pipeline is None else table_of(present.pipeline)


def table_of(asked: Pipeline) -> Table:
    """Make, or read, the table of a pipeline; on one device that stands for a mesh, that of the mesh."""
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
