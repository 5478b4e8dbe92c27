"""`jshard.shard` on `axis_types: auto`: the same places by the same YAML, the rest left to XLA, each operation under its claim."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layers.partition.named import named
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import bare, inner
from jshard.programs.provenance import Cause
from jshard.signals.signal import Signal
from tests.support import cases

X, TARGETS = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32), np.arange(8)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        hidden = jax.nn.relu(self.up(x))
        return self.down(hidden)


def cross_entropy(model, x, targets):
    logs = jax.nn.log_softmax(model(x))
    return -jnp.take_along_axis(logs, targets[:, None], -1).mean()


YAML = """
jshard: {mesh: {data: 2, tensor: 4}}
up: {row: data, column: tensor, match: ["up/**"]%s}
down: {row: data, reduction: tensor, match: ["down/**"]%s}
"""


@pytest.fixture
def both(tmp_path):
    """`both(store=...)`: the same program by one file, partitioned and left to XLA."""

    def run(more=""):
        path = tmp_path / "one.yaml"
        path.write_text(YAML % (more, more))
        found = {}
        for kind in ("explicit", "auto"):
            jshard.load(str(path), [f"jshard.axis_types={kind}"])
            model = jshard.shard(Model(nnx.Rngs(0)), X)
            step = nnx.value_and_grad(jshard.shard(cross_entropy))
            with jax.set_mesh(jshard.mesh()):
                value, gradients = nnx.jit(step)(model, X, TARGETS)
            ledger = jshard.explain(lambda *args, step=step: step(*args), model, X, TARGETS)
            states = [dict(nnx.to_flat_state(nnx.state(each, nnx.Param))) for each in (model, gradients)]
            found[kind] = value, *states, ledger
        return found

    return run


@pytest.mark.seconds
def test_what_sequence_splits_is_told_to_xla(tmp_path):
    def between(model, x):
        """After the sum an operation of which there is no other, whose part on a device is in the compiled text."""
        return jnp.sin(model(x)).sum()

    jshard.unload()
    x = X.reshape(2, 4, 16) / 10
    loss, dense = nnx.value_and_grad(between)(Model(nnx.Rngs(0)), x)
    path = tmp_path / "one.yaml"
    parts = {}
    for more in ("", ", sequence: tensor"):
        path.write_text(YAML % (more, more))
        jshard.load(str(path), ["jshard.axis_types=auto"])
        model = jshard.shard(Model(nnx.Rngs(0)), x)
        step = nnx.jit(nnx.value_and_grad(jshard.shard(between)))
        with jax.set_mesh(jshard.mesh()):
            value, gradients = step(model, x)
            text = step.lower(model, x).compile().as_text()
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        for (path_of, got), (_, want) in zip(nnx.to_flat_state(gradients), nnx.to_flat_state(dense), strict=True):
            np.testing.assert_allclose(got[...], want[...], rtol=1e-4, atol=1e-5, err_msg=str(path_of))
        parts[more] = set(re.findall(r"f32\[([\d,]+)\]\S* (?:sine|cosine)\(", text))
    assert parts == {"": {"1,4,16"}, ", sequence: tensor": {"1,1,16"}}


def axes(variable):
    return Layout.of(variable.get_value()).axes


@pytest.mark.seconds
@pytest.mark.parametrize("more", ["", ", store: data"], ids=["tensor", "tensor and fsdp"])
def test_one_file_gives_the_same_loss_gradients_and_places_both_ways(both, more):
    jshard.unload()
    loss, dense = nnx.value_and_grad(cross_entropy)(Model(nnx.Rngs(0)), X, TARGETS)
    dense = dict(nnx.to_flat_state(nnx.state(dense, nnx.Param)))
    found = both(more)
    for value, placed, gradients, _ in found.values():
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        for path, want in dense.items():
            np.testing.assert_allclose(gradients[path][...], want[...], rtol=1e-4, atol=1e-6, err_msg=str(path))
            assert axes(gradients[path]) == axes(placed[path]), path
    (_, placed, *_), (_, left, *_) = found.values()
    assert {path: axes(each) for path, each in placed.items()} == {path: axes(each) for path, each in left.items()}
    assert axes(left["up", "kernel"]) == (("data",) if more else (), ("tensor",))
    assert all(not line.compiler for line in found["explicit"][3])
    assert all(line.compiler for line in found["auto"][3])


def test_tensor_parallel_costs_the_same_both_ways_told_by_claim(both):
    found = both()
    partitioned, left = found["explicit"][3], found["auto"][3]
    sums = [collections.Counter(), collections.Counter()]
    for counter, ledger in zip(sums, (partitioned, left), strict=True):
        for line in ledger:
            counter[line.place.line, line.signal, line.phase, line.collective, line.axis] += line.total
    assert sums[0] == sums[1]
    first = Model.__call__.__code__.co_firstlineno
    assert {line.source for line in left if line.signal == "up"} == {f"test_named.py:{first + 1}"}
    (summed,) = [line for line in left if line.axis == "tensor"]
    assert (summed.signal, summed.primitive, summed.source) == ("down", "dot_general", f"test_named.py:{first + 2}")
    assert str(jshard.diff(partitioned, left)) == "the same collectives and memory"
    without = jshard.diff(partitioned, left.only(signal="down"))
    assert str(without).splitlines()[-1] == "differs: 2 all_reduce gone"


class Odd(nnx.Module):
    """What no rule can take: a primitive without one, and a shard_map of its own."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = self.down(jax.nn.relu(self.up(x))) / 10
        x = jnp.sin(jax.lax.linalg.householder_product(x.T, x[:, 0]))
        if jshard.signals.active_config.configuration() is None:
            return x.sum(0)
        own = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(0), "data"), mesh=jshard.mesh(), in_specs=jax.P("data"), out_specs=jax.P()
        )
        return own(x)


