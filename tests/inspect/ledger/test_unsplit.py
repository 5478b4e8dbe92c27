"""Parameters that lie whole under a signal that would split them are told; no other is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.inspect.ledger.whole import _listed, _splitting
from jshard.layers.program_claims import active_signals
from jshard.programs.provenance import scope
from jshard.signals.signal import Shard, Signal
from tests.support import cases

AUTO = {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}
SIGNALS = {"up": {"row": "data", "column": "tensor", "store": "data"}, "down": {"row": "data", "reduction": "tensor"}}
P = jax.P
LINEAR = "use jshard.Linear for nnx.Linear"
OTHER = "lay it out where it is made: jshard.place(x, jax.P(...))"


class Model(nnx.Module):
    def __init__(self, layer, rngs):
        with jshard.signal("up"):
            self.up, self.norm = layer(8, 16, rngs=rngs), nnx.LayerNorm(16, use_bias=False, rngs=rngs)
        with jshard.signal("down"):
            self.down = layer(16, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("up"):
            x = self.norm(self.up(x))
        with jshard.signal("down"):
            return self.down(x)


def unsplit(f, *args):
    return [
        (each.signal, each.parameter, each.bytes, each.keys, each.hint) for each in jshard.explain(f, *args).unsplit
    ]


X = np.ones((8, 8), np.float32)
NORM = ("up", "norm.scale", 64, "column: tensor, store: data", OTHER)
WHOLE = [
    NORM,
    ("up", "up.bias, up.kernel", 576, "column: tensor, store: data", LINEAR),
    ("down", "down.kernel", 512, "reduction: tensor", LINEAR),  # the bias is whole in a jshard.Linear too
]


def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))


def mapped(model, x):
    graph, state = nnx.split(model)
    call = lambda state, x: nnx.merge(graph, state)(x)
    return jax.shard_map(call, mesh=jshard.mesh(), in_specs=P(), out_specs=P())(state, x)


def scanned(model, x):
    return jax.lax.scan(lambda x, _: (model(x), None), x, length=2)[0]


@pytest.mark.parametrize("f", [lambda m, x: m(x), nnx.jit(lambda m, x: m(x)), nnx.remat(lambda m, x: m(x)), scanned, mapped],
                         ids=["plain", "jit", "remat", "scan", "shard_map"])  # fmt: skip
def test_parameters_of_plain_layers_are_told_through_every_call(f):
    with cases.loaded({"jshard": AUTO, **SIGNALS}):
        assert sorted(unsplit(f, Model(nnx.Linear, nnx.Rngs(0)), X)) == sorted(WHOLE)


def test_each_is_a_line_of_what_prints():
    with cases.loaded({"jshard": AUTO, **SIGNALS}):
        ledger = jshard.explain(lambda m, x: m(x), Model(nnx.Linear, nnx.Rngs(0)), X)
    *_, norm, up, down, _ = str(ledger).splitlines()
    assert [norm, up, down] == list(map(str, ledger.unsplit))


def test_those_of_a_training_step_and_of_modules_taken_apart():
    with cases.loaded({"jshard": AUTO, **SIGNALS}):
        model = Model(nnx.Linear, nnx.Rngs(0))
        assert sorted(unsplit(step, model, jshard.Optimizer(model, optax.sgd(0.1)), X)) == sorted(WHOLE)
        graph, state = nnx.split(model)
        names = [each[1] for each in unsplit(lambda state, x: nnx.merge(graph, state)(x), state, X)]
        assert names == ["down.kernel", "norm.scale and 2 more"]  # of no module that is known


@pytest.mark.seconds
def test_parameters_that_their_signal_splits_are_not_told():
    with cases.loaded({"jshard": AUTO, **SIGNALS}):
        assert unsplit(lambda m, x: m(x), Model(jshard.Linear, nnx.Rngs(0)), X) == [NORM]
        blocks = nnx.vmap(lambda rngs: jshard.MLP(8, 16, 8, rngs=rngs))(nnx.Rngs(0).split(3))
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        assert unsplit(run, blocks, X) == []
        plain = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        assert unsplit(lambda m, x: m(x), plain, X) == []  # outside every signal
    alone = AUTO | {"mesh": {"data": 1, "tensor": 1}}  # nothing is split over one device
    with cases.loaded({"jshard": alone, **SIGNALS}):
        assert unsplit(lambda m, x: m(x), Model(nnx.Linear, nnx.Rngs(0)), X) == []
    with cases.loaded({"jshard": AUTO, "up": {"row": "data"}, "down": {"store": {"optimizer": "data"}}}):
        assert unsplit(lambda m, x: m(x), Model(nnx.Linear, nnx.Rngs(0)), X) == []


def test_a_layer_built_under_another_signal_and_an_array_cut_by_workers():
    with cases.loaded({"jshard": AUTO, **SIGNALS, "whole": {}, "cut": {"shard": {"axis": 1, "mesh": "tensor"}}}):
        with jshard.signal("whole"):
            layer = jshard.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))

        def f(layer, x):
            with jshard.signal("up"):
                return layer(x)

        keys = "column: tensor, store: data"
        assert unsplit(f, layer, X) == [("up", "kernel", 512, keys, "build the layer under this signal")]
        with jshard.signal("cut"):
            found = unsplit(jshard.signal("cut")(lambda m, x: m(x)), nnx.Linear(8, 16, rngs=nnx.Rngs(0)), X)
        assert found == [("cut", "kernel", 512, "shard: tensor", LINEAR)]


def test_the_first_use_under_a_signal_counts_and_its_key_is_the_place(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "jshard: {mesh: {data: 2, tensor: 4}, axis_types: auto}\nup:\n  row: data\n  column: tensor\ndown: {store: data}\n"
    )

    def f(layer, x):
        x = x @ layer.kernel[...]
        with jshard.signal("up"):
            x = x @ layer.kernel[...]
        with jshard.signal("down"):
            return x @ layer.kernel[...]

    with cases.loaded(str(tmp_path / "c.yaml")):
        (found,) = jshard.explain(f, nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0)), X, backward=False).unsplit
    told = (
        f"{tmp_path}/c.yaml:4  up  unsplit: kernel whole on each device (256 B), not split by column: tensor; {LINEAR}"
    )
    assert str(found) == told
    assert str(dataclasses.replace(found, place=None)) == told.replace(f"{tmp_path}/c.yaml:4", "-")


def test_operands_of_one_equation_may_have_been_used_before():
    def f(a, b, x):
        with scope(signal="up"):
            x = x @ a
        with scope(signal="down"):
            return x @ (a + b)

    uses = active_signals(jax.make_jaxpr(f)(X, X, X).jaxpr, ["a", "b", ""], {}, ())
    assert {path: (first.names, first.rank) for path, (first, *_) in uses.items()} == {
        "a": (("up",), 2),
        "b": (("down",), 2),
    }


@pytest.mark.parametrize(
    ("names", "told"), [("a", "a"), ("ab", "a, b"), ("abc", "a and 2 more"), ("abcd", "a and 3 more")]
)
def test_many_parameters_are_counted(names, told):
    assert _listed(names) == told


def test_the_last_line_says_what_the_compiler_adds_on_an_auto_mesh():
    added = "none added by XLA for CPU; for another chip see jshard plan"
    for axis_types, told in (("auto", f"; {added}"), ("explicit", "")):
        with cases.loaded({"jshard": {"mesh": {"data": 2}, "axis_types": axis_types}}):
            x = cases.placed(X, P("data"))
            ledger = jshard.explain(jnp.sin, x, backward=False)
            assert str(ledger) == f"total: no collectives{told}"


@pytest.mark.parametrize(
    ("signal", "rank", "keys"),
    [
        (Signal("a", column=("t",), reduction=("d",), store=("d",)), 2, ["column", "reduction", "store"]),
        (Signal("a", column=("t",), reduction=("d",), store=("d",)), 1, ["column", "store"]),
        (Signal("a", column=("t",), store=("d",)), 0, []),
        (Signal("a", column=("one",), store=("d",)), 2, ["store"]),
        (Signal("a", shard=Shard(-2, (0, 1))), 2, ["shard"]),
        (Signal("a", shard=Shard(2, (0, 1))), 2, []),
        (Signal("a", shard=Shard(3, (0, 1))), 2, []),
        (Signal("a", shard=Shard(0, mesh=("one",))), 2, []),
    ],
)
def test_keys_that_split_a_parameter(signal, rank, keys):
    assert [key for key, _ in _splitting(signal, rank, {"d": 2, "t": 4, "one": 1})] == keys
