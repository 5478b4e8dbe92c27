"""What a layer says when sizes, meshes or arguments don't fit: whole sentences."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jshard.errors import JShardError
from jshard.layers import MLP, Linear, matmul, mean, sum
from jshard.layers.strategy import Strategy, strategy_of
from jshard.layouts import Layout, redistribute
from jshard.signals.active_config import configuration, load, mesh, unload
from jshard.signals.scope import signal
from jshard.signals.signal import Shard, Signal
from tests.support import cases

CONFIG = """\
jshard:
  mesh: {data: 2, tensor: 4}

rows: {row: data}
columns: {column: tensor}
sums: {reduction: tensor}
scattered: {reduction: tensor, output: scatter}
stored:
  row: data
  column: tensor
  store: data
sequence: {row: data, column: tensor, sequence: tensor}
gt: {shard: {axis: 0, workers: null}}
gt2: {shard: {axis: 2, workers: null}}
zero1: {row: data, store: {optimizer: data}}
between: {sequence: tensor}
between sums: {reduction: tensor, sequence: tensor}
stored sums: {reduction: tensor, store: data}
"""


@pytest.fixture(autouse=True)
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    load("c.yaml")
    yield
    unload()


def build(name, inputs=16, outputs=16, **arguments):
    with signal(name):
        return Linear(inputs, outputs, rngs=nnx.Rngs(0), **arguments)


def sentence(f, *args, **kwargs):
    with pytest.raises(JShardError) as caught:
        f(*args, **kwargs)
    return str(caught.value)


ones = np.ones


BUILT = {
    (
        "columns",
        16,
        250,
    ): 'signal "columns" (c.yaml:5) splits 250 columns over mesh axis "tensor" of size 4; use 248 or 252, or pad',
    ("columns", 16, 3): 'signal "columns" (c.yaml:5) splits 3 columns over mesh axis "tensor" of size 4; use 4, or pad',
    (
        "sums",
        15,
        16,
    ): 'signal "sums" (c.yaml:6) splits 15 inputs over mesh axis "tensor" of size 4; use 12 or 16, or pad',
    (
        "stored",
        15,
        16,
    ): 'signal "stored" (c.yaml:11) splits 15 inputs of the kernel over mesh axis "data" of size 2; use 14 or 16, or pad',
    ("stored", 16, 12): (
        'signal "stored" (c.yaml:11) splits 12 numbers of the bias over mesh axes "tensor" x "data" of size 8; use 8 or 16, or pad'
    ),
    ("stored sums", 16, 15): (
        'signal "stored sums" (c.yaml:18) splits 15 columns of the kernel over mesh axis "data" of size 2; use 14 or 16, or pad'
    ),
    ("gt", 12, 16): (
        'signal "gt" (c.yaml:13) splits 12 inputs of the kernel over mesh axes "data" x "tensor" of size 8; use 8 or 16, or pad'
    ),
    ("gt2", 16, 16): 'signal "gt2" (c.yaml:14) shards axis 2 of a rank-2 kernel; use 0 or 1',
}


@pytest.mark.parametrize("case", BUILT)
def test_building_a_layer_that_does_not_divide_is_one_sentence(case):
    assert sentence(build, *case) == BUILT[case]


CALLED = {
    ("rows", (7, 16)): 'signal "rows" (c.yaml:4) splits 7 rows over mesh axis "data" of size 2; use 6 or 8, or pad',
    (
        "rows",
        (16,),
    ): 'signal "rows" (c.yaml:4) splits rows over mesh axis "data", but x has one axis; give x a batch axis: x[None]',
    ("stored", (16,)): (
        'signal "stored" (c.yaml:9) splits rows over mesh axis "data", but x has one axis; give x a batch axis: x[None]'
    ),
    (
        "scattered",
        (6, 16),
    ): 'signal "scattered" (c.yaml:7) splits 6 rows over mesh axis "tensor" of size 4; use 4 or 8, or pad',
    (
        "between",
        (16,),
    ): 'signal "between" (c.yaml:16) splits rows over mesh axis "tensor", but x has one axis; give x a batch axis: x[None]',
    ("between sums", (4, 6, 16)): (
        'signal "between sums" (c.yaml:17) splits 6 sequence positions over mesh axis "tensor" of size 4; use 4 or 8, or pad'
    ),
    ("sequence", (4, 6, 16)): (
        'signal "sequence" (c.yaml:12) splits 6 sequence positions over mesh axis "tensor" of size 4; use 4 or 8, or pad'
    ),
    ("rows", (8, 15)): (
        'signal "rows" (c.yaml:4) has a Linear of 16 inputs, called with an array of shape (8, 15); give it arrays whose '
        "last axis is 16"
    ),
}


@pytest.mark.parametrize("case", CALLED)
def test_calling_a_layer_on_sizes_that_do_not_divide_is_one_sentence(case):
    name, shape = case
    layer = build(name)
    assert sentence(layer, ones(shape, np.float32)) == CALLED[case]
    assert sentence(jax.jit(lambda x: layer(x)), ones(shape, np.float32)) == CALLED[case]


def test_out_sharding_and_a_signal_are_one_too_many():
    layer = build("rows")
    assert sentence(layer, ones((8, 16)), out_sharding=P()) == (
        'signal "rows" (c.yaml:4) sets the sharding of the output, and so does out_sharding=; remove out_sharding='
    )


def test_a_shard_map_over_some_mesh_axes_is_one_sentence():
    layer = build("stored")
    x = redistribute(ones((8, 16), np.float32), Layout(mesh(), "data", None))
    call = jax.shard_map(layer, mesh=mesh(), in_specs=P("data", None), out_specs=P("data", None), axis_names={"data"})
    assert sentence(jax.jit(call), x) == (
        'signal "stored" (c.yaml:8) is over mesh axis "tensor", inside a shard_map over data only; use a shard_map '
        "over every mesh axis"
    )


def test_a_model_built_under_another_configuration_is_one_sentence_inside_a_shard_map():
    layer = nnx.clone(build("columns"))
    call = jax.shard_map(layer, mesh=mesh(), in_specs=P(), out_specs=P())
    assert sentence(call, redistribute(ones((8, 16), np.float32), Layout(mesh(), None, None))) == (
        'signal "columns" (c.yaml:5) finds a kernel of (16, 16) on each device where (16, 4) is expected; build the model '
        "under the configuration that it is called under"
    )


def test_matmul_of_shapes_that_do_not_match_is_one_sentence():
    assert sentence(matmul, ones((2, 3)), ones((4, 5))) == (
        "jshard.matmul of (2, 3) and (4, 5): the last axis of x does not match the first of w; use x[..., K] and w[K, N]"
    )


def test_reducing_an_axis_that_is_not_there_is_one_sentence():
    assert sentence(sum, ones((2, 3)), axis=2) == "jshard.sum over axis 2 of a rank-2 array; use an axis from 0 to 1"


def test_reducing_one_axis_of_a_part_without_a_signal_is_one_sentence():
    x = redistribute(ones((8, 16), np.float32), Layout(mesh(), "data", None))
    call = jax.shard_map(lambda x: mean(x, axis=0), mesh=mesh(), in_specs=P("data", None), out_specs=P(None))
    assert sentence(call, x) == (
        "jshard.mean over axis 0 inside a shard_map can't tell which mesh axes of data split it; call it under a signal "
        "that says so, or reduce every axis: jshard.mean(x)"
    )


def test_a_layout_over_a_mesh_axis_that_is_not_there_is_one_sentence():
    assert (
        sentence(Layout, mesh(), "dta")
        == 'axis 0 is laid over mesh axis "dta", which the mesh does not have; use one of data, tensor'
    )


def test_a_mesh_axis_twice_in_a_layout_is_one_sentence():
    assert sentence(Layout, mesh(), "data", ("tensor", "data")) == (
        'mesh axis "data" splits both axis 0 and axis 1 of one array; take "data" away from one of them'
    )


def test_redistributing_what_does_not_divide_is_one_sentence():
    assert sentence(redistribute, ones((6, 4)), Layout(mesh(), "tensor", None)) == (
        'jshard.place splits axis 0 of size 6 over mesh axis "tensor" of size 4; use 4 or 8, or pad'
    )
    assert sentence(redistribute, ones(8), Layout(mesh(), "data", None)) == (
        "jshard.place lays out 2 axes, but the array (8,) has 1; give 1 axes"
    )


# -- what the words mean --


def test_layouts_are_those_of_the_table_of_cases():
    """Not one program: tests/layers/test_linear.py has what they cost."""
    for case in cases.on("2x2x2"):
        load(case.configuration("2x2x2"))
        strategy = strategy_of(configuration().lookup(("layer",)))
        found = {
            "x": strategy.x(case.rank),
            "kernel": strategy.kernel(),
            "bias": strategy.bias(),
            "y": strategy.y(case.rank),
        }
        assert {array: layout.spec for array, layout in found.items()} == {
            array: case.spec(array) for array in found
        }, case.name


def test_what_a_product_divides_is_by_the_rank_of_its_input():
    strategy = Strategy(mesh(), row=("data",), sequence=("tensor",), column=("tensor",))
    sizes = [("reduction", 6, (), "inputs"), ("column", 16, ("tensor",), "columns")]
    assert strategy.splits((), 6, 16) == strategy.splits((6,), 6, 16) == sizes
    assert strategy.splits((4, 6), 6, 16) == [
        ("row", 4, ("data", "tensor"), "rows"), *sizes, ("output", 4, ("data",), "rows"),
    ]  # fmt: skip
    assert strategy.splits((4, 8, 6), 6, 16) == [
        ("row", 4, ("data",), "rows"),
        ("sequence", 8, ("tensor",), "sequence positions"), ("sequence", 8, (), "sequence positions"),
        *sizes, ("output", 4, ("data",), "rows"),
    ]  # fmt: skip


def test_an_output_that_is_gathered_leaves_its_input_as_it_is():
    strategy = Strategy(mesh(), reduction=("data",), column=("tensor",), output="gather")
    assert strategy.x(2).axes == ((), ("data",))
    assert strategy.y(2).axes == ((), ())


def test_gt_words_are_rows_columns_or_whole():
    on, both = mesh(), ("data", "tensor")
    for shard, expected in (
        (Shard(0), {"row": both, "store": both}), (Shard(1), {"column": both}), (Shard(-1), {"column": both}),
        (Shard(0, replicated=True), {}), (Shard(None), {}),
    ):  # fmt: skip
        assert strategy_of(Signal("a", shard=shard)) == Strategy(on, **expected)
    with pytest.raises(JShardError):
        strategy_of(Signal("a", shard=Shard(-2)))


def test_gt_axis_0_is_rows_with_the_kernel_at_rest_by_rows():
    with signal("gt"):
        layer = Linear(16, 8, rngs=nnx.Rngs(0))
    assert layer.kernel[...].sharding.spec == P(("data", "tensor"), None)
    assert layer(ones((8, 16), np.float32)).sharding.spec == P(("data", "tensor"), None)


def test_equal_signals_are_one_strategy():
    load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "a": {"row": "data"}, "b": {"row": ["data"]}})
    present = configuration()
    assert present is not None
    a, b = (strategy_of(present.lookup((name,))) for name in "ab")
    assert a == b == Strategy(mesh(), row=("data",))
    assert hash(a) == hash(b)


def test_mlp_under_no_signals_of_its_own_name_says_which():
    load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "up": {}})
    assert sentence(MLP, 4, 8, 4, rngs=nnx.Rngs(0)) == 'signal "down" is not in <dict>; use up'
