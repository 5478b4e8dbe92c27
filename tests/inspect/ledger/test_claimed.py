"""What a ledger says of claims: the words of each signal beside where its parameters lie; and what `check` says lies whole."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jshard
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
         "replicated, as a bias of a reduction must be"),
        ("c.yaml:3", "sums", "reduction: tensor", "blocks/*/down/kernel x 2", "float32[32,16]", "[tensor, -]", "",
         "[8, 16] each", f"dot_general, {here}", ""),
        ("c.yaml:4", "odd", "shard: axis 1 over tensor", "odd", "float32[2,16]", "[-, tensor]", "", "[2, 4] each", "", ""),
        ("c.yaml:5", "rest", "whole", "unused", "float32[16]", "whole", "", "", "", "not used by this program"),
    ]  # fmt: skip
    assert not ledger.unsplit  # what no word splits is told here alone
    assert " ".join(rows[0]).strip() in " ".join(str(ledger).split())
    assert "as a bias of a reduction must be" in ledger._repr_html_()
    assert "as a bias of a reduction must be" in jshard.report(model, X).html


@pytest.mark.parametrize(("mesh", "over"), [((), "workers"), (("d", "t"), "d x t")])
def test_a_shard_is_told_by_its_axis_and_what_it_is_over(mesh, over):
    assert declared(Signal("a", shard=Shard(1, mesh=mesh))) == f"shard: axis 1 over {over}"


def test_a_parameter_that_lies_elsewhere_is_told(model):
    for kernel, spec in [(model.blocks[0].up.kernel, jax.P()), (model.blocks[1].down.kernel, jax.P("tensor", "data"))]:
        kernel.set_value(jshard.place(kernel.get_value(), spec))
    differs = {each.parameter: each.differs for each in jshard.explain(model, X).claims}
    moved = "not yet in place: its next call moves it"
    assert differs["blocks/0/up/kernel"] == differs["blocks/1/down/kernel"] == moved
    assert differs["blocks/1/up/kernel"] == differs["blocks/*/up/bias"] == ""
    arrays = (("", ["unused"], np.ones(size), "") for size in (8, 16, 32))
    assert [each.count for each in claimed(arrays, jshard.explain(model, X).placed)] == [1]


def test_at_rest_is_read_from_the_arrays(tmp_path):
    """A model that was given to jshard.shard without an example lies on one device until its first call moves it."""
    jshard.load({**MESH, "all": {"row": "data", "store": "data", "match": ["**"]}})
    model = jshard.shard(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
    rows = {each.parameter: each for each in jshard.explain(model, X).claims}
    assert rows["kernel"].at_rest == ("", "") and rows["kernel"].part == (16, 32)
    assert rows["kernel"].differs == "not yet in place: its next call moves it"
    model(X)
    row = next(each for each in jshard.explain(model, X).claims if each.parameter == "kernel")
    assert row.part == model.kernel[...].addressable_shards[0].data.shape != (16, 32) and row.differs == ""


class Other(nnx.Module):
    """Its parameter has the name of one of the model's."""

    def __init__(self, size):
        self.unused = nnx.Param(jnp.ones(size))


def test_a_claim_says_how_parameters_lie_at_rest_where_that_differs():
    claim = Claimed(None, "a", "column: t", "w", 1, "float32[8]", ("t",), ("d",), (2,), "", "")
    assert claim.cells() == ("-", "a", "column: t", "w", "float32[8]", "[t]", "at rest [d]", "[2] each", "", "")


# -- other kinds of models --


@functools.partial(jax.tree_util.register_dataclass, data_fields=["up", "down"], meta_fields=[])
@dataclasses.dataclass
class Registered:
    """A model that is a tree of arrays, as those of Equinox are."""

    up: Any
    down: Any


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(linen.relu(linen.Dense(32, name="up", use_bias=False)(x)))


