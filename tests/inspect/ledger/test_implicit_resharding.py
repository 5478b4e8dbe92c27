"""What the partitioner moves and nobody asked for is told: held against the compiled program, operation by operation."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.cli import main
from jshard.errors import JShardError
from jshard.inspect.compiled import collectives_in, wire_bytes
from jshard.inspect.ledger.entries import Left
from jshard.inspect.ledger.explicit_sharding import _moved, split_of
from jshard.inspect.ledger.ledger import read
from jshard.inspect.ledger.promises import Baseline, added, check_promises
from jshard.inspect.plan import explain
from jshard.layouts.axes import Factors
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration, unload

YAML = """\
jshard:
  mesh: {data: 2, tensor: 4}
layer1: {row: data, column: tensor}
"""


@pytest.fixture(autouse=True)
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.yaml").write_text(YAML)
    jshard.load("some.yaml")
    yield
    unload()


def sharding(*spec):
    return NamedSharding(jshard.mesh(), P(*spec))


def put(shape, *spec, dtype=np.float32):
    return jax.device_put((np.arange(np.prod(shape)) % 7).reshape(shape).astype(dtype), sharding(*spec))


def rows():
    return put((8, 16), "data")


def tiles():
    return put((8, 16), "data", "tensor")


def images():
    return put((4, 16, 16, 3), "data", "tensor")


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def looked_up(table, indices):
    return table.at[indices].get(out_sharding=sharding("data"))


Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]

# Along a split axis, so that something has to move: all of these have collectives on CPU that no type prices.
MOVES: dict[str, Case] = {
    "pad": (lambda x: jnp.pad(x, ((1, 7), (0, 0))), lambda: (rows(),)),
    "flip": (lambda x: x[::-1], lambda: (tiles(),)),
    "slice": (lambda x: x[:4], lambda: (tiles(),)),
    "slice's gradient": (jax.grad(lambda x: (x[:4] ** 2).sum()), lambda: (rows(),)),
    "concatenate": (lambda x: jnp.concatenate([x, x]), lambda: (rows(),)),
    "split": (lambda x: jnp.split(x, 2)[0], lambda: (rows(),)),
    "reshape": (lambda x: x.reshape(-1, out_sharding=sharding("data")), lambda: (tiles(),)),
    "dynamic_slice": (lambda x, k: lax.dynamic_slice_in_dim(x, k, 4, 0), lambda: (rows(), jnp.int32(1))),
    "dynamic_update_slice": (
        lambda x, u, k: lax.dynamic_update_slice_in_dim(x, u, k, 0),
        lambda: (rows(), put((4, 16), "data"), jnp.int32(1)),
    ),
    "reshape, within a mesh axis": (
        lambda x: x.reshape(4, 2, 16, out_sharding=sharding("data")),
        lambda: (put((8, 16), ("data", "tensor")),),
    ),
    "product, one operand whole": (
        lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=sharding("data")),
        lambda: (tiles(), put((16, 12))),
    ),
    "product, result whole": (
        lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=sharding()),
        lambda: (rows(), put((16, 12))),
    ),
    "product, result elsewhere": (
        lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=sharding("tensor")),
        lambda: (rows(), put((16, 12))),
    ),
    "convolution": (convolved, lambda: (images(), put((3, 3, 3, 5)))),
    "top_k": (lambda x: lax.top_k(x, 4)[0], lambda: (rows(),)),
    "fft": (lambda x: jnp.fft.fft(x, axis=0).real, lambda: (rows(),)),
    "reduction by hand": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + 1.0 * b, (0,)), lambda: (rows(),)),
    "callback": (lambda x: (jax.debug.callback(lambda x: None, x), jnp.sin(x))[1], lambda: (rows(),)),
    "device_put": (lambda x: jax.device_put(x, sharding()), lambda: (rows(),)),
    "device_put, other mesh axis": (lambda x: jax.device_put(x, sharding("tensor")), lambda: (rows(),)),
    "out_shardings": (lambda x: jax.jit(jnp.sin, out_shardings=sharding(None, "data"))(x), lambda: (rows(),)),
    "out_shardings, whole": (lambda x: jax.jit(jnp.sin, out_shardings=sharding())(x), lambda: (rows(),)),
    "out_shardings, other mesh axis": (
        lambda x: jax.jit(jnp.sin, out_shardings=sharding("tensor"))(x), lambda: (rows(),)
    ),
    "order of mesh axes": (
        lambda x: jax.sharding.reshard(x, sharding(("tensor", "data"))),
        lambda: (put((8, 16), ("data", "tensor")),),
    ),
    "mesh axes exchanged": (lambda x: jax.sharding.reshard(x, sharding("tensor", "data")), lambda: (tiles(),)),
    "major mesh axis away": (
        lambda x: jax.sharding.reshard(x, sharding("tensor")),
        lambda: (put((8, 16), ("data", "tensor")),),
    ),
    "major mesh axis away, the other order": (
        lambda x: jax.sharding.reshard(x, sharding("data")),
        lambda: (put((8, 16), ("tensor", "data")),),
    ),
    "major mesh axis added": (
        lambda x: jax.sharding.reshard(x, sharding(("data", "tensor"))),
        lambda: (put((8, 16), "tensor"),),
    ),
    "in a branch": (
        lambda x, which: lax.cond(which, lambda x: x[::-1], lambda x: x, x),
        lambda: (rows(), put((), dtype=np.bool_)),
    ),
    "in a loop": (lambda x: lax.scan(lambda x, _: (x[::-1] + 1, None), x, None, length=3)[0], lambda: (rows(),)),
    "in a trip": (lambda x: lax.while_loop(lambda x: x.sum() < 3, lambda x: x[::-1] + 1, x), lambda: (rows(),)),
    "in remat": (jax.checkpoint(lambda x: x[::-1]), lambda: (rows(),)),
}  # fmt: skip

LOCAL: dict[str, Case] = {
    "elementwise": (lambda x: jnp.clip(jnp.where(x > 0, jnp.sin(x) * 2 + x, x), 0, 1), lambda: (tiles(),)),
    "with a whole vector": (lambda x, v: x + v, lambda: (tiles(), put((16,)))),
    "dtype": (lambda x: x.astype(jnp.bfloat16), lambda: (tiles(),)),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int8), lambda: (tiles(),)),
    "transpose": (lambda x: x.T, lambda: (tiles(),)),
    "new axes": (lambda x: jnp.stack([x, x])[:, None].squeeze(1), lambda: (tiles(),)),
    "broadcast": (lambda v: jnp.broadcast_to(v, (8, 16)), lambda: (put((16,), "tensor"),)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), lambda: (rows(),)),
    "flip": (lambda x: jnp.flip(x, 1), lambda: (rows(),)),
    "roll": (lambda x: jnp.roll(x, 1, 1), lambda: (rows(),)),
    "slice": (lambda x: x[:, :4], lambda: (rows(),)),
    "concatenate": (lambda x: jnp.concatenate([x, x], 1), lambda: (rows(),)),
    "axes joined": (lambda x: x.reshape(128), lambda: (rows(),)),
    "first axis divided": (lambda x: x.reshape(2, 4, 16), lambda: (rows(),)),
    "last axis divided": (lambda x: x.reshape(8, 4, 4), lambda: (tiles(),)),
    "axis of one": (lambda x: x.reshape(1, 8, 1, 16), lambda: (tiles(),)),
    "columns": (lambda x: jnp.take(x, jnp.array([0, 3]), axis=1), lambda: (rows(),)),
    "along": (lambda x, i: jnp.take_along_axis(x, i[:, None], 1), lambda: (rows(), put((8,), "data", dtype=np.int32))),
    "table": (looked_up, lambda: (put((16, 12)), put((8,), dtype=np.int32))),
    "one hot": (lambda i: jax.nn.one_hot(i, 8), lambda: (put((8,), "data", dtype=np.int32),)),
    "sort": (lambda x: jnp.sort(x, 1), lambda: (rows(),)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), lambda: (rows(),)),
    "sums of whole axes": (lambda x: x.sum(1) + x.var(1) + jax.nn.logsumexp(x, 1), lambda: (rows(),)),
    "product": (lambda x, w: x @ w, lambda: (rows(), put((16, 12), None, "tensor"))),
    "product, rows split further": (
        lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=sharding(("data", "tensor"))),
        lambda: (rows(), put((16, 12))),
    ),
    "convolution": (convolved, lambda: (put((4, 8, 8, 3), "data"), put((3, 3, 3, 8)))),
    "pooling": (pooled, lambda: (put((4, 8, 8, 3), "data"),)),
    "triangle": (jnp.tril, lambda: (tiles(),)),
    "scatter": (lambda x, i, u: x.at[:, i].add(u), lambda: (rows(), put((4,), dtype=np.int32), put((8, 4), "data"))),
    "random": (
        lambda x: x + jax.random.uniform(jax.random.key(0), x.shape, out_sharding=sharding("data", "tensor")),
        lambda: (tiles(),),
    ),
    "split further": (lambda x: jax.sharding.reshard(x, sharding("data", "tensor")), lambda: (rows(),)),
    "out_shardings as it lies": (lambda x: jax.jit(jnp.sin, out_shardings=sharding("data"))(x), lambda: (rows(),)),
    "device_put of what is whole": (lambda x: jax.device_put(x, sharding("data")), lambda: (put((8, 16)),)),
}  # fmt: skip


def asked_and_got(case):
    f, arguments = case
    arguments = arguments()
    with jax.set_mesh(jshard.mesh()):
        return read(jax.make_jaxpr(f)(*arguments)), jax.jit(f).lower(*arguments).compile()


@pytest.mark.parametrize("name", MOVES)
def test_what_the_compiler_moves_and_no_type_prices_is_told(name):
    ledger, compiled = asked_and_got(MOVES[name])
    got = [each for each in collectives_in(compiled) if each.group > 1]
    if name == "fft" or got:  # a compiler may learn to do better; what it does move is told
        assert ledger.left, str(ledger)
    assert len(MOVES) >= 25


def test_most_of_what_is_told_does_move():
    moving = [name for name in ("flip", "slice", "concatenate", "reshape", "dynamic_slice") if _moves(name)]
    assert len(moving) == 5


def _moves(name):
    ledger, compiled = asked_and_got(MOVES[name])
    return wire_bytes(compiled) > ledger.total == 0


@pytest.mark.parametrize("name", LOCAL)
def test_what_every_device_can_do_by_itself_is_not_told(name):
    ledger, compiled = asked_and_got(LOCAL[name])
    assert (ledger.left, ledger.total, wire_bytes(compiled)) == ((), 0, 0), str(ledger)


ELEMENTWISE = [
    *(getattr(jax.nn, name) for name in "celu elu gelu hard_tanh leaky_relu mish relu6 selu sigmoid silu softplus".split()),
    *(getattr(jnp, name) for name in "cbrt exp exp2 expm1 log log10 log1p log2 reciprocal sinh sqrt square tan tanh".split()),
    jax.scipy.special.erf, jax.scipy.special.i0e, lambda x: jnp.power(x, 2.5),
]  # fmt: skip


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda function: function.__name__)
def test_functions_of_each_number_and_their_gradients_are_not_told(function):
    with jax.set_mesh(jshard.mesh()):
        found = read(jax.make_jaxpr(jax.value_and_grad(lambda x: function(x).sum()))(tiles()))
    assert found.left == (), str(found)


def test_a_mesh_axis_that_moves_alone_is_priced_and_not_told():
    with jax.set_mesh(jshard.mesh()):
        ledger = read(jax.make_jaxpr(lambda x: jax.sharding.reshard(x, sharding(None, "data")))(rows()))
    assert (ledger.left, [line.collective for line in ledger.lines]) == ((), ["all_to_all"])


@pytest.mark.parametrize(("one", "other"), [("data", None), (None, "data")])
def test_a_product_whose_operands_lie_differently_is_told_without_a_price(one, other):
    with jax.set_mesh(jshard.mesh()):
        ledger = read(jax.make_jaxpr(jnp.matmul)(put((8, 16), None, one), put((16, 8), other)))
    assert (ledger.lines, [(left.primitive, left.mesh_axes) for left in ledger.left]) == (
        (),
        [("dot_general", ("data",))],
    )


@pytest.mark.parametrize(
    ("name", "moved"), [("conv_general_dilated", ["data"] * 2), ("dot_general", []), ("scatter-add", ["data"] * 2)]
)
def test_only_a_product_sums_what_its_type_prices(name, moved):
    x = types.SimpleNamespace(aval=jax.typeof(rows()))
    eqn = types.SimpleNamespace(primitive=types.SimpleNamespace(name=name), invars=[x, x], outvars=[])
    both_sum = Factors((((0,),), ((0,),)), (), (8,), ("sum",))
    assert _moved(eqn, both_sum, [[("data",)]] * 2, []) == moved


def test_what_has_no_sharding_is_not_split():
    assert split_of(types.SimpleNamespace(shape=(2, 3))) == [(), ()]


def test_an_operation_that_is_not_known_counts_as_one_that_moves():
    x = put((8, 4, 4), "data")
    (left,) = read(jax.make_jaxpr(lambda x: lax.linalg.lu(x)[0])(x)).left
    assert (left.primitive, left.mesh_axes) == ("lu", ("data",))


def test_a_mesh_axis_of_one_device_moves_nothing(mesh):
    one = mesh(data=1, tensor=4)
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(one, P("data")))
    assert read(jax.make_jaxpr(lambda x: x[::-1])(x)).left == ()


def test_inside_shard_map_nothing_is_left_to_the_compiler():
    body = jax.shard_map(
        lambda x: jnp.concatenate([x[::-1], x]), mesh=jshard.mesh(), in_specs=P("data"), out_specs=P("data")
    )
    assert read(jax.make_jaxpr(body)(rows())).left == ()


# -- how it is told --


def turned(x):
    with jshard.signal("layer1"):
        x = jnp.flip(x, 0)
    return jnp.sin(x[:4]).sum()


def here(offset):
    return f"test_implicit_resharding.py:{turned.__code__.co_firstlineno + offset}"


def test_ledger_tells_what_the_compiler_decides_and_counts_it_apart():
    ledger = explain(turned, rows())
    assert str(ledger).splitlines()[1:] == [
        f"some.yaml:3  layer1  forward  rev over data ({here(2)}): not asked for, decided by the compiler",
        f"-  -  forward  slice over data ({here(3)}): not asked for, decided by the compiler",
        f"-  -  backward  pad over data ({here(3)}): not asked for, decided by the compiler",
        f"some.yaml:3  layer1  backward  rev over data ({here(2)}): not asked for, decided by the compiler",
        "total: 1 collective, 4 B on the wire per device (forward 4 B); not counted: 4 that the compiler decides",
    ]
    assert [left.signal for left in ledger.only(phase="backward").left] == ["-", "layer1"]
    assert ledger.only(collective="all_reduce").left == ()


def test_times_in_a_loop_are_told_and_lines_are_one():
    def f(x):
        y = lax.scan(lambda x, _: (x[::-1] + 1, None), x, None, length=2)[0]
        return lax.while_loop(lambda x: x.sum() < 3, lambda x: x[::-1] + 1, y)

    line = f.__code__.co_firstlineno + 1
    assert [left.words for left in read(jax.make_jaxpr(f)(rows())).left] == [
        f"2 x rev over data (test_implicit_resharding.py:{line})",
        f"? x rev over data (test_implicit_resharding.py:{line + 1})",
    ]


def test_ledger_that_only_leaves_to_the_compiler_says_so():
    ledger = read(jax.make_jaxpr(lambda x: x[::-1])(rows()))
    assert ledger.summary() == "total: no collectives; not counted: 1 that the compiler decides"


def test_document_holds_what_is_left_and_comes_back():
    ledger = explain(turned, rows())
    told = json.loads(ledger.to_json())
    assert told["left"][0] == {
        "place": "some.yaml:3", "signal": "layer1", "phase": "forward", "primitive": "rev", "mesh_axes": ["data"],
        "count": 1, "count_known": True, "via": "", "source": here(2), "key": "row",
        "redistributed": False, "remat": False, "claimed": False, "chosen": "", "branches": [],
    }  # fmt: skip


def test_promise_can_not_be_held_where_the_compiler_decides():
    jshard.load("some.yaml", ["layer1.expect={all_reduce: 0}"])
    ledger = explain(turned, rows(), backward=False)
    with pytest.raises(JShardError) as told:
        check_promises(ledger, configuration())
    assert str(told.value) == (
        f'signal "layer1" (the command line) expects a count, but only the compiler decides what rev over data ({here(2)}) moves; '
        "do it inside jax.shard_map, or place its array by jshard.place first"
    )


def test_baseline_holds_what_is_left_to_the_compiler():
    was, now = explain(jnp.sin, rows(), backward=False), explain(turned, rows(), backward=False)
    accepted = Baseline.read(Baseline.of(now, "2x4").text("check"), "b", "check")
    assert list(added(accepted, now, "2x4", name="b", command="check")) == []
    told = list(added(Baseline.of(was, "2x4"), now, "2x4", name="b", command="check"))
    assert told[1:] == [
        'signal "layer1" (some.yaml:3) leaves 1 more rev over data in forward to the compiler than b, bytes unknown; '
        "accept it: check --update",
        f"the program ({here(3)}), under no signal, leaves 1 more slice over data in forward to the compiler than b, bytes "
        "unknown; accept it: check --update",
    ]


MODEL = """\
import numpy as np
from flax import nnx
import jshard


