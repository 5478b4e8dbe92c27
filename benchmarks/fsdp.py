"""A step of FSDP compiled for chips that are not there: what it keeps, what it sends, and how long it would take, by XLA's
partitioner and by `store` in its forms.

    python -m benchmarks.fsdp [--topology v5e:4x4,v6e:4x4] [--layers 8] [--rows 512,1024] [--width 2048] [--ways store]
    python -m benchmarks.fsdp --pod 8,24,48      what configs/pod-fsdp.yaml of so many layers needs on a v5e:16x16
    python -m benchmarks.fsdp --decoder all      configs/decoder/fsdp.yaml beside MaxText's own step of the same sizes

Layers x + gelu(x up) down in bfloat16 over float32 masters, `rows` of x a chip, weights over all chips, one step of SGD. It
asks for `pip install "jshard[tpu]"`, or `"jshard[plan]"` for GPUs. The time is that of `jshard plan`, a model; the bound is the
longer of each way's own wire and of the six products of a layer, none of them computed again, at their peaks.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jshard
from jshard.inspect.plan import Topology, plan
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.signals.active_config import configuration

STORES: dict[str, Any] = {
    "keep": {"parameters": "data", "keep": True},
    "store": "data",
    "prefetch": {"parameters": "data", "prefetch": True},
}
WAYS = ("partitioner", *STORES)
# Parameters whole on every chip: by XLA's partitioner, by jshard, and with gradient sums one layer late.
WHOLE: dict[str, Any] = {"replicated": {}, "data": {}, "late": {"store": {"prefetch": True}}}


def loss(params: Any, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.gelu(x @ up) @ down, None

    return jnp.mean(jnp.square(jax.lax.scan(block, x, params)[0].astype(jnp.float32)))


def step(loss: Any, params: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients)


def by_partitioner(params: Any, x: jax.Array) -> jax.Array:
    """The layers computed anew in the backward pass, their inputs split by rows."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        y = x + jax.nn.gelu(x @ up) @ down
        return jax.lax.with_sharding_constraint(y, jax.NamedSharding(jshard.mesh(), jax.P("data"))), None

    return jnp.mean(jnp.square(jax.lax.scan(jax.checkpoint(block), x, params)[0].astype(jnp.float32)))


def planned(way: str, topology: Topology, layers: int, rows: int, width: int) -> Any:
    is_auto = way in ("partitioner", "replicated")
    auto = {"axis_types": "auto"} if is_auto else {}
    stored = WHOLE.get(way, {"store": STORES.get(way, "data")})
    signal = {"row": "data", **stored, "match": ["**"]}
    jshard.load({"jshard": {"mesh": {"data": topology.devices}, **auto}, "all": signal})
    present = configuration()
    assert present is not None
    with moved_to(mesh_on(topology, present)):

        def shape(sizes: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.NamedSharding(jshard.mesh(), jax.P(*spec)))

        rest = () if way in WHOLE else (None, "data")
        params = {
            "up": shape((layers, width, 4 * width), jnp.float32, *rest),
            "down": shape((layers, 4 * width, width), jnp.float32, *rest),
        }
        x = shape((rows * topology.devices, width), jnp.bfloat16, "data")
        f = by_partitioner if is_auto else jshard.shard(loss)
        run = jax.jit(lambda params, x: step(f, params, x), donate_argnums=0)
        return plan(run, params, x, topology=topology.name, backward=False)


def line(way: str, made: Any, first: Any, flops: float) -> str:
    """One way beside the first of the table, and beside its wire and so many operations."""
    wire = sum(got.total for got in made.got)
    shown = sum(got.total * (1 - got.hidden) for got in made.got)
    numbers = f"{way:12}{wire / 2**20:10,.0f} MiB{made.memory.parts['temporaries'] / 2**20:10,.0f} MiB"
    if made.estimate is None:  # nobody knows pretended devices
        return numbers
    step, work = made.estimate.seconds, made.estimate.seconds_of("work")
    bound = max(made.estimate.seconds_of("wire"), flops / made.topology.chip.peak("bfloat16"))
    return (
        f"{numbers}{100 * shown / wire:9.0f} %{1e3 * work:11.1f} ms{1e3 * step:10.1f} ms"
        f"{step / first.estimate.seconds:9.2f}{step / bound:9.2f}"
    )


