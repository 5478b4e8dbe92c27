"""Random programs without a fault verify: layers of jshard's by strategies, meshes, dtypes and what surrounds them; and those
that `make fuzz-programs` draws.

`make verify-random` runs 200 of each; here are the first few. Each is drawn from a seed, so that a failure is found again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.inspect.verify import verify
from jshard.signals.active_config import unload
from tests.support import fuzz_programs
from tests.support.random_programs import Writer, program

EXAMPLES = int(os.environ.get("JSHARD_VERIFY_EXAMPLES", "4"))
FEATURES = 16

# Of one product, by letters: d is data, t tensor, p pipe.
LOOPS: list[dict[str, Any]] = [
    {}, {"row": "d"}, {"column": "t"}, {"reduction": "t"}, {"row": "d", "column": "t"}, {"row": "d", "reduction": "t"},
    {"row": "dt"}, {"reduction": "dt"}, {"column": "dt"}, {"row": "d", "column": "t", "reduction": "p"},
    {"row": "p", "column": "dt"}, {"column": "t", "output": "gather"}, {"row": "d", "column": "t", "output": "gather"},
    {"reduction": "t", "output": "scatter"}, {"row": "d", "reduction": "t", "output": "scatter"},
    {"column": "t", "sequence": "t"}, {"reduction": "t", "sequence": "t"}, {"row": "d", "column": "t", "sequence": "t"},
    {"row": "d", "reduction": "t", "sequence": "t"}, {"row": "d", "store": "d"}, {"row": "dt", "store": "dt"},
    {"row": "dt", "store": "d"}, {"row": "d", "column": "t", "store": "d"}, {"row": "d", "reduction": "t", "store": "d"},
    {"row": "d", "store": {"optimizer": "d"}}, {"row": "d", "column": "t", "backward": "other"},
]  # fmt: skip
MORE: list[dict[str, Any]] = [
    {}, {}, {}, {"remat": True}, {"dtype": {"compute": "bfloat16"}}, {"dtype": {"reduce": "bfloat16"}},
    {"dtype": {"compute": "bfloat16", "reduce": "float32"}}, {"dtype": {"param": "bfloat16"}},
    {"dtype": {"compute": "float16", "reduce": "float32"}},
]  # fmt: skip
MESHES = [
    {"data": 8}, {"data": 2, "tensor": 4}, {"data": 4, "tensor": 2}, {"data": 1, "tensor": 2}, {"data": 2, "tensor": 2, "pipe": 2},
]  # fmt: skip
RESULTS = {  # no scalars
    "rows": lambda y: y,
    "maxima": lambda y: jshard.max(y.astype(jnp.float32), axis=-1),
    "columns": lambda y: {"sum": jshard.sum(y.astype(jnp.float32), axis=0), "squares": y**2},
}
LETTERS = {"d": "data", "t": "tensor", "p": "pipe"}
ACTIVATIONS = {"relu": nnx.relu, "gelu": nnx.gelu, "tanh": jnp.tanh, "silu": nnx.silu, "none": lambda x: x}
LOSSES = {
    "squares": lambda y: jshard.mean(y.astype(jnp.float32) ** 2),
    "softmax": lambda y: -jshard.mean(jax.nn.log_softmax(y.astype(jnp.float32))),
    "sum of maxima": lambda y: jshard.sum(jshard.max(y.astype(jnp.float32), axis=-1)),
}


def uses(keys: dict[str, Any]) -> set[str]:
    """The letters of the mesh axes that it names."""
    words = [part for word in keys.values() for part in (word.values() if isinstance(word, dict) else [word])]
    return {letter for word in words if isinstance(word, str) and set(word) <= set(LETTERS) for letter in word}


def spelled(keys: dict[str, Any]) -> dict[str, Any]:
    def names(word: Any) -> Any:
        if isinstance(word, dict):
            return {key: names(each) for key, each in word.items()}
        return [LETTERS[letter] for letter in word] if isinstance(word, str) and set(word) <= set(LETTERS) else word

    return {key: names(word) if key != "dtype" else word for key, word in keys.items()}


@dataclasses.dataclass(frozen=True)
class Random:
    mesh: dict[str, int]
    axis_types: str
    layers: tuple[tuple[str, dict[str, Any]], ...]  # Linear, MLP, matmul or unsigned, and the keys of its signal
    activation: str
    dropout: bool
    rank: int
    loss: str
    around: str  # loss, jit, remat, train: a step with adamw, sgd: one with sgd
    rows: str | None = None  # the mesh axis that splits the rows of x


def layers(seed: int) -> Random:
    """Random layers of jshard's, under random strategies."""
    draw = Writer(seed)
    mesh = draw.one(MESHES)
    here = {letter for letter, name in LETTERS.items() if name in mesh}
    loops = [keys for keys in LOOPS if uses(keys) <= here]
    layer = lambda: (
        draw.one(["Linear", "Linear", "MLP", "matmul", "unsigned"]),
        draw.one(loops) | draw.one(MORE),
    )
    around = draw.one(["loss", "loss", "jit", "remat", "train", "sgd"])
    return Random(
        mesh,
        draw.one(["explicit", "explicit", "auto"]),
        tuple(layer() for _ in range(draw.one([1, 2]))),
        draw.one(list(ACTIVATIONS)),
        draw.chance(0.5),
        draw.one([2, 3]),
        draw.one([*LOSSES, *(RESULTS if around in ("loss", "jit", "remat") else ())]),
        around,
        draw.one([None, "data"]),
    )


