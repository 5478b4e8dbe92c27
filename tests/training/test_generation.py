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
from jshard.inspect.compiled import hlo_text
from jshard.training import generation
from jshard.training.generation import Sampling, Writer

SIZES = {"vocabulary": 64, "width": 32, "depth": 2, "heads": 8, "kv_heads": 4, "hidden": 64, "dropout": 0.1}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [11]]
PLACED = "configs/decoder/placement.yaml"
HEAD = {"head": {"extends": "_split", "column": "tensor", "match": ["head/**"]}}
MESHES = {
    "2x4": ("_split.sequence=tensor",), "2x4 whole": ("_split={row: data}", "rest={row: data, match: ['**']}"),
    "8": ("jshard.mesh={data: 8, tensor: 1}",),
}  # fmt: skip
DRAWN = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 3}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(generation, "ROOM", 8)


EXPERTS = {**SIZES, "experts": 4, "capacity": 0.5, "window": 4, "hidden": 32}
ROWS = ["data", "expert"]
SPREAD = {
    "jshard": {"mesh": {"data": 2, "expert": 4}},
    "experts": {"row": ROWS, "expert": "expert", "match": ["blocks/mlp/{gate,up,down}/**"]},
    "rest": {"row": ROWS, "match": ["**"]},
}


@functools.cache
def unsplit(experts=False):
    return jshard.Decoder(**(EXPERTS if experts else SIZES), rngs=nnx.Rngs(0))


@functools.cache
def split(mesh):
    return jshard.shard(nnx.clone(unsplit(mesh == "experts")), np.zeros((8, 8), np.int32))


def decoder(mesh=None, experts=False):
    """The model of all tests, on this mesh, whose configuration is loaded."""
    jshard.unload()
    if mesh is None:
        return unsplit(experts)
    jshard.load(SPREAD if mesh == "experts" else {"jshard": {"include": PLACED}, **HEAD}, MESHES.get(mesh, ()))
    return split(mesh)


def written(model, prompts=PROMPTS, **how):
    return [list(each) for each in zip(*jshard.generate(model, prompts, tokens=6, **how), strict=True)]


@functools.cache
def alone(drawn=False, experts=False):
    return written(decoder(experts=experts), **(DRAWN if drawn else {}))


@pytest.mark.seconds
@pytest.mark.parametrize("experts", [False, True], ids=["", "of experts with a window"])
def test_greedy_tokens_are_those_of_the_whole_text(experts):
    texts = [[*prompt, *found] for prompt, found in zip(PROMPTS, alone(experts=experts), strict=True)]
    padded = np.array([text + [0] * (12 - len(text)) for text in texts], np.int32)
    view = nnx.view(decoder(experts=experts), deterministic=True, dropless=True, raise_if_not_found=False)
    likeliest = np.asarray(jnp.argmax(nnx.jit(lambda model, tokens: model(tokens))(view, padded), -1)).tolist()
    for prompt, text, row in zip(PROMPTS, texts, likeliest, strict=True):
        assert row[len(prompt) - 1 : len(text) - 1] == text[len(prompt) :]


@pytest.mark.seconds
@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_the_same_on_every_mesh(mesh):
    greedy, drawn = alone(), alone(drawn=True)
    assert greedy != drawn
    model = decoder(mesh)
    assert written(model) == greedy
    assert written(model, **DRAWN) == drawn


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_root")
def test_tokens_of_a_model_of_experts_are_the_same_where_they_are_split():
    assert written(decoder("experts")) == alone(experts=True)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize("mesh", [None, "2x4", "8"])
def test_a_token_copies_nothing_of_the_caches_size(mesh):
    writer = Writer(decoder(mesh), PROMPTS, 6, Sampling(), 0)
    token, cache = jax.eval_shape(writer.prefill)
    step = generation._decode.lower(writer.graph, writer.room, writer.state, cache, token, writer.lengths)
    text = step.compile().as_text()
    shape = cache[0].shape if mesh is None else cache[0].sharding.shard_shape(cache[0].shape)

    def made(*shape):
        """What the instructions are that make an array of this shape."""
        typed = f"[{','.join(map(str, shape))}]{{"
        every = [
            each for computation in hlo_text.HloProgram(text).computations.values() for each in computation.values()
        ]
        return {each.opcode for each in every if not each.type.startswith("(") and typed in each.type}

    given, written = {"parameter", "get-tuple-element", "bitcast", "fusion"}, {"scatter", "dynamic-update-slice"}
    assert made(*shape) & written
    assert made(*shape) <= given | written
    assert not (made(1, *shape[1:]) | made(*shape[1:])) & written  # a layer is only read
    assert text.count("may-alias") == len(cache)


