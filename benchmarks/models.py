"""Other people's models by `jshard.shard`, a line for each under each plan: how far its loss, its gradients and a
step of decoding, where it has one, are from one device's, what is gathered that is no parameter, and the wire against that of
XLA's partitioner for arrays that lie alike.

    python -m benchmarks.models [MODEL ...] [--plans data,fsdp] [--topology v5e:2x4] [--no-wire]

The models, their batches and plans are the tables of tests/support/other_models.py (NNX) and
tests/support/linen_models.py (Linen: functions of `params`). `make all` installs most of their packages;
canvit-nnx==0.2.0, canvit-core==0.2.1 and heal-swin-nnx==0.2.0, which ask for Python 3.12, go in by
`pip install --no-deps`.
Numbers are those of eight pretended CPU devices, for tiny models; the wire is that of larger ones on absent TPUs (`pip install
"jshard[tpu]"`), in bytes of each device for a loss and its gradients. A line is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard
from tests.support import linen_models
from tests.support.other_models import MODELS, TINY, Size

WIDE = Size(tokens=64, width=128, words=512)  # TPUs pad what is smaller, and sum what is scattered
MOVES = ("all_gather", "all_to_all", "permute")
OF_THE_PLAN = ("store", "sequence", "column")  # the last where a kernel of several is cut
HEADINGS = f"{'model':12}{'plan':21}{'loss':>9}{'gradients':>11}{'decode':>9}{'gathers':>9}{'wire':>13}{'XLA':>13}{'of XLA':>8}"


def deviation(wanted: Any, got: Any) -> float:
    """The largest difference between two trees, for each array in parts of its largest number; of one that is zero but for
    rounding, as the gradient of a bias of keys, in thousandths of the largest of all."""
    sizes = [float(np.abs(w).max()) for w in jax.tree.leaves(wanted)]
    each = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), sizes, strict=True)
    return max(float(np.abs(np.asarray(x) - w).max()) / max(size, max(sizes) / 1000) for w, x, size in each)


class Nnx:
    """A model of NNX, its loss and a batch, freshly built: a call may change it."""

    value_and_grad: Any = staticmethod(nnx.value_and_grad)
    jit: Any = staticmethod(nnx.jit)

    def __init__(self, name: str, size: Size):
        adopted, self.name = MODELS[name], name
        self.loss, self.plans, self.model, self.batch = (
            adopted.loss,
            adopted.plans,
            adopted.build(size),
            adopted.batch(size),
        )

    def decoded(self, wrap: Callable[[Any], Any] = lambda f: f) -> Any:
        """What the model's own decoding gives, its function wrapped so; nothing where it has none."""
        adopted = MODELS[self.name]
        return [] if adopted.decode is None else nnx.jit(wrap(adopted.decode))(self.model, *adopted.start())

    def place(self, sharded: Any) -> Any:
        """Return the parameters where they rest, after the model has them there."""
        sharded(self.model, *self.batch)
        return nnx.state(self.model, nnx.Param)


class Linen(Nnx):
    """Parameters of a Linen model, and a loss that takes them."""

    value_and_grad: Any = staticmethod(jax.value_and_grad)
    jit: Any = staticmethod(jax.jit)

    def __init__(self, name: str, size: Size):
        self.made = made = _linen(name, size)
        self.loss, self.plans, self.model = made.loss, made.plans(), made.params
        self.batch = made.batch, jax.random.PRNGKey(0)

    def decoded(self, wrap: Callable[[Any], Any] = lambda f: f) -> Any:
        return self.made.decoded(lambda f: jax.jit(wrap(f)), self.model)

    def place(self, sharded: Any) -> Any:
        self.model = sharded.place(self.model, *self.batch)
        return self.model


@functools.cache
def _linen(name: str, size: Size) -> linen_models.Model:
    """Each that is built draws another batch."""
    return linen_models.MODELS[name](size)


def sized(name: str, size: Size) -> Nnx:
    return Linen(name, size) if name in linen_models.MODELS else Nnx(name, size)


