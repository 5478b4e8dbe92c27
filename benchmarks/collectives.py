"""What XLA makes of a gather and of a scatter on TPUs that are not there, and what permutes cost instead: the source of rows of
`kernels.choose` (docs/measurements/kernels.md). Needs `pip install "jshard[tpu]"`; some seconds a line.

    python -m benchmarks.collectives [--topologies v5e:4x4,v5e:16x16] [--groups 0,4] [--rows 2048] [--columns 2048]

An array of bfloat16 in each device's memory is read, sent and written again, with nothing else to do meanwhile. A group of 0
is all devices.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import jshard
from jshard import kernels
from jshard.inspect.plan import Topology, plan
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.printing.units import size
from jshard.signals.active_config import configuration

OPS = ("all_gather", "reduce_scatter")


def planned(topology: Topology, group: int, op: str, algorithm: str, shape: tuple[int, int]) -> Any:
    """The plan of one collective over `group` devices."""
    jshard.load({"jshard": {"mesh": {"others": topology.devices // group, "group": group}}})
    present = configuration()
    assert present is not None
    with moved_to(mesh_on(topology, present)):

        def body(x: jax.Array) -> jax.Array:
            return getattr(kernels, op)(x[0] * 2, "group", algorithm=algorithm)[None] * 3

        split = jax.P(("others", "group"))
        shape = shape if op == "reduce_scatter" else (shape[0] // group, shape[1])
        x = jax.ShapeDtypeStruct(
            (topology.devices, *shape), jnp.bfloat16, sharding=jax.NamedSharding(jshard.mesh(), split)
        )
        run = jax.jit(jax.shard_map(body, mesh=jshard.mesh(), in_specs=split, out_specs=split))
        return plan(run, x, topology=topology.name, backward=False)


def line(topology: Topology, group: int, op: str, algorithm: str, made: Any) -> str:
    kinds = sorted({f"{'a' if got.asynchronous else ''}synchronous {got.collective}" for got in made.got})
    wire, seconds = sum(got.total for got in made.got), made.estimate.seconds
    head = f"{topology.name:12}{group:5}  {op:15}{algorithm:9}"
    return f"{head}{size(wire):>10}{1e6 * seconds:10,.0f} us  {', '.join(kinds)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description="Collectives on absent TPUs.")
    parser.add_argument("--topologies", default="v5e:4x4,v5p:2x2x4,v6e:4x4")
    parser.add_argument("--groups", default="0,4", help="devices of a group; 0 are all")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    asked = parser.parse_args(arguments)
    for topology in map(Topology.of, asked.topologies.split(",")):
        for group in (int(word) or topology.devices for word in asked.groups.split(",")):
            for op in OPS:
                for algorithm in ("xla", "permute"):
                    made = planned(topology, group, op, algorithm, (asked.rows, asked.columns))
                    print(line(topology, group, op, algorithm, made), flush=True)


if __name__ == "__main__":
    main()
