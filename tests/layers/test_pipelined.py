"""What a pipeline is made of before it runs: its table, where a model is cut, and what each stage has of it. Traced alone."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers.balance import Costs
from jshard.layers.call_arguments import OUTSIDE, PARAMETER, VARIABLE
from jshard.layers.partition.stages import Counts
from jshard.layers.pipeline.numbered import PipelinedPieces
from jshard.layers.pipeline.scheduled import table_of
from jshard.layers.pipeline.stacked import OneStage, Pipelined
from jshard.layers.sharded_call import Call
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import equations
from jshard.schedules import generate
from jshard.signals.active_config import configuration, on_mesh

WIDTH, LAYERS, MICROBATCHES = 8, 4, 2
X = np.zeros((4, WIDTH), np.float32)


class Layer(nnx.Module):
    """With a scale that nobody learns, and what it made of each row last."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.BatchStat(jnp.ones((2, WIDTH)))
        self.rows = nnx.Cache(jnp.zeros((4, WIDTH)))

    def __call__(self, x):
        self.rows[...] = x = x + nnx.relu(self.up(x)) * self.scale[0]
        return x


class Model(nnx.Module):
    layer = Layer

    def __init__(self, depth=LAYERS, *, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.blocks = jshard.stack(self.layer, depth, rngs=rngs)

    def __call__(self, x):
        return self.blocks(self.first(x))


def loss(model, x):
    return jnp.sum(model(x)) + jnp.sum(model.blocks.rows[...])


def words(layers="equal", *, edges=True, pipeline=(), mesh=(), first=(), up=()):
    asked = {"train": {"microbatches": MICROBATCHES}, "pipeline": {"axis": "stage", **dict(pipeline)}}
    return {
        "jshard": {"mesh": {"stage": 2, "data": 2, **dict(mesh)}, **asked},
        "blocks": {"stage": layers, "match": ["blocks/**"]},
        "up": {"row": "data", **dict(up), "match": ["blocks/up/**"]},
        **({"edges": {"row": "data", **dict(first), "match": ["first/**"]}} if edges else {}),
    }


def made(f=loss, *, depth=LAYERS, kind=Pipelined, model=Model, given=(X,)):
    call = Call(f, (model(depth, rngs=nnx.Rngs(0)), *given), {})
    return kind(
        call.program, *([n for n, each in enumerate(call.kinds) if each == of] for of in (PARAMETER, VARIABLE, OUTSIDE))
    )


def traced(found):
    program = found.program
    shapes = [(MICROBATCHES, *t.shape) if n in found.batch else t.shape for n, t in enumerate(program.types)]
    layouts = [Layout(program.mesh, *axes) for axes in found._in_axes]
    return jax.make_jaxpr(found.run)([
        jax.ShapeDtypeStruct(shape, t.dtype, sharding=each.sharding)
        for shape, t, each in zip(shapes, program.types, layouts, strict=True)
    ])  # fmt: skip


@pytest.mark.quick("gpipe")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "gpipe"])
def test_one_device_that_stands_for_a_mesh_has_all_chunks_of_its_table(schedule):
    jshard.load(words(pipeline={"schedule": schedule}, first={"store": ["data", "stage"]}))
    of_two = generate(schedule, 2, MICROBATCHES, None)
    found = made()
    assert (found.table, found.meant) == (of_two, of_two)
    one = jax.make_mesh((1, 1), ("stage", "data"), (jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    with on_mesh(one, jshard.mesh()):
        assert table_of(configuration().pipeline) == of_two
        found = made()
        kind = "zero_bubble" if schedule == "zero_bubble" else "1f1b"
        assert found.meant == of_two
        assert found.table == generate(kind, 1, MICROBATCHES, of_two.virtual_stages)
        traced(found)


def test_stages_are_the_last_of_what_splits_at_rest_and_a_stage_has_the_others_left():
    mesh = {"zed": 2}
    jshard.load(words(mesh=mesh, first={"store": ["data", "zed", "stage"]}))
    found = made()
    (number,) = (n for n, each in enumerate(found.program.inputs) if each.path == "first/kernel")
    assert found.program.in_axes[number] == (("data", "zed", "stage"), ())
    assert found.program.part_of_stage(number, None).rest == (("data", "zed"), ())
    assert found._axis_of_stages(number) == 0
    jshard.load(words(mesh=mesh, first={"store": ["data", "stage", "zed"]}))
    with pytest.raises(JShardError) as told:
        traced(made())
    assert str(told.value) == (
        'signal "edges" (<dict>) names mesh axis "stage", that of the stages, not last in store (<dict>); write store: [data, zed, '
        "stage]"
    )


RANGES = {"0..0": 0, "1..3": 1}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("layers", "how"),
    [
        ("equal", {}),
        ("equal", {"first": {"store": ["data", "stage"]}}),
        (RANGES, {"pipeline": {"schedule": "zero_bubble"}}),
    ],
    ids=str,
)
def test_layers_that_leave_rows_and_have_numbers_of_their_own_are_traced(layers, how):
    jshard.load(words(layers, **how))
    found = made()
    text = traced(found)
    assert [v.aval.shape for v in text.jaxpr.outvars][:1] == [()]
    assert len(text.jaxpr.outvars) == 1 + len(found.parameters) + len(found.variables)
    over_stages = [eqn for eqn in equations(text) if "stage" in str(eqn.params.get("axis_name"))]
    scattered = [eqn for eqn in over_stages if eqn.primitive.name == "reduce_scatter"]
    assert len(scattered) == ("first" in how)  # and not summed: of what is split over stages at rest


def test_how_layers_lie_is_told_and_what_rests_whole():
    jshard.load(words(RANGES))
    assert made().layers_words == "blocks: stages of 1, 3 layers, as written"
    jshard.load(words({"0..0": 0, "1..2": 1, "3..3": 2}, mesh={"stage": 3, "data": 1}))
    assert made().layers_words == (
        "blocks: stages of 1, 2, 1 layers, as written; 2 of 2 parameters rest whole on every stage, as no axis divides by 3 more"
    )


def test_what_costs_a_layer_and_what_is_around_it():
    jshard.load(words("balance"))
    product = 2 * 4 * WIDTH * WIDTH
    assert made().costs == Costs(LAYERS, product, product, 0, 4 * (WIDTH * WIDTH + WIDTH))


class Kept(nnx.Module):
    """With variables: how often it ran, the sum of its last input, of all inputs, a result of before, and a mean."""

    def __init__(self, depth, *, rngs):
        self.a_calls, self.b_last = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))
        self.c_all, self.d_before = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros((2,)))
        self.e_mean = nnx.BatchStat(jnp.zeros((WIDTH,)))
        self.blocks = jshard.stack(Plain, depth, rngs=rngs)

    def __call__(self, x):
        self.a_calls[...] += 1
        self.b_last[...] = x.sum()
        if self.keeps_all:
            self.c_all[...] += x.sum()
        x, before = self.blocks(x), self.d_before[...].sum() if self.uses else 0
        self.d_before[...] = x[:2, 0] if self.uses else jnp.zeros(2)
        self.e_mean[...] = x.mean(0)
        return x + before

    keeps_all, uses = False, False


