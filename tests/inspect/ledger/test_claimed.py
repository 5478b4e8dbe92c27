"""What a ledger says of claims: the words of each signal beside where its parameters lie; and what `check` says lies whole."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.inspect.ledger import Ledger
from jshard.inspect.ledger.claimed import Claimed, claimed, declared
from jshard.inspect.ledger.whole import _words, whole
from jshard.signals.signal import Shard, Signal

FILE = """\
jshard: {mesh: {data: 2, tensor: 4}}
wide: {row: data, column: tensor, store: data, match: ["blocks/*/up/**"]}
sums: {row: data, reduction: tensor, match: ["blocks/*/down/**"]}
odd: {shard: {axis: 1, mesh: tensor}, match: ["odd"]}
rest: {row: data, match: ["**"]}
"""
X = np.ones((8, 16), np.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.odd, self.unused = nnx.Param(jnp.ones((2, 16))), nnx.Param(jnp.ones(16))

    def __call__(self, x):
        for block in self.blocks:
            x = block.down(nnx.relu(block.up(x)))
        return x * self.odd.sum(0)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(FILE)
    jshard.load("c.yaml")
    yield jshard.shard(Model(nnx.Rngs(0)), X)
    jshard.unload()


def test_a_ledger_ends_with_what_each_claim_says_beside_how_its_parameters_lie(model):
    ledger = jshard.explain(model, X)
    rows = [each.cells() for each in ledger.claims]
    here = f"test_claimed.py:{inspect.getsourcelines(Model.__call__)[1] + 2}"
    assert rows == [
        ("c.yaml:2", "wide", "column: tensor, store: data", "blocks/*/up/bias x 2", "float32[32]", "[tensor]",
         "at rest [tensor+data]", "[4] each", f"add, {here}", ""),
        ("c.yaml:2", "wide", "column: tensor, store: data", "blocks/*/up/kernel x 2", "float32[16,32]", "[-, tensor]",
         "at rest [data, tensor]", "[8, 8] each", f"dot_general, {here}", ""),
        ("c.yaml:3", "sums", "reduction: tensor", "blocks/*/down/bias x 2", "float32[16]", "whole", "", "", f"add, {here}",
         "no axis for reduction"),
        ("c.yaml:3", "sums", "reduction: tensor", "blocks/*/down/kernel x 2", "float32[32,16]", "[tensor, -]", "",
         "[8, 16] each", f"dot_general, {here}", ""),
        ("c.yaml:4", "odd", "shard: axis 1 over tensor", "odd", "float32[2,16]", "[-, tensor]", "", "[2, 4] each", "", ""),
        ("c.yaml:5", "rest", "whole", "unused", "float32[16]", "whole", "", "", "", "not used by this program"),
    ]  # fmt: skip
    assert not ledger.unsplit  # what no word splits is told here alone
    assert " ".join(rows[0]).strip() in " ".join(str(ledger).split())
    assert "no axis for reduction" in ledger._repr_html_()
    assert [each.cells() for each in Ledger.from_json(ledger.to_json()).claims] == rows
    assert "no axis for reduction" in jshard.report(model, X).html


@pytest.mark.parametrize(("mesh", "over"), [((), "workers"), (("d", "t"), "d x t")])
def test_a_shard_is_told_by_its_axis_and_what_it_is_over(mesh, over):
    assert declared(Signal("a", shard=Shard(1, mesh=mesh))) == f"shard: axis 1 over {over}"


def test_a_parameter_that_lies_elsewhere_is_told(model):
    for kernel, spec in [(model.blocks[0].up.kernel, jax.P()), (model.blocks[1].down.kernel, jax.P("tensor", "data"))]:
        kernel.set_value(jshard.place(kernel.get_value(), spec))
    differs = {each.parameter: each.differs for each in jshard.explain(model, X).claims}
    moved = "not there yet: its next call moves it"
    assert differs["blocks/0/up/kernel"] == differs["blocks/1/down/kernel"] == moved
    assert differs["blocks/1/up/kernel"] == differs["blocks/*/up/bias"] == ""
    assert [each.count for each in claimed([Other(8), Other(16), Other(32)])] == [1]


class Other(nnx.Module):
    """Its parameter has the name of one of the model's."""

    def __init__(self, size):
        self.unused = nnx.Param(jnp.ones(size))


