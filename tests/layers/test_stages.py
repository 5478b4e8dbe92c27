"""`jshard.pipeline` in YAML: layers on their stages, run by a schedule, against the same microbatches on one device."""

from __future__ import annotations

import collections
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled.traffic import collectives_in
from jshard.inspect.ledger import Ledger, Traced, ledger_of
from jshard.inspect.ledger.diff import compare
from jshard.inspect.plan.flops import arithmetic_of
from jshard.inspect.timeline import capture
from jshard.jaxprs import equations
from jshard.layers.accumulation import accumulated
from jshard.layers.partition import ticks
from jshard.layers.sharding import objective_of
from jshard.provenance import said
from jshard.schedules import KINDS, generate
from jshard.schedules.steps import steps
from jshard.signals.active_config import unload
from jshard.units import size

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


def built(Model=Model, **how):
    return Model(rngs=nnx.Rngs(0), **how)


def configured(stages, tensor=1, data=1, schedule="1f1b", chunks=None, microbatches=MICROBATCHES, edges=None, **words):
    split = {"row": "data", **words}
    asked = {"axis": "stage", "microbatches": microbatches, "schedule": schedule}
    return {
        "jshard": {
            "mesh": {"stage": stages, "data": data, "tensor": tensor},
            "pipeline": asked if chunks is None else {**asked, "chunks": chunks},
        },
        "blocks": {"stage": "equal"},
        "up": {**split, "column": "tensor", "match": ["blocks/up/**"]},
        "down": {**split, "reduction": "tensor", "match": ["blocks/down/**"]},
        **({} if edges is None else {"edges": {"row": "data", "store": edges, "match": ["embed/**", "norm/**"]}}),
        "rest": {key: word for key, word in split.items() if key != "sequence"} | {"match": ["**"]},
    }


@pytest.fixture(scope="module")
def one_device():
    """Loss, gradients, and what is left behind, on one device."""
    jshard.unload()
    found = {}
    for kind in (Model, Six, Scaled):
        model = built(kind)
        found[kind] = jax.tree.map(np.asarray, (*nnx.jit(accumulated(loss))(model, X, Y), counts(model)))
    return found


def counts(model):
    return [x for x in jax.tree.leaves(nnx.state(model, nnx.RngState)) if x.dtype == jnp.uint32]


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-6), found, expected)


