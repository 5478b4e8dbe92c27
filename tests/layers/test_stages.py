"""`jshard.pipeline` in YAML: layers on their stages, run by a schedule, against the same microbatches on one device."""

from __future__ import annotations

import collections
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled.schedule import collectives_in
from jshard.inspect.ledger import Traced, ledger_of
from jshard.inspect.plan.comparison import compare as against
from jshard.inspect.timeline import capture
from jshard.layers.gradients import accumulated
from jshard.layers.pipeline import ticks
from jshard.layers.sharding import objective_of
from jshard.printing.units import size
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import equations
from jshard.programs.provenance import said
from jshard.schedules import KINDS, generate
from jshard.schedules.steps import steps
from jshard.signals.active_config import unload
from tests.support.drawn import drawn

WIDTH, HIDDEN, WORDS, LAYERS, MICROBATCHES = 8, 16, 11, 8, 4


class Block(nnx.Module):
    def __init__(self, dropout, *, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, scale):
        return x + self.dropout(self.down(nnx.silu(self.up(self.norm(x))))) * scale


class Plain(nnx.Module):
    def __init__(self, dropout, *, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x, scale):
        return x + self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    """Words looked up, layers that are all given a scale of the words, and logits by the same table."""

    def __init__(self, depth=LAYERS, dropout=0.3, block=Block, *, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = jshard.stack(block, depth, dropout, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(self.norm(self.blocks(self.embed(x), self.scale(x))))

    def scale(self, x):
        return 1.0 + 0.1 * (x > 5)[..., None]


class Six(Model):
    def __init__(self, *, rngs):
        super().__init__(6, rngs=rngs)


class Scaled(Model):
    """All layers are given a parameter of none of them."""

    def scale(self, x):
        return super().scale(x) * self.norm.scale[...]


def loss(model, x, y):
    """With a term that no row takes part in."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(model(x)), y[..., None], -1)
    return -jnp.mean(chosen) + 1e-2 * jnp.sum(model.embed.embedding[...] ** 2)


X, Y = np.random.default_rng(0).integers(0, WORDS, (2, MICROBATCHES, 4, 6), np.int32)


def built(kind=Model, **how):
    return drawn(kind, **how)


def configured(
    stages,
    tensor=1,
    data=1,
    schedule="1f1b",
    chunks=None,
    microbatches=MICROBATCHES,
    edges=None,
    layers="equal",
    name="blocks",
    **words,
):
    split = {"row": "data", **words}
    asked = {"axis": "stage", "schedule": schedule}
    return {
        "jshard": {
            "mesh": {"stage": stages, "data": data, "tensor": tensor},
            "pipeline": asked if chunks is None else {**asked, "chunks": chunks},
            "train": {"microbatches": microbatches},
        },
        name: {"stage": layers, "match": ["blocks/**"]},
        "up": {**split, "column": "tensor", "match": ["blocks/up/**"]},
        "down": {**split, "reduction": "tensor", "match": ["blocks/down/**"]},
        **({} if edges is None else {"edges": {"row": "data", "store": edges, "match": ["embed/**", "norm/**"]}}),
        "rest": {key: word for key, word in split.items() if key != "sequence"} | {"match": ["**"]},
    }


@functools.cache
def of_one_device(kind=Model, what=loss, **how):
    """Loss, gradients, and what is left behind, on one device."""
    jshard.unload()
    model = built(kind, **how)
    return jax.tree.map(np.asarray, (*nnx.jit(accumulated(what))(model, X, Y), counts(model)))


def sharded(model):
    return jshard.shard(model, jax.ShapeDtypeStruct(X.shape[1:], jnp.int32))


def counts(model):
    return [x for x in jax.tree.leaves(nnx.state(model, nnx.RngState)) if x.dtype == jnp.uint32]


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-6), found, expected)


def in_ranges(*counts, stages):
    """Layers of chunks one behind the other, as they are written."""
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    return {f"{first}..{first + n - 1}": at % stages for at, (first, n) in enumerate(zip(firsts, counts, strict=True))}


CASES = {
    "1f1b, rows and tensor": (Model, {"stages": 2, "tensor": 2, "data": 2}),
    "gpipe, tensor, 4": (Model, {"stages": 4, "tensor": 2, "schedule": "gpipe"}),
    "interleaved, sequence": (Model, {"stages": 2, "tensor": 2, "schedule": "interleaved", "sequence": "tensor"}),
    "interleaved, 4": (Model, {"stages": 4, "tensor": 2, "schedule": "interleaved", "microbatches": MICROBATCHES}),
    "zero_bubble, store, 4": (Model, {"stages": 4, "data": 2, "schedule": "zero_bubble", "store": "data"}),
    "1f1b, edges stored": (Model, {"stages": 2, "tensor": 2, "data": 2, "edges": ["data", "stage"], "store": "data"}),
    "1f1b, 8": (Model, {"stages": 8}),
    "1f1b, by any name": (Model, {"stages": 2, "tensor": 2, "name": "halves"}),
    "interleaved of 4 chunks": (Model, {"stages": 2, "schedule": "interleaved", "chunks": 4}),
    "interleaved of 3 chunks, rows": (Six, {"stages": 2, "data": 2, "schedule": "interleaved", "chunks": 3}),
    "1f1b, remat, a parameter of all": (Scaled, {"stages": 2, "tensor": 2, "remat": "full"}),
    "1f1b, ranges, rows and tensor": (
        Model,
        {"stages": 2, "tensor": 2, "data": 2, "layers": in_ranges(3, 5, stages=2)},
    ),
    "gpipe, ranges, 4": (
        Model,
        {"stages": 4, "tensor": 2, "schedule": "gpipe", "layers": in_ranges(3, 2, 2, 1, stages=4)},
    ),
    "interleaved, ranges, sequence": (
        Model,
        {
            "stages": 2,
            "tensor": 2,
            "schedule": "interleaved",
            "sequence": "tensor",
            "layers": in_ranges(1, 3, 2, 2, stages=2),
        },
    ),
    "zero_bubble, ranges of six, store": (
        Six,
        {"stages": 4, "data": 2, "schedule": "zero_bubble", "store": "data", "layers": in_ranges(1, 2, 2, 1, stages=4)},
    ),
    "1f1b, balance, remat, a parameter of all": (Scaled, {"stages": 4, "remat": "full", "layers": "balance"}),
    "zero_bubble, gathered ahead": (
        Model,
        {
            "stages": 2,
            "data": 2,
            "schedule": "zero_bubble",
            "store": {"parameters": "data", "prefetch": True},
            "edges": ["data", "stage"],
        },
    ),
    "zero_bubble, remat, 4": (Model, {"stages": 4, "schedule": "zero_bubble", "remat": "full"}),
    "zero_bubble, chunks computed again": (Model, {"stages": 4, "schedule": "zero_bubble", "remat": "chunk"}),
    "zero_bubble of 2 chunks, a parameter of all": (Scaled, {"stages": 2, "schedule": "zero_bubble", "chunks": 2}),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", CASES)
def test_a_schedule_computes_what_one_device_does(case):
    kind, how = CASES[case]
    expected, of_one, left = of_one_device(kind)
    jshard.load(configured(**how))
    model = sharded(built(kind))
    at_rest = jax.tree.map(operator.attrgetter("sharding"), nnx.state(model, nnx.Param))
    kernel = model.blocks.up.kernel[...]
    is_equal = "layers" not in how
    assert kernel.sharding.spec[0] == ("stage" if is_equal else None)
    assert is_equal or "stage" in jax.tree.leaves(tuple(kernel.sharding.spec))
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {len(kernel) // how["stages"] ** is_equal}
    embedding, edges = model.embed.embedding[...], how.get("edges", ())
    assert (embedding.sharding.spec[1] or ()) == (tuple(edges) or how.get("store", ()))
    value, gradients = nnx.jit(accumulated(loss))(model, X, Y)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close(gradients, of_one)
    jax.tree.map(lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(), gradients, at_rest)
    jax.tree.map(np.testing.assert_array_equal, counts(model), left)


@pytest.mark.seconds
@pytest.mark.parametrize("remat", [False, "chunk"])
@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zero_bubble"])
def test_the_ledger_counts_a_send_once_for_each_microbatch_and_hop(case, remat):
    """And what a stage does as often as it does it: no idle tick, and what is computed again says so."""
    jshard.load(configured(4, tensor=2, schedule=case, remat=remat))
    model = sharded(built(dropout=0.0))
    traced = Traced(accumulated(loss), (model, X, Y), {})
    lines = ledger_of(traced, traced.nodes)
    hops, of_x = (7, 2) if case == "interleaved" else (3, 1)
    found = {(line.phase, "remat" in line.via, line.axis, line.collective): line for line in lines}
    assert not any(line.branches for line in lines)
    for phase in ("forward", "backward"):
        x = 4 * 6 * WIDTH * 4  # of parameters that go to where they run, others
        (sent,) = (line for line in lines if (line.phase, line.collective, line.payload) == (phase, "permute", x))
        assert (sent.count, sent.total) == (hops * MICROBATCHES, of_x * MICROBATCHES * x)
        assert sent.signal == "blocks" and f"{of_x * MICROBATCHES} by a stage" in sent.via
    times = MICROBATCHES * LAYERS // 4
    assert found["forward", False, "tensor", "all_reduce"].count == times
    again = [line.count for line in lines if line.axis == "tensor" and "remat" in line.via]
    twice = remat and case == "zero_bubble"  # W computes its chunk again too, and the gradients between its layers
    assert again == ([times] * (1 + twice) if remat else [])
    by_inputs = [
        line for line in lines if line.axis == "tensor" and line.phase == "backward" and "remat" not in line.via
    ]
    assert [line.count for line in by_inputs] == [times] * (1 + twice)
    of_layers, of_head = 2 * LAYERS // 4 * WIDTH * HIDDEN // 2, WIDTH * WORDS  # numbers that a row meets on a device
    flops = arithmetic_of(traced.forward(), remat=False).total
    # forward, and by inputs and weights: without idle ticks
    assert flops == 2 * MICROBATCHES * 4 * 6 * ((3 + twice) * of_layers + 3 * of_head)
    whole = [
        line for line in lines if line.axis == "stage" and line.phase == "backward" and line.collective == "all_reduce"
    ]
    assert sorted(line.payload for line in whole) == [4 * WIDTH, 4 * WORDS * WIDTH]
    assert {line.count for line in whole} == {1}


@pytest.mark.seconds
@pytest.mark.parametrize(("schedule", "counts", "most", "flops_of"), [
    ("zero_bubble", (3, 2, 2, 1), 3, 3),
    ("1f1b", (3, 2, 2, 1), 3, 3),  # the first stage has most layers, and no head
    ("1f1b", (2, 2, 1, 3), 3, "head"),
    ("interleaved", (2, 1, 1, 1, 1, 1), 3, 3),  # of 3 stages: layers 0, 1 and 5, 2 and 6, 3 and 7, 4
], ids=str)  # fmt: skip
def test_the_ledger_counts_the_layers_of_the_stage_that_has_most(schedule, counts, most, flops_of):
    """And arithmetic that of the stage that has most of it: the head is on the last alone."""
    stages = len(counts) // (2 if schedule == "interleaved" else 1)
    depth = sum(counts)
    jshard.load(configured(stages, tensor=2, schedule=schedule, layers=in_ranges(*counts, stages=stages)))
    model = sharded(built(depth=depth, dropout=0.0))
    traced = Traced(accumulated(loss), (model, X, Y), {})
    lines = ledger_of(traced, traced.nodes)
    assert not any(line.branches for line in lines)
    found = [line for line in lines if line.axis == "tensor" and line.collective == "all_reduce"]
    found = [line for line in found if line.payload == 4 * 6 * WIDTH * 4]
    assert {line.count for line in found} == {MICROBATCHES * most} and [line.phase for line in found] == [
        "forward",
        "backward",
    ]
    a_layer, head = 2 * WIDTH * HIDDEN // 2, WIDTH * WORDS
    assert arithmetic_of(traced.forward(), remat=False).total == 3 * 2 * MICROBATCHES * 4 * 6 * (
        3 * a_layer + head * (flops_of == "head")
    )
    moved = [line for line in lines if (line.axis, line.collective) == ("stage", "all_to_all")]
    of_stages = str(jshard.explain(accumulated(loss), model, X, Y)).splitlines()
    whole = "; 4 of 4 parameters rest whole on every stage, as no axis divides by 3 more" * (stages == 3)
    (told,) = (line for line in of_stages if line.startswith("blocks: "))
    kind = "chunks, one of each stage in turn," if stages == 3 else "stages"
    assert told == f"blocks: {kind} of {', '.join(map(str, counts))} layers, as written{whole}"
    assert {line.phase for line in moved} == (set() if whole else {"forward", "backward"})
    assert {line.count for line in moved} <= {1}


@pytest.mark.seconds
def test_balance_places_layers_by_flop_and_says_why():
    """Behind the layers is the product with the table of words: as much as six layers."""
    words = 6 * 2 * HIDDEN
    jshard.load(configured(4, schedule="1f1b", layers="balance"))
    model = built(depth=11, dropout=0.0)
    model.embed = nnx.Embed(words, WIDTH, rngs=nnx.Rngs(0))
    model = sharded(model)
    found = jshard.explain(accumulated(loss), model, X, Y)
    (told,) = (each.layers for each in found.stages)
    assert told == (
        "blocks: stages of 4, 3, 3, 1 layers, 49.2 kFLOP, 36.9 kFLOP, 36.9 kFLOP, 86.0 kFLOP of a microbatch forward: a layer has "
        "12.3 kFLOP, before them are 0 FLOP, after them 73.7 kFLOP; in use a device has room for 4 layers, 4.25 KiB of parameters, "
        "in each chunk"
    )
    assert told in str(found).splitlines()


@pytest.mark.slow
def test_ledger_report_difference_and_timeline_tell_the_schedule():
    """With what each stage holds, keeps and sends; a table of one is a picture of the others too."""
    ledgers = {}
    for schedule, remat in (("zero_bubble", False), ("1f1b", False), ("gpipe", "chunk"), ("1f1b", "chunk")):
        jshard.load(configured(2, tensor=2, schedule=schedule, remat=remat))
        model = sharded(built(dropout=0.0))
        ledgers[schedule if remat else f"{schedule}, kept"] = jshard.explain(accumulated(loss), model, X, Y)
    says = "1f1b: 2 stages, 4 microbatches, 6 ticks, 20.0 % idle in lock-step"
    assert str(ledgers["1f1b"]).splitlines().count(says) == 1
    found = jshard.diff(ledgers["gpipe"], ledgers["1f1b"])
    assert not found.same and found.summary() == "differs: another schedule"
    assert f"+ {says}" in str(found).splitlines()
    found = jshard.diff(ledgers["1f1b, kept"], ledgers["1f1b"])
    assert found.summary().startswith("differs: ") and "another schedule" in found.summary()
    html = jshard.report(accumulated(loss), model, X, Y).html
    rows = re.findall(r"<tr>(.*?)</tr>", html[html.index('id="stages"') :], re.DOTALL)[1:3]
    numbers = [re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row)).split() for row in rows]
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    # the devices of a stage follow one another
    held = [sum(x.addressable_data(stage * 2).nbytes for x in parameters) for stage in range(2)]
    x = 4 * 6 * WIDTH * 4
    for stage, row in enumerate(numbers):
        assert row[:3] == [str(stage), *size(held[stage]).split()]
        assert row[-4:] == [["4", "0", *size(4 * x).split()], ["0", "4", *size(4 * x).split()]][stage]
    bars = html[html.index('id="stages"') :].partition("</section>")[0].count("<rect")
    assert bars == 2 + 2 * 2 * MICROBATCHES  # lanes, and F and B of each microbatch
    assert capture.stages() == {str(n): n // 2 for n in range(4)}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("case", "counts", "remat"),
    [
        ("1f1b", (4, 4), False),
        ("zero_bubble", (4, 4), False),
        ("1f1b", (3, 5), False),
        ("zero_bubble", (4, 4), "chunk"),
    ],
    ids=str,
)
def test_the_compiled_text_costs_what_the_table_says(case, counts, remat):
    """What a stage does counts in the ticks in which it does it; a send in every tick, and what of that the table does not
    ask for is told apart, in bytes."""
    is_equal = len({*counts}) == 1
    placed = "equal" if is_equal else in_ranges(*counts, stages=2)
    jshard.load(configured(2, tensor=2, schedule=case, layers=placed, remat=remat))
    model = sharded(built(dropout=0.0))
    table = generate(case, 2, MICROBATCHES)
    compiled = nnx.jit(accumulated(loss)).lower(model, X, Y).compile()
    found = collections.Counter()
    for each in collectives_in(compiled):
        if len(each.payloads) == 1 and each.collective != "all_to_all":
            found[each.collective, each.causes[0].signal, each.causes[0].phase] += each.count
    layers = MICROBATCHES * max(counts)
    again = {("all_reduce", "down", "backward"): layers * 2} if remat else {}  # in B, and in W
    assert found == again | {
        ("all_reduce", "down", "forward"): layers,
        ("all_reduce", "up", "backward"): layers * (2 if remat else 1),
        ("permute", "blocks", "forward"): table.ticks,
        ("permute", "blocks", "backward"): table.ticks,
    }
    traced = Traced(accumulated(loss), (model, X, Y), {})
    got = collectives_in(compiled)
    rows = against(ledger_of(traced, traced.nodes), got, {"stage": 2, "data": 1, "tensor": 2}).rows
    idle, x = table.ticks - MICROBATCHES, 4 * 6 * WIDTH * 4
    for row in (row for row in rows if row.collective == "permute"):
        assert (row.asked, row.got, row.wire_asked) == (MICROBATCHES, table.ticks, MICROBATCHES * x)
        assert row.wire_got == table.ticks * x
        assert [str(each) for each in row.differences] == [
            f"{idle} in ticks in which a stage has none to send ({size(idle * x)})"
        ]


@functools.cache
def verified(schedule, stages):
    """With tensor parallelism inside stages where there are devices for it, and without: against one reference."""
    tensor = 2 if stages < 8 else 1
    jshard.load(configured(stages, tensor=tensor, schedule=schedule, microbatches=2))
    model = sharded(built(depth=16 if (stages, schedule) == (8, "interleaved") else LAYERS, block=Plain))
    without = [{"tensor": 1}] * (tensor - 1)
    return jshard.verify(accumulated(loss), model, X[:2, :2], Y[:2, :2], backward=False, meshes=without)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_a_schedule_is_verified_bitwise(schedule, stages, tensor):
    found = verified(schedule, stages)
    verdicts = [each.verdict for each in found.findings if each.mesh == {"stage": stages, "data": 1, "tensor": tensor}]
    assert verdicts and {*verdicts} == {"bitwise"}, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "layers", "stages", "tensor"), [
    ("1f1b", in_ranges(1, 3, 2, 2, stages=4), 4, 2), ("interleaved", in_ranges(1, 3, 3, 1, stages=2), 2, 1),
    ("zero_bubble", "balance", 4, 1), ("gpipe", "balance", 2, 2),
], ids=str)  # fmt: skip
def test_unequal_stages_are_verified_bitwise(schedule, layers, stages, tensor):
    jshard.load(configured(stages, tensor=tensor, schedule=schedule, microbatches=2, layers=layers))
    model = sharded(built(block=Plain))
    found = jshard.verify(accumulated(loss), model, X[:2, :2], Y[:2, :2], backward=False)
    assert found, str(found)
    assert {each.verdict for each in found.findings} == {"bitwise"}, str(found)


@pytest.mark.seconds
def test_without_microbatches_every_stage_runs_layers_that_no_stage_has_equally():
    """Each gathered as it is used."""
    jshard.load(configured(2, tensor=2, data=2, layers=in_ranges(3, 5, stages=2)))
    model, x, y = jshard.shard(built(dropout=0.0), X[0]), X[0], Y[0]
    found = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, x, y)
    logits = nnx.jit(lambda model, x: model(x))(model, x)
    unload()
    alone = built(dropout=0.0)
    close(found, nnx.value_and_grad(loss)(alone, x, y))
    close(logits, alone(x))


@pytest.mark.seconds
def test_without_microbatches_the_stages_run_one_after_the_other():
    """Forward, as in an evaluation, and for gradients of any loss."""
    jshard.load(configured(2, tensor=2, data=2))
    model, x, y = jshard.shard(built(dropout=0.0), X[0]), X[0], Y[0]
    value, gradients = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, x, y)
    logits = nnx.jit(lambda model, x: model(x))(model, x)
    graph, state = nnx.split(model)
    made = equations(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x))
    unload()
    alone = built(dropout=0.0)
    close((value, gradients), nnx.value_and_grad(loss)(alone, x, y))
    close(logits, alone(x))
    assert collections.Counter(eqn.primitive.name for eqn in made)["ppermute"] == 1


@pytest.mark.seconds
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_loop_of_ones_own_runs_by_the_schedule(is_traced):
    """The rows of a batch, as they are, in `jshard.value_and_grad`."""
    expected, of_one, left = of_one_device()
    jshard.load(configured(2, tensor=2, data=2))
    model, differentiated = sharded(built()), jshard.value_and_grad(loss)
    x, y = (part.reshape(-1, *part.shape[2:]) for part in (X, Y))
    if not is_traced:
        of_rows = jshard.value_and_grad(lambda model, x, y, scale: scale * loss(model, x, y)[None])
        found = jshard.explain(of_rows, model, *(jshard.scatter(each, jax.P("data")) for each in (x, y)), 2.0)
        assert [each.table for each in found.stages] == [generate("1f1b", 2, MICROBATCHES)]
        return
    value, gradients = nnx.jit(differentiated)(model, x, y)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close(gradients, of_one)
    jax.tree.map(np.testing.assert_array_equal, counts(model), left)
    with pytest.raises(JShardError) as error:
        differentiated(model, x[:6], y[:6])
    assert str(error.value) == (
        "jshard.pipeline (<dict>) has 4 microbatches, and jshard.value_and_grad is given 6 rows; use 4 or 8 rows"
    )
    wrt = nnx.All(nnx.Param, nnx.PathContains("embed"))
    named = jshard.value_and_grad(lambda y, *, model, x: loss(model, x, y), argnums=1, wrt=wrt)
    _, some = nnx.jit(named)(y, model=sharded(built()), x=x)
    close(some, nnx.filter_state(of_one, wrt))


class Doubled(nnx.Module):
    """A layer whose numbers are whole, whatever is dropped."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.where(jax.random.bernoulli(rngs.params(), shape=(WIDTH,)), 1.0, -1.0))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(x * self.scale[...])


class Whole(nnx.Module):
    def __init__(self, *, rngs):
        whole = lambda key, shape, dtype: jax.random.randint(key, shape, -3, 4).astype(dtype)
        self.embed = nnx.Embed(WORDS, WIDTH, embedding_init=whole, rngs=rngs)
        self.blocks = jshard.stack(Doubled, 4, rngs=rngs)

    def __call__(self, x):
        return self.blocks(self.embed(x))


def weighed(model, x, y):
    return jnp.sum(model(x) * (y % 3 - 1)[..., None]) / 64


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("stages", "schedule", "layers"),
    [(2, "interleaved", "equal"), (4, "zero_bubble", "equal"), (2, "1f1b", in_ranges(1, 3, stages=2))],
    ids=str,
)
def test_dropout_is_that_of_no_pipeline_bitwise(stages, schedule, layers):
    """In a model whose numbers are exact in any order, so that one dropped otherwise would show."""
    expected = of_one_device(Whole, weighed)[:2]
    said = configured(stages, data=2, schedule=schedule, layers=layers)
    jshard.load({key: words for key, words in said.items() if key not in ("up", "down")})
    found = nnx.jit(accumulated(weighed))(sharded(built(Whole)), X, Y)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.any(found[1]["blocks"]["scale"][...])


@pytest.mark.slow
def test_mixed_precision_inside_stages_is_that_of_no_pipeline():
    """Products in bfloat16, parameters and sums of gradients in float32."""
    how = configured(2, tensor=2, data=2, dtype={"param": "float32", "compute": "bfloat16", "reduce": "float32"})
    found, dtypes = [], []
    for pipeline in (how["jshard"]["pipeline"], None):
        how["jshard"]["pipeline"] = pipeline
        if pipeline is None:
            del how["jshard"]["pipeline"], how["blocks"]
        jshard.load(how)
        model = sharded(built(dropout=0.0))
        eqns = equations(Traced(accumulated(loss), (model, X, Y), {}).forward())
        products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
        claimed = [eqn for eqn in products if said(eqn.source_info.name_stack.stack, "claim") in ("up", "down")]
        dtypes.append({tuple(str(v.aval.dtype) for v in eqn.invars) for eqn in claimed})
        found.append(nnx.jit(accumulated(loss))(model, X, Y))
    (value, gradients), (expected, of_one) = found
    assert ("bfloat16", "bfloat16") in dtypes[0] and dtypes[0] == dtypes[1]
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=2e-3), gradients, of_one)


