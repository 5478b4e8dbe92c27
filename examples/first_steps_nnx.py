"""First steps with a Flax NNX model: a step, its cost, its proof, a file, and the same run on another mesh.

python -m examples.first_steps_nnx
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import jshard

TENSOR, FSDP = "configs/first-steps/tensor.yaml", "configs/first-steps/fsdp.yaml"


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return jshard.cross_entropy(model(x), y)


@jshard.jit
def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = jshard.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(32, 64)).astype(np.float32)
    return x, x[:, :10].argmax(axis=1)


def new() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def report(what: str, losses: list[jax.Array], kernel: jax.Array) -> None:
    part = kernel.addressable_shards[0].data.shape
    print(f"{what}: losses {', '.join(f'{loss:.3f}' for loss in losses)}; a device holds {part} of {kernel.shape}")


def main() -> None:
    jshard.pretend(8)  # leave it out where there are accelerators
    model, optimizer = new()
    report("one device", [step(model, optimizer, *batch(n)) for n in range(6)], model.up.kernel[...])

    jshard.load(TENSOR)
    model, optimizer = new()
    print(jshard.explain(step, model, optimizer, *batch(0)))
    print(jshard.verify(step, model, optimizer, *batch(0)))
    report("tensor", [step(model, optimizer, *batch(n)) for n in range(3)], model.up.kernel[...])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.safetensors"
        jshard.save_weights(nnx.state((model, optimizer)), file)
        jshard.load(FSDP)
        model, optimizer = new()
        nnx.update((model, optimizer), jshard.load_weights(nnx.state((model, optimizer)), file))
    report("then FSDP", [step(model, optimizer, *batch(n)) for n in range(3, 6)], model.up.kernel[...])


if __name__ == "__main__":
    main()
