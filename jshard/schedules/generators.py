"""The schedules that have a name, each in closed form."""

from __future__ import annotations

from jshard.schedules.table import StageOp, Table

KINDS = {  # what they do, and how many chunks of layers a stage has unless said
    "gpipe": ("all forwards, then all backwards", 1),
    "1f1b": ("a backward as soon as there is one, so that few inputs are kept", 1),
    "interleaved": ("1f1b with several chunks of layers a stage, which fills and drains the pipeline sooner", 2),
    "zero_bubble": ("1f1b with weight gradients split off, which no other stage waits for", 1),
}


def generate(kind: str, stages: int, microbatches: int, chunks: int | None = None) -> Table:
    """Make the table of one of KINDS. Each tick but those that fill and drain the pipeline has an F and a B on every stage,
    where `microbatches` is a multiple of `stages` or there is one chunk."""
    chunks = KINDS[kind][1] if chunks is None else chunks
    # Microbatches go through in groups of `stages`: a group takes chunk 0, and comes back to the first stage as it ends.
    order = {
        (microbatch, chunk): (microbatch // stages * chunks + chunk) * stages + microbatch % stages
        for microbatch in range(microbatches)
        for chunk in range(chunks)
    }
    first_backward = max(order.values()) + stages if kind == "gpipe" else chunks * stages - 1
    when = {}
    for (microbatch, chunk), at in order.items():
        back = first_backward + order[microbatch, chunks - 1 - chunk]
        for stage in range(stages):
            virtual = chunk * stages + stage
            when[StageOp("F", microbatch, virtual)] = at + stage
            when[StageOp("B", microbatch, virtual)] = back + stages - 1 - stage
            if kind == "zero_bubble":  # all stages at once, as a slot costs all what it costs one
                when[StageOp("W", microbatch, virtual)] = back + stages - 1
    return Table.of(kind, stages, when)