def test_a_program_that_no_rule_can_take_runs_left_to_xla():
    jshard.unload()
    dense = Odd(nnx.Rngs(0))(X)
    claims = {
        "up": {"row": "data", "column": "tensor", "match": ["up/**"]},
        "down": {"row": "data", "reduction": "tensor", "match": ["down/**"]},
    }
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}, **claims}):
        model = jshard.shard(Odd(nnx.Rngs(0)), X)
        assert axes(model.down.kernel) == (("tensor",), ())
        np.testing.assert_allclose(model(X), dense, rtol=1e-4, atol=1e-5)


def test_what_no_rule_can_take_is_told_with_the_way_out():
    def sums(x):
        return jax.shard_map(lambda x: x, mesh=jshard.mesh(), in_specs=jax.P(), out_specs=jax.P())(x).sum()

    with cases.loaded({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "match": ["**"]}}):
        with pytest.raises(JShardError) as error:
            jshard.shard(sums)(X)
    assert str(error.value) == (
        f"test_named.py:{sums.__code__.co_firstlineno + 1} calls shard_map, which has collectives and devices of its own; give the "
        "model its path without it, or write axis_types: auto under jshard, to leave the program to XLA"
    )


@jax.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(lambda x, w: (x * w, w), lambda w, ct: (ct * w, ct))


def nested(up, stacked, x):
    """The claim of each product is its own, whatever holds it."""

    def turn(x, w):
        return jax.lax.cond(x.sum() > 0, lambda up, w, x: x @ jnp.sinh(w) + up[0], lambda up, w, x: x, up, w, x), None

    x, _ = jax.lax.scan(turn, x, stacked)
    x = jax.checkpoint(lambda up, x: x @ up.astype(jnp.float32))(up, x)
    x, _ = jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] @ up, c[1] + 1), (x, 0))
    return scaled(jax.jit(lambda x: jnp.cos(x))(x), x)


def test_operations_in_loops_branches_and_calls_are_named_by_the_parameter_they_use():
    jaxpr = jax.make_jaxpr(nested)(jnp.ones((4, 4), jnp.bfloat16), jnp.ones((3, 4, 4)), jnp.ones((2, 4)))
    found = collections.defaultdict(set)

    def read(jaxpr, outer):
        for eqn in bare(jaxpr).eqns:
            cause = outer.inside(eqn.source_info.name_stack.stack)
            found[eqn.primitive.name].add(cause.path)
            for each in inner(eqn) if not eqn.primitive.name.startswith("custom") else ():
                read(each, cause)

    claims = [Signal("up"), Signal("stacked"), None]
    told = named(jaxpr, claims, jshard.layouts.mesh.build_mesh({"data": 1}), {})
    read(told, Cause())
    assert found["dot_general"] == {("stacked",), ("up",)}
    assert found["convert_element_type"] >= {("up",)}
    assert found["sinh"] == {("stacked",)}  # though another parameter goes into the branch as well
    assert found["cos"] == {("up",)}
    assert {path for name in found for path in found[name] if name.startswith("custom")} == {("up",)}
    x = jax.random.normal(jax.random.key(0), (2, 4))
    args = jnp.full((4, 4), 0.5, jnp.bfloat16), jnp.ones((3, 4, 4)), x
    np.testing.assert_array_equal(
        jax.core.eval_jaxpr(bare(told), getattr(jaxpr, "consts", []), *args)[0],
        nested(*args),
    )


def test_a_cast_of_a_parameter_is_its_own_and_a_product_is_the_last_ones():
    def f(up, down, x):
        one, other = up.astype(np.float32), down.astype(np.float32)
        y = one @ x
        return jnp.cos(jnp.exp(other) + y)

    half = jnp.ones((4, 4), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(f)(half, half, np.ones((4, 4), np.float32))
    claims, on = [Signal("up"), Signal("down"), None], jshard.layouts.mesh.build_mesh({"data": 1})
    told = named(jaxpr, claims, on, {eqn.outvars[0]: (("data",), ()) for eqn in bare(jaxpr).eqns})
    paths = [Cause().inside(eqn.source_info.name_stack.stack).path for eqn in bare(told).eqns]
    assert paths == [
        ("up",),
        ("down",),
        ("up",),
        ("down",),
        ("down",),
        ("down",),
    ]  # casts, product, exp, add, cos; no claim has `sequence`


def test_operations_under_a_signal_keep_it():
    def f(w, x):
        with jshard.signal("mine"):
            y = x @ w
        return y + 1

    with cases.loaded({"jshard": {"mesh": {"data": 2}}, "mine": {}}):
        jaxpr = named(jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((2, 4))), [Signal("up"), None], jshard.mesh(), {})
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    assert [Cause().inside(eqn.source_info.name_stack.stack).path for eqn in eqns] == [("mine",), ("up",)]