class Fp8(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(32, name="up", use_bias=False, dot_general_cls=linen.fp8_ops.Fp8DotGeneralOp)(x)


MESH = {"jshard": {"mesh": {"data": 2, "tensor": 4}}}
UP = {**MESH, "up": {"row": "data", "column": "tensor", "match": ["up/**"]}, "rest": {"row": "data", "match": ["**"]}}


def product(params, x):
    leaf = jax.tree.leaves(params)
    return (jax.nn.relu(x @ leaf[-1]) @ leaf[0]).sum()


def linen_variables():
    module = jshard.shard(Dense())
    return jax.jit(module.apply), (module.init(jax.random.key(0), X), X)


def linen_parameters():
    module = jshard.shard(Dense())
    f = jshard.shard(lambda params, x: module.apply({"params": params}, x).sum())
    return jax.value_and_grad(f), (module.init(jax.random.key(0), X)["params"], X)


def train_state():
    module = jshard.shard(Dense())
    params = module.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))
    return lambda state, x: state.apply_fn({"params": state.params}, x).sum(), (state, X)


def plain_tree():
    f = jshard.shard(product)
    return f, (f.place({"down": {"w": jnp.ones((32, 8))}, "up": {"w": jnp.ones((16, 32))}}, X), X)


def registered():
    f = jshard.shard(lambda params, x: (jax.nn.relu(x @ params.up["w"]) @ params.down["w"]).sum())
    return f, (f.place(Registered({"w": jnp.ones((16, 32))}, {"w": jnp.ones((32, 8))}), X), X)


@pytest.mark.parametrize("kind", [linen_variables, linen_parameters, train_state, plain_tree, registered])
def test_every_claim_of_every_kind_of_model_has_a_row(kind):
    jshard.load(UP)
    f, args = kind()
    claims = jshard.explain(f, *args).claims
    rows = {
        each.parameter.split("/")[0]: (each.says, each.in_use, each.differs)
        for each in claims
        if "bias" not in each.parameter
    }
    assert rows == {"up": ("column: tensor", ("", "tensor"), ""), "down": ("whole", ("", ""), "")}
    assert len(claims) == (3 if "linen" in kind.__name__ or kind is train_state else 2)


def rows_of(configuration, f, *args):
    jshard.load({**MESH, **configuration})
    return {each.parameter: (each.says, each.differs) for each in jshard.explain(f, *args).claims}


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_a_product_that_is_hidden_from_its_kernel_is_told():
    module = jshard.shard(Fp8())
    jshard.load(UP)
    variables = module.init(jax.random.key(0), X)
    why = "column: its first use, custom_vjp_call, is no product"
    assert rows_of(UP, module.apply, variables, X) == {"up/kernel": ("column: tensor", why)}


class Places(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize(
    ("places", "scatters", "fault"),
    [
        (16, True, ""),
        (17, True, "sequence: 17 places do not divide by 4 (test_claimed.py:HERE)"),
        (16, False, "sequence: nothing sums over tensor"),
    ],
)
def test_a_sequence_that_is_not_scattered_is_told(places, scatters, fault):
    words = {"row": "data", "sequence": "tensor"}
    down = {**words, "reduction": "tensor", "match": ["down/**"]} if scatters else {**words, "match": ["down/**"]}
    x = np.ones((4, places, 16), np.float32)
    told = fault.replace("HERE", str(inspect.getsourcelines(Places.__call__)[1] + 1))
    configuration = {"up": {**words, "match": ["up/**"]}, "down": down}
    jshard.load({**MESH, **configuration})
    found = rows_of(configuration, jshard.shard(Places(nnx.Rngs(0)), x), x)
    assert found["down/kernel"] == (f"{'reduction: tensor, ' * scatters}sequence: tensor", told)
    assert found["up/kernel"] == found["up/bias"] == ("sequence: tensor", told)


WHY = {
    "column": ({"column": "tensor"}, lambda p, x: (x @ p["w"]).sum(), (16,), "column: dot_general keeps no axis of it"),
    "column of what is added": (
        {"column": "tensor"}, lambda p, x: (x + p["w"]).sum(), (16,), "column: it is added to an array that no word splits"),
    "reduction": ({"reduction": "tensor"}, lambda p, x: (x * p["w"]).sum(), (16,), "reduction: its first use, mul, is no product"),
    "expert": ({"expert": "tensor"}, lambda p, x: (x @ p["w"]).sum(), (16, 8), "expert: dot_general has no axis of experts"),
    "store": ({"store": "data"}, lambda p, x: (x[:, :3] @ p["w"]).sum(), (3, 5),
              "store: replicated over data, as 3 and 5 do not divide by 2; 60 B on each device"),
    "shard": ({"shard": {"axis": 0, "mesh": "tensor"}}, lambda p, x: (x @ p["w"]).sum(), (16, 8),
              "not yet in place: its next call moves it"),
    "unused": ({"column": "tensor"}, lambda p, x: x.sum(), (16, 8), "not used by this program"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:signal .* of the parameter bytes replicated")
@pytest.mark.parametrize("case", WHY)
def test_a_word_that_splits_nothing_says_why(case):
    words, f, shape, why = WHY[case]
    found = rows_of(
        {"w": {**words, "match": ["w"]}}, jshard.shard(lambda params, x: f(params, x)), {"w": jnp.ones(shape)}, X
    )
    assert found["w"][1] == why


def told_whole(model, x):
    """What `check` says lies whole, by the roles that a call with `x` gives the parameters."""
    return whole(model, jshard.explain(model, x).placed)


def test_what_lies_whole_and_need_not_is_told_with_the_word_that_would_split_it(model):
    assert told_whole(model, X) == [
        "c.yaml:3  sums  whole: blocks/*/down/bias x 2 float32[16], 128 B on each device; would be split by store: data (16 in 2)",
        "c.yaml:5  rest  whole: unused float32[16], 64 B on each device; would be split by store: data (16 in 2), store: tensor (16 in "
        "4)",
    ]


def test_what_is_less_than_a_hundredth_is_not_told():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "kernel": {"row": "data", "store": "data", "match": ["kernel"]},
                 "bias": {"row": "data", "match": ["bias"]}})  # fmt: skip
    assert len(told_whole(jshard.shard(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), np.ones((8, 64))), np.ones((8, 64)))) == 1
    assert told_whole(jshard.shard(nnx.Linear(1024, 8, rngs=nnx.Rngs(0)), np.ones((8, 1024))), np.ones((8, 1024))) == []