def numbers(name: str, plan: str, alone: Any) -> tuple[list[float | None], int]:
    """How far loss, gradients and decoding are from those `alone`, and how many gathers are not of parameters."""
    found = sized(name, TINY)
    jshard.load(found.plans[plan])
    sharded = jshard.shard(found.loss)
    step = found.value_and_grad(sharded)
    got = found.jit(step)(found.model, *found.batch)
    found.place(sharded)
    got = jax.device_get((*got, found.decoded(jshard.shard)))
    apart = [deviation(w, x) if jax.tree.leaves(w) else None for w, x in zip(alone, got, strict=True)]
    ledger = jshard.explain(lambda model, *batch: step(model, *batch), found.model, *found.batch)
    moves = sum(line.count for line in ledger if line.collective in MOVES and line.cause.key not in OF_THE_PLAN)
    return apart, moves


def _kept(signal: dict[str, Any]) -> dict[str, Any]:
    return signal | {"store": {"parameters": signal["store"], "keep": True}} if "store" in signal else signal


def wire(name: str, plan: str, topology: str) -> tuple[int, int]:
    """Bytes on the wire of each device, by jshard and by the partitioner, which is told how arguments and gradients lie,
    and what `sequence` says of activations. It gathers once what is stored, and keeps it: so does jshard here."""
    found = sized(name, WIDE)
    configuration = {key: _kept(signal) for key, signal in found.plans[plan].items()}
    jshard.load(configuration)
    sharded, on = jshard.shard(found.loss), jshard.mesh()
    specs = jax.tree.map(lambda x: x.sharding.spec, found.place(sharded))
    rows = lambda x: jax.device_put(
        x, jax.NamedSharding(on, jax.P("data" if x.ndim and x.shape[0] == WIDE.rows else None))
    )
    batch = jax.tree.map(rows, found.batch)

    def constrained(model: Any, *batch: Any) -> Any:
        loss, gradients = found.value_and_grad(sharded)(model, *batch)
        place = lambda x, spec: jax.lax.with_sharding_constraint(x, jax.NamedSharding(jshard.mesh(), spec))
        return loss, jax.tree.map(place, gradients, specs)

    ours = jshard.plan(lambda *args: found.value_and_grad(sharded)(*args), found.model, *batch, topology=topology)
    jshard.load({**configuration, "jshard": {**configuration["jshard"], "axis_types": "auto"}})
    theirs = jshard.plan(constrained, found.model, *batch, topology=topology, backward=False)
    return sum(got.total for got in ours.got), sum(got.total for got in theirs.got)


def line(name: str, plan: str, alone: Any, topology: str) -> str:
    apart, moves = numbers(name, plan, alone)
    loss, gradients, decoded = ("-" if each is None else f"{each:.1e}" for each in apart)
    text = f"{name:12}{plan:21}{loss:>9}{gradients:>11}{decoded:>9}{moves:9,}"
    if topology:
        ours, theirs = wire(name, plan, topology)
        text += f"{ours:11,} B{theirs:11,} B{ours / max(theirs, 1):8.2f}"
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Other people's models, sharded.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="some of them; all if none is named")
    parser.add_argument("--plans", default="", help="some of them, with commas between: data,fsdp")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--no-wire", action="store_true", help="compile nothing for absent TPUs")
    asked = parser.parse_args(arguments)
    jshard.pretend(8)
    warnings.simplefilter("ignore", DeprecationWarning)  # these models take names that JAX is going to remove
    print(HEADINGS, flush=True)
    for name in asked.models or (*MODELS, *linen_models.MODELS):
        jshard.unload()
        one = sized(name, TINY)
        decoded = sized(name, TINY).decoded()  # a call may change a model
        alone = jax.device_get((*one.jit(one.value_and_grad(one.loss))(one.model, *one.batch), decoded))
        for plan in [plan for plan in one.plans if plan in (asked.plans or ",".join(one.plans)).split(",")]:
            print(line(name, plan, alone, "" if asked.no_wire else asked.topology), flush=True)


if __name__ == "__main__":
    main()
