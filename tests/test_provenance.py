"""Every collective of a training step, and the key of the configuration that it names; what a user's own scopes can't do."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jshard
from jshard.inspect.ledger import explain
from jshard.signals.active_config import load, unload

D, T = "data", "tensor"
AR, AG, RS, A2A = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    unload()


def configured(keys: str, more: str = "") -> dict[int, str]:
    """Loads a signal "only" with one key a line; the key that stands on each line."""
    head = f"jshard:\n  mesh: {{data: 2, tensor: 4}}\n{more}only:\n"
    text = head + "".join(f"  {line}\n" for line in keys.splitlines())
    with open("one.yaml", "w") as file:
        file.write(text)
    load("one.yaml")
    found, outer = {}, ["", ""]
    for number, line in enumerate(text.splitlines(), 1):
        name = line.split(":")[0]
        depth = (len(name) - len(name.strip())) // 2
        outer[depth:] = [name.strip()]
        found[number] = ".".join(outer).removeprefix("only.")
    return found


def step(layer, optimizer, x):
    def loss(layer, x):
        return jnp.square(layer(x)).sum()

    gradients, of_x = nnx.grad(loss, argnums=(0, 1))(layer, x)
    optimizer.update(layer, gradients)
    return of_x


def named(keys: str, rank: int = 3) -> set[tuple[str, str, str, str]]:
    """Of the collectives of a step that a signal asked for: phase, collective, mesh axes, and the key on the line named."""
    lines = configured(keys, OTHER if "other" in keys else "")
    with jshard.signal("only"):
        layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))
    ledger = explain(step, layer, jshard.Optimizer(layer, optax.sgd(0.1)), jnp.ones((8,) * rank))
    return {
        (line.phase, line.collective, line.axis, lines[line.place.line])
        for line in ledger
        if line.signal.startswith("only")
    }


# -- one key a line: the line named is that of the key --

OTHER = "other:\n  row: [data, tensor]\n"
DTYPE = "dtype:\n  compute: bfloat16\n  reduce: float32"
F, B, U = "forward", "backward", "update"
# x comes in whole, so that its gradient is gathered over what splits it
X_ROW, X_SEQUENCE = (B, AG, D, "row"), (B, AG, T, "sequence")
GATHERED = {(F, AG, T, "sequence"), (B, RS, T, "sequence"), X_SEQUENCE}
STORED = {(F, AG, D, "store"), (B, RS, D, "store"), X_ROW}
SHARDED = {(F, AG, D, "shard"), (B, RS, D, "shard"), (B, AG, D, "shard")}
KEYS: dict[str, tuple[str, set[tuple[str, str, str, str]]]] = {
    "row": ("row: data", {(B, AR, D, "row"), X_ROW}),
    "column": ("column: tensor", {(B, AR, T, "column")}),
    "reduction": ("reduction: tensor", {(F, AR, T, "reduction"), (B, AG, T, "reduction")}),
    "row and column": ("column: tensor\nrow: data", {(B, AR, D, "row"), (B, AR, T, "column"), X_ROW}),
    "sequence": ("sequence: tensor", {(B, AR, T, "sequence"), X_SEQUENCE}),
    "sequence of columns": ("column: tensor\nsequence: tensor", GATHERED),
    "sequence of a reduction": (
        "reduction: tensor\nsequence: tensor",
        {(F, RS, T, "sequence"), (B, AG, T, "sequence"), (B, AR, T, "sequence"), (B, AG, T, "reduction")},
    ),
    "sequence before row": ("sequence: tensor\nrow: data", {(B, AR, "data, tensor", "row"), X_ROW, X_SEQUENCE}),
    "store": ("row: data\nstore: data", STORED),
    "store alone": ("store: data", {(F, AG, D, "store")}),
    "store of a sequence": (
        "sequence: data\nstore: data",
        {(F, AG, D, "store"), (B, RS, D, "store"), (B, AG, D, "sequence")},
    ),
    "store of the optimizer": (
        "row: data\nstore:\n  optimizer: data",
        {(B, AR, D, "row"), X_ROW, (U, AG, D, "store.optimizer")},
    ),
    "output: gather": ("column: tensor\noutput: gather", {(F, AG, T, "output"), (B, AR, T, "column")}),
    "output: scatter": (
        "reduction: tensor\noutput: scatter",
        {(F, RS, T, "output"), (B, AG, T, "output"), (B, AR, T, "reduction"), (B, AG, T, "reduction")},
    ),
    "output: sum": (
        "reduction: tensor\nsequence: tensor\noutput: sum",
        {(F, AR, T, "output"), (B, AG, T, "reduction")},
    ),
    "shard of rows": ("shard:\n  axis: 0\n  mesh: data", SHARDED),
    "shard of columns": ("shard:\n  axis: 1\n  mesh: tensor", {(B, AR, T, "shard")}),
    "backward": (
        "row: data\ncolumn: tensor\nbackward: other",
        {(B, A2A, T, "backward"), (B, AG, T, "backward"), (B, AR, "data, tensor", "other.row"), (B, AG, D, "backward")},
    ),
    "dtype.reduce": (f"row: data\ncolumn: tensor\n{DTYPE}", {(B, AR, D, "row"), (B, AR, T, "column"), X_ROW}),
    "dtype.reduce of what is stored": (f"row: data\nstore: data\n{DTYPE}", STORED),
    "dtype.reduce of a sequence": (f"column: tensor\nsequence: tensor\n{DTYPE}", GATHERED),
    "remat": ("column: tensor\nsequence: tensor\nremat: true", {*GATHERED, (B, AG, T, "remat")}),
    "remat of what is stored": ("row: data\nstore: data\nremat: true", {*STORED, (B, AG, D, "remat")}),
    "kernel": (
        "column: tensor\nkernel:\n  all_reduce: in_order\nreduction: data\nsequence: data",
        {(F, RS, D, "sequence"), (B, AG, D, "sequence"), (B, A2A, T, "column"), (B, AR, D, "sequence"), (B, AG, D, "reduction")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_collective_names_the_line_of_the_key_that_asks(name):
    keys, expected = KEYS[name]
    assert named(keys) == expected