def test_a_kernel_of_data_parallel_training_is_told_with_every_word():
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": {"row": "data", "match": ["**"]}})
    found = told_whole(jshard.shard(nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0)), X), X)
    assert found == [
        "<dict>  all  whole: kernel float32[16,6], 384 B on each device; would be split by store: data (16 in 2), reduction: tensor "
        "(16 in 4)"
    ]


@pytest.mark.parametrize("rows", [8, 32])
def test_of_a_model_of_other_shapes_only_what_any_array_can_be_is_told(rows):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": {"row": "data", "match": ["**"]}})
    placed = jshard.explain(jshard.shard(nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0))), X).placed
    (found,) = whole(nnx.Linear(rows, 6, use_bias=False, rngs=nnx.Rngs(0)), placed)
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
    assert whole(layer, {}) == [
        "<dict>  layer  whole: kernel float32[6,16], 384 B on each device; would be split by store: data (6 in 2), column: tensor "
        "(16 in 4)"
    ]


@pytest.mark.parametrize(("beside", "told"), [(197, 1), (198, 0)])
def test_what_is_a_hundredth_to_the_byte_is_not_told(beside, told):
    jshard.load({"jshard": {"mesh": {"data": 2}}})
    model = Other(2)
    model.unused.set_value(jnp.ones(2, jnp.int8))
    model.split = nnx.Param(jshard.place(jnp.ones(2 * beside, jnp.int8), jax.P("data")))
    assert len(whole(model, {})) == told


def test_nothing_could_be_split_without_a_mesh():
    jshard.unload()
    assert whole(Other(2), {}) == []
    jshard.load({"a": {}})
    assert whole(Other(2), {}) == []


class Many(nnx.Module):
    def __init__(self):
        self.parts = nnx.List([nnx.Param(jnp.ones(2 * size)) for size in range(20, 34)])

    def __call__(self, x):
        return x * sum(part.sum() for part in self.parts)


def test_of_many_that_lie_whole_the_largest_are_told():
    jshard.load({"jshard": {"mesh": {"data": 2}}, "all": {"row": "data", "match": ["**"]}})
    found = told_whole(jshard.shard(Many(), X), X)
    assert len(found) == 13
    assert found[0].startswith("<dict>  all  whole: parts/13 float32[66], 264 B on each device; ")
    assert found[-1] == "other parameters are whole and could be split, 328 B on each device"
