"""First steps with a Linen model and a TrainState: a step, its cost, its proof, a file, and the same run on another mesh.

python -m examples.first_steps_linen
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jshard

TENSOR, FSDP = "configs/first-steps/tensor.yaml", "configs/first-steps/fsdp.yaml"


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10, name="down")(nn.relu(nn.Dense(256, name="up")(x)))


@jshard.jit
def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return jshard.cross_entropy(state.apply_fn({"params": params}, x), y)

    loss, grads = jshard.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(32, 64)).astype(np.float32)
    return x, x[:, :10].argmax(axis=1)


def new() -> TrainState:
    model = Model()
    params = model.init(jax.random.key(0), batch(0)[0])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def train(state: TrainState, numbers: range) -> tuple[TrainState, list[jax.Array]]:
    losses = []
    for number in numbers:
        state, loss = step(state, *batch(number))
        losses.append(loss)
    return state, losses


def report(what: str, losses: list[jax.Array], kernel: Any) -> None:
    part = kernel.addressable_shards[0].data.shape
    print(f"{what}: losses {', '.join(f'{loss:.3f}' for loss in losses)}; a device holds {part} of {kernel.shape}")


def main() -> None:
    jshard.pretend(8)  # leave it out where there are accelerators
    state = new()
    state, losses = train(state, range(6))
    report("one device", losses, state.params["up"]["kernel"])

    jshard.load(TENSOR)
    state = new()
    print(jshard.explain(step, state, *batch(0)))
    print(jshard.verify(step, state, *batch(0)))
    state, losses = train(state, range(3))
    report("tensor", losses, state.params["up"]["kernel"])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.safetensors"
        jshard.save_weights(state, file)
        jshard.load(FSDP)
        state = jshard.load_weights(new(), file)
    state, losses = train(state, range(3, 6))
    report("then FSDP", losses, state.params["up"]["kernel"])


if __name__ == "__main__":
    main()
