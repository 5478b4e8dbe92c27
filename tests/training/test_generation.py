"""`jshard.generate`: the tokens that a model would choose by itself, the same on every mesh, by a cache that is split and donated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.training import generation
from jshard.training.generation import Sampling, Writer

SIZES = {"vocabulary": 64, "width": 32, "depth": 2, "heads": 8, "kv_heads": 4, "hidden": 64, "dropout": 0.1}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [11]]
PLACED = "configs/decoder/placement.yaml"
HEAD = {"head": {"extends": "_split", "column": "tensor", "match": ["head/**"]}}
MESHES = {
    "2x4": ("_split.sequence=tensor",), "2x4 whole": ("_split={row: data}", "rest={row: data, match: ['**']}"),
    "8": ("jshard.mesh={data: 8, tensor: 1}",), "1": ("jshard.mesh={data: 1, tensor: 1}",),
}  # fmt: skip
DRAWN = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 3}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(generation, "ROOM", 8)


def decoder(mesh=None):
    if mesh is None:
        jshard.unload()
        return jshard.Decoder(SIZES, rngs=nnx.Rngs(0))
    jshard.load({"jshard": {"include": PLACED}, **HEAD}, MESHES[mesh])
    return jshard.shard(jshard.Decoder(SIZES, rngs=nnx.Rngs(0)), np.zeros((8, 8), np.int32))


def written(model, **how):
    return [list(each) for each in zip(*jshard.generate(model, PROMPTS, tokens=6, **how), strict=True)]


@functools.cache
def alone(drawn=False):
    return written(decoder(), **(DRAWN if drawn else {}))


def test_greedy_tokens_are_those_of_the_whole_text_read_anew_for_each():
    model = nnx.view(decoder(), deterministic=True)
    for prompt, found in zip(PROMPTS, alone(), strict=True):
        text = list(prompt)
        for _ in found:
            text.append(int(jnp.argmax(model(np.array([text], np.int32))[0, -1])))
        assert text[len(prompt) :] == found


@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_the_same_on_every_mesh(mesh):
    greedy, drawn = alone(), alone(drawn=True)
    assert greedy != drawn
    model = decoder(mesh)
    assert written(model) == greedy
    assert written(model, **DRAWN) == drawn


def test_what_a_row_draws_depends_on_no_other_row():
    every, model = alone(drawn=True), decoder()
    by_itself = [next(iter(each)) for each in zip(*jshard.generate(model, PROMPTS[:1], tokens=6, **DRAWN), strict=True)]
    assert by_itself == every[0][:1]
    assert written(model, **{**DRAWN, "seed": 4}) != every


@pytest.mark.usefixtures("in_the_root")
def test_the_cache_is_split_by_rows_and_heads_and_donated():
    writer = Writer(decoder("2x4"), PROMPTS, 6, Sampling(), 0)
    token, cache = writer.prefill()
    assert {each.sharding.spec[-4:] for each in cache} == {jax.P("data", None, "tensor", None)[-4:]}
    _, after = writer.decode(0, token, cache)
    assert all(each.is_deleted() for each in cache)
    assert [each.sharding for each in after] == [each.sharding for each in cache]


@pytest.mark.usefixtures("in_the_root")
def test_a_token_costs_two_sums_a_layer_whatever_the_prompt():
    model = decoder("2x4 whole")
    for longest in (6, 60):
        writer = Writer(model, [[1] * longest, [2]], 6, Sampling(), 0)
        token, cache = writer.prefill()
        step = functools.partial(generation._decode, writer.graph, writer.sampling)
        ledger = jshard.explain(step, writer.state, cache, token, writer.lengths, writer.key, backward=False)
        sums = [line for line in ledger if line.signal != "-"]
        assert [(line.collective, line.mesh_axes) for line in sums] == [("all_reduce", ("tensor",))] * len(sums)
        assert sum(line.count for line in sums) == 1 + 2 * SIZES["depth"]
        assert {line.payload for line in sums} == {SIZES["width"] * 4}  # one row on each of two
        rest = [line for line in ledger if line.signal == "-"]
        assert sum(line.payload for line in rest) == SIZES["vocabulary"] * 4 + 2 * 4  # logits, and the tokens


def test_a_row_ends_behind_a_stop():
    (_, second, third), model = alone(), decoder()
    stop = next(token for token in second if token not in third)
    until = second.index(stop) + 1
    got = written(model, stop=[stop])
    assert got[1] == [*second[:until], *[None] * (6 - until)]
    assert got[2] == third
    alone_too = [*jshard.generate(model, PROMPTS[1:2], tokens=6, stop=[stop])]
    assert alone_too == [[token] for token in second[:until]]


CHANCES = np.array([[0.1, 0.4, 0.05, 0.25, 0.2]])


@pytest.mark.parametrize(("how", "may"), [
    ({"top_k": 2}, {1, 3}), ({"top_p": 0.5}, {1, 3}), ({"top_p": 0.3}, {1}), ({"top_p": 0.0}, {1}),
    ({"top_k": 3, "top_p": 0.99}, {1, 3, 4}), ({}, {0, 1, 2, 3, 4}),
], ids=str)  # fmt: skip
def test_tokens_are_drawn_of_those_that_may_be(how, may):
    sampling = Sampling(temperature=1.0, **how)
    many = jnp.repeat(jnp.log(CHANCES), 2000, 0)
    drawn = np.asarray(sampling.choose(many, jnp.zeros(2000, jnp.int32), jax.random.key(0)))
    assert set(drawn.tolist()) == may
    chances = CHANCES[0] * [number in may for number in range(5)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 2000, chances / chances.sum(), atol=0.05)


@pytest.mark.parametrize(("how", "sentence"), [
    ({"temperature": -1.0}, "temperature is -1.0; use 0 or more"),
    ({"top_p": 1.5}, "top_p is 1.5; use a number between 0 and 1"),
    ({"top_k": 0}, "top_k is 0; use 1 or more"),
    ({"prompts": [[1], []]}, "prompt 1 is empty; begin with a token at least"),
    ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
     "a Linear has no init_cache, by which tokens are generated; give it a jshard.Decoder"),
], ids=lambda each: next(iter(each)) if isinstance(each, dict) else "")  # fmt: skip
def test_a_mistake_is_told(how, sentence):
    with pytest.raises(JShardError) as error:
        next(jshard.generate(**{"model": jshard.Decoder(SIZES, rngs=nnx.Rngs(0)), "prompts": PROMPTS, **how}))
    assert str(error.value) == sentence