class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layer1"):
            self.up = jshard.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer1"):
            return self.up(x[::-1])


def data():
    return {"train": (np.ones((8, 4), np.float32), np.zeros(8, np.int32)), "test": (np.ones((8, 4), np.float32), np.zeros(8, np.int32))}
"""


def test_check_tells_what_the_compiler_decides(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("turned.py").write_text(MODEL)
    text = YAML.replace("layer1: {row: data,", "layer1: {expect: {bytes: 1MiB}, row: data,") + "inputs: {row: data}\n"
    Path("turned.yaml").write_text(
        text.replace("  mesh:", "  train: {model: 'turned:Model', data: 'turned:data', batch: 8}\n  mesh:")
    )
    assert main(["check", "turned.yaml"]) == 1
    out, err = capsys.readouterr()
    assert "layer1  forward  rev over data (turned.py:13): not asked for, decided by the compiler" in out
    assert err.startswith(
        'signal "layer1" (turned.yaml:4) expects a count, but only the compiler decides what rev over data (turned'
    )


def test_left_is_compared_by_what_it_is_and_not_by_where_it_is_written():
    one = Left(Cause(source="a.py:1"), "rev", ("data",), 1, True)
    assert one == Left(Cause(source="b.py:2"), "rev", ("data",), 1, True)
