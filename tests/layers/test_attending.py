"""`jshard.attend`: attention under jshard.shard equals one device."""

from __future__ import annotations

import collections
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers import attention, ring_attention
from jshard.layers import ring as on_device
from jshard.layers.partition.value import Value
from jshard.programs.jaxprs import equations
from tests.support import cases

ROWS, PLACES, HEADS, KEYS, SIZE = 8, 32, 8, 4, 4
WIDTH = HEADS * SIZE
draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, PLACES, WIDTH)).astype(np.float32)
SEGMENTS = np.array([1, 0, 2], np.int32)[np.sort(draw.integers(0, 3, (ROWS, PLACES)), axis=1)]  # in no order


class Attention(nnx.Module):
    def __init__(self, rngs, keys=KEYS, size=SIZE, **how):
        linear = nnx.LinearGeneral
        self.q = linear(WIDTH, (HEADS, size), use_bias=False, rngs=rngs)
        self.k = linear(WIDTH, (keys, size), use_bias=False, rngs=rngs)
        self.v = linear(WIDTH, (keys, size), use_bias=False, rngs=rngs)
        self.o = linear((HEADS, size), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.how = how

    def __call__(self, x, segments):
        segments = segments if self.how.get("segments", True) else None
        how = {key: word for key, word in self.how.items() if key != "segments"}
        return x + self.o(jshard.attend(self.q(x), self.k(x), self.v(x), segments=segments, **how))


def loss(model, x, segments):
    """Of terms with one sign: a sum of both may be nearly nothing, and its error is not."""
    return jnp.square(jnp.sin(model(x, segments))).mean()


def written_out(model, x, segments):
    """Attention, as one writes it down."""
    how = {"causal": True, "window": None, "segments": True, **model.how}
    q, k, v = model.q(x), *(jnp.repeat(each(x), HEADS // KEYS, axis=2) for each in (model.k, model.v))
    apart = jnp.arange(PLACES)[:, None] - jnp.arange(PLACES)
    seen = (apart >= 0) | (not how["causal"])
    if how["window"] is not None:
        seen &= abs(apart) < how["window"]
    seen = seen[None, None]
    if how["segments"]:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5, -jnp.inf)
    y = x + model.o(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v))
    return jnp.square(jnp.sin(y)).mean()


HOW = {
    "causal": {"segments": False}, "segments": {}, "window": {"window": 5}, "both ways": {"causal": False},
    "near both ways": {"causal": False, "window": 11},
}  # fmt: skip


def plan(mesh, heads=("tensor",), key_heads=None, **words):
    row = {"row": "data"} if "data" in mesh else {}
    heads = [name for name in heads if name in mesh]
    keys = heads if key_heads is None else key_heads
    return {
        "jshard": {"mesh": mesh},
        "q": {**row, **({"column": heads} if heads else {}), **words, "match": ["q/**"]},
        "kv": {**row, **({"column": keys} if keys else {}), **words, "match": ["{k,v}/**"]},
        "out": {**row, **({"reduction": heads} if heads else {}), **words, "match": ["o/**"]},
    }


@functools.cache
def reference(how):
    jshard.unload()
    return jax.device_get(nnx.jit(nnx.value_and_grad(written_out))(Attention(nnx.Rngs(0), **HOW[how]), X, SEGMENTS))


def run(how):
    return nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(
        jshard.shard(Attention(nnx.Rngs(0), **HOW[how]), X, SEGMENTS), X, SEGMENTS
    )


@pytest.mark.quick("near both ways")
@pytest.mark.parametrize("how", HOW)
def test_attend_is_attention_on_one_device_and_with_its_heads_split(how):
    want = reference(how)
    cases.alike(nnx.jit(nnx.value_and_grad(loss))(Attention(nnx.Rngs(0), **HOW[how]), X, SEGMENTS), want)
    jshard.load(plan({"data": 2, "tensor": 4}))
    cases.alike(run(how), want)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("how", "most", "least", "blocks"),
    [
        ("causal", 12, 64, (12, 12, 8)),
        ("segments", 12, 64, (12, 12, 8)),
        ("window", 12, 64, (12, 12, 8)),
        ("causal", 512, 4, (8, 8, 8, 8)),  # a quarter
    ],
)
def test_queries_in_blocks_attend_as_all_at_once_and_make_fewer_scores(monkeypatch, how, most, least, blocks):
    monkeypatch.setattr(attention, "BLOCK", most)
    monkeypatch.setattr(attention, "LEAST", least)
    jshard.unload()
    want = reference(how)
    model = lambda: Attention(nnx.Rngs(0), **HOW[how], implementation="blocks")
    step = nnx.jit(nnx.value_and_grad(loss))
    cases.alike(step(model(), X, SEGMENTS), want)
    scores = [
        math.prod(eqn.outvars[0].aval.shape)
        for eqn in equations(jax.make_jaxpr(lambda x: model()(x, SEGMENTS))(X))
        if eqn.primitive.name == "dot_general"
        and eqn.outvars[0].aval.shape[-1] != SIZE
        and eqn.outvars[0].aval.ndim > 3
    ]
    keys = (12, 16, 12) if how == "window" else itertools.accumulate(blocks)
    seen = [ROWS * HEADS * queries * many for queries, many in zip(blocks, keys, strict=True)]
    assert [each for each in scores if each in seen] == seen, scores
    jshard.load(plan({"data": 2, "tensor": 4}))
    cases.alike(nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(jshard.shard(model(), X, SEGMENTS), X, SEGMENTS), want)