def test_what_a_row_draws_depends_on_no_other_row():
    every, model = alone(drawn=True), decoder()
    assert written(model, [[9], PROMPTS[1], [12, 4]], **DRAWN)[1] == every[1]
    assert written(model, **{**DRAWN, "seed": 4}) != every


@pytest.mark.seconds
@pytest.mark.usefixtures("in_the_root")
def test_the_cache_is_split_by_rows_and_heads_and_donated():
    writer = Writer(decoder("2x4"), PROMPTS, 6, Sampling(), 0)
    token, cache = writer.prefill()
    assert {tuple(each.sharding.spec) for each in cache} == {(None, "data", "tensor", None, None)}
    _, after = writer.decode(0, token, cache)
    assert all(each.is_deleted() for each in cache)
    assert [each.sharding for each in after] == [each.sharding for each in cache]


@pytest.mark.seconds
@pytest.mark.usefixtures("in_the_root")
def test_a_token_costs_two_sums_a_layer_whatever_the_prompt():
    model = decoder("2x4 whole")
    for longest in (6, 60):
        writer = Writer(model, [[1] * longest, [2]], 6, Sampling(), 0)
        token, cache = jax.eval_shape(writer.prefill)

        def step(state, cache, token, writer=writer):
            logits, cache = generation._decode(writer.graph, writer.room, state, cache, token, writer.lengths)
            return generation._chosen(writer.sampling, logits, writer.lengths, writer.key), cache

        ledger = jshard.explain(step, writer.state, cache, token, backward=False)
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
    all_end = [*jshard.generate(model, PROMPTS[1:2] * 3, tokens=6, stop=[stop])]
    assert all_end == [[token] * 3 for token in second[:until]]


CHANCES = np.array([[0.1, 0.4, 0.05, 0.25, 0.2]])


@pytest.mark.quick(4)
@pytest.mark.parametrize(("how", "may"), [
    ({"top_k": 2}, {1, 3}), ({"top_p": 0.5}, {1, 3}), ({"top_p": 0.3}, {1}), ({"top_p": 0.0}, {1}),
    ({"top_k": 3, "top_p": 0.99}, {1, 3, 4}), ({}, {0, 1, 2, 3, 4}), ({"temperature": 0.5}, {0, 1, 2, 3, 4}),
], ids=str)  # fmt: skip
def test_tokens_are_drawn_of_those_that_may_be(how, may):
    sampling = Sampling(**{"temperature": 1.0, **how})
    many = jnp.repeat(jnp.log(CHANCES), 2000, 0)
    drawn, after = (np.asarray(sampling.choose(many, jnp.full(2000, at), jax.random.key(0))) for at in (0, 1))
    assert set(drawn.tolist()) == may
    assert (drawn == after).mean() < 0.8 or len(may) == 1  # each place draws anew
    chances = CHANCES[0] ** (1 / sampling.temperature) * [number in may for number in range(5)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 2000, chances / chances.sum(), atol=0.05)


@pytest.mark.parametrize(("how", "sentence"), [
    ({"temperature": -1.0}, "temperature is -1.0; use 0 or more"),
    ({"top_p": 1.5}, "top_p is 1.5; use a number between 0 and 1"),
    ({"top_k": 0}, "top_k is 0; use 1 or more"),
    ({"top_k": 5}, "top_k is 5 at temperature 0, which always takes the likeliest token; use a temperature above 0, such as 1.0"),
    ({"tokens": 0}, "tokens is 0; use 1 or more"),
    ({"prompts": []}, "there is no prompt; give a list of prompts, each a list of tokens"),
    ({"prompts": [[1], []]}, "prompt 1 is empty; give at least one token"),
    ({"prompts": [[1], [5, 64]]},
     "prompt 1 has token 64 at place 1, and the model knows 64 tokens; use tokens from 0 to 63, of the tokenizer that it was "
     "trained with"),
    ({"prompts": [[-1]]},
     "prompt 0 has token -1 at place 0, and the model knows 64 tokens; use tokens from 0 to 63, of the tokenizer that it was "
     "trained with"),
    ({"model": nnx.Module()},
     "a Module has no init_cache, which generation needs; give it a jshard.Decoder"),
], ids=lambda each: next(iter(each)) if isinstance(each, dict) else "")  # fmt: skip
def test_a_mistake_is_told(how, sentence):
    with pytest.raises(JShardError) as error:
        next(jshard.generate(**{"model": decoder(), "prompts": PROMPTS, **how}))
    assert str(error.value) == sentence
