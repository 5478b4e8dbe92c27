"""First steps with a dict of parameters: a step, its cost, its proof, a file, and the same run on another mesh.

python -m examples.first_steps_dict
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jshard

TENSOR, FSDP = "configs/first-steps/tensor.yaml", "configs/first-steps/fsdp.yaml"
TX = optax.adam(1e-2)
Params = dict[str, dict[str, jax.Array]]


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    x = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jshard.cross_entropy(x @ params["down"]["kernel"] + params["down"]["bias"], y)


@jshard.jit
def step(params: Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Any, optax.OptState, jax.Array]:
    loss, grads = jshard.value_and_grad(loss_fn)(params, x, y)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(32, 64)).astype(np.float32)
    return x, x[:, :10].argmax(axis=1)


def new() -> tuple[Params, optax.OptState]:
    draw = np.random.default_rng(0)
    params = {
        name: {
            "kernel": jnp.array(draw.normal(size=(rows, columns), scale=rows**-0.5), jnp.float32),
            "bias": jnp.zeros(columns),
        }
        for name, rows, columns in (("up", 64, 256), ("down", 256, 10))
    }
    return params, TX.init(params)


def train(params: Params, state: optax.OptState, numbers: range) -> tuple[Params, optax.OptState, list[jax.Array]]:
    losses = []
    for number in numbers:
        params, state, loss = step(params, state, *batch(number))
        losses.append(loss)
    return params, state, losses


def report(what: str, losses: list[jax.Array], kernel: jax.Array) -> None:
    part = kernel.addressable_shards[0].data.shape
    print(f"{what}: losses {', '.join(f'{loss:.3f}' for loss in losses)}; a device holds {part} of {kernel.shape}")


def main() -> None:
    jshard.pretend(8)  # leave it out where there are accelerators
    params, state = new()
    params, state, losses = train(params, state, range(6))
    report("one device", losses, params["up"]["kernel"])

    jshard.load(TENSOR)
    params, state = new()
    print(jshard.explain(step, params, state, *batch(0)))
    print(jshard.verify(step, params, state, *batch(0)))
    params, state, losses = train(params, state, range(3))
    report("tensor", losses, params["up"]["kernel"])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.safetensors"
        jshard.save_weights((params, state), file)
        jshard.load(FSDP)
        params, state = jshard.load_weights(new(), file)
    params, state, losses = train(params, state, range(3, 6))
    report("then FSDP", losses, params["up"]["kernel"])


if __name__ == "__main__":
    main()
