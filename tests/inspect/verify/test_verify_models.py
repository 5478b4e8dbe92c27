"""Models of plain Flax and of others under claims: every array is proven bitwise; a claim that does not fit, and a fault in the
partition itself, are named with their line."""

from __future__ import annotations

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jshard
from jshard.kernels.all_reduction import all_reduce
from jshard.layers import ring
from jshard.layers.partition import lookup, part, run, shape
from tests.support.qwen3 import qwen3
from tests.support.two_blocks import (
    DECODER,
    IMAGES,
    QWEN3,
    TEXT,
    TOKENS,
    VIT,
    Decoder,
    ViT,
    also,
    cross_entropy,
    of_qwen3,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    jshard.unload()


def verified(text, model, *batch, f=cross_entropy, **more):
    Path("model.yaml").write_text(text)
    jshard.load("model.yaml")
    return jshard.verify(jshard.shard(f), model(nnx.Rngs(0)), *batch, **more)


def all_bitwise(found, count, zero=()):
    """Every one of them, and none that shows nothing but those known to be zero."""
    assert [each.name for each in found.findings if each.verdict != "bitwise"] == [], str(found)
    assert [each.name for each in found.findings if each.zero] == [f"gradient of model.{name}" for name in zero], str(
        found
    )
    assert len(found.findings) == count, str(found)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        DECODER,
        also(also(DECODER, "sequence", "tensor"), "store", "data").replace(
            'sequence: tensor, match: ["**"]', 'match: ["**"]'
        ),
    ],
    ids=["tensor", "tensor, sequence and FSDP"],
)
def test_two_blocks_of_a_decoder_are_bitwise(text):
    found = verified(text, Decoder, *TEXT)
    assert all_bitwise(found, 1 + 2 * 10 + 3)
    rows = {each.name: (each.cause.signal, str(each.cause.place)) for each in found.findings}
    assert rows["gradient of model.blocks.1.attention.o.kernel"] == ("sums", "model.yaml:3")
    assert rows["gradient of model.norm.scale"] == ("rest", "model.yaml:7")


@pytest.mark.slow
@pytest.mark.parametrize("text", [VIT, also(VIT, "store", "data")], ids=["tensor", "tensor and FSDP"])
def test_two_blocks_of_a_vision_transformer_are_bitwise(text):
    zero = [f"blocks.{n}.attention.key.bias" for n in range(2)]  # softmax takes no notice of it
    assert all_bitwise(verified(text, ViT, *IMAGES), 1 + 1 + 2 * 16 + 8, zero)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # it takes names that JAX is going to remove
def test_two_blocks_of_qwen3_are_bitwise(extra):
    assert all_bitwise(verified(QWEN3, lambda rngs: qwen3(extra, 4), *TOKENS, f=of_qwen3), 26)


# -- faults of the partition --


class Small(nnx.Module):
    """A product that is summed over devices, behind one that is split, and a lookup before both."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.up, self.down = (nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in ((8, 16), (16, 8)))

    def __call__(self, tokens):
        return nnx.log_softmax(self.down(nnx.silu(self.up(self.embed(tokens)))))


SMALL = """\
jshard: {mesh: {data: 2, tensor: 2}}
up: {row: data, column: tensor, match: ["up/**"]}
down: {row: data, reduction: tensor, match: ["down/**"]}
table: {row: data, reduction: tensor, match: ["embed/**"]}
"""


def first_part(x, names, op="sum", **more):
    """What is the same everywhere, and yet no sum: the part of the first device."""
    mine = jnp.where(lax.axis_index(names) == 0, x, 0)
    return lax.psum(mine, names) if op == "sum" else all_reduce(x, names, op=op)


def summed_twice(x, names, op="sum", **more):
    x = all_reduce(x, names, op=op)
    return lax.psum(lax.pcast(x, names, to="varying"), names) if op == "sum" else x


def unmarked(x, names, *_):
    """It varies, as its type says, and its gradient is that of the first device."""
    missing = tuple(sorted(names - jax.typeof(x).mat.varying))

    @jax.custom_vjp
    def marked(x):
        return lax.pcast(x, missing, to="varying")

    marked.defvjp(lambda x: (marked(x), None), lambda _, g: (first_part(g, missing),))
    return marked(x) if missing and jnp.issubdtype(x.dtype, jnp.inexact) else x


def next_rank(names, size, sizes, dtype):
    return (shape.first(names, size, sizes, dtype) + size) % (size * sizes[names[0]])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("module", "name", "fault", "signal", "phase", "looks"),
    [
        (run, "all_reduce", first_part, None, "forward", "values differ"),  # every sum is wrong, and no place told
        (run, "all_reduce", summed_twice, "table", "forward", "2 times too large"),
        (part, "vary", unmarked, "up", "backward", ""),
        (lookup, "first", next_rank, "table", "forward", ""),
    ],
    ids=["a sum left out", "a sum taken twice", "x not marked", "another device's rows"],
)
def test_a_fault_in_the_partition_is_caught(monkeypatch, module, name, fault, signal, phase, looks):
    monkeypatch.setattr(module, name, fault)
    tokens = jnp.array([[0, 1], [2, 9], [3, 10], [4, 5]])  # of rows on either device
    found = verified(SMALL, Small, tokens, f=lambda model, tokens: (model(tokens) ** 2).sum())
    assert not found.ok, str(found)
    (begin,) = found.beginnings
    assert begin.cause.phase == phase and looks in begin.looks, str(found)
    assert signal is None or (begin.cause.signal, begin.cause.place.source) == (signal, "model.yaml"), str(found)


@pytest.mark.seconds
def test_a_softmax_that_is_not_corrected_on_its_way_round_a_ring_is_not_equal(monkeypatch):
    """The largest score stands as 0, so that it cancels: by the true operations it has to, too."""
    jshard.load({"jshard": {"mesh": {"data": 2, "ring": 4}}, "all": {"row": "data", "ring": "ring", "match": ["**"]}})
    tokens = np.random.default_rng(0).integers(0, 16, (4, 16)).astype(np.int32)

    def verified():
        model = jshard.Decoder(vocabulary=16, width=16, depth=1, heads=2, hidden=32, rngs=nnx.Rngs(0))
        return jshard.verify(jshard.shard(lambda model, tokens: jnp.mean(model(tokens) ** 2)), model, tokens)

    verdicts = {each.verdict for each in verified().findings}
    assert verdicts == {"bitwise"}
    faded = lambda x: jnp.exp(x) if x.ndim == 5 else jnp.ones_like(x)
    monkeypatch.setattr(ring, "jnp", types.SimpleNamespace(**{**vars(jnp), "exp": faded}))
    assert {each.verdict for each in verified().findings} == {"differs"}