def typed(*words: str) -> dict[str, Any]:
    """What `jshard plan` of a configuration says."""
    command = [sys.executable, "-m", "jshard", "plan", *words, "--trust", "--json", "--limit", "3000"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@dataclasses.dataclass(frozen=True)
class Pod:
    """configs/pod-fsdp.yaml on the chips of a topology, in its own sizes or smaller ones."""

    topology: str = "v5e:16x16"
    width: int = 4096
    hidden: int = 16384
    rows: int = 32  # on each device
    words: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return Topology.of(self.topology).devices

    @property
    def kept(self) -> int:
        """Bytes of a layer that its gradients need: its input, an activation and a mask."""
        return self.rows * (2 * self.width + (2 + 1) * self.hidden)

    @property
    def at_rest(self) -> int:
        """Bytes of its part of the weights as they are gathered, in bfloat16, and of the gradients."""
        return 2 * self.width * self.hidden // self.devices * (2 + 4)

    @property
    def whole(self) -> int:
        """Bytes of a weight that is gathered, in bfloat16, and of the gradient of one before it is scattered."""
        return self.width * self.hidden * (2 + 4)

    def temporaries(self, depth: int) -> tuple[int, int]:
        sizes = f"features: {self.width}"
        words = [
            f"jshard.train.model={{path: examples.pod:Model, depth: {depth}, {sizes}, hidden: {self.hidden}}}",
            f"jshard.train.data={{path: examples.pod:data, {sizes}}}",
            f"jshard.train.batch={self.rows * self.devices}",
        ]
        topology = "--topology", self.topology
        return temporaries_of(typed("configs/pod-fsdp.yaml", *words, *self.words, *topology))


SMALL = Pod("v5e:2x4", 1024, 4096, 256, ("jshard.mesh.data=4", "jshard.mesh.tensor=2"))


def temporaries_of(found: dict[str, Any]) -> tuple[int, int]:
    """Bytes of temporaries at the peak, with what is in VMEM then, and the compiler's own sum."""
    memory = found["memory"]
    arguments, results, temporaries, _ = memory["parts"].values()
    return memory["peak"] - arguments - results, temporaries


def pods(depths: list[int], pod: Pod) -> None:
    """What a layer adds. A gathered weight would be as much as both of a layer, whole, in bfloat16."""
    mib = 2**20
    at_rest = f"{pod.at_rest / mib:.2f} MiB of weights and gradients at rest"
    print(f"a layer: {pod.kept / mib:.2f} MiB kept for its gradients, {at_rest}")
    print(f"beside them, whatever the depth, {pod.whole / mib:,.0f} MiB: a weight, gathered, and the gradient of one")
    before: tuple[int, int] | None = None
    for depth in depths:
        peak, temporaries = pod.temporaries(depth)
        account = pod.whole + depth * (pod.kept + pod.at_rest)
        told = f", {(peak - before[1]) / (depth - before[0]) / mib:.2f} MiB for each more" if before else ""
        before = depth, peak
        sizes = f"{peak / mib:,.0f} MiB of temporaries at the peak, {account / mib:,.0f} of them these{told}"
        sizes += f"; the compiler's sum {temporaries / mib:,.0f}"
        print(f"pod-fsdp on {pod.topology}, {depth:3} layers: {sizes}", flush=True)


_SHORT = "jshard.train.data.length=1024"
_TENSOR = ("jshard.mesh.data=4", "jshard.mesh.tensor=4", "_split.sequence=tensor")
# What is typed, the chips, and the best modelled step of MaxText 0.2.5 (jax 0.12.0.1, libtpu 0.0.50.1; remat full or
# minimal, XLA's windowed products on or off) by the same walk, in milliseconds, with its temporaries in MiB.
DECODERS: dict[str, tuple[tuple[str, ...], str, float, int]] = {
    "fsdp 16": ((), "v5e:4x4", 121.7, 2184),
    "fsdp 16, remat: full": (("_layer.remat=full",), "v5e:4x4", 121.7, 2184),
    "fsdp 16, 1,024 tokens": ((_SHORT,), "v5e:4x4", 68.4, 662),
    "the same, products kept": ((_SHORT, "_layer.remat={save: [q, k, v, gate, up, attention]}"), "v5e:4x4", 68.4, 662),
    "tensor, sequence 4 x fsdp 4": (_TENSOR, "v5e:4x4", 131.5, 2254),
    "fsdp 256, remat: full": (
        ("jshard.mesh.data=256", "jshard.train.batch=256", "_layer.remat=full"),
        "v5e:16x16",
        133.2,
        941,
    ),
}


def decoders(names: list[str]) -> None:
    print("configs/decoder/fsdp.yaml, 2,048 tokens a chip, beside MaxText's best; a model, nothing was measured")
    heads = f"{'at the peak':>14}{'temporaries':>14}{'theirs':>12}{'wire':>9}{'work':>9}{'step':>10}"
    print(f"{'':30}{heads}{'theirs':>10}{'of theirs':>10}")
    for name in names:
        words, topology, theirs, held = DECODERS[name]
        found = typed("configs/decoder/fsdp.yaml", *words, "--topology", topology)
        parts = collections.Counter[str]()
        for part in found["time"]["parts"]:
            parts[part["name"]] += 1e3 * part["seconds"]
        step, (peak, memory) = 1e3 * found["time"]["seconds"], (size / 2**20 for size in temporaries_of(found))
        times = f"{parts['wire']:6.1f} ms{parts['work']:6.1f} ms{step:7.1f} ms{theirs:7.1f} ms"
        print(f"{name:30}{peak:10,.0f} MiB{memory:10,.0f} MiB{held:8,} MiB{times}{step / theirs:10.2f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description="A step of FSDP on absent chips.")
    parser.add_argument("--topology", default="v5e:4x4,v5p:2x2x4,v6e:4x4", help="several with commas between")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", default="512,1024,4096", help="of x on each chip")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help=f"some of them, with commas between; or {', '.join(WHOLE)}, which keep all on each",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs; a small one of --pod")
    parser.add_argument("--pod", metavar="DEPTHS", help="plan configs/pod-fsdp.yaml with so many layers")
    parser.add_argument("--decoder", metavar="ROWS", help=f"all, or some of: {'; '.join(DECODERS)}")
    asked = parser.parse_args(arguments)
    if asked.decoder:
        decoders(list(DECODERS) if asked.decoder == "all" else asked.decoder.split(";"))
        return
    if asked.pod:
        pods([int(depth) for depth in asked.pod.split(",")], SMALL if asked.quick else Pod())
        return
    layers, all_rows, width = (2, "16", 128) if asked.quick else (asked.layers, asked.rows, asked.width)
    for topology in map(Topology.of, asked.topology.split(",")):
        for rows in map(int, all_rows.split(",")):
            print(f"{topology}, {layers} layers of {width:,}, {rows:,} rows a chip")
            heads = f"{'wire':>14}{'temporaries':>14}{'not hidden':>11}{'work':>14}{'step':>13}"
            print(f"{'':12}{heads}{'of first':>9}{'of bound':>9}")
            first = None
            for way in asked.ways.split(","):
                made = planned(way, topology, layers, rows, width)
                first = first or made
                print(line(way, made, first, 6 * 2 * rows * width * 4 * width * layers), flush=True)


if __name__ == "__main__":
    main()