class Experts(nnx.Module):
    def __init__(self, dropout, *, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.moe = jshard.MoE(WIDTH, HIDDEN, 4, balance=0.5, router_z=0.1, rngs=rngs)

    def __call__(self, x, scale):
        return x + self.moe(self.norm(x)) * scale


def with_experts(stages, schedule, split, **sizes):
    """Experts by their places, or their kernels, split over mesh axes inside stages."""
    how = configured(stages, schedule=schedule, **sizes)
    paths = ["blocks/moe/gate/**", "blocks/moe/up/**"] + ["blocks/moe/down/**"] * ("column" not in split)
    experts = {"experts": {"row": "data", **split, "match": paths}}
    stored = {word: axes for word, axes in split.items() if word == "store"}
    rest = {"rest": {"row": "data", **stored, "match": ["**"]}}
    return {"jshard": how["jshard"], "blocks": how["blocks"], **experts, **rest}


EXPERTS = {
    "1f1b, by places": (2, "1f1b", {"expert": "data"}, {"data": 2}),
    "interleaved, tensor": (2, "interleaved", {"column": "tensor"}, {"data": 2, "tensor": 2}),
    "1f1b, by places and tensor": (2, "1f1b", {"expert": "data", "column": "tensor"}, {"data": 2, "tensor": 2}),
    "interleaved, by places": (2, "interleaved", {"expert": "data"}, {"data": 2}),
    "zero_bubble, 4, by places": (4, "zero_bubble", {"expert": "data"}, {"data": 2}),
    "gpipe, 4, tensor": (4, "gpipe", {"column": "tensor"}, {"tensor": 2}),
    "1f1b, ranges, by places": (2, "1f1b", {"expert": "data"}, {"data": 2, "layers": in_ranges(1, 3, stages=2)}),
    "1f1b, 4, stored": (4, "1f1b", {"store": "data"}, {"data": 2}),
    "zero_bubble, by places, stored": (
        2,
        "zero_bubble",
        {"expert": "tensor", "store": "data"},
        {"data": 2, "tensor": 2},
    ),
}


def balanced(model):
    """Loss, gradients, and the losses of balance that are left in the model."""
    made = nnx.jit(accumulated(objective_of(loss)))(model, X, Y)
    return jax.tree.map(np.asarray, (*made, model.blocks.moe.auxiliary[...]))


@functools.cache
def of_experts_on_one_device():
    jshard.unload()
    return balanced(built(depth=4, block=Experts))


@pytest.mark.seconds
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_inside_stages_leave_their_losses_of_balance(case):
    """Which go to the loss with what goes from stage to stage; those of the last microbatch stay in the model."""
    value, of_one, auxiliary = of_experts_on_one_device()
    stages, schedule, split, sizes = EXPERTS[case]
    jshard.load(with_experts(stages, schedule, split, **sizes))
    found, gradients, left = balanced(sharded(built(depth=4, block=Experts)))
    close((found, gradients, left), (value, of_one, auxiliary))
    assert np.all(left > 0.5)
    assert np.any(gradients["blocks"]["moe"]["router"]["kernel"][...])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b, by places", "zero_bubble, 4, by places", "1f1b, 4, stored"])
def test_experts_inside_stages_are_verified_bitwise(case):
    stages, schedule, split, sizes = EXPERTS[case]
    jshard.load(with_experts(stages, schedule, split, **sizes))
    model = sharded(built(depth=4, block=Experts))
    found = jshard.verify(accumulated(objective_of(loss)), model, X, Y, backward=False)
    assert found, str(found)
    assert {each.verdict for each in found.findings} == {"bitwise"}, str(found)


@pytest.mark.seconds
def test_a_table_of_mine_is_run(tmp_path):
    expected, *_ = of_one_device()
    path = tmp_path / "mine.txt"
    path.write_text("F0 F1 B0 F2B1 F3 B2 B3\n. F0B0 F1B1 . F2B2 F3B3\n")
    jshard.load(configured(2, schedule=str(path)))
    value, _ = nnx.jit(accumulated(loss))(sharded(built()), X, Y)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for words, sentence in (
        ({"stages": 4}, f"jshard.pipeline (<dict>) has 4 stages, and its table {path} has 2; write another table, or give the "
         "pipeline 2 stages"),
        ({"stages": 2, "chunks": 2}, f"jshard.pipeline (<dict>) has 2 chunks, and its table {path} has 1; write another table, or "
         "give the pipeline 1 chunk"),
        ({"stages": 2, "microbatches": 2}, f"jshard.pipeline (<dict>) has 2 microbatches, and its table {path} has 4; write "
         "another table, or give the pipeline 4 microbatches"),
    ):  # fmt: skip
        jshard.load(configured(schedule=str(path), **words))
        with pytest.raises(JShardError) as error:
            accumulated(loss)(jshard.shard(built()), X, Y)
        assert str(error.value) == sentence


class Statistics(Block):
    def __init__(self, dropout, *, rngs):
        super().__init__(dropout, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, scale):
        self.mean[...] = 0.9 * self.mean[...] + x.mean()
        return super().__call__(x, scale)


def twice(model, x, y):
    return loss(model, x, y) + loss(model, y, x)


def regular(model, x, y):
    return loss(model, x, y) + jnp.sum(model.blocks.up.kernel[...] ** 2)


SAYS = 'signal "blocks" (<dict>) says stage (<dict>)'
WRONG = {
    "layers that do not divide": (
        {"depth": 6}, {"stages": 4}, loss,
        'signal "blocks" (<dict>) splits axis 0 of "blocks/down/bias" (6, 8) claimed at <dict> over mesh axis "stage" of size 4; '
        "use 4 or 8, or claim it without stage",
    ),
    "chunks that do not divide": (
        {}, {"stages": 2, "chunks": 3}, loss,
        'jshard.pipeline (<dict>) has 2 stages of 3 chunks, and signal "blocks" (<dict>) splits 8 layers among them; use 6 or 12 '
        "layers, or write stage: balance",
    ),
    "statistics": (
        {"block": Statistics}, {"stages": 2}, loss,
        "jshard.pipeline (<dict>) has several microbatches on their way, and the model keeps variables that its data change, as "
        "running statistics; use layers that keep none, as nnx.LayerNorm",
    ),
    "called twice": (
        {}, {"stages": 2}, twice,
        f"{SAYS}, and its layers run in 2 loops (test_stages.py:LINE, test_stages.py:LINE); call one stack once, whose globs tell "
        "no layers apart",
    ),
    "used beside": (
        {}, {"stages": 2}, regular,
        f"{SAYS}, and its layers are used by integer_pow (test_stages.py:LINE), and not by the loop of a jshard.stack alone; call "
        "the stack as the model does, with no jax.jit, jax.checkpoint or other use of its parameters",
    ),
}  # fmt: skip


@pytest.mark.quick("used beside")
@pytest.mark.parametrize("fault", WRONG)
def test_what_no_pipeline_runs_is_one_sentence(fault):
    model, how, objective, sentence = WRONG[fault]
    jshard.load(configured(**how))
    with pytest.raises(JShardError) as error:
        accumulated(objective)(jshard.shard(built(**model)), X, Y)
    assert re.sub(r"py:\d+", "py:LINE", str(error.value)).splitlines()[0] == sentence


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            {"edges": ["stage", "data"]},
            'signal "edges" (<dict>) names mesh axis "stage", that of the stages, not last in store (<dict>); write store: [data, '
            "stage]",
        ),
        (
            {"store": "stage"},
            'signal "down" (<dict>) names mesh axis "stage" for store and signal "blocks" (<dict>) for stage (<dict>), which would '
            'split "blocks/down/bias" (8, 8) claimed at <dict> over it twice; claim the layers apart from what all stages have',
        ),
    ],
)
def test_what_is_stored_over_stages_wrongly_is_one_sentence(how, sentence):
    jshard.load(configured(2, data=2, **how))
    with pytest.raises(JShardError) as error:
        accumulated(loss)(jshard.shard(built()), X, Y)
    assert str(error.value).splitlines()[0] == sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"store": {"parameters": "data", "prefetch": True}},
            'signal "up" (<dict>) says store.prefetch (<dict>), and signal "blocks" (<dict>) has stages of unequal layers (<dict>); '
            "remove prefetch, or write stage: equal",
        ),
        (
            {"store": ["stage", "data"]},
            'signal "up" (<dict>) names mesh axis "stage", that of the stages, not last in store (<dict>); write store: [data, stage]',
        ),
    ],
    ids=str,
)
def test_what_unequal_stages_do_not_run_is_one_sentence(words, sentence):
    how = configured(2, data=2, layers=in_ranges(3, 5, stages=2))
    how["up"] |= words
    jshard.load(how)
    with pytest.raises(JShardError) as error:
        accumulated(loss)(jshard.shard(built()), X, Y)
    assert str(error.value) == sentence


