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
    found, outer = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        name = line.split(":")[0]
        inside = name.startswith("    ")
        outer = outer if inside else name.strip()
        found[number] = f"{outer}.{name.strip()}" if inside else name.strip()
    return found


def step(layer, optimizer, x):
    def loss(layer, x):
        return jnp.square(layer(x)).sum()

    gradients, of_x = nnx.grad(loss, argnums=(0, 1))(layer, x)
    optimizer.update(layer, gradients)
    return of_x


def named(keys: str, more: str = "", rank: int = 3) -> set[tuple[str, str, str, str]]:
    """Of the collectives of a step that a signal asked for: phase, collective, mesh axes, and the key on the line named."""
    lines = configured(keys, more)
    with jshard.signal("only"):
        layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))
    ledger = explain(step, layer, jshard.Optimizer(layer, optax.sgd(0.1)), jnp.ones((8,) * rank))
    return {
        (line.phase, line.collective, line.axis, lines[line.place.line])
        for line in ledger
        if line.signal.startswith("only")
    }
