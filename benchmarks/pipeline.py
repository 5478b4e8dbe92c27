"""A pipeline's step compiled for chips that are not there: the temporaries of each device for more and more microbatches, and
how much of what stages send each other no work hides, by a walk through the compiled schedule, which takes all ticks to be like
their mean; beside it the share that the table has nothing to run beside.

    python -m benchmarks.pipeline [--topology v5e:2x2] [--schedules gpipe,1f1b] [--microbatches 8,16,32] [--layers 8]
        [--counts 3,2,2,1] [--rows 1024] [--width 1024] [--remat chunk] [--quick]

Layers x + gelu(x up) down in float32, `rows` of x a microbatch, a stage for each chip. It asks for `pip install "jshard[tpu]"`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard
from jshard.inspect.plan import Topology, plan
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.layers.creating import abstract
from jshard.layers.gradients import accumulated
from jshard.schedules import KINDS, Table, generate
from jshard.schedules.cost import percent, sends_alone
from jshard.signals.active_config import configuration


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, layers: int, width: int, *, rngs: nnx.Rngs):
        self.blocks = jshard.stack(Block, layers, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


def loss(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def planned(
    table: Table, microbatches: int, topology: Topology, counts: list[int] | None, layers: int, rows: int, width: int,
    remat: str | bool,
) -> Any:  # fmt: skip
    each = counts or []
    firsts = [sum(each[:stage]) for stage in range(len(each))]
    ranges = {f"{first}..{first + count - 1}": n for n, (first, count) in enumerate(zip(firsts, each, strict=True))}
    jshard.load({
        "jshard": {
            "mesh": {"stage": topology.devices},
            "train": {"microbatches": microbatches}, "pipeline": {"axis": "stage", "schedule": table.name},
        },
        "blocks": {"stage": ranges or "equal", "match": ["**"], "remat": remat},
    })  # fmt: skip
    present = configuration()
    assert present is not None
    with moved_to(mesh_on(topology, present)):
        x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        model = abstract(lambda: jshard.shard(Model(layers, width, rngs=nnx.Rngs(0)), x))
        batch = jax.ShapeDtypeStruct((microbatches, rows, width), jnp.float32)
        return plan(accumulated(loss), model, batch, batch, topology=topology.name, backward=False)


def exposed(made: Any, of_microbatches: bool) -> float | None:
    """The share of the bytes between stages that a device waits for: of what microbatches are sent, or of layers that run on
    another stage than they rest on."""
    rows = [row for row in made.comparison.rows if row.collective == "permute" and row.wire_got]
    rows = [row for row in rows if of_microbatches == any(each.kind == "lock-step" for each in row.differences)]
    return sum(row.wire_got - row.hidden for row in rows) / sum(row.wire_got for row in rows) if rows else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description="A pipeline on absent chips.")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--schedules", default=",".join(KINDS), help="some of them, with commas between")
    parser.add_argument("--microbatches", default="8,16,32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--counts", help="of layers, by stage, as 3,2,2,1; as many on each unless said")
    parser.add_argument("--rows", type=int, default=1024, help="of x in a microbatch")
    parser.add_argument("--width", type=int, default=1024)
    words = "what backwards compute again: chunk, full or products; nothing unless said"
    parser.add_argument("--remat", default=False, help=words)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    asked = parser.parse_args(arguments)
    rows, width = (64, 64) if asked.quick else (asked.rows, asked.width)
    topology = Topology.of(asked.topology)
    by_stage = [int(word) for word in asked.counts.split(",")] if asked.counts else None
    layers = sum(by_stage or [asked.layers])
    print(f"{topology}, {layers} layers of {width:,}, {rows:,} rows a microbatch")
    counts = [int(word) for word in asked.microbatches.split(",")]
    print("".join(f"{count:>14,}" for count in counts) + "  microbatches")
    for schedule in asked.schedules.split(","):
        tables = [generate(schedule, topology.devices, count) for count in counts]
        made = [
            planned(table, count, topology, by_stage, layers, rows, width, asked.remat)
            for table, count in zip(tables, counts, strict=True)
        ]
        held = (each.memory.parts["temporaries"] / 2**20 for each in made)
        print(f"{schedule}\n" + "".join(f"{each:10,.1f} MiB" for each in held) + "  temporaries", flush=True)
        if all(each.estimate for each in made):  # of chips, and not of CPUs
            print(
                "".join(f"{1e3 * each.estimate.seconds:11.1f} ms" for each in made) + "  a step, modelled", flush=True
            )
        alone = [sends_alone(table) for table in tables]
        for words, shares in (
            ("sends, not hidden", [exposed(each, of_microbatches=True) for each in made]),
            ("with no work beside them, by the table", alone),
            ("layers sent to where they run, not hidden", [exposed(each, of_microbatches=False) for each in made]),
        ):
            if found := [f"{percent(share):>14}" for share in shares if share is not None]:
                print("".join(found) + f"  {words}", flush=True)


if __name__ == "__main__":
    main()