def traced(queries, keys, **how):
    """The program of attention over so many places."""
    q, k = (jax.ShapeDtypeStruct((1, places, 2, SIZE), np.float32) for places in (queries, keys))
    return jax.make_jaxpr(lambda q, k: jshard.attend(q, k, k, **how))(q, k)


@pytest.mark.parametrize(("places", "blocks"), [(128, [64] * 2), (300, [75] * 4), (4096, [512] * 8)])
def test_a_block_is_a_quarter_of_the_queries_from_64_to_512(places, blocks):
    jshard.unload()
    *_, joined = equations(traced(places, places, implementation="blocks"))
    assert [each.aval.shape[1] for each in joined.invars] == blocks


@pytest.mark.parametrize(("queries", "keys", "how"), [(32, 32, {"causal": False}), (5, 8, {}), (8, 5, {})])
def test_blocks_of_what_is_not_causal_are_told(queries, keys, how):
    jshard.unload()
    with pytest.raises(JShardError) as told:
        traced(queries, keys, implementation="blocks", **how)
    assert str(told.value) == (
        f'attention of {queries} queries over {keys} keys has implementation "blocks", which needs causal attention without '
        "a mask and equal numbers; leave implementation out"
    )


@pytest.mark.parametrize(("how", "sentence"), [
    ({"window": 0}, "attention has a window of 0; use 1 or more, or leave it out: then all are seen"),
    ({"implementation": "cudn"}, 'attention has implementation "cudn"; did you mean "cudnn"?'),
    ({"implementation": "?"}, 'attention has implementation "?"; use xla, cudnn, blocks'),
])  # fmt: skip
def test_what_no_attention_has_is_told(how, sentence):
    with pytest.raises(JShardError) as told:
        traced(4, 4, **how)
    assert str(told.value) == sentence


@pytest.mark.parametrize(
    ("queries", "keys", "is_ring"),
    [(2, 2, True), (1, 1, False), (0, 0, False), (1, 2, False), (3, 2, False)],
)
def test_only_places_that_attend_to_each_other_go_around_a_ring(queries, keys, is_ring):
    jshard.load(RINGS["ring"])
    primitives = {eqn.primitive.name for eqn in equations(traced(queries, keys))}
    assert ("by_hand" in primitives) == is_ring, primitives