class Model(nnx.Module):
    def __init__(self, said: Random, rngs: nnx.Rngs):
        self.said = said
        self.layers = nnx.List([])
        for number, (kind, keys) in enumerate(said.layers):
            with jshard.signal(f"layer{number}"):
                if kind == "Linear":
                    self.layers.append(jshard.Linear(FEATURES, FEATURES, rngs=rngs))
                elif kind == "MLP":
                    self.layers.append(jshard.MLP(FEATURES, FEATURES, FEATURES, rngs=rngs))
                else:
                    w = nnx.initializers.lecun_normal()(rngs.params(), (FEATURES, FEATURES))
                    if kind == "unsigned":  # lies as the signal says, and runs outside of it
                        where = spelled(keys)
                        spec = P(*(tuple(where.get(loop, ())) or None for loop in ("reduction", "column")))
                        w = jax.device_put(w, jax.NamedSharding(jshard.mesh(), spec))
                    self.layers.append(nnx.Param(w))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for number, ((kind, _), layer) in enumerate(zip(self.said.layers, self.layers, strict=True)):
            with contextlib.nullcontext() if kind == "unsigned" else jshard.signal(f"layer{number}"):
                x = jshard.matmul(x, layer[...]) if kind in ("matmul", "unsigned") else layer(x)
            x = ACTIVATIONS[self.said.activation](x)
            if self.said.dropout and not number:
                x = self.dropout(x)
        return x


def checked(said: Random) -> Any:
    """The verification of a program, on its mesh."""
    signals: dict[str, Any] = {}
    for number, (kind, keys) in enumerate(said.layers):
        name = f"layer{number}"
        signals[name] = spelled(keys)
        if kind == "MLP":  # its two products are the words up and down of the signal
            signals |= {f"{name}/up": spelled(keys), f"{name}/down": spelled(keys)}
    jshard.load({"jshard": {"mesh": said.mesh, "axis_types": said.axis_types}, "other": {"row": "data"}, **signals})
    try:
        model = Model(said, nnx.Rngs(0))
        shape = (8, 8, FEATURES)[-said.rank :] if said.rank == 3 else (8, FEATURES)
        x = jax.device_put(np.ones(shape, np.float32), jax.NamedSharding(jshard.mesh(), P(said.rows)))

        def loss(model, x):
            return (LOSSES | RESULTS)[said.loss](model(x))

        def train(model, optimizer, x):
            value, gradients = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, gradients)
            return value

        if said.around in ("train", "sgd"):
            tx = optax.adamw(1e-3) if said.around == "train" else optax.sgd(0.1, momentum=0.9)
            return verify(train, model, jshard.Optimizer(model, tx), x)
        wrap = {"loss": lambda f: f, "jit": nnx.jit, "remat": nnx.remat}[said.around]
        return verify(wrap(loss), model, x)
    finally:
        unload()


# A maximum and relu switch where rounding in bfloat16 may fall to either side: no fault, however far the gradients are off.
FLIPS = Random(
    {"data": 2, "tensor": 4}, "explicit",
    (("Linear", {"row": "d", "store": "d"}), ("MLP", {"reduction": "t", "output": "scatter", "dtype": {"compute": "bfloat16"}})),
    "relu", True, 3, "sum of maxima", "loss",
)  # fmt: skip
# A result that is no scalar, of a product that no signal splits: it was NOT EQUAL.
UNSIGNED = Random({"data": 8}, "explicit", (("unsigned", {"column": "d"}),), "none", False, 2, "rows", "loss")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("said", [FLIPS, UNSIGNED, *map(layers, range(EXAMPLES))], ids=str)
def test_random_layers_without_a_fault_verify(said):
    verification = checked(said)
    assert verification.ok, str(verification)
    if not any("dtype" in keys for _, keys in said.layers):  # eight bits can't hold every sum of 64 rows
        assert {finding.verdict for finding in verification.findings} == {"bitwise"}, str(verification)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_random_programs_without_a_fault_verify(seed):
    said = program(seed)
    jshard.load(said.configuration)
    try:
        verification = verify(jshard.shard(said.function()), *said.data())
        assert verification.ok, f"{verification}\n{said}"
    except JShardError as refused:
        assert fuzz_programs.outcome(said).kind == "refused", f"{refused}\n{said}"
    finally:
        unload()
