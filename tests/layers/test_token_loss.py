"""`jshard.cross_entropy`: a loss in chunks equals that of all logits at once, costs what its docstring says, and holds less."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers.token_loss import CHUNK as CHUNK_UNLESS_SAID
from jshard.layers.token_loss import by_places, losses_of
from jshard.programs.jaxprs import equations
from jshard.signals.schema import json_schema

ROWS, PLACES, WIDTH, WORDS, CHUNK = 8, 16, 8, 32, 4
draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, PLACES, WIDTH)).astype(np.float32)
TARGETS = draw.integers(-3, WORDS, (ROWS, PLACES)).clip(-1).astype(np.int32)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)


def loss(model, x, targets):
    return jshard.cross_entropy(model.up(x), targets, head=model.head.kernel[...], z=1e-2, chunk=CHUNK)


def of_all_logits(model, x, targets):
    logits = model.head(model.up(x))
    total = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, total - chosen + 1e-2 * total**2, 0).sum() / (targets >= 0).sum()


def plan(head, rest=None, **mesh):
    rest = {"row": "data", "match": ["**"], **(rest or {})}
    return {"jshard": {"mesh": mesh}, "head": {"row": "data", "match": ["head/**"], **head}, "rest": rest}


# Bytes on the wire by what is moved. In chunks, all of the forward and backward pass; a place's numbers are 4 bytes.
NUMBERS = ROWS // 2 * PLACES * 4
KERNEL, HIDDEN = WIDTH * WORDS * 4, ROWS // 2 * PLACES * WIDTH * 4
COLUMNS = {
    ("all_reduce", "forward", "tensor"): 3 * NUMBERS, ("all_reduce", "backward", "tensor"): 2 * NUMBERS + HIDDEN,
}  # fmt: skip
PLANS = {
    "data": (plan({}, data=8), {("all_reduce", "backward", "data"): KERNEL}),
    "columns": (
        plan({"column": "tensor"}, data=2, tensor=4),
        COLUMNS | {("all_reduce", "backward", "data"): KERNEL // 4},
    ),
    "columns, stored": (
        plan({"column": "tensor", "store": "data"}, data=2, tensor=4),
        COLUMNS
        | {("all_gather", "forward", "data"): KERNEL // 4, ("reduce_scatter", "backward", "data"): KERNEL // 4},
    ),
    "columns, places split": (
        plan({"column": "tensor"}, {"reduction": "tensor", "sequence": "tensor"}, data=2, tensor=4),
        {
            ("all_reduce", "forward", "tensor"): 3 * NUMBERS, ("all_reduce", "backward", "tensor"): 2 * NUMBERS,
            ("all_gather", "forward", "tensor"): HIDDEN, ("all_gather", "backward", "tensor"): HIDDEN,
            ("reduce_scatter", "backward", "tensor"): HIDDEN, ("all_reduce", "backward", "data"): KERNEL // 4,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    jshard.unload()
    return jax.device_get(nnx.jit(nnx.value_and_grad(of_all_logits))(Model(nnx.Rngs(0)), X, TARGETS))


def gradients_are_alike(got, want):
    for (path, one), (_, other) in zip(nnx.to_flat_state(got), nnx.to_flat_state(want), strict=True):
        np.testing.assert_allclose(one[...], other[...], rtol=1e-4, atol=1e-6, err_msg=str(path))


def test_a_chunk_is_as_long_as_the_schema_says():
    assert f"Positions of a row with logits in memory at a time; default: {CHUNK_UNLESS_SAID}." in str(json_schema())


@pytest.mark.parametrize("chunk", [1, 3, 16, 99])
def test_any_chunk_is_the_loss_of_all_logits(whole, chunk):
    jshard.unload()

    def f(model, x, targets):
        return jshard.cross_entropy(model.up(x), targets, head=model.head.kernel[...], z=1e-2, chunk=chunk)

    got, gradients = nnx.jit(nnx.value_and_grad(f))(Model(nnx.Rngs(0)), X, TARGETS)
    np.testing.assert_allclose(got, whole[0], rtol=1e-6)
    gradients_are_alike(gradients, whole[1])


@pytest.mark.quick("data")
@pytest.mark.parametrize("name", PLANS)
def test_a_loss_in_chunks_is_that_of_one_device_and_costs_its_formula(whole, name):
    written, wire = PLANS[name]
    jshard.load(written)
    model, f = jshard.shard(Model(nnx.Rngs(0))), jshard.shard(loss)
    f.place(model, X, TARGETS)
    got, gradients = nnx.jit(nnx.value_and_grad(f))(model, X, TARGETS)
    np.testing.assert_allclose(got, whole[0], rtol=1e-6)
    gradients_are_alike(gradients, whole[1])
    moved = collections.Counter()
    for line in jshard.explain(lambda *given: nnx.value_and_grad(f)(*given), model, X, TARGETS):
        if line.payload > 8 and "head" in line.signal:  # not the two sums
            moved[line.collective, line.phase, *line.mesh_axes] += line.count * line.payload
    assert dict(moved) == wire


def test_a_stored_head_that_is_cast_in_each_chunk_is_gathered_once_in_that_dtype():
    jshard.load(PLANS["columns, stored"][0])
    model = jshard.shard(Model(nnx.Rngs(0)))
    model.head.dtype = jnp.bfloat16

    @jshard.shard
    def f(model, x, targets):
        each = by_places(lambda x, y: losses_of(model.head(x).astype(jnp.float32), y, 0.0), model.up(x), targets, CHUNK)
        return each.mean()

    f.place(model, X, np.maximum(TARGETS, 0))
    lines = jshard.explain(lambda *given: nnx.value_and_grad(f)(*given), model, X, np.maximum(TARGETS, 0))
    assert [(line.collective, line.phase, line.count, line.payload) for line in lines if "data" in line.mesh_axes
            and "head" in line.signal and line.payload > 4] == [
        ("all_gather", "forward", 1, KERNEL // 8), ("reduce_scatter", "backward", 1, KERNEL // 8)]  # fmt: skip


def test_the_gradient_of_a_stored_head_is_multiplied_a_part_at_a_time_where_it_leaves_by_permutes(whole):
    """Of one chunk. Each part is sent once, and where another use reads the head too the whole gradient is cut."""
    jshard.load(plan({"column": "tensor", "store": "data", "kernel": {"reduce_scatter": "permute"}}, data=4, tensor=2))
    model = jshard.shard(Model(nnx.Rngs(0)))

    def f(model, x, targets):
        return jshard.cross_entropy(model.up(x), targets, head=model.head.kernel[...], z=1e-2, chunk=PLACES)

    jshard.shard(f).place(model, X, TARGETS)
    step = nnx.value_and_grad(jshard.shard(f))
    got, gradients = nnx.jit(step)(model, X, TARGETS)
    np.testing.assert_allclose(got, whole[0], rtol=1e-6)
    gradients_are_alike(gradients, whole[1])
    assert gradients.head.kernel[...].sharding == model.head.kernel[...].sharding
    sent = [line for line in jshard.explain(step, model, X, TARGETS) if line.collective == "permute"]
    assert [(line.signal, line.phase, line.count, line.total) for line in sent] == [
        ("head", "backward", 3, 3 * KERNEL // 2 // 4)
    ]

    def products(f):
        program = jax.make_jaxpr(
            lambda *state: nnx.value_and_grad(jshard.shard(f))(nnx.merge(graph, *state), X, TARGETS)
        )
        found = (eqn for eqn in equations(program(state)) if eqn.primitive.name == "dot_general")
        return collections.Counter(eqn.outvars[0].aval.size for eqn in found if eqn.outvars[0].aval.ndim == 2)

    graph, state = nnx.split(model)
    part = WIDTH * WORDS // 2 // 4
    assert products(f)[part] == 4 and not products(f)[4 * part]
    more = lambda *given: f(*given) + (given[0].head.kernel[...] ** 2).sum()
    assert not products(more)[part] and products(more)[4 * part] == 1


@pytest.mark.seconds
def test_verify_finds_no_deviation():
    jshard.load(PLANS["columns, stored"][0])
    found = jshard.verify(jshard.shard(loss), Model(nnx.Rngs(0)), X, TARGETS)
    assert {each.verdict for each in found.findings} <= {"bitwise", "within"}, found


def test_a_loss_in_chunks_holds_an_eighth_of_the_logits():
    places, words = 256, 512
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in
              (((4, places, WIDTH), jnp.float32), ((WIDTH, words), jnp.float32), ((4, places), jnp.int32))]  # fmt: skip

    def all_logits(x, head, targets):
        chosen = jnp.take_along_axis(logs := jax.nn.log_softmax(x @ head), targets[..., None], -1)
        return -chosen.mean() + 0 * logs.sum()

    def temporaries(f):
        return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    jshard.unload()
    chunked = temporaries(lambda x, head, y: jshard.cross_entropy(x, y, head=head, chunk=places // 16))
    assert chunked < temporaries(all_logits) / 8


@pytest.mark.parametrize("chunk, products", [(256, 3), (128, 4)])
def test_logits_of_one_chunk_are_made_once(chunk, products):
    """And those of several again, behind which there is the gradient of x and that of the head."""
    jshard.unload()
    given = [np.zeros(s, t) for s, t in (((4, 256, 8), "f"), ((8, 16), "f"), ((4, 256), "i"))]
    gradient = jax.grad(lambda x, head, y: jshard.cross_entropy(x, y, head=head, chunk=chunk), (0, 1))
    program = equations(jax.make_jaxpr(gradient)(*given))
    assert [eqn.primitive.name for eqn in program].count("dot_general") == products


def test_no_target_is_no_loss():
    jshard.unload()
    assert jshard.cross_entropy(X, np.full_like(TARGETS, -1), head=np.ones((WIDTH, WORDS), np.float32)) == 0


def test_one_target_is_the_loss_and_z_is_none_unless_said():
    jshard.unload()
    head, targets = draw.normal(size=(WIDTH, WORDS)).astype(np.float32), np.full_like(TARGETS, -1)
    targets[2, 3] = 5
    np.testing.assert_allclose(
        jshard.cross_entropy(X, targets, head=head), -jax.nn.log_softmax(X[2, 3] @ head)[5], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("x", "head", "targets"),
    [
        ((8, 16, 8), (32, 8), (8, 16)),
        ((8, 16, 8), (4, 32), (8, 16)),
        ((8, 16, 8), (8, 32), (8, 8)),
        ((8, 16, 8), (8, 32), (8, 32)),
        ((8, 16), (32,), (8, 16)),
        ((8, 16, 8, 2), (8, 2, 32), (8, 16)),
    ],
)
def test_arrays_that_do_not_fit_are_told(x, head, targets):
    with pytest.raises(JShardError) as told:
        jshard.cross_entropy(np.ones(x, np.float32), np.ones(targets, np.int32), head=np.ones(head, np.float32))
    assert str(told.value) == (
        f"jshard.cross_entropy was given outputs {x}, head {head} and targets {targets}; give it "
        "outputs[rows, places, features], head[features, words] and targets[rows, places]"
    )


def test_logits_that_do_not_fit_their_targets_are_told():
    with pytest.raises(JShardError) as error:
        jshard.cross_entropy(np.ones((8, 10)), np.ones((8, 10)))
    assert str(error.value) == (
        "jshard.cross_entropy was given outputs (8, 10) and targets (8, 10); give it outputs[..., classes] and targets[...]"
    )


def test_a_head_is_a_kernel_or_a_function_and_logits_need_none(whole):
    jshard.unload()
    model = Model(nnx.Rngs(0))
    hidden, z = model.up(X), {"z": 1e-2}
    for outputs, head in ((hidden, model.head), (hidden, model.head.kernel[...]), (model.head(hidden), None)):
        np.testing.assert_allclose(jshard.cross_entropy(outputs, TARGETS, head=head, **z), whole[0], rtol=1e-6)
