"""Equal stretches of a program are calls of one program: values, collectives and names stay, and JAX traces a stretch once."""

from __future__ import annotations

import collections
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.extend.core import Primitive

import jshard
from benchmarks.trace import counted
from jshard.layers.partition import folding
from jshard.layers.partition.folding import folded
from jshard.programs.jaxprs import equations

SPLIT = {"row": "data", "store": "data"}
PLANS = {
    "fsdp": {"jshard": {"mesh": {"data": 8}}, "all": {**SPLIT, "match": ["**"]}},
    "tensor and fsdp": {
        "jshard": {"mesh": {"data": 2, "tensor": 4}},
        "columns": {**SPLIT, "column": "tensor", "match": ["**/up/kernel"]},
        "sums": {**SPLIT, "reduction": "tensor", "match": ["**/down/kernel"]},
        "rest": {**SPLIT, "match": ["**"]},
    },
    "whole": {"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "match": ["**"]}},
}
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.silu(self.up(self.norm(x)))))


class Chain(nnx.Module):
    def __init__(self, depth, **how):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, **how) for _ in range(depth)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss(model, x):
    return jnp.mean(jnp.square(model(x)))


def lowered(depth, **how):
    model = Chain(depth, **how)
    step = nnx.jit(nnx.value_and_grad(jshard.shard(lambda model, x: loss(model, x))))
    return model, step


def calls(jaxpr):
    """How many calls of shared programs a trace has, and of how many programs."""
    bodies = [id(eqn.params["jaxpr"]) for eqn in equations(jaxpr) if eqn.params.get("name") == "layer"]
    return len(bodies), len(set(bodies))


@pytest.mark.quick("tensor and fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_equal_blocks_are_calls_of_one_program_and_equal_one_device(plan, monkeypatch):
    wanted, gradients = nnx.value_and_grad(loss)(Chain(5), X)
    jshard.load(PLANS[plan])
    model, step = lowered(5)
    got, found = step(model, X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, gradients)
    graph, state = nnx.split(model)
    forward = jax.make_jaxpr(lambda state, x: jshard.shard(loss)(nnx.merge(graph, state), x))(state, X)
    assert calls(forward.jaxpr) == (5, 1)
    lines = jshard.explain(step, model, X)
    monkeypatch.setattr(folding, "FEWEST", 99)
    one_by_one = jshard.explain(lowered(5)[1], model, X)
    assert totals(one_by_one) == totals(lines)
    at = inspect.getsourcelines(Block.__call__)[1] + 1
    backward = {each.cause.source for each in lines if each.cause.phase == "backward"}
    assert f"test_folding.py:{at}" in backward  # and not the line of the loss alone, as of what JAX transposes as one


def totals(ledger):
    """How often each collective runs for a cause, by shape."""
    found = collections.Counter()
    for line in ledger:
        found[line.cause.path, line.cause.phase, line.cause.key, line.collective, line.shape] += line.count
    return found


def test_a_block_more_is_a_call_more_and_no_trace():
    """JAX binds a few operations for each further block: its call, forward, linear and transposed, and moves of its arrays."""
    jshard.load(PLANS["tensor and fsdp"])
    counts = {}
    for depth in (5, 9):
        model, step = lowered(depth)
        step.lower(model, X)
        model, step = lowered(depth)
        with counted() as counts[depth]:
            step.lower(model, X)
    assert counts[9]["traces"] == counts[5]["traces"]
    assert counts[9]["equations"] - counts[5]["equations"] <= 4 * 80


def test_equations_whose_parameters_have_no_hash_are_unlike_all_others():
    odd = Primitive("odd")
    odd.def_abstract_eval(lambda x, *, how: x)
    program = jax.make_jaxpr(lambda x: odd.bind(odd.bind(x, how={}), how={}))(X)
    one, other = map(folding.EquationNames().of, program.eqns)
    assert one != other


def test_what_several_stretches_read_is_shared_by_all():
    """A tied kernel is gathered, and its gradient summed, once: its readers are no calls."""

    def f(params, x):
        for each in params["own"]:
            x = jnp.tanh(x @ each) @ params["tied"] + x
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1.0) - jnp.exp(-x * x)
        return x.sum()

    params = {"own": [np.eye(16, dtype=np.float32)] * 4, "tied": np.eye(16, dtype=np.float32)}
    program = jax.make_jaxpr(f)(params, X)
    assert folded(program, [True] * 5 + [False]) is program
    alone = jax.make_jaxpr(lambda params, x: f({**params, "tied": np.eye(16, dtype=np.float32)}, x))(params, X)
    assert sum(eqn.primitive.name == "folded" for eqn in folded(alone, [True] * 5 + [False]).jaxpr.eqns) == 4


def test_what_is_made_of_parameters_where_it_is_needed_stays_in_one_program():
    """A broadcast of parameters that is read behind a call would be gathered there, and its gradient."""

    def f(params, x):
        bias = jnp.broadcast_to(params["bias"][None] * 2, x.shape)
        for each in params["own"]:
            x = jnp.tanh(x @ each) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1.0) - jnp.exp(-x * x)
        return (x + bias).sum()

    params = {"bias": X[0], "own": [np.eye(16, dtype=np.float32)] * 4}
    program = jax.make_jaxpr(f)(params, X)
    assert folded(program, [True] * 5 + [False]) is program
    assert folded(program, [False] + [True] * 4 + [False]) is not program


class LinenChain(linen.Module):
    @linen.compact
    def __call__(self, x):
        for number in range(4):
            x = linen.LayerNorm(name=f"norm_{number}")(x)
            x = x + linen.Dense(16, name=f"down_{number}")(jax.nn.silu(linen.Dense(32, name=f"up_{number}")(x)))
        return x


def test_layers_of_other_names_stay_apart_and_blocks_keep_theirs():
    """Linen puts a module's name into the names of its operations: a call stands under its own block's."""

    class Inner(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.LayerNorm(name="norm")(x)
            return x + linen.Dense(16, name="down")(jax.nn.silu(linen.Dense(32, name="up")(x)))

    class Blocks(linen.Module):
        @linen.compact
        def __call__(self, x):
            for number in range(4):
                x = Inner(name=f"block_{number}")(x)
            return x

    for model, names in ((LinenChain(), []), (Blocks(), [f"block_{number}" for number in range(4)])):
        program = jax.make_jaxpr(model.apply)(model.init(jax.random.key(0), X), X)
        found = folded(program, [True] * (len(program.jaxpr.invars) - 1) + [False]).jaxpr.eqns
        stacks = [str(eqn.source_info.name_stack) for eqn in found if eqn.primitive.name == "folded"]
        assert [stack.split("/")[-1] for stack in stacks] == names
