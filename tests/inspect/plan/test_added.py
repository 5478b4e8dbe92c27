"""What XLA's partitioner adds on Auto axes: lines of `jshard.explain`, each with the user's line, its operation and signal."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled import wire_bytes
from tests.support import cases

AUTO = {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}
XLA = "XLA for CPU"


def loss(up, down, x):
    hidden = jnp.tanh(x @ up)
    y = hidden @ down

    def turn(y, _):
        return y + jnp.tanh(y @ up) @ down, None

    y, _ = jax.lax.scan(turn, y, None, length=3)
    return (y**2).sum()


def line(words, f=loss):
    """`test_added.py:25`: where the words stand in a function."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    return (
        f"test_added.py:{next(n for n, each in enumerate(lines, 1) if n > f.__code__.co_firstlineno and words in each)}"
    )


def shapes(mesh):
    def lying(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return lying((16, 32), None, "tensor"), lying((32, 16), "tensor", None), lying((8, 16), "data", None)


def facts(lines):
    return sorted(
        (each.phase, each.collective, each.axis, each.count, each.payload, each.primitive, each.source)
        for each in lines
    )


ROWS = 8 // 2 * 16 * 4  # bytes of y on a device, whose rows are split
PART = 16 * 32 // 4 * 4  # of a parameter, whose columns or rows are


@pytest.fixture
def pure(mesh):
    on = mesh(data=2, tensor=4, axis_types="auto")
    return on, jshard.explain(jax.value_and_grad(loss, (0, 1)), *shapes(on))


def test_a_function_of_pure_jax_lists_what_its_products_and_sums_cost(pure):
    on, ledger = pure
    product, turn, up = line("hidden @ down"), line("jnp.tanh(y @ up)"), line("x @ up")
    assert facts(ledger) == sorted([
        ("forward", "all_reduce", "tensor", 1, ROWS, "dot_general", product),
        ("forward", "all_reduce", "tensor", 3, ROWS, "dot_general", turn),  # in each turn of the loop
        ("forward", "all_reduce", "data", 1, 4, "reduce_sum", line(".sum()")),
        ("backward", "all_reduce", "tensor", 3, ROWS, "dot_general", turn),
        ("backward", "all_reduce", "data", 6, PART, "dot_general", turn),  # both parameters
        ("backward", "all_reduce", "data", 1, PART, "dot_general", product),
        ("backward", "all_reduce", "data", 1, PART, "dot_general", up),
    ])  # fmt: skip
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes(on)).compile()
    assert ledger.total == wire_bytes(compiled)
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())) <= ledger.count  # it combines some


def test_each_line_says_the_operation_and_its_place_and_the_last_who_added_how_much(pure):
    _, ledger = pure
    first = next(each for each in ledger if each.axis == "tensor")
    assert f"(dot_general at {line('hidden @ down')}, added by {XLA})" in " ".join(first.cells())
    assert ledger.summary().endswith(
        f"; {ledger.count} of them, {ledger.total:,} B, added by {XLA}; for another chip see jshard plan"
    )
    assert jshard.diff(ledger, ledger).same
    assert (
        ledger.only(phase="forward")
        .summary()
        .endswith("; 5 of them, 1,540 B, added by XLA for CPU; for another chip see jshard plan")
    )


@pytest.mark.seconds
def test_what_is_compiled_for_devices_that_are_not_here_is_the_same(pure):
    on, ledger = pure
    absent = jshard.explain(jax.value_and_grad(loss, (0, 1)), *shapes(on.abstract_mesh))
    assert facts(absent) == facts(ledger)
    assert absent.summary() == ledger.summary()


def test_a_loop_that_ends_when_it_ends_counts_one_turn(mesh):
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    on = mesh(data=2, axis_types="auto")
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(on, P("data")))
    (found,) = jshard.explain(until, x, backward=False)
    assert (found.primitive, found.count, found.count_known, found.payload) == ("reduce_sum", 1, False, 4)
    assert found.source == line("x.sum() < 9", test_a_loop_that_ends_when_it_ends_counts_one_turn)


def test_what_a_layer_asks_for_is_not_told_as_added(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "jshard: {mesh: {data: 2, tensor: 4}, axis_types: auto}\n"
        "down: {row: data, reduction: tensor}\n"
        "objective: {row: data}\n"
    )
    with cases.loaded(str(path)) as on:
        with jshard.signal("down"):
            layer = jshard.Linear(32, 16, rngs=nnx.Rngs(0))
        x = jax.device_put(jnp.ones((8, 32)), NamedSharding(on, P("data", "tensor")))

        def objective(layer, x):
            y = layer(x)
            with jshard.signal("objective"):
                return (y**2).sum()

        asked, added = jshard.explain(objective, layer, x, backward=False)
    assert (asked.signal, asked.payload, asked.compiler, asked.axis) == ("down", ROWS, "", "tensor")
    assert (added.signal, added.payload, added.compiler, added.axis) == ("objective", 4, XLA, "data")
    assert (added.place.line, added.asked, added.cause.key) == (3, True, "row")
    assert added.source == line("(y**2).sum()", test_what_a_layer_asks_for_is_not_told_as_added)


def test_nothing_is_compiled_on_explicit_axes_or_for_one_device(mesh, monkeypatch):
    monkeypatch.setattr("jshard.inspect.plan.planning.collectives_in", lambda text: 1 / 0)
    assert jshard.explain(jnp.sum, shapes(mesh(data=2, tensor=4))[0]).compiler == ""
    assert jshard.explain(jnp.sin, jnp.ones(8)).compiler == ""
    with cases.loaded({"jshard": {"mesh": {"data": 1}, "axis_types": "auto"}}) as on:
        assert jshard.explain(jnp.sin, jax.device_put(jnp.ones(8), NamedSharding(on, P("data")))).compiler == ""


def test_split_logits_in_code_behind_the_model_name_three_ways_out():
    def cross_entropy(model, x, targets):
        return -jnp.take_along_axis(jax.nn.log_softmax(model(x)), targets[:, None], -1).mean()

    words = {"row": "data", "column": "tensor", "match": ["**"]}
    x, targets = jnp.ones((8, 16)), jnp.arange(8)
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "head": words}):
        model = jshard.shard(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), x)
        with pytest.raises(JShardError) as error:
            jshard.explain(cross_entropy, model, x, targets, backward=False)
        jshard.explain(jshard.shard(cross_entropy), model, x, targets, backward=False)
    place = (
        f"tests/inspect/plan/{line('take_along_axis', test_split_logits_in_code_behind_the_model_name_three_ways_out)}"
    )
    assert str(error.value).startswith(f"{place} (in cross_entropy) fails while it is traced: ShardingTypeError: Use ")
    assert str(error.value).endswith(
        "; give cross_entropy to jshard.shard, write output: gather for the signal of the product before it, or axis_types: auto "
        "under jshard"
    )
    for mends in ({"head": {**words, "output": "gather"}}, {"jshard": AUTO}):
        with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "head": words, **mends}):
            model = jshard.shard(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), x)
            jshard.explain(cross_entropy, model, x, targets, backward=False)