CASES = {
    "1f1b, rows and tensor": (Model, {"stages": 2, "tensor": 2, "data": 2}),
    "gpipe, tensor, 4": (Model, {"stages": 4, "tensor": 2, "schedule": "gpipe"}),
    "interleaved, sequence": (Model, {"stages": 2, "tensor": 2, "schedule": "interleaved", "sequence": "tensor"}),
    "interleaved, 4": (Model, {"stages": 4, "tensor": 2, "schedule": "interleaved", "microbatches": MICROBATCHES}),
    "zero_bubble, store, 4": (Model, {"stages": 4, "data": 2, "schedule": "zero_bubble", "store": "data"}),
    "1f1b, edges stored": (Model, {"stages": 2, "tensor": 2, "data": 2, "edges": ["data", "stage"], "store": "data"}),
    "1f1b, 8": (Model, {"stages": 8}),
    "interleaved of 4 chunks": (Model, {"stages": 2, "schedule": "interleaved", "chunks": 4}),
    "interleaved of 3 chunks, rows": (Six, {"stages": 2, "data": 2, "schedule": "interleaved", "chunks": 3}),
    "1f1b, remat, a parameter of all": (Scaled, {"stages": 2, "tensor": 2, "remat": "full"}),
    "zero_bubble of 2 chunks, a parameter of all": (Scaled, {"stages": 2, "schedule": "zero_bubble", "chunks": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_computes_what_one_device_does(case, one_device):
    kind, how = CASES[case]
    jshard.load(configured(**how))
    model = jshard.shard(built(kind), jax.ShapeDtypeStruct(X.shape[1:], jnp.int32))
    at_rest = jax.tree.map(operator.attrgetter("sharding"), nnx.state(model, nnx.Param))
    kernel = model.blocks.up.kernel[...]
    assert kernel.sharding.spec[0] == "stage"
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {len(kernel) // how["stages"]}
    embedding, edges = model.embed.embedding[...], how.get("edges", ())
    assert (embedding.sharding.spec[1] or ()) == (tuple(edges) or how.get("store", ()))
    value, gradients = nnx.jit(accumulated(loss))(model, X, Y)
    expected, of_one, left = one_device[kind]
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close(gradients, of_one)
    jax.tree.map(lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(), gradients, at_rest)
    jax.tree.map(np.testing.assert_array_equal, counts(model), left)


@pytest.mark.parametrize("case", ["1f1b", "interleaved"])
def test_the_ledger_counts_a_send_once_for_each_microbatch_and_hop(case):
    """And what a stage does as often as it does it: no idle tick, and what is computed again says so."""
    jshard.load(configured(4, tensor=2, schedule=case))
    model = jshard.shard(built(dropout=0.0))
    traced = Traced(accumulated(loss), (model, X, Y), {})
    lines = ledger_of(traced, traced.nodes)
    hops, of_x = {"1f1b": (3, 1), "interleaved": (7, 2)}[case]
    found = {(line.phase, "remat" in line.via, line.axis, line.collective): line for line in lines}
    assert not any(line.branches for line in lines)
    for phase in ("forward", "backward"):
        x = 4 * 6 * WIDTH * 4  # of parameters that go to where they run, others
        (sent,) = (line for line in lines if (line.phase, line.collective, line.payload) == (phase, "permute", x))
        assert (sent.count, sent.total) == (hops * MICROBATCHES, of_x * MICROBATCHES * x)
        assert sent.signal == "blocks" and f"{of_x * MICROBATCHES} by a stage" in sent.via
    times = MICROBATCHES * LAYERS // 4
    assert found["forward", False, "tensor", "all_reduce"].count == times
    assert found["backward", True, "tensor", "all_reduce"].count == times
    assert found["backward", False, "tensor", "all_reduce"].count == times
    per_row = (
        2 * LAYERS // 4 * WIDTH * HIDDEN // 2 + WIDTH * WORDS
    )  # numbers in the kernels that a row meets on a device
    flops = arithmetic_of(traced.forward(), remat=False).total
    assert flops == 3 * 2 * MICROBATCHES * 4 * 6 * per_row  # forward, and by inputs and weights: without idle ticks
    whole = [
        line for line in lines if line.axis == "stage" and line.phase == "backward" and line.collective == "all_reduce"
    ]
    assert sorted(line.payload for line in whole) == [4 * WIDTH, 4 * WORDS * WIDTH]
    assert {line.count for line in whole} == {1}


def test_ledger_report_difference_and_timeline_tell_the_schedule():
    """With what each stage holds, keeps and sends; a table of one is a picture of the others too."""
    ledgers = {}
    for schedule in ("gpipe", "1f1b"):
        jshard.load(configured(2, tensor=2, schedule=schedule))
        model = jshard.shard(built(dropout=0.0), jax.ShapeDtypeStruct(X.shape[1:], jnp.int32))
        ledgers[schedule] = jshard.explain(accumulated(loss), model, X, Y)
    says = "1f1b: 2 stages, 4 microbatches, 6 ticks, 20.0 % idle in lock-step"
    assert str(ledgers["1f1b"]).splitlines().count(says) == 1
    assert Ledger.from_json(ledgers["1f1b"].to_json()) == ledgers["1f1b"]
    found = compare(ledgers["gpipe"], Ledger.from_json(ledgers["1f1b"].to_json()))
    assert not found.same and found.summary() == "differs: another schedule"
    cells = [line.split() for line in found.text().splitlines()]
    assert ["ticks", "10", "6"] in cells and ["inputs", "kept,", "by", "stage", "4", "4", "3", "1"] in cells
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
    bars = html[html.index('id="stages"') : html.index('id="plan"')].count("<rect")
    assert bars == 2 * (2 + 2 * 2 * MICROBATCHES)  # drawn twice: lanes, and F and B of each microbatch
    assert capture.pipeline() == {
        "pipeline": ledgers["1f1b"].stages[0].document(),
        "stages": {str(n): n // 2 for n in range(4)},
    }


@pytest.mark.parametrize("case", ["1f1b", "zero_bubble"])
def test_the_compiled_text_costs_what_the_table_says(case):
    """What a stage does counts in the ticks in which it does it; a send in those in which any stage sends."""
    jshard.load(configured(2, tensor=2, schedule=case))
    model = jshard.shard(built(dropout=0.0))
    table = generate(case, 2, MICROBATCHES)
    compiled = nnx.jit(accumulated(loss)).lower(model, X, Y).compile()
    found = collections.Counter()
    for each in collectives_in(compiled):
        if len(each.payloads) == 1:
            found[each.collective, each.causes[0].signal, each.causes[0].phase] += each.count
    layers = MICROBATCHES * LAYERS // 2
    again = 2 if case == "zero_bubble" else 1  # W computes its chunk again too
    assert found == {
        ("all_reduce", "down", "forward"): layers,
        ("all_reduce", "up", "backward"): layers * again,
        ("all_reduce", "down", "backward"): layers * again,
        ("permute", "blocks", "forward"): MICROBATCHES,
        ("permute", "blocks", "backward"): MICROBATCHES,
    }
    assert table.ticks > MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_schedule_is_verified_bitwise(schedule, stages, tensor):
    jshard.load(configured(stages, tensor=tensor, schedule=schedule, microbatches=2))
    model = jshard.shard(built(block=Plain))
    found = jshard.verify(accumulated(loss), model, X[:2, :2], Y[:2, :2], backward=False)
    assert found, str(found)
    assert {each.verdict for each in found.findings} == {"bitwise"}, str(found)


def test_without_microbatches_the_stages_run_one_after_the_other():
    """Forward, as in an evaluation, and for gradients of any loss."""
    jshard.load(configured(2, tensor=2, data=2))
    model, x, y = jshard.shard(built(dropout=0.0)), X[0], Y[0]
    value, gradients = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, x, y)
    logits = nnx.jit(lambda model, x: model(x))(model, x)
    graph, state = nnx.split(model)
    made = equations(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x))
    unload()
    alone = built(dropout=0.0)
    close((value, gradients), nnx.value_and_grad(loss)(alone, x, y))
    close(logits, alone(x))
    assert collections.Counter(eqn.primitive.name for eqn in made)["ppermute"] == 1


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_loop_of_ones_own_runs_by_the_schedule(is_traced, one_device):
    """The rows of a batch, as they are, in `jshard.value_and_grad`."""
    jshard.load(configured(2, tensor=2, data=2))
    model, differentiated = jshard.shard(built()), jshard.value_and_grad(loss)
    x, y = (part.reshape(-1, *part.shape[2:]) for part in (X, Y))
    if not is_traced:
        found = jshard.explain(differentiated, model, *(jshard.scatter(each, jax.P("data")) for each in (x, y)))
        assert [each.table for each in found.stages] == [generate("1f1b", 2, MICROBATCHES)]
        return
    value, gradients = nnx.jit(differentiated)(model, x, y)
    expected, of_one, left = one_device[Model]
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close(gradients, of_one)
    jax.tree.map(np.testing.assert_array_equal, counts(model), left)
    with pytest.raises(JShardError) as error:
        differentiated(model, x[:6], y[:6])
    assert str(error.value) == (
        "jshard.pipeline (<dict>) has 4 microbatches, and jshard.value_and_grad is given 6 rows; use 4 or 8 rows"
    )
    with pytest.raises(JShardError) as error:
        jshard.value_and_grad(loss, has_aux=True)(model, x, y)
    assert str(error.value) == (
        "jshard.value_and_grad by jshard.pipeline (<dict>) takes arrays in their order, and gives the value and the gradients by "
        "all parameters; leave has_aux, wrt and named arguments away, or remove jshard.pipeline"
    )


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


@pytest.mark.parametrize(("stages", "schedule"), [(2, "interleaved"), (4, "zero_bubble")])
def test_dropout_is_that_of_no_pipeline_bitwise(stages, schedule):
    """In a model whose numbers are exact in any order, so that one dropped otherwise would show."""
    weighed = lambda model, x, y: jnp.sum(model(x) * (y % 3 - 1)[..., None]) / 64
    said = configured(stages, data=2, schedule=schedule)
    jshard.load({key: words for key, words in said.items() if key not in ("up", "down")})
    found = nnx.jit(accumulated(weighed))(jshard.shard(Whole(rngs=nnx.Rngs(0))), X, Y)
    unload()
    expected = nnx.jit(accumulated(weighed))(Whole(rngs=nnx.Rngs(0)), X, Y)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.any(found[1]["blocks"]["scale"][...])


def test_mixed_precision_inside_stages_is_that_of_no_pipeline():
    """Products in bfloat16, parameters and sums of gradients in float32."""
    how = configured(2, tensor=2, data=2, dtype={"param": "float32", "compute": "bfloat16", "reduce": "float32"})
    found, dtypes = [], []
    for pipeline in (how["jshard"]["pipeline"], None):
        how["jshard"]["pipeline"] = pipeline
        if pipeline is None:
            del how["jshard"]["pipeline"], how["blocks"]
        jshard.load(how)
        model = jshard.shard(built(dropout=0.0), jax.ShapeDtypeStruct(X.shape[1:], jnp.int32))
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


@pytest.mark.parametrize(("schedule", "tensor", "split"), [
    ("1f1b", 1, {"expert": "data"}), ("interleaved", 2, {"column": "tensor"}),
])  # fmt: skip
def test_experts_inside_stages_leave_their_losses_of_balance(schedule, tensor, split):
    """Which go to the loss with what goes from stage to stage; those of the last microbatch stay in the model."""
    how = configured(2, data=2, tensor=tensor, schedule=schedule)
    how = {key: words for key, words in how.items() if key not in ("up", "down")}
    paths = ["blocks/moe/gate/**", "blocks/moe/up/**"] + ["blocks/moe/down/**"] * ("expert" in split)
    rest = {"rest": {"row": "data", "match": ["**"]}}
    experts = {"experts": {"row": "data", **split, "match": paths}}
    jshard.load({key: words for key, words in how.items() if key != "rest"} | experts | rest)
    found = []
    for model in (jshard.shard(built(depth=4, block=Experts)), built(depth=4, block=Experts)):
        value, gradients = nnx.jit(accumulated(objective_of(loss)))(model, X, Y)
        found.append((value, gradients, model.blocks.moe.auxiliary[...]))
        unload()
    close(*found)
    assert np.all(np.asarray(found[0][2]) > 0.5)
    assert np.any(found[0][1]["blocks"]["moe"]["router"]["kernel"][...])


def test_a_table_of_mine_is_run(tmp_path, one_device):
    path = tmp_path / "mine.txt"
    path.write_text("F0 F1 B0 F2B1 F3 B2 B3\n. F0B0 F1B1 . F2B2 F3B3\n")
    jshard.load(configured(2, schedule=str(path)))
    value, _ = nnx.jit(accumulated(loss))(jshard.shard(built()), X, Y)
    np.testing.assert_allclose(value, one_device[Model][0], rtol=1e-6)
    for words, sentence in (
        ({"stages": 4}, f"jshard.pipeline (<dict>) has 4 stages, and its table {path} has 2; write another table, or give the "
         "pipeline 2 stages"),
        ({"stages": 2, "chunks": 2}, f"jshard.pipeline (<dict>) has 2 chunks, and its table {path} has 1; write another table, or "
         "give the pipeline 1 chunks"),
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
        "layers",
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


@pytest.mark.parametrize("fault", WRONG)
def test_what_no_pipeline_runs_is_one_sentence(fault):
    model, how, objective, sentence = WRONG[fault]
    jshard.load(configured(**how))
    with pytest.raises(JShardError) as error:
        accumulated(objective)(jshard.shard(built(**model)), X, Y)
    assert re.sub(r"py:\d+", "py:LINE", str(error.value)).splitlines()[0] == sentence


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


def test_a_stage_that_no_parameter_is_on_is_one_sentence():
    said = configured(2)
    said["layers"] = said.pop("blocks")
    jshard.load(said)
    with pytest.raises(JShardError) as error:
        accumulated(loss)(jshard.shard(built()), X, Y)
    assert str(error.value) == (
        'signal "layers" (<dict>) says stage (<dict>), and no parameter of the model is claimed by it, or is in a stack called '
        '"layers"; give the signal the path of a jshard.stack in the model, as blocks'
    )
    said["jshard"]["pipeline"]["axis"] = "stage"
    said["rest"]["stage"] = "equal"
    jshard.load(said)
    with pytest.raises(JShardError) as error:
        jshard.shard(built(), X[0])
    assert str(error.value) == (
        'signal "rest" (<dict>) says stage (<dict>), and "embed/embedding" (11, 8) claimed at <dict>, is in no loop over layers; '
        "build the layers with jshard.stack, or give stage to the stack alone\n"
        'signal "rest" (<dict>) says stage (<dict>), and "norm/scale" (8,) claimed at <dict>, is in no loop over layers; build the '
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
    """Stage 1 differentiates the second time at the first microbatch's input."""
    second = [tick for tick in columns["B_input"] if tick[1] >= 0][1]
    second[1] = 1 - second[1]


def lost(columns):
    """Stage 1 never makes the weight gradients of its first microbatch."""
    next(tick for tick in columns["W_microbatch"] if tick[1] >= 0)[1] = -1


# what is planted, in which schedule, and where it is found
PLANTED = {
    swapped: ("gpipe", "stage 1, tick 3, microbatch 0 (B0 of gpipe)", "backward", "the gradient of its input: "),
    other: ("gpipe", "stage 0, tick 0, microbatch 0 (F0 of gpipe)", "forward", "its output: that of microbatch 1"),
    stale: ("gpipe", "stage 1, tick 4, microbatch 1 (B1 of gpipe)", "backward", "the gradient of its input: "),
    lost: (
        "zero_bubble", "stage 1, tick 2, microbatch 0 (W0 of zero_bubble)", "backward",
        "what it adds to the gradients of its layers: nothing",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_table_that_is_run_wrongly_is_told_by_stage_tick_and_microbatch(fault, monkeypatch):
    def planted(table):
        found = steps(table)
        if table.stages > 1:
            fault(found.columns)
        return found

    schedule, slot, phase, looks = PLANTED[fault]
    monkeypatch.setattr(ticks, "steps", planted)
    jshard.load(configured(2, tensor=2 if fault is lost else 1, schedule=schedule, microbatches=2))
    found = jshard.verify(accumulated(loss), jshard.shard(built(block=Plain)), X[:2, :2], Y[:2, :2], backward=False)
    assert not found
    (begin,) = found.beginnings
    assert (begin.slot, begin.cause.signal, begin.cause.phase) == (slot, "blocks", phase)
    assert begin.looks.startswith(looks), begin.looks
    assert f'it begins in {slot}, signal "blocks" (<dict>), {phase}: off by' in str(found)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_program_is_as_long_for_more_microbatches(schedule):
    lengths = set()
    for microbatches in (4, 16):
        jshard.load(configured(2, schedule=schedule, microbatches=microbatches))
        x = jax.ShapeDtypeStruct((microbatches, *X.shape[1:]), jnp.int32)
        model = jshard.shard(built(), jax.ShapeDtypeStruct(X.shape[1:], jnp.int32))
        graph, state = nnx.split(model)
        made = jax.make_jaxpr(lambda state, x: accumulated(loss)(nnx.merge(graph, state), x, x))(state, x)  # noqa: B023
        lengths.add(sum(1 for _ in equations(made)))
    assert len(lengths) == 1, lengths