def test_a_claim_says_how_parameters_lie_at_rest_where_that_differs():
    claim = Claimed(None, "a", "column: t", "w", 1, "float32[8]", ("t",), ("d",), (2,), "", "")
    assert claim.cells() == ("-", "a", "column: t", "w", "float32[8]", "[t]", "at rest [d]", "[2] each", "", "")


def test_what_lies_whole_and_need_not_is_told_with_the_word_that_would_split_it(model):
    assert whole(model) == [
        "c.yaml:3  sums  whole: blocks/*/down/bias x 2 float32[16], 128 B on each device; would be split by store: data (16 in 2)",
        "c.yaml:5  rest  whole: unused float32[16], 64 B on each device; would be split by store: data (16 in 2), store: tensor (16 in "
        "4)",
    ]


def test_what_is_less_than_a_hundredth_is_not_told():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "kernel": {"row": "data", "store": "data", "match": ["kernel"]},
                 "bias": {"row": "data", "match": ["bias"]}})  # fmt: skip
    assert len(whole(jshard.shard(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), np.ones((8, 64))))) == 1
    assert whole(jshard.shard(nnx.Linear(1024, 8, rngs=nnx.Rngs(0)), np.ones((8, 1024)))) == []


def test_a_kernel_of_data_parallel_training_is_told_with_every_word():
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": {"row": "data", "match": ["**"]}})
    found = whole(jshard.shard(nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0)), X))
    assert found == [
        "<dict>  all  whole: kernel float32[16,6], 384 B on each device; would be split by store: data (16 in 2), reduction: tensor "
        "(16 in 4)"
    ]


@pytest.mark.parametrize("rows", [8, 32])
def test_of_a_model_of_other_shapes_only_what_any_array_can_be_is_told(rows):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": {"row": "data", "match": ["**"]}})
    jshard.shard(nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0)), X)
    (found,) = whole(nnx.Linear(rows, 6, use_bias=False, rngs=nnx.Rngs(0)))
    assert found.endswith(f"would be split by store: data ({rows} in 2), store: tensor ({rows} in 4)")


def test_no_word_is_told_for_a_mesh_axis_that_the_signal_names():
    def words(**said):
        return [*_words(Signal("a", **said), (16, 8), ("reduction", "column"), {"data": 2, "one": 1, "tensor": 4})]

    assert words() == ["column: data (8 in 2)", "column: tensor (8 in 4)"]
    assert words(row=("data",), sequence=("tensor",)) == ["store: data (16 in 2)"]
    assert words(store=("data",), column=("tensor",)) == words(shard=Shard(0)) == []


def test_layers_of_jshard_are_told_by_their_own_axes():
    jshard.load({"jshard": {"mesh": {"data": 2, "one": 1, "tensor": 4}}, "layer": {"row": "data"}})
    with jshard.signal("layer"):
        layer = jshard.Linear(6, 16, use_bias=False, rngs=nnx.Rngs(0))
    assert whole(layer) == [
        "<dict>  layer  whole: kernel float32[6,16], 384 B on each device; would be split by store: data (6 in 2), column: tensor "
        "(16 in 4)"
    ]


@pytest.mark.parametrize(("beside", "told"), [(197, 1), (198, 0)])
def test_what_is_a_hundredth_to_the_byte_is_not_told(beside, told):
    jshard.load({"jshard": {"mesh": {"data": 2}}})
    model = Other(2)
    model.unused.set_value(jnp.ones(2, jnp.int8))
    model.split = nnx.Param(jshard.place(jnp.ones(2 * beside, jnp.int8), jax.P("data")))
    assert len(whole(model)) == told


def test_nothing_could_be_split_without_a_mesh():
    jshard.unload()
    assert whole(Other(2)) == []
    jshard.load({"a": {}})
    assert whole(Other(2)) == []


class Many(nnx.Module):
    def __init__(self):
        self.parts = nnx.List([nnx.Param(jnp.ones(2 * size)) for size in range(20, 34)])

    def __call__(self, x):
        return x * sum(part.sum() for part in self.parts)


def test_of_many_that_lie_whole_the_largest_are_told():
    jshard.load({"jshard": {"mesh": {"data": 2}}, "all": {"row": "data", "match": ["**"]}})
    found = whole(jshard.shard(Many(), X))
    assert len(found) == 13
    assert found[0].startswith("<dict>  all  whole: parts/13 float32[66], 264 B on each device; ")
    assert found[-1] == "others lie whole and need not, 328 B on each device"
