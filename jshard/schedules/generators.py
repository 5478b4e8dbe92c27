"""The named schedules, each in closed form."""

from __future__ import annotations

from jshard.schedules.table import StageOp, Table

KINDS = {  # description, and the default number of chunks per stage
    "gpipe": ("all forwards, then all backwards", 1),
    "1f1b": ("each backward as early as possible, to keep few inputs", 1),
    "interleaved": ("1f1b with several chunks of layers per stage, to fill and drain the pipeline sooner", 2),
    "zero_bubble": ("1f1b with separate weight gradients, as no other stage waits for them", 1),
}


def generate(kind: str, stages: int, microbatches: int, chunks: int | None = None) -> Table:
    """Return the table of a schedule in KINDS. Between filling and draining, each tick has an F and
    a B on every stage, if `stages` divides `microbatches` or there is one chunk."""
    chunks = KINDS[kind][1] if chunks is None else chunks
    # Groups of `stages` microbatches pass through chunk 0, and return to the first stage right after it.
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
            if kind == "zero_bubble":  # all stages at once: a slot on one stage costs all stages
                when[StageOp("W", microbatch, virtual)] = back + stages - 1
    return Table.of(kind, stages, when)