RINGS = {
    "ring": plan({"ring": 8}, ring="ring"),
    "ring of two, rows, heads": plan({"data": 2, "ring": 2, "tensor": 2}, ring="ring"),
    "fewer key heads than devices": plan({"ring": 1, "kv": 4, "group": 2}, ["kv", "group"], ["kv"], ring="ring"),
    "ulysses": plan({"data": 2, "ring": 4}, ring="ring", attention="ulysses"),
    "ulysses, heads": plan({"ring": 2, "tensor": 2}, ring="ring", attention="ulysses"),
}


@pytest.mark.quick("ulysses, heads-both ways")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", RINGS)
def test_rows_split_by_places_attend_as_on_one_device(how, name):
    want = reference(how)
    jshard.load(RINGS[name])
    cases.alike(run(how), want)


def wire(how, *kinds):
    """Bytes that one device sends, by phase, in collectives of these kinds."""
    sent = collections.Counter()
    model, f = Attention(nnx.Rngs(0), **HOW[how]), jshard.shard(loss)
    ledger = jshard.explain(lambda *given: nnx.value_and_grad(f)(*given), model, X, SEGMENTS)
    for line in ledger:
        if line.collective in kinds:
            assert (line.signal.split("/")[-1], line.cause.key) == ("kv", "ring"), line
            sent[line.phase] += line.count * line.payload
    assert not any(line.cause.redistributed for line in ledger), ledger
    return dict(sent)


KV = ROWS * PLACES * KEYS * SIZE * 4  # of all devices
Q, S = KV * HEADS // KEYS, ROWS * PLACES * 4


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        # keys and values go on by seven devices, what belongs to the gradients of both by eight; causal rows change places
        ("causal", (2 * Q + 2 * KV) + 7 * 2 * KV, (2 * Q + 2 * KV) + 7 * 2 * KV + 8 * 2 * KV),
        ("segments", (2 * Q + 2 * KV + S) + 7 * (2 * KV + S), (2 * Q + 2 * KV) + 7 * (2 * KV + S) + 8 * 2 * KV),
        ("both ways", 7 * (2 * KV + S), 7 * (2 * KV + S) + 8 * 2 * KV),
        ("window", 2 * KV + S, 2 * KV + S + 2 * 2 * KV),  # five places: of four there is one part before
    ],
)
def test_a_ring_costs_its_formula(how, forward, backward):
    jshard.load(RINGS["ring"])
    assert wire(how, "permute") == {"forward": forward // 8, "backward": backward // 8}


@pytest.mark.parametrize(
    ("heads", "key_heads", "count", "split"),
    [
        ((), (), 3, ((), ())),
        (("kv",), (), 8, (("kv",), ("kv",))),
        (("kv", "group"), ("kv",), 4, (("kv", "group"), ("kv",))),  # each has one, which others of its group have too
        (("kv", "group"), ("kv",), 12, ((), ())),
        (("kv", "group"), ("group",), 2, ((), ())),
        (("group", "kv"), ("kv",), 4, ((), ())),
    ],
)
def test_heads_stay_split_where_each_device_has_the_keys_of_its_own(heads, key_heads, count, split):
    q = Value((2, 16, 24, 4), ((), ("ring",), heads, ()), jnp.float32)
    k = Value((2, 16, count, 4), ((), (), key_heads, ()), jnp.float32)
    found = ring_attention._split(q, k, {"kv": 4, "group": 2, "ring": 2})
    assert (found.places, (found.heads, found.key_heads)) == (("ring",), split)


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (2, 1), (5, 1), (6, 2), (99, 3), (None, 3)])
def test_keys_go_as_far_as_a_window_reaches(monkeypatch, window, hops):
    """On four devices, each with four places of a row."""
    monkeypatch.setattr(on_device, "axis_size", lambda names: 4)
    causal, both_ways = (
        on_device.AttentionRing(on_device.Form(each, window, 1.0), ("a",), 4) for each in (True, False)
    )
    assert (causal.hops, both_ways.hops) == (hops, 3)
    assert (causal.is_balanced, both_ways.is_balanced) == (window is None, False)