def test_remat_of_chunks_of_what_is_no_layer_of_a_stage_is_one_sentence():
    said = configured(2)
    said["edges"] = {"remat": "chunk", "match": ["embed/**", "norm/**"]}
    jshard.load(said)
    with pytest.raises(JShardError) as error:
        accumulated(loss)(jshard.shard(built()), X, Y)
    assert str(error.value) == (
        'signal "edges" (<dict>) says remat: chunk, of layers of a jshard.stack on the stages of a pipeline, and claims none of '
        "them; write remat: full"
    )


def test_a_stage_that_no_parameter_is_on_is_one_sentence():
    said = configured(2)
    del said["blocks"]["match"]
    jshard.load(said)
    with pytest.raises(JShardError) as error:
        accumulated(loss)(jshard.shard(built()), X, Y)
    assert str(error.value) == (
        'signal "blocks" (<dict>) says stage (<dict>), and no parameter of the model is claimed by it; write match: ["blocks/**"], '
        "with the path of a jshard.stack in the model"
    )
    said["jshard"]["pipeline"]["axis"] = "stage"
    said["rest"]["stage"] = "equal"
    jshard.load(said)
    with pytest.raises(JShardError) as error:
        jshard.shard(built(), X[0])
    assert str(error.value) == (
        'signal "rest" (<dict>) says stage (<dict>), and "embed/embedding" (11, 8) claimed at <dict> is in no loop over layers; '
        "build the layers with jshard.stack, or give stage to the stack alone\n"
        'signal "rest" (<dict>) says stage (<dict>), and "norm/scale" (8,) claimed at <dict> is in no loop over layers; build the '
        "layers with jshard.stack, or give stage to the stack alone"
    )


