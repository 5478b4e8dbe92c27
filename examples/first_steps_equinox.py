"""First steps with an Equinox module: a step, its cost, its proof, a file, and the same run on another mesh.

python -m examples.first_steps_equinox
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import numpy as np
import optax

import jshard

TENSOR, FSDP = "configs/first-steps/tensor.yaml", "configs/first-steps/fsdp.yaml"
TX = optax.adam(1e-2)


class Model(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        up, down = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(64, 256, key=up), eqx.nn.Linear(256, 10, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def loss_fn(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return jshard.cross_entropy(jax.vmap(model)(x), y)


@jshard.jit
def step(model: Model, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Model, optax.OptState, jax.Array]:
    loss, grads = jshard.value_and_grad(loss_fn)(model, x, y)
    updates, state = TX.update(grads, state)
    return eqx.apply_updates(model, updates), state, loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(32, 64)).astype(np.float32)
    return x, x[:, :10].argmax(axis=1)


def new() -> tuple[Model, optax.OptState]:
    model = Model(jax.random.key(0))
    return model, TX.init(eqx.filter(model, eqx.is_array))


def train(model: Model, state: optax.OptState, numbers: range) -> tuple[Model, optax.OptState, list[jax.Array]]:
    losses = []
    for number in numbers:
        model, state, loss = step(model, state, *batch(number))
        losses.append(loss)
    return model, state, losses


def report(what: str, losses: list[jax.Array], kernel: jax.Array) -> None:
    part = kernel.addressable_shards[0].data.shape
    print(f"{what}: losses {', '.join(f'{loss:.3f}' for loss in losses)}; a device holds {part} of {kernel.shape}")


def main() -> None:
    jshard.pretend(8)  # leave it out where there are accelerators
    model, state = new()
    model, state, losses = train(model, state, range(6))
    report("one device", losses, model.up.weight)

    jshard.load(TENSOR)
    model, state = new()
    print(jshard.explain(step, model, state, *batch(0)))
    print(jshard.verify(step, model, state, *batch(0)))
    model, state, losses = train(model, state, range(3))
    report("tensor", losses, model.up.weight)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.safetensors"
        jshard.save_weights((model, state), file)
        jshard.load(FSDP)
        model, state = jshard.load_weights(new(), file)
    model, state, losses = train(model, state, range(3, 6))
    report("then FSDP", losses, model.up.weight)


if __name__ == "__main__":
    main()