@pytest.mark.parametrize(("ways", "length", "is_balanced"), [(4, 4, True), (2, 2, True), (4, 3, False), (1, 4, False)])
def test_only_parts_of_two_pieces_each_are_balanced(monkeypatch, ways, length, is_balanced):
    monkeypatch.setattr(on_device, "axis_size", lambda names: ways)
    ring = on_device.AttentionRing(on_device.Form(True, None, 1.0), ("a",), length)
    assert ring.is_balanced == is_balanced
    seen = [ring.places(device).tolist() for device in range(ways)]
    assert sorted(sum(seen, [])) == [*range(ways * length)]
    if is_balanced:
        assert {sum(places) for places in seen} == {length * (ways * length - 1) // 2}  # equal work


def test_an_exchange_of_heads_costs_its_formula():
    jshard.load(RINGS["ulysses"])
    one_way = (2 * Q + 2 * KV) // 8
    assert wire("causal", "all_to_all", "permute") == {"forward": one_way, "backward": one_way}


def program(how, words):
    jshard.load(words)
    f, model = jshard.shard(loss), Attention(nnx.Rngs(0), **HOW[how])
    graph, state = nnx.split(model)

    def run(state, x, segments):
        return jax.value_and_grad(lambda state: f(nnx.merge(graph, state), x, segments))(state)

    return run, state


def test_causal_rows_are_balanced():
    """One device multiplies as much as any other, and little more than half of all pairs."""
    flops = {}
    for how in ("causal", "both ways"):
        run, state = program(how, RINGS["ring"])
        every = equations(jax.make_jaxpr(run)(state, X, SEGMENTS))
        flops[how] = sum(
            math.prod(eqn.outvars[0].aval.shape) for eqn in every
            if eqn.primitive.name == "dot_general" and len(eqn.outvars[0].aval.shape) == 5
        )  # fmt: skip
    assert flops["causal"] < flops["both ways"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("places", "queries"), [(512, 512), (513, 171), (1024, 512)])
def test_512_queries_meet_keys_at_a_time_or_fewer_that_divide_them(places, queries):
    run, state = program("window", plan({"ring": 2}, ring="ring"))
    shapes = [jax.ShapeDtypeStruct((1, 2 * places, *x.shape[2:]), x.dtype) for x in (X, SEGMENTS)]
    every = equations(jax.make_jaxpr(run)(state, *shapes))
    products = [eqn.outvars[0].aval.shape for eqn in every if eqn.primitive.name == "dot_general"]
    assert {shape[-2] for shape in products if len(shape) == 5} == {queries}


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["causal", "segments"])
def test_queries_that_meet_keys_in_turn_attend_as_all_at_once(how, monkeypatch):
    want = reference(how)
    monkeypatch.setattr("jshard.layers.ring.QUERIES", 3)
    jshard.load(plan({"ring": 4}, ring="ring"))
    cases.alike(run(how), want)


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["ring"])
def test_what_a_device_holds_is_flat_where_length_and_devices_grow_together(name):
    held = {}
    for devices in (2, 8):
        run, state = program("causal", plan({"ring": devices}, ring="ring"))
        shapes = [jax.ShapeDtypeStruct((1, 64 * devices, *x.shape[2:]), x.dtype) for x in (X, SEGMENTS)]
        compiled = jax.jit(run).lower(state, *shapes).compile()
        held[devices] = compiled.memory_analysis().temp_size_in_bytes
    assert held[8] < 1.1 * held[2], held