def swapped(columns):
    """On stage 1 the first two backwards are of each other's microbatch."""
    row = [tick for tick in columns["B_microbatch"] if tick[1] >= 0]
    row[0][1], row[1][1] = row[1][1], row[0][1]


def other(columns):
    """The first stage takes microbatch 1 twice, and never 0."""
    next(tick for tick in columns["F_microbatch"] if tick[0] == 0)[0] = 1


def stale(columns):
    """Stage 1 differentiates the second time by what is kept of the first microbatch."""
    second = [tick for tick in columns["B_kept"] if tick[1] >= 0][1]
    second[1] = 1 - second[1]


def lost(columns):
    """Stage 1 never makes the weight gradients of its first microbatch."""
    next(tick for tick in columns["W_microbatch"] if tick[1] >= 0)[1] = -1


# what is planted, in which schedule and on which mesh
PLANTED = {
    swapped: ("gpipe", {}),
    other: ("gpipe", {"tensor": 2}),
    stale: ("gpipe", {"data": 2}),
    lost: ("zero_bubble", {"tensor": 2}),
}


@functools.cache
def run_wrongly(schedule):
    """Each fault that is planted in the schedule, on its mesh: against one reference."""
    faults = {str(sizes): fault for fault, (kind, sizes) in PLANTED.items() if kind == schedule}
    first, *others = (sizes for kind, sizes in PLANTED.values() if kind == schedule)

    def planted(table, **how):
        found = steps(table, **how)
        if table.stages > 1:
            faults[str({name: size for name, size in jshard.mesh().shape.items() if name != "stage" and size > 1})](
                found.columns
            )
        return found

    jshard.load(configured(2, schedule=schedule, microbatches=2, **first))
    model = sharded(built(block=Plain))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ticks, "steps", planted)
        return jshard.verify(accumulated(loss), model, X[:2, :2], Y[:2, :2], backward=False, meshes=others)


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_table_that_is_run_wrongly_is_told(fault):
    schedule, sizes = PLANTED[fault]
    found, mesh = run_wrongly(schedule), {"stage": 2, "data": 1, "tensor": 1} | sizes
    assert "differs" in {each.verdict for each in found.findings if each.mesh == mesh}
    (begin,) = (each for each in found.beginnings if each.mesh == mesh)
    assert begin.off > 0 and f"{begin}" in str(found)


@pytest.mark.seconds
@pytest.mark.parametrize("schedule", KINDS)
def test_a_program_is_as_long_for_more_microbatches(schedule):
    lengths = set()
    for microbatches in (4, 16):
        jshard.load(configured(2, schedule=schedule, microbatches=microbatches))
        x = jax.ShapeDtypeStruct((microbatches, *X.shape[1:]), jnp.int32)
        model = sharded(built())
        graph, state = nnx.split(model)
        made = jax.make_jaxpr(lambda state, x: accumulated(loss)(nnx.merge(graph, state), x, x))(state, x)  # noqa: B023
        lengths.add(sum(1 for _ in equations(made)))
    assert len(lengths) == 1, lengths
