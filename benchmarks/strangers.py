"""Other people's models under FSDP in one line, and under tensor parallelism with FSDP on a 2x4 mesh, against one device.

    pip install --no-deps --target strangers $(python -m benchmarks.strangers --packages)
    PYTHONPATH=strangers JAX_DISABLE_MOST_OPTIMIZATIONS=1 python -m benchmarks.strangers [MODEL ...]

Each model is as its package has it, with tiny sizes and parameters moved away from what they start with. A row of the table in
docs/your-model.md says that value and every gradient equal those of one device, or the one sentence that refuses the model.
Half an hour on two cores; `[MODEL ...]` are names of `MODELS`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard
from benchmarks.models_of_strangers import MODELS, NEEDED, PACKAGES, Stranger, inexact

FSDP = {"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "store": "data", "match": ["**"]}}
TOLERANCE = 1e-3  # of the largest number of each gradient


def numbers(found: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(found) if inexact(x)]


def value_and_grad(model: Any, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    if isinstance(model, nnx.Module):
        return nnx.jit(nnx.value_and_grad(loss))
    return jax.jit(jax.value_and_grad(loss))


def outcomes(stranger: Stranger, layouts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield of each layout that the model equals one device, or what came instead."""
    jshard.unload()
    with nnx.use_eager_sharding(False):  # else an annotated model asks for a mesh
        loss, model, batch = stranger.build()
    expected = numbers(value_and_grad(model, loss)(model, *batch))
    for name, configuration in layouts.items():
        jshard.load(configuration)
        try:
            loss, model, batch = stranger.build()
            yield name, _outcome(loss, model, batch, expected)
        except jshard.JShardError as error:
            yield name, f"refused: {error}".splitlines()[0]
        finally:
            jshard.unload()


def _outcome(loss: Callable[..., jax.Array], model: Any, batch: tuple[Any, ...], expected: list[np.ndarray]) -> str:
    sharded = jshard.shard(loss)
    placed = sharded.place(model, *batch)
    model = model if isinstance(model, nnx.Module) else placed
    found = numbers(value_and_grad(model, sharded)(model, *batch))
    scale = max(np.abs(each).max(initial=0) for each in expected)
    pairs = zip(found, expected, strict=True)
    worst = max(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-3 * scale) for a, b in pairs)
    return "equal" if worst < TOLERANCE else f"DIFFERS by {worst:.1e}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--packages", action="store_true", help="print the packages that the models are in")
    chosen = parser.parse_args(words)
    if chosen.packages:
        print(*PACKAGES.split(), *NEEDED.split())
        return
    jshard.pretend(8)
    warnings.simplefilter("ignore")  # the models call what JAX is going to remove, and `store` names what it replicates
    print("| package | model | fsdp | tensor and fsdp |\n|---|---|---|---|")
    versions = {name: version for name, _, version in (each.partition("==") for each in PACKAGES.split())}
    for name in chosen.models or MODELS:
        found: dict[str, str] = {}
        layouts = {"fsdp": FSDP, "tensor and fsdp": MODELS[name].tensor()}
        try:
            for layout, outcome in outcomes(MODELS[name], layouts):
                found[layout] = outcome
        except Exception as error:  # a fault of jshard's, of JAX's or of the package: the row names it
            found |= {
                each: f"FAULT {type(error).__name__}: {error}".splitlines()[0] for each in layouts if each not in found
            }
        package = MODELS[name].package
        print(f"| {package} {versions[package]} | {name} | {' | '.join(found[each] for each in layouts)} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