@pytest.mark.seconds
def test_a_ring_and_exchanged_heads_hold_as_much():
    """At a time 512 queries meet a part of the keys with all heads, or all keys with a part of the heads."""
    held = {}
    for name, words in {"ring": {}, "ulysses": {"attention": "ulysses"}}.items():
        run, state = program("causal", plan({"ring": 4}, ring="ring", **words))
        shapes = [jax.ShapeDtypeStruct((1, 4 * 512, *x.shape[2:]), x.dtype) for x in (X, SEGMENTS)]
        held[name] = jax.jit(run).lower(state, *shapes).compile().memory_analysis().temp_size_in_bytes
    assert held["ulysses"] / held["ring"] == pytest.approx(1, abs=0.1), held


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "ulysses, heads"])
def test_verify_finds_no_deviation_of_a_ring(name):
    jshard.load(RINGS[name])
    found = jshard.verify(jshard.shard(loss), Attention(nnx.Rngs(0)), X, SEGMENTS)
    assert {each.verdict for each in found.findings} <= {"bitwise", "within"}, found


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_a_ring_runs_in_loops_checkpoints_and_gradients_that_are_sharded(name):
    """Two layers as a scan over a checkpoint, and a gradient taken inside of what is sharded."""
    graph, state = nnx.split(Attention(nnx.Rngs(0)))

    def deep(model, x, segments):
        graph, state = nnx.split(model)
        turn = jax.checkpoint(lambda x, _: (nnx.merge(graph, state)(x, segments), None))
        return jnp.sin(jax.lax.scan(turn, x, None, length=2)[0]).mean()

    jshard.unload()
    want = nnx.jit(nnx.value_and_grad(deep))(nnx.merge(graph, state), X, SEGMENTS)
    jshard.load(RINGS[name])
    cases.alike(nnx.jit(nnx.value_and_grad(jshard.shard(deep)))(nnx.merge(graph, state), X, SEGMENTS), want)
    cases.alike(
        jshard.shard(lambda *given: nnx.value_and_grad(deep)(*given))(nnx.merge(graph, state), X, SEGMENTS), want
    )


def test_a_ring_left_to_the_compiler_is_plain_attention():
    want = reference("causal")
    auto = plan({"data": 2, "ring": 4}, ring="ring")
    jshard.load({**auto, "jshard": {**auto["jshard"], "axis_types": "auto"}})
    cases.alike(run("causal"), want)


@pytest.mark.seconds
def test_heads_stay_split_whatever_their_size():
    jshard.load(plan({"ring": 2, "tensor": 2}, ring="ring"))
    lines = jshard.explain(jshard.shard(loss), Attention(nnx.Rngs(0), size=3), X, SEGMENTS)
    assert {line.collective for line in lines if line.phase == "forward"} == {"permute", "all_reduce"}


@pytest.mark.seconds
def test_queries_that_each_device_has_whole_meet_keys_around_the_ring():
    """Of queries that no signal splits, as learned ones, each device takes those of its places."""
    model, queries = Attention(nnx.Rngs(0)), np.sin(np.arange(ROWS * PLACES * WIDTH)).reshape(ROWS, PLACES, HEADS, SIZE)
    model.learned = nnx.Param(jnp.asarray(queries, jnp.float32))

    def asked(model, x):
        return jnp.sin(model.o(jshard.attend(model.learned[...], model.k(x), model.v(x)))).mean()

    jshard.unload()
    want = jax.device_get(nnx.jit(nnx.value_and_grad(asked))(model, X))
    jshard.load(plan({"ring": 4}, ring="ring") | {"rest": {"match": ["**"]}})
    cases.alike(nnx.jit(nnx.value_and_grad(jshard.shard(asked)))(model, X), want)
    assert "permute" in {line.collective for line in jshard.explain(jshard.shard(asked), model, X)}


def test_places_that_do_not_divide_and_key_heads_that_are_too_few_are_told():
    jshard.load(RINGS["ring"])
    with pytest.raises(JShardError) as told:
        jshard.shard(Attention(nnx.Rngs(0)))(X[:, :30], SEGMENTS[:, :30])
    assert str(told.value) == (
        'signal "kv" (<dict>) splits 30 places of each row over mesh axis "ring" of size 8; use 24 or 32, or pad'
    )
    jshard.load(plan({"ring": 8}, ring="ring", attention="ulysses"))
    with pytest.raises(JShardError) as told:
        jshard.shard(Attention(nnx.Rngs(0), keys=2))(X, SEGMENTS)
    assert str(told.value) == (
        'signal "kv" (<dict>) says attention: ulysses (<dict>), which splits 2 key heads over ring of size 8; write '
        "attention: ring, or use a mesh axis whose size divides the key heads"
    )
