"""What is equal on all devices of a mesh axis, and used in parts only: its gradient is not gathered."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard

MOVES = ("all_gather", "all_to_all", "permute", "reduce_scatter")
ROWS = np.random.default_rng(0).normal(size=(8, 16, 16)).astype(np.float32)
CLAIMS = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "up": {"row": "data", "column": "tensor", "sequence": "tensor", "match": ["**/up/**"]},
    "down": {"row": "data", "reduction": "tensor", "sequence": "tensor", "match": ["**/down/**"]},
    "rest": {"row": "data", "match": ["**"]},
}


class Mlp(nnx.Module):
    """A residual block, whose rows of words `sequence` splits."""

    def __init__(self, rngs):
        self.norm, self.up, self.down = (
            nnx.LayerNorm(16, rngs=rngs),
            nnx.Linear(16, 32, rngs=rngs),
            nnx.Linear(32, 16, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Embedded(nnx.Module):
    """Whisper's encoder: a convolution, which needs its neighbours, and what is added for each place, in front of the
    first residual."""

    def __init__(self, rngs):
        self.conv, self.mlp = nnx.Conv(16, 16, 3, rngs=rngs), Mlp(rngs)
        self.places = nnx.Embed(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.mlp(jax.nn.gelu(self.conv(x)) + self.places(jnp.arange(16)))


class Recurrent(nnx.Module):
    """canvit: words behind registers, and once more with a word that the first call left."""

    def __init__(self, rngs):
        self.embed, self.mlp = nnx.Linear(16, 16, rngs=rngs), Mlp(rngs)
        self.first = nnx.Param(jax.random.normal(rngs.params(), (1, 4, 16)))

    def __call__(self, x):
        first = jnp.broadcast_to(self.first[...], (8, 4, 16))
        for at in range(2):
            words = self.mlp(jnp.concatenate([first, self.embed(x[:, 8 * at : 8 * at + 8])], 1))
            first = jnp.concatenate([words[:, :1], first[:, 1:]], 1)
        return words


class Normalized(nnx.Module):
    """heal-swin: what a layer without a claim makes, normalized behind it, and its input once more further on."""

    def __init__(self, rngs):
        self.embed, self.mix, self.mlp = nnx.Conv(4, 16, 1, rngs=rngs), nnx.Conv(16, 16, 1, rngs=rngs), Mlp(rngs)
        self.norm = nnx.LayerNorm(16, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return self.mlp(x + self.norm(self.mix(x))) + x


SCATTER = {("reduce_scatter", "forward", "sequence"): 1, ("all_gather", "backward", "sequence"): 1}
GATHER = {("all_gather", "forward", "sequence"): 1, ("reduce_scatter", "backward", "sequence"): 1}


@pytest.mark.parametrize(("model", "moves"), [
    (Embedded, SCATTER), (Recurrent, dict.fromkeys(SCATTER, 2)), (Normalized, SCATTER | GATHER),
])  # fmt: skip
def test_gradients_of_what_is_used_in_parts_are_not_gathered(model, moves):
    made, rows = model(nnx.Rngs(0)), ROWS[..., :4] if model is Normalized else ROWS
    loss = lambda model, x: jnp.square(model(x)).mean()
    alone = nnx.value_and_grad(loss)(made, rows)
    jshard.load(CLAIMS)
    sharded = jshard.shard(loss)
    sharded(made, rows)  # the parameters are where they rest
    step = nnx.value_and_grad(sharded)
    got = nnx.jit(step)(made, rows)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * float(np.abs(one).max()))
    ledger = jshard.explain(lambda model, x: step(model, x), made, rows)
    found = collections.Counter()
    for line in ledger:
        if line.collective in MOVES:
            found[line.collective, line.phase, line.cause.key] += line.count
    assert found == moves
