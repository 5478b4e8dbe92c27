"""`jshard.MLP`: one all-reduce forward and one backward, or the collectives that its signals ask for instead."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

HIDDEN = 32
PAIR = {"up": {"column": "tensor"}, "down": {"reduction": "tensor"}}
ROWS = {name: keys | {"row": "data"} for name, keys in PAIR.items()}
SEQUENCE = {name: keys | {"sequence": "tensor"} for name, keys in PAIR.items()}
STORE = {name: {"row": ["data", "tensor"], "store": ["data", "tensor"]} for name in PAIR}


class Dense(nnx.Module):
    """The same numbers in plain Flax."""

    def __init__(self, **arguments):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(cases.INPUTS, HIDDEN, rngs=rngs, **arguments)
        self.down = nnx.Linear(HIDDEN, cases.INPUTS, rngs=rngs, **arguments)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def mlp(**arguments):
    return jshard.MLP(cases.INPUTS, HIDDEN, cases.INPUTS, rngs=nnx.Rngs(0), **arguments)


WHOLE = {"kernel_init": cases.integers, "bias_init": cases.integers}
P = jax.P

# keys, x and y (and so their gradients), kernel and bias of up and of down, collectives forward and backward
CASES = {
    "pair": (PAIR, P(), {"up": (P(None, "tensor"), P("tensor")), "down": (P("tensor"), P())},
             {("all_reduce", 4): 1}, {("all_reduce", 4): 1}),
    "rows": (ROWS, P("data"), {"up": (P(None, "tensor"), P("tensor")), "down": (P("tensor"), P())},
             {("all_reduce", 4): 1}, {("all_reduce", 4): 1, ("all_reduce", 2): 4}),
    # the bias of down is added to the parts of the sequence: its gradient is summed over them
    "sequence": (SEQUENCE, P(None, "tensor"), {"up": (P(None, "tensor"), P("tensor")), "down": (P("tensor"), P())},
                 {("all_gather", 4): 1, ("reduce_scatter", 4): 1},
                 {("all_gather", 4): 1, ("reduce_scatter", 4): 1, ("all_reduce", 4): 1}),
    # four parameters, one mesh axis at a time: groups of 2 and 4, never of 8; the kernels again for the gradients of x
    "store": (STORE, P(("data", "tensor")),
              dict.fromkeys(PAIR, (P(("data", "tensor")), P(("data", "tensor")))),
              {("all_gather", 2): 4, ("all_gather", 4): 4},
              {("reduce_scatter", 2): 4, ("reduce_scatter", 4): 4, ("all_gather", 2): 2, ("all_gather", 4): 2}),
}  # fmt: skip


def shape_of(name):
    """Of x and y: a sequence has an axis of its own."""
    return (8, 8, cases.INPUTS) if name == "sequence" else (8, cases.INPUTS)


@functools.cache
def dense(shape):
    x = cases.numbers(shape)
    return cases.forward_and_gradients(Dense(**WHOLE), x, np.flip(x))


@pytest.mark.quick("pair-shard_map-auto", "store-shard_map-auto")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("door", ["layer", "jit", "shard_map"])
@pytest.mark.parametrize("name", CASES)
def test_mlp_has_exactly_the_collectives_of_its_signals(name, door, axis_types):
    signals, spec, parameters, forward, backward = CASES[name]
    numbers = cases.numbers(shape_of(name))
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **signals}):
        model = mlp(**WHOLE)
        x, cotangent = cases.placed(numbers, spec), cases.placed(np.flip(numbers), spec)
        if door == "layer":
            graph, state = nnx.split(model)
            f = lambda state, *args: cases.forward_and_gradients(nnx.merge(graph, state), *args)
            args = state, x, cotangent
            compiled = jax.jit(f).lower(*args).compile()
            results = compiled(*args)
        else:
            wrap = jshard.jit if door == "jit" else in_one_shard_map
            f, args = wrap(cases.forward_and_gradients), (model, x, cotangent)
            compiled = f.lower(*args).compile()
            results = f(*args)
        jax.tree.map(cases.assert_equal, results, dense(numbers.shape))
        for array in (results[0], results[2]):
            cases.assert_lies(array, spec)
        for layer, specs in parameters.items():
            for parameter, lies in zip(("kernel", "bias"), specs, strict=True):
                cases.assert_lies(getattr(getattr(model, layer), parameter)[...], lies)
                cases.assert_lies(results[1][layer][parameter][...], lies)
        asked = collections.Counter(forward) + collections.Counter(backward)
        again = {kind: count for kind, count in backward.items() if name == "store" and kind[0] == "all_gather"}
        joined = asked - collections.Counter(again)  # by XLA for CPU, outside loops
        assert cases.collectives_got(compiled) in (asked, joined)
        if door != "shard_map" or axis_types == "explicit":
            ledger = cases.assert_priced(f, args, compiled)
            assert cases.collectives_asked(ledger.only(phase="forward")) == forward
            assert cases.collectives_asked(ledger.only(phase="backward")) == backward
            assert {line.signal for line in ledger} == {"up", "down"}


def test_reduce_scatter_stays_one_in_the_compiled_text():
    signals, spec, *_ = CASES["store"]
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals}):
        model = mlp(use_bias=False)
        x = cases.placed(cases.numbers((8, 16)), spec)
        graph, state = nnx.split(model)
        f = lambda state, x: cases.forward_and_gradients(nnx.merge(graph, state), x, x)
        found = cases.collectives_in(jax.jit(f).lower(state, x).compile())
    full = 4 * cases.INPUTS * HIDDEN
    scattered = sorted((got.opcode, got.group, got.payloads) for got in found if got.collective == "reduce_scatter")
    gathered = sorted((got.group, got.payloads) for got in found if got.collective == "all_gather")
    assert scattered == [("reduce-scatter", 2, (full,))] * 2 + [("reduce-scatter", 4, (full // 2,))] * 2
    once = [(2, (full,))] * 2 + [(4, (full // 2,))] * 2
    assert gathered in (once, sorted(once * 2))  # again for backward, which jax 0.10.2's XLA for CPU joins


# -- under scan and remat --


def stack(make, count):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return make(rngs)

    return create(nnx.Rngs(0))


@pytest.mark.seconds
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("name", ["rows", "sequence"])
def test_blocks_under_scan_cost_that_many_times_one(name, remat):
    signals, spec, _, forward, backward = CASES[name]
    count = 3
    numbers = cases.numbers(shape_of(name))
    make = lambda rngs: jshard.MLP(cases.INPUTS, HIDDEN, cases.INPUTS, rngs=rngs)
    call = lambda block, x: x + block(x)
    run = nnx.scan(nnx.remat(call) if remat else call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    expected = cases.forward_and_gradients(stack(make, count), numbers, numbers, run)  # no configuration: plain Flax
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals}):
        blocks, x = stack(make, count), cases.placed(numbers, spec)
        graph, state = nnx.split(blocks)
        f = lambda state, x: cases.forward_and_gradients(nnx.merge(graph, state), x, x, run)
        compiled = jax.jit(f).lower(state, x).compile()
        actual = compiled(state, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, expected)
        ledger = cases.assert_priced(f, (state, x), compiled)
        again = {("all_gather", 4): 1} if remat and name == "sequence" else {}
        asked = cases.collectives_asked(ledger)
        once = collections.Counter(forward) + collections.Counter(backward) + collections.Counter(again)
        assert asked == {kind: count * arrays for kind, arrays in once.items()}
        assert cases.collectives_got(compiled) == asked


# -- one program --


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "keys",
    [{"column": "tensor"}, {"store": "tensor", "dtype": {"compute": "bfloat16", "reduce": "float32"}},
     {"reduction": "tensor", "remat": True}, {"column": "tensor", "backward": "other"}, "mlp"], ids=str,
)  # fmt: skip
def test_compile_true_makes_each_layer_one_program_and_its_backward_another(keys):
    layer = PAIR if keys == "mlp" else {"other": {"row": "tensor"}}
    signals = layer | {"layer": {"compile": True} | ({} if keys == "mlp" else keys)}
    with cases.loaded({"jshard": {"mesh": {"tensor": 4}}, **signals}):
        with jshard.signal("layer"):
            model = mlp() if keys == "mlp" else jshard.Linear(cases.INPUTS, cases.INPUTS, rngs=nnx.Rngs(0))
        x = cases.placed(cases.numbers((8, cases.INPUTS)), P())
        assert cases.compilations(lambda: model(x)) == 1
        y = model(x)
        for f, *args in ((lambda m, x: m(x), model, x), (model, x), (lambda m: m(x), model)):
            pull = jax.vjp(f, *args)[1]
            assert cases.compilations(lambda pull=pull: pull(y)) <= 1  # what a case before it pulled is not made again
            assert cases.compilations(lambda pull=pull: pull(y)) == 0


def test_compile_true_makes_a_call_one_program():
    outer = {"jshard": {"mesh": {"data": 2, "tensor": 4}}, "block": {"compile": True}, **ROWS}
    x = cases.numbers((8, 16))
    with cases.loaded(outer):
        with jshard.signal("block"):
            model = mlp()
        x = cases.placed(x, P("data"))
        assert [cases.compilations(lambda: model(x)) for _ in range(2)] == [1, 0]
        y = model(x)
    with cases.loaded(outer | {"block": {}}):
        with jshard.signal("block"):
            model = mlp()
        x = cases.placed(cases.numbers((8, 16)), P("data"))
        assert cases.compilations(lambda: model(x)) > 1
        np.testing.assert_allclose(model(x), y, rtol=1e-6)


def test_mlp_is_found_by_nested_names_and_takes_its_own():
    nested = {"jshard": {"mesh": {"tensor": 4}}, "decoder": {}, "decoder/up": PAIR["up"], "decoder/down": PAIR["down"]}
    with cases.loaded(nested):
        with jshard.signal("decoder"):
            model = mlp()
        cases.assert_lies(model.up.kernel[...], P(None, "tensor"))
        cases.assert_lies(model.down.kernel[...], P("tensor"))
    with cases.loaded({"jshard": {"mesh": {"tensor": 4}}, "wide": PAIR["up"], "narrow": PAIR["down"]}):
        model = mlp(signals=("wide", "narrow"), activation=jnp.tanh)
        cases.assert_lies(model.down.kernel[...], P("tensor"))
        ledger = jshard.explain(model, cases.numbers((8, 16)), backward=False)
        assert ledger.counts("signal") == {"narrow": 1}


def test_mlp_splits_and_prints_as_a_module():
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **ROWS}):
        model = mlp()
        graph, state = nnx.split(model)
        x = cases.numbers((8, 16))
        cases.assert_equal(nnx.merge(graph, state)(x), model(x))
        assert "kernel" in repr(model) and "MLP" in repr(model)
