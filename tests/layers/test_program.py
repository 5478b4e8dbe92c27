"""What a program is told before it runs: signals that say what would do nothing, and what an auto mesh leaves to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard.errors import JShardError
from jshard.layers import partition
from jshard.layers.partition.pieces import Pieces
from jshard.signals.claims import Claim, Stage
from tests.support.partitioned import built

X = np.ones((8, 8), np.float32)
WS = np.stack([X] * 4)


def looped(ws, u, x):
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] @ u


def staged(signals):
    """The signals of a pipeline of two stages, of four devices each."""
    asked = {"train": {"microbatches": 2}, "pipeline": {"axis": "stage", "schedule": "1f1b"}}
    return jshard.load({"jshard": {"mesh": {"stage": 2, "data": 4}, **asked}, **signals}).signals


def test_a_signal_outside_of_loops_is_told_behind_one_that_is_in_a_loop(mesh):
    words = {"row": "data", "remat": "full"}
    signals = jshard.load({"jshard": {"mesh": {"data": 2}}, "a": words, "b": words}).signals
    with pytest.raises(JShardError) as error:
        built(mesh(data=2), looped, [WS, X, X], [Claim(signals["a"], "a"), Claim(signals["b"], "b"), (("data",), ())])
    assert str(error.value) == (
        'signal "b" (<dict>) says remat, which jshard.shard does for layers in a loop, and none of its parameters is in a loop; '
        "build the layers with jshard.stack"
    )


def test_chunks_are_of_layers_on_all_stages(mesh):
    signals = staged({"blocks": {"stage": "equal"}, "a": {"row": "data", "remat": "chunk"}, "b": {"row": "data"}})
    claim = Claim(signals["a"], "**", Stage("stage", signals["blocks"]))
    program, _ = built(mesh(stage=2, data=4), looped, [WS, X, X], [claim, Claim(signals["b"], "b"), (("data",), ())])
    assert program.in_axes[0] == (("stage",), (), ())


def test_on_auto_axes_a_program_stays_as_it_is():
    on = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    stored = {"row": "data", "store": "data"}
    signals = jshard.load({"jshard": {"mesh": {"data": 2}, "axis_types": "auto"}, "a": stored}).signals
    inputs = [partition.Input(claim=Claim(signals["a"], "**"), path=path) for path in "wu"] + [
        partition.Input(((),) * 2)
    ]
    program = jax.make_jaxpr(looped)(WS, X, X)
    assert partition.Program(on, program, inputs).jaxpr is program


def test_a_stack_over_all_stages_beside_a_numbered_stage_is_a_sentence(mesh):
    signals = staged({"all": {"stage": "equal"}, "one": {"stage": 0}, "a": {"row": "data"}})
    stages = Stage("stage", signals["all"]), Stage("stage", signals["one"], 0)
    ways = [*(Claim(signals["a"], "**", stage) for stage in stages), (("data",), ())]
    program, _ = built(mesh(stage=2, data=4), looped, [WS, X, X], ways)
    with pytest.raises(JShardError) as error:
        Pieces(program)
    assert str(error.value) == (
        'signal "all" (<dict>) says stage: equal (<dict>), and signal "one" (<dict>) says stage: 0 (<dict>); give each signal the '
        "number of its stage, or let one stack be split equally"
    )


USES = {  # of a parameter; whether one product reads it and nothing else
    "none": (lambda w, x: x, False),
    "a product": (lambda w, x: x @ w, True),
    "no product": (lambda w, x: x * w, False),
    "two products": (lambda w, x: x @ w @ w, False),
}


@pytest.mark.parametrize("case", USES)
def test_it_is_known_what_one_product_alone_reads(mesh, case):
    f, expected = USES[case]
    program, _ = built(
        mesh(data=2), f, [X, X], [{"row": "data", "store": {"parameters": "data", "keep": True}}, (("data",), ())]
    )
    assert program.reader == ["dot_general" * is_read for is_read in (expected, case in ("a product", "two products"))]


def test_of_layers_on_stages_no_product_gathers_again(mesh):
    signals = staged({"all": {"stage": "equal"}, "a": {"row": "data", "store": "data"}})
    claim = Claim(signals["a"], "**", Stage("stage", signals["all"]))
    program, _ = built(mesh(stage=2, data=4), looped, [WS, X, X], [claim, ((), ()), (("data",), ())])
    assert program.reader == [""] * 3


def test_how_results_are_split_is_planned_without_a_trace(mesh, monkeypatch):
    signal = jshard.load({"jshard": {"mesh": {"data": 2}}, "a": {"row": "data"}}).signals["a"]
    inputs = [partition.Input(claim=Claim(signal, "**"), path="w"), partition.Input((("data",), ()))]
    program = jax.make_jaxpr(lambda w, x: x @ w)(X, X)
    monkeypatch.setattr(jax, "shard_map", None)
    monkeypatch.setattr(jax, "make_jaxpr", None)
    assert partition.Program(mesh(data=2), program, inputs).out_axes == [(("data",), ())]
