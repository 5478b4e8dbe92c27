"""Layers that are no stack, on stages that signals number: one program, cut where its values go from one stage to another."""

from __future__ import annotations

import contextlib
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers import partition
from jshard.layers.gradients import accumulated
from jshard.programs.jaxprs import equations
from jshard.schedules import Cost, generate
from jshard.signals.claims import Claim, Stage

pytestmark = pytest.mark.usefixtures("nothing_loaded")

WORDS = 12


class Wide(nnx.Module):
    def __init__(self, width, hidden, *, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Grow(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.up(nnx.relu(x))


class Model(nnx.Module):
    """Blocks of three kinds, of two widths, each with a scale of the words; what the first is given is used behind the last."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(WORDS, 8, rngs=rngs)
        self.blocks = nnx.List([Wide(8, 16, rngs=rngs), Grow(8, rngs=rngs), Wide(16, 8, rngs=rngs)])
        self.head = nnx.Linear(16, WORDS, rngs=rngs)

    def __call__(self, x):
        scale, y = 1.0 + 0.1 * (x > 5)[..., None], self.embed(x)
        skipped = y
        for block in self.blocks:
            y = block(y) * scale
        return self.head(y) * (1.0 + jnp.sum(skipped**2, -1, keepdims=True))


def loss(model, x, y):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(model(x)), y[..., None], -1)
    return -jnp.mean(chosen) + 1e-2 * jnp.sum(model.embed.embedding[...] ** 2)


X, Y = np.random.default_rng(0).integers(0, WORDS, (2, 4, 6), np.int32)


def configured(stages=2, pipeline=True, **words):
    split = {"row": "data", **words}
    first = {"first": {"stage": 0, **split, "match": ["embed/**"]}}
    middle = {"stage": 1 if stages > 1 else 0, **split}
    return {
        "jshard": {
            "mesh": {"stage": stages, "data": 2, "tensor": 2},
            "train": {"microbatches": 2},
            "pipeline": {"axis": "stage"},
        },
        **first,
        "up0": {"stage": 0, **split, "column": "tensor", "match": ["blocks/0/up/**"]},
        "down0": {"stage": 0, **split, "reduction": "tensor", "match": ["blocks/0/down/**"]},
        "norm0": {"stage": 0, **split, "match": ["blocks/0/norm/**"]},
        "grow": {**middle, "match": ["blocks/1/**"]},
        "up2": {**middle, "column": "tensor", "match": ["blocks/2/up/**"]},
        "down2": {**middle, "reduction": "tensor", "match": ["blocks/2/{down,norm}/**"]},
        "head": {**middle, "match": ["head/**"]},
    }


@pytest.fixture(scope="module")
def one_device():
    jshard.unload()
    return jax.tree.map(np.asarray, nnx.value_and_grad(loss)(Model(rngs=nnx.Rngs(0)), X, Y))


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-6), found, expected)


@pytest.mark.seconds
@pytest.mark.parametrize("words", [{}, {"store": "data"}], ids=["rows and tensor", "store"])
def test_blocks_of_several_kinds_run_on_the_stages_that_signals_number(words, one_device):
    jshard.load(configured(**words))
    model = jshard.shard(Model(rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct(X.shape, jnp.int32))
    kernel = model.blocks[1].up.kernel[...]
    assert "stage" in str(kernel.sharding.spec)
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(model, X, Y)
    close(value, one_device[0])
    close(gradients, one_device[1])
    at_rest = jax.tree.map(operator.attrgetter("sharding"), nnx.state(model, nnx.Param))
    jax.tree.map(lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(), gradients, at_rest)


# -- GT's form: lists of workers --

WORKERS = {
    "first": {"shard": {"axis": 1, "workers": [0, 1]}},
    "second": {"shard": {"axis": 0, "workers": [2, 3]}},
    "third": {"shard": {"axis": 0, "workers": [0, 1]}},
}
ROWS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)


class Workers(nnx.Module):
    """Layers that follow one another on other workers, and a last one on the first's."""

    def __init__(self, *, rngs):
        with jshard.signal("first"):
            self.up = jshard.Linear(8, 16, use_bias=False, rngs=rngs)
        with jshard.signal("second"):
            self.down = jshard.Linear(16, 8, rngs=rngs)
        with jshard.signal("third"):
            self.head = jshard.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        with jshard.signal.context("first"):
            x = nnx.relu(self.up(x))
        with jshard.signal.context("second"):
            x = self.down(x)
        with jshard.signal.context("third"):
            return self.head(nnx.relu(x))


def square(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def trained(model, optimizer, steps=3):
    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(square)(model, x, y)
        optimizer.update(model, gradients)
        return value

    step = nnx.jit(step)
    return [step(model, optimizer, *ROWS) for _ in range(steps)]


@pytest.mark.seconds
def test_layers_on_lists_of_workers_are_stages_of_one_mesh_and_train_in_one_program():
    plain = Workers(rngs=nnx.Rngs(0))
    expected = trained(plain, nnx.Optimizer(plain, optax.adamw(0.1), wrt=nnx.Param))
    jshard.load(WORKERS)
    model = Workers(rngs=nnx.Rngs(0))
    assert {d.id for d in model.down.kernel[...].devices()} == {2, 3}
    model = jshard.shard(model, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert dict(jshard.mesh().shape) == {"stage": 2, "workers": 2}
    assert [d.id for d in jshard.mesh().devices.flat] == [0, 1, 2, 3]
    assert model.up.kernel[...].sharding.spec == jax.P("stage", "workers")
    assert {shard.data.shape for shard in model.down.kernel[...].addressable_shards} == {(8, 4)}
    optimizer = jshard.Optimizer(model, optax.adamw(0.1))
    found = trained(model, optimizer)
    close(found, expected)
    close(*(nnx.state(each, nnx.Param) for each in (model, plain)))
    mu = optimizer.opt_state[0].mu["up"]["kernel"][...]
    assert mu.sharding.is_equivalent_to(model.up.kernel[...].sharding, 2)


# -- by a schedule --

BATCHES = np.random.default_rng(1).integers(0, WORDS, (2, 4, 4, 6), np.int32)


@pytest.fixture(scope="module")
def in_microbatches():
    jshard.unload()
    return nnx.jit(accumulated(loss))(Model(rngs=nnx.Rngs(0)), *BATCHES)


@pytest.mark.seconds
@pytest.mark.parametrize(("schedule", "store"), [("1f1b", None), ("gpipe", "data"), ("zero_bubble", None)])
def test_a_schedule_computes_what_one_device_does(schedule, store, in_microbatches):
    said = configured(**({} if store is None else {"store": store}))
    said["jshard"]["pipeline"]["schedule"] = schedule
    said["jshard"]["train"]["microbatches"] = 4
    jshard.load(said)
    model = jshard.shard(Model(rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct(X.shape, jnp.int32))
    at_rest = jax.tree.map(operator.attrgetter("sharding"), nnx.state(model, nnx.Param))
    value, gradients = nnx.jit(accumulated(loss))(model, *BATCHES)
    close(value, in_microbatches[0])
    close(gradients, in_microbatches[1])
    jax.tree.map(lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(), gradients, at_rest)


def test_a_batch_in_microbatches_without_a_schedule_is_one_sentence():
    jshard.load(WORKERS)
    model = jshard.shard(Workers(rngs=nnx.Rngs(0)))
    with pytest.raises(JShardError) as told:
        accumulated(square)(model, *(np.stack([x, x]) for x in ROWS))
    assert str(told.value) == (
        'signal "second" (<dict>) is on a stage, and a batch in microbatches goes through stages by a schedule; write '
        "jshard: {pipeline: {axis: stage}, train: {microbatches: 4}}"
    )


def with_backward(said, **back):
    return {name: {**signal, **({"backward": back[name]} if name in back else {})} for name, signal in said.items()}


@pytest.mark.seconds
def test_a_backward_on_other_workers_is_part_of_the_program():
    expected = nnx.value_and_grad(square, argnums=(0, 1))(Workers(rngs=nnx.Rngs(0)), *ROWS)
    jshard.load(with_backward(WORKERS, first="second", second="third"))
    model = jshard.shard(Workers(rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((8, 8), jnp.float32))
    f = nnx.value_and_grad(square, argnums=(0, 1))
    close(nnx.jit(f)(model, *ROWS), expected)
    ledger = jshard.explain(f, model, *ROWS)
    there = [line for line in ledger if line.collective == "permute" and line.cause.key == "backward"]
    assert {line.phase for line in there} == {"backward"}
    sent = {name: sum(line.count for line in there if line.signal == name) for name in ("first", "second")}
    assert sent == {"first": 1, "second": 3}  # cotangents; of what another has made, it and its cotangent too
    assert sum(line.count for line in ledger if line.collective == "permute") == 8
    found = jshard.verify(square, model, *ROWS)
    assert "EQUAL on {stage: 2, workers: 2} and on one device: 8 arrays, all bitwise" in str(found)


class Layer(nnx.Module):
    def __init__(self, stage, *, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        with jshard.signal(f"stage{stage}_columns"):
            self.up = jshard.Linear(8, 16, use_bias=False, rngs=rngs)
        with jshard.signal(f"stage{stage}_rows"):
            self.down = jshard.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Small(nnx.Module):
    """Two layers on the first of four stages and one on the others, words before them and logits behind."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([Layer(stage, rngs=rngs) for stage in (0, 0, 1, 2, 3)])
        with jshard.signal("stage3_columns"):
            self.head = jshard.Linear(8, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CLAIMED = [  # what plain Flax has built
    'stage0.match=["embed/**", "layers/{0,1}/norm/**"]',
    *(f'stage{n}.match=["layers/{n + 1}/norm/**"]' for n in range(1, 4)),
]


def entropy(model, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(model(x)), y[..., None], -1))


@pytest.mark.slow
def test_a_file_of_gt_trains_four_stages_of_two_workers_as_one_device_does():
    x, y = np.random.default_rng(2).integers(0, 16, (2, 8, 2, 6), np.int32)
    expected = nnx.jit(accumulated(entropy))(Small(rngs=nnx.Rngs(0)), x, y)
    jshard.load("examples/gt/pipeline.yaml", ["jshard.pipeline={axis: stage}", "microbatches=8", *CLAIMED])
    model = jshard.shard(Small(rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct(x.shape[1:], jnp.int32))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    total = sum(leaf.nbytes for leaf in leaves)
    for number in range(8):
        here = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device.id == number)
        assert here == total / 8  # of four stages 1/2 of one's
    value, gradients = nnx.jit(accumulated(entropy))(model, x, y)
    close(value, expected[0])
    close(gradients, expected[1])
    assert "EQUAL on {stage: 4, workers: 2} and on one device" in str(jshard.verify(accumulated(entropy), model, x, y))
    ledger = jshard.explain(accumulated(entropy), model, x, y)
    assert (
        sum(line.count for line in ledger if line.mesh_axes == ("stage",) and line.collective == "permute") == 2 * 3 * 8
    )
    assert Cost(generate("1f1b", 4, 8)).lock_step.idle == pytest.approx(3 / 11)


def test_microbatches_of_a_run_that_are_not_those_of_its_pipeline_are_refused():
    jshard.load(configured())
    with pytest.raises(JShardError) as told:
        jshard.train(Model(rngs=nnx.Rngs(0)), optax.sgd(0.1), {"train": (X, Y)}, microbatches=4)
    assert str(told.value) == (
        "jshard.train is given microbatches=4, and stages over stage, 2 microbatches by 1f1b (<dict>); remove microbatches"
    )


@pytest.mark.slow
def test_jshard_train_trains_a_file_of_gt():
    x, y = np.random.default_rng(2).integers(0, 16, (2, 16, 6), np.int32)
    how = {"steps": 3, "batch": 16, "shuffle": False}
    jshard.unload()
    expected = jshard.train(Small(rngs=nnx.Rngs(0)), optax.sgd(0.1), {"train": (x, y)}, **how)
    jshard.load("examples/gt/pipeline.yaml", ["jshard.pipeline={axis: stage}", "microbatches=4", *CLAIMED])
    assert jshard.train(Small(rngs=nnx.Rngs(0)), optax.sgd(0.1), {"train": (x, y)}, **how) == pytest.approx(expected)


class Spelled(nnx.Module):
    """A block of GT's demo of eight workers as GT spells it: arrays, `@`, a scope in a scope."""

    def __init__(self, stage, *, rngs):
        self.stage = stage
        self.weight = nnx.Param(jnp.ones(8))
        self.up_weight = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.down_weight = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))

    def __call__(self, x):
        with jshard.signal.context(self.stage):
            normed = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * self.weight[...]
            with jshard.signal.context(f"{self.stage}_colpar"):
                hidden = jax.nn.relu(normed @ self.up_weight[...])
            with jshard.signal.context(f"{self.stage}_rowpar"):
                return x + hidden @ self.down_weight[...]


class Demo(nnx.Module):
    def __init__(self, *, rngs):
        blocks = []
        for stage in range(4):
            with jshard.signal.context(f"pp_stage{stage}"):
                if stage == 0:
                    self.embed_weight = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))
                blocks.append(Spelled(f"pp_stage{stage}", rngs=rngs))
                if stage == 3:
                    self.output_weight = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        with jshard.signal.context("pp_stage0"):
            x = self.embed_weight[...][x]
        for number, block in enumerate(self.blocks):
            with jshard.signal.context(f"stage{number - 1}_to_stage{number}") if number else contextlib.nullcontext():
                x = x + 0
            x = block(x)
        with jshard.signal.context("pp_stage3_colpar"):
            return x @ self.output_weight[...]


def of_demo():
    """GT's file for it: each signal has a backward, on the same workers."""
    shard = lambda axis, stage: {"shard": {"axis": axis, "workers": [2 * stage, 2 * stage + 1]}}
    found = {f"stage{stage}_to_stage{stage + 1}": shard(0, stage + 1) for stage in range(3)}
    for stage in range(4):
        for name, axis in (("", 0), ("_colpar", 1), ("_rowpar", 0)):
            found |= {
                f"pp_stage{stage}{name}": {**shard(axis, stage), "backward": f"pp_stage{stage}{name}_bwd"},
                f"pp_stage{stage}{name}_bwd": shard(axis, stage),
            }
    return found


@pytest.mark.seconds
def test_the_demo_of_gt_runs_as_gt_spells_it():
    x, y = np.random.default_rng(2).integers(0, 16, (2, 16, 6), np.int32)
    expected = nnx.jit(nnx.value_and_grad(entropy))(Demo(rngs=nnx.Rngs(0)), x, y)
    jshard.load(of_demo())
    model = jshard.shard(Demo(rngs=nnx.Rngs(0)), x)
    assert dict(jshard.mesh().shape) == {"stage": 4, "workers": 2}
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    for number in range(8):
        here = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device.id == number)
        assert here == sum(leaf.nbytes for leaf in leaves) / 8  # of four stages 1/2 of one's
    value, gradients = nnx.jit(nnx.value_and_grad(jshard.shard(entropy)))(model, x, y)
    close(value, expected[0])
    close(gradients, expected[1])
    ledger = jshard.explain(jshard.shard(entropy), model, x, y)
    sums = [line.signal for line in ledger if line.mesh_axes == ("workers",) and line.collective == "all_reduce"]
    assert {f"pp_stage{stage}/pp_stage{stage}_rowpar" for stage in range(4)} <= set(sums)


# -- where a program is cut --

NUMBERED = {"jshard": {"mesh": {"stage": 2, "tensor": 2}, "train": {"microbatches": 2}, "pipeline": {"axis": "stage"}}}


class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def again(model, x):
    return jnp.sum(model.first(model(x)))


PROGRAMS = {  # how many arrays each piece makes, and how many go from one to the next
    "in order": (lambda model, x: jnp.sum(model(x)), [1, 1], 1),
    "parameters of two stages": (lambda model, x: jnp.sum(x @ (model.first.kernel * model.second.kernel)), [1, 1], 1),
    "back to the first": (again, [1, 1, 1], 2),
    "past another": (lambda model, x: jnp.sum(model.first(x) * model.first(model.second(x))), [1, 1, 1], 3),
    "beside another": (lambda model, x: jnp.sum(model(x) * model.first(x)), [2, 1], 2),
    "a larger array": (lambda model, x: (
        jnp.sum(model(x).T @ jnp.concatenate([model.first.bias, model.first.bias]))), [1, 1, 1], 2),
    "a sum of squares": (lambda model, x: jnp.sum(model(x)) + jnp.sum(model.first.kernel[...] ** 2), [2, 1], 2),
    "squares of both": (lambda model, x: jnp.sum(model(x)) + jnp.sum(x) * sum(
        jnp.sum(kernel[...] ** 2) for kernel in (model.first.kernel, model.second.kernel)), [2, 1], 2),
    "squares and rows": (lambda model, x: (
        jnp.sum(model(x)) + jnp.sum(x) * jnp.sum(model.first.kernel[...] ** 2)), [2, 1], 2),
    "several results": (lambda model, x: (
        model.first(x), 1.0, jnp.sum(model.second.bias**2), model.first.bias[...], jnp.sin(x) + jnp.arange(4),
        jnp.sum(model(x))), [3, 2], 1),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_goes_from_stage_to_stage_where_it_needs_their_parameters(case):
    f, made, sent = PROGRAMS[case]
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    expected = f(Two(rngs=nnx.Rngs(0)), x)
    jshard.load(said({"stage": 0}, {"stage": 1}))
    model = jshard.shard(Two(rngs=nnx.Rngs(0)))
    jshard.shard(f).place(model, x)
    run = nnx.jit(jshard.shard(f))
    found = [*equations(jax.make_jaxpr(run)(model, x))]
    assert [len(eqn.outvars) for eqn in found if eqn.primitive.name == "cond"] == made
    assert sum(eqn.primitive.name == "ppermute" for eqn in found) == sent
    close(run(model, x), expected)


# -- what does not run is a sentence --


def rounded(model, x):
    return jnp.sum(jnp.where(model.first(x) > 0, model.second(x), 0))


def said(first, second, **more):
    return {**NUMBERED, "one": {"match": ["first/**"], **first}, "two": {"match": ["second/**"], **second}, **more}


SENTENCES = {
    "no layers": (said({"stage": 0}, {"stage": 0}), again, (
        'mesh axis "stage" has 2 stages, and no parameter is on stage 1 (signal "one" (<dict>) has stage 0, <dict>); write '
        "stage: 1 for some layers, or make the mesh axis smaller"
    )),
    "too many": (said({"stage": 0}, {"stage": 2}), again, (
        'signal "two" (<dict>) is on stage 2 (<dict>), and mesh axis "stage" has 2; use 0 to 1, or make the mesh axis larger'
    )),
    "stored": (said({"stage": 0, "match": ["first/kernel"]}, {"stage": 1}, rest={"store": "stage", "match": ["**"]}), again, (
        'signal "rest" (<dict>) names mesh axis "stage" for store (<dict>), that of stages that signals number; give that '
        "signal a stage too: what is on one rests split over all"
    )),
    "back to the first": (said({"stage": 0}, {"stage": 1}), again, (
        "jshard.pipeline (<dict>) goes from stage 0 to stage 1, and the model goes through stages 0, 1, 0; give what uses a "
        "parameter the stage of it, and later layers the same stage or a later one"
    )),
    "whole numbers": (said({"stage": 0}, {"stage": 1}), rounded, (
        "jshard.pipeline (<dict>) sends bool[2,4] from stage to stage, and only what has a gradient can go; compute it of the "
        "batch, or in the layer that uses it"
    )),
    "a backward apart": (said({"stage": 0, "backward": "two"}, {"stage": 1}), lambda model, x: jnp.sum(model(x)), (
        'jshard.pipeline (<dict>) runs a backward where its forward ran, and signal "one" (<dict>) names another (<dict>); '
        "remove backward, or jshard.pipeline"
    )),
    "a backward nowhere": (said({"stage": 0, "backward": "no"}, {"stage": 1}, no={}), again, (
        'signal "one" (<dict>) has its backward as signal "no" (<dict>) says (<dict>), which is on no stage of its own; give it '
        "the workers of one stage, or write stage: 1"
    )),
    "a backward beyond": (said({"stage": 0, "backward": "no"}, {"stage": 1}, no={"stage": 2}), again, (
        'signal "one" (<dict>) has its backward as signal "no" (<dict>) says (<dict>), which is on no stage of its own; give it '
        "the workers of one stage, or write stage: 1"
    )),
    "whole numbers and a backward apart": (said({"stage": 0, "backward": "two"}, {"stage": 1}), rounded, (
        'signal "one" (<dict>) has its backward on other workers, and sends bool[2,4] from stage to stage, and only what has a '
        "gradient can go; compute it of the batch, or in the layer that uses it"
    )),
    "whole numbers before a backward apart": (said({"stage": 0}, {"stage": 1, "backward": "one"}), rounded, (
        'signal "two" (<dict>) has its backward on other workers, and sends bool[2,4] from stage to stage, and only what has a '
        "gradient can go; compute it of the batch, or in the layer that uses it"
    )),
    "two backwards": (said(
        {"stage": 0, "match": ["first/kernel"]}, {"stage": 1}, bias={"stage": 0, "backward": "two", "match": ["first/bias"]}
    ), again, (
        'signal "bias" (<dict>) and signal "one" (<dict>) follow one another on stage 0, and have their backward on stages 1 '
        "and 0; give both the same backward"
    )),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_what_does_not_run_is_one_sentence(case):
    asked, f, sentence = SENTENCES[case]
    jshard.load(asked)
    with pytest.raises(JShardError) as told:
        accumulated(f)(jshard.shard(Two(rngs=nnx.Rngs(0))), np.ones((2, 2, 4), np.float32))
    assert str(told.value) == sentence


@pytest.mark.parametrize(("stacked", "number"), [("two", "one"), ("one", "two")])
def test_a_stack_that_is_split_equally_has_no_numbers_beside_it(stacked, number):
    class Stacked(Two):
        def __init__(self, *, rngs):
            built = {"one": nnx.Linear(4, 4, rngs=rngs), "two": nnx.Linear(4, 4, rngs=rngs)}
            built[stacked] = jshard.stack(nnx.Linear, 2, 4, 4, rngs=rngs)
            self.first, self.second = built.values()

    jshard.load(said(*({"stage": "equal" if name == stacked else 0} for name in ("one", "two"))))
    with pytest.raises(JShardError) as told:
        jshard.shard(Stacked(rngs=nnx.Rngs(0)), np.ones((2, 4), np.float32))
    assert str(told.value) == (
        f'signal "{stacked}" (<dict>) says stage: equal (<dict>), and signal "{number}" (<dict>) says stage: 0 (<dict>); give '
        "each signal the number of its stage, or let one stack be split equally"
    )


def test_on_its_stage_a_parameter_rests_as_all_but_the_stages_split_it(mesh):
    sizes = {"stage": 2, "data": 2, "tensor": 2}
    signals = jshard.load({
        "jshard": {"mesh": sizes, "train": {"microbatches": 2}, "pipeline": {"axis": "stage", "schedule": "1f1b"}},
        "whole": {"row": "data", "column": "tensor", "stage": 0},
        "stored": {"row": "data", "column": "tensor", "store": "data", "stage": 1},
    }).signals  # fmt: skip
    claims = [
        Claim(signals[name], "**", Stage("stage", signals[name], at)) for at, name in enumerate(("whole", "stored"))
    ]
    w = np.ones((8, 8), np.float32)
    inputs = [
        *(partition.Input(claim=claim, path=name) for claim, name in zip(claims, "uw", strict=True)),
        partition.Input((("data",), ())),
    ]
    program = partition.Program(
        mesh(**sizes), jax.make_jaxpr(lambda u, w, x: jnp.sin(x @ u) @ w)(w, w, w).jaxpr, inputs
    )
    assert program.in_axes[:2] == [(("stage",), ("tensor",)), (("data", "stage"), ("tensor",))]
    parts = [program.part_of_stage(number, w) for number in (0, 1)]
    assert [part.axes for part in parts] == [((), ("tensor",))] * 2
    assert [part.lies for part in parts] == [((), ("tensor",)), (("data",), ("tensor",))]