class Plain(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.up(x)


class Uses(Kept):
    uses = True


class KeepsAll(Kept):
    keeps_all = True


def test_variables_that_a_call_makes_of_its_data_alone_are_those_of_the_last_microbatch():
    jshard.load(words(edges=False))
    found = made(lambda model, x: jnp.sum(model(x)), model=Kept)
    assert list(found.of_data) == [1, 4]
    assert [v.aval.shape for v in traced(found).jaxpr.outvars][3:] == [(), (), (), (2,), (WIDTH,)]
    for kind in (KeepsAll, Uses):
        found = made(lambda model, x: jnp.sum(model(x)), model=kind)
        assert list(found.of_data) == [1, 4]
        with pytest.raises(JShardError, match="keeps variables that its data change"):
            found.states  # noqa: B018


class Counting(nnx.Module):
    """A layer that leaves a whole number, which the loss uses."""

    def __init__(self, *, rngs):
        self.up, self.calls = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = jnp.argmax(x)
        return x + self.up(x)


class OfCounting(Model):
    layer = Counting


BY_TAN = (
    'signal "blocks" (<dict>) says stage (<dict>), and its layers are used by tan (test_pipelined.py:LINE), and not by the loop '
    "of a jshard.stack alone; call the stack as the model does, with no jax.jit, jax.checkpoint or other use of its parameters"
)
WRONG = {
    "whole numbers": (OfCounting, lambda model, x: jnp.sum(model(x)) * model.blocks.calls[...].sum(), (
        "jshard.pipeline (<dict>) sends int32[4] from stage to stage, and only what has a gradient can go; compute it of the batch, "
        "or in the layer that uses it"
    )),
    "used by another": (Model, lambda model, x: loss(model, x) + jnp.sum(jnp.tan(model.blocks.up.bias[...])), BY_TAN),
    "used at last by another": (Model, lambda model, x: (
        loss(model, x) + loss(model, x) + jnp.sum(jnp.tan(model.blocks.up.bias[...]))), BY_TAN),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_cut_is_a_sentence(case):
    model, f, sentence = WRONG[case]
    jshard.load(words())
    with pytest.raises(JShardError) as told:
        made(f, model=model)
    assert re.sub(r"py:\d+", "py:LINE", str(told.value)) == sentence


def twice(model, x):
    x = model.blocks(x)
    return jnp.sum(model.blocks(x))


def test_layers_in_two_loops_are_told_by_both_lines():
    jshard.load(words())
    with pytest.raises(JShardError) as told:
        made(twice)
    line = twice.__code__.co_firstlineno
    assert f"run in 2 loops (test_pipelined.py:{line + 1}, test_pipelined.py:{line + 2});" in str(told.value)


def test_layers_of_unequal_chunks_are_read_and_written_where_they_are():
    counts = Counts((1, 3, 2), 3)
    mine = types.SimpleNamespace(counts=counts, layers=counts.longest)
    x = np.arange(6.0) + 10
    assert [OneStage._read(mine, x, np.int32(n)).tolist() for n in range(3)] == [
        [10, 11, 12],
        [11, 12, 13],
        [14, 15, 15],
    ]
    room = jnp.zeros(6)
    for number in range(3):
        room = OneStage._written(mine, room, jnp.arange(3) + 10.0 * (number + 1), np.int32(number))
    assert room.tolist() == [10, 20, 21, 22, 30, 31]


def test_layers_of_equal_chunks_are_read_and_written_where_they_are():
    counts = Counts((2, 2), 2)
    mine = types.SimpleNamespace(counts=counts, layers=2)
    x = np.arange(4.0)
    assert [OneStage._read(mine, x, np.int32(n)).tolist() for n in range(2)] == [[0, 1], [2, 3]]
    assert (
        OneStage._written(mine, jnp.zeros((4, 2)), jnp.ones((2, 2)), np.int32(1)).tolist()
        == [[0, 0]] * 2 + [[1, 1]] * 2
    )
    made = jax.make_jaxpr(lambda x: OneStage._read(mine, x, np.int32(1)))(x)
    assert not [eqn for eqn in equations(made) if eqn.primitive.name == "gather"]


@pytest.mark.parametrize(("remat", "again"), [("full", False), ("chunk", True), (False, False)])
def test_chunks_are_computed_again_where_their_remat_says_so(remat, again):
    jshard.load(words(up={"remat": remat}))
    assert made()._recomputes() is again


# -- of signals that number their stages --


class Several(nnx.Module):
    """Products one behind the other, and a variable that a function may write."""

    def __init__(self, depth, *, rngs):
        self.first, self.second = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))
        self.third, self.kept = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        return self.third(self.second(self.first(x)))


