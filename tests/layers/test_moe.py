"""`jshard.MoE`: experts over devices equal those of one device, whatever is dropped."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from tests.support import cases

pytestmark = pytest.mark.usefixtures("nothing_loaded")

ROWS, PLACES, WIDTH, HIDDEN, EXPERTS = 8, 16, 8, 8, 8
draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, PLACES, WIDTH)).astype(np.float32)
HOW = {"dropless": {}, "capacity": {"capacity": 1.0}}


def layer(how):
    return jshard.MoE(WIDTH, HIDDEN, EXPERTS, router_z=0.1, **HOW[how], rngs=nnx.Rngs(0))


def loss(model, x):
    return jnp.sin(x + model(x)).mean() + model.auxiliary[...]


def written_out(model, x):
    """Every expert for every token, and what the router and the room leave of it."""
    scores = x @ model.router.kernel[...]
    shares = jax.nn.softmax(scores, -1)
    weights, chosen = jax.lax.top_k(shares, 2)
    picked = jax.nn.one_hot(chosen, EXPERTS)
    every = jnp.einsum("btd,edf->btef", x, model.gate.kernel[...])
    every = nnx.silu(every) * jnp.einsum("btd,edf->btef", x, model.up.kernel[...])
    every = jnp.einsum("btef,efd->bted", every, model.down.kernel[...])
    room = PLACES if model.capacity is None else 4  # two of sixteen for eight experts: 2 * 16 / 8
    before = jnp.cumsum(picked.reshape(ROWS, -1, EXPERTS), 1).reshape(picked.shape)
    kept = picked * (before <= room) * (weights / weights.sum(-1, keepdims=True))[..., None]
    y = jnp.einsum("btke,bted->btd", kept, every)
    balance = EXPERTS * (picked.sum(2).mean((0, 1)) / 2 * shares.mean((0, 1))).sum()
    auxiliary = 0.01 * balance + 0.1 * jnp.square(jax.nn.logsumexp(scores, -1)).mean()
    return jnp.sin(x + y).mean() + auxiliary


def plan(mesh, rows, **words):
    columns = {"column": "tensor"} if "tensor" in mesh else {}
    sums = {"reduction": "tensor"} if "tensor" in mesh else {}
    return {
        "jshard": {"mesh": mesh},
        "wide": {"row": rows, "expert": "expert", **columns, **words, "match": ["{gate,up}/**"]},
        "narrow": {"row": rows, "expert": "expert", **sums, **words, "match": ["down/**"]},
        "rest": {"row": rows, "match": ["**"]},
    }


PLANS = {
    "experts": plan({"expert": 8}, ["expert"]),
    "experts, tensor, data": plan({"data": 2, "expert": 2, "tensor": 2}, ["data", "expert"]),
    "experts, stored": plan({"data": 2, "expert": 4}, ["data", "expert"], store="data"),
    "experts of all rows": plan({"data": 2, "expert": 4}, ["data"]),
}


def reference(how):
    return jax.device_get(nnx.jit(nnx.value_and_grad(written_out))(layer(how), X))


@pytest.mark.quick("capacity")
@pytest.mark.parametrize("how", HOW)
def test_a_token_is_what_its_experts_make_of_it(how):
    want = reference(how)
    cases.alike(nnx.jit(nnx.value_and_grad(loss))(layer(how), X), want)


@pytest.mark.parametrize(("capacity", "room"), [(0.01, 1), (1.0, 4), (1.1, 5), (99.0, PLACES), (None, PLACES)])
def test_an_expert_has_room_for_one_at_least_and_for_a_row_at_most(capacity, room):
    model = jshard.MoE(WIDTH, HIDDEN, EXPERTS, capacity=capacity, rngs=nnx.Rngs(0))
    second = np.full((1, 2 * PLACES), 1)  # every choice is the second expert's
    slots, found = model._slots(second, np.eye(EXPERTS, dtype=int)[second], PLACES)
    assert found == room
    assert slots.tolist() == [[*range(room, 2 * room), *[EXPERTS * room] * (2 * PLACES - room)]]


def test_what_is_not_said_of_a_router_and_how_experts_are_drawn():
    model = jshard.MoE(64, 16, 64, rngs=nnx.Rngs(0))
    assert (model.top_k, model.balance, model.router_z) == (2, 0.01, 0.0)
    for einsum, width in ((model.gate, 64), (model.up, 64), (model.down, 16)):  # each as a layer of its own
        np.testing.assert_allclose(einsum.kernel[...].std((1, 2)), width**-0.5, rtol=0.1)


def test_a_capacity_drops_some_tokens():
    assert reference("capacity")[0] != reference("dropless")[0]


@pytest.mark.seconds
def test_a_dropless_view_has_room_for_all_and_stays_one():
    view = nnx.view(layer("capacity"), dropless=True)
    np.testing.assert_array_equal(view(X), layer("dropless")(X))
    view.set_view()  # what it does not say stays as it is
    np.testing.assert_array_equal(view(X), layer("dropless")(X))
    assert not np.array_equal(nnx.view(view, dropless=False)(X), view(X))


@pytest.mark.quick("experts, tensor, data-dropless")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PLANS)
def test_experts_over_devices_equal_one_device(how, name):
    want = reference(how)
    jshard.load(PLANS[name])
    model = jshard.shard(layer(how), X)
    assert "expert" in model.gate.kernel.get_value().sharding.spec[0]
    cases.alike(nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, X), want)


@pytest.mark.parametrize("name", ["experts", "experts, tensor, data"])
def test_tokens_cost_an_all_to_all_each_way(name):
    jshard.load(PLANS[name])
    moved, f = collections.Counter(), jshard.shard(loss)
    model = jshard.shard(layer("capacity"), X)
    for line in jshard.explain(lambda *given: nnx.value_and_grad(f, argnums=(0, 1))(*given), model, X):
        if line.collective == "all_to_all":
            assert (line.signal, line.cause.key) == ("narrow", "expert"), line
            moved[line.phase, line.mesh_axes] += line.count * line.payload
        assert not line.cause.redistributed or line.signal == "-", line  # the gradient of x, which lay whole
    room, devices = 4, 8 if name == "experts" else 4
    tokens = ROWS // devices * EXPERTS * room * WIDTH * 4
    assert dict(moved) == {("forward", ("expert",)): 2 * tokens, ("backward", ("expert",)): 2 * tokens}


@pytest.mark.slow
def test_verify_finds_no_deviation_of_experts():
    jshard.load(PLANS["experts, tensor, data"])
    found = jshard.verify(jshard.shard(loss), layer("capacity"), X)
    assert {each.verdict for each in found.findings} <= {"bitwise", "within"}, found


def test_experts_that_can_not_be_are_told():
    with pytest.raises(JShardError) as told:
        jshard.MoE(WIDTH, HIDDEN, 0, rngs=nnx.Rngs(0))
    assert str(told.value) == "jshard.MoE has experts=0; use 1 or more"
    for top_k in (0, 5):
        with pytest.raises(JShardError) as told:
            jshard.MoE(WIDTH, HIDDEN, 4, top_k=top_k, rngs=nnx.Rngs(0))
        assert str(told.value) == f"jshard.MoE chooses top_k={top_k} of 4 experts; use top_k from 1 to 4"
    for capacity in (0, -0.5):
        with pytest.raises(JShardError) as told:
            jshard.MoE(WIDTH, HIDDEN, 4, capacity=capacity, rngs=nnx.Rngs(0))
        assert str(told.value) == (
            f"jshard.MoE has capacity={capacity}, so that its experts take no token; use capacity 1.25, or leave it out: then "
            "no token is dropped"
        )
    for top_k in (1, 4):
        assert (
            nnx.eval_shape(lambda top_k=top_k: jshard.MoE(WIDTH, HIDDEN, 4, top_k=top_k, rngs=nnx.Rngs(0))).top_k
            == top_k
        )
    jshard.load(plan({"expert": 8}, ["expert"]))
    with pytest.raises(JShardError) as told:
        jshard.shard(jshard.MoE(WIDTH, HIDDEN, 4, rngs=nnx.Rngs(0)), X)
    assert str(told.value) == (
        'signal "narrow" (<dict>) splits 4 experts over mesh axis "expert" of size 8; use 8, or add experts'
    )
    two = plan({"expert": 2, "other": 4}, ["expert"])
    two["narrow"]["expert"] = "other"
    jshard.load(two)
    with pytest.raises(JShardError) as told:
        jshard.shard(layer("dropless"), X)
    assert str(told.value) == (
        'signal "wide" (<dict>) splits experts over expert, and signal "narrow" (<dict>) over other; give both the same expert: '
        "tokens go to their experts one way"
    )