def numbered(first, second, third, stages=2, **pipeline):
    return {
        "jshard": {
            "mesh": {"stage": stages, "data": 2},
            "train": {"microbatches": MICROBATCHES},
            "pipeline": {"axis": "stage", **pipeline},
        },
        "one": {"match": ["first/**"], "row": "data", **first},
        "two": {"match": ["second/**"], "row": "data", **second},
        "three": {"match": ["third/**"], "row": "data", **third},
    }


def aside(model, x):
    """A loss of the first stage, and a variable of the last."""
    model.kept[...] = model(x).sum()
    return jnp.sum(model.first(x))


def of_none(model, x):
    model.kept[...] = model(x).sum()
    return jnp.sum(x)


def back(model, x):
    return jnp.sum(model.third(model.first(model.second(model.first(x)))))


ZERO, ONE, TWO = ({"stage": number} for number in range(3))
OF_LAST = "jshard.pipeline (<dict>) ends on stage 1, and the loss does not depend on its parameters; give the last layers the last stage"
NUMBERED = {
    "chunks": (numbered(ZERO, ZERO, ONE, chunks=3), lambda model, x: jnp.sum(model(x)), (
        'jshard.pipeline (<dict>) has 3 chunks of layers a stage, and signal "one" (<dict>) is on stage 0 (<dict>); write '
        "chunks: 1, or build equal layers with jshard.stack"
    )),
    "a loss before the end": (numbered(ZERO, ZERO, ONE), aside, OF_LAST),
    "a loss of no stage": (numbered(ZERO, ZERO, ONE), of_none, OF_LAST),
    "back to the first": (numbered(ZERO, ONE, TWO, 3), back, (
        "jshard.pipeline (<dict>) goes from stage 0 to stage 2, and the model goes through stages 0, 1, 0, 2; give what uses a "
        "parameter the stage of it, and later layers the same stage or a later one"
    )),
    "a backward before": (numbered(ZERO, ZERO, {**ONE, "backward": "one"}), lambda model, x: jnp.sum(model(x)), (
        'jshard.pipeline (<dict>) runs a backward where its forward ran, and signal "three" (<dict>) names another (<dict>); '
        "remove backward, or jshard.pipeline"
    )),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERED)
def test_what_goes_otherwise_than_from_stage_to_stage_is_a_sentence(case):
    said, f, sentence = NUMBERED[case]
    jshard.load(said)
    with pytest.raises(JShardError) as told:
        made(f, model=Several, kind=PipelinedPieces)
    assert str(told.value) == sentence


def test_stages_send_as_much_as_the_largest_of_each_dtype_and_keep_no_more():
    jshard.load(numbered(ZERO, ZERO, ONE))
    found = made(lambda model, x: jnp.sum(model(x)), model=Several, kind=PipelinedPieces)
    assert found.longest == {("float32", ("stage",)): 1, ("float32", ("data", "stage")): 2 * WIDTH}
    (loop,) = (eqn for eqn in equations(traced(found)) if eqn.primitive.name == "scan" and eqn.params["length"] > 2)
    # rows and a number each, arrived and sent, forward and backward; and sums of gradients
    assert len(loop.outvars) == 8
    none = np.zeros((0, WIDTH), np.float32)
    found = made(lambda model, x: jnp.sum(model(x)), model=Several, kind=PipelinedPieces, given=(none,))
    assert list(found.longest.values()) == [1, 1]
    traced(found)
