"""Where no signal names a strategy: the cheapest is taken, by the wire and the arithmetic of the passes that are traced."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.inspect.compiled import wire_bytes
from jshard.inspect.plan import explain
from jshard.layers import choose, matrix_product
from jshard.layers.matrix_product import Candidate, Operand, choices
from jshard.layers.strategy import Strategy
from jshard.runs import events

pytestmark = pytest.mark.usefixtures("nothing_loaded")

WHOLE, ROWS, COLUMNS = (None, None), ("w", None), (None, "w")
A = (np.arange(32 * 16).reshape(32, 16) % 7 - 3).astype(np.float32)
B = (np.arange(16 * 8).reshape(16, 8) % 5 - 2).astype(np.float32)


def load(mesh, **jshard_keys):
    """A configuration whose signals are all the ways there are to write a strategy over `mesh`, and one that says
    nothing."""
    names, signals = list(mesh), {"nothing": {}}
    for loops in itertools.product(("row", "column", "reduction", "none"), repeat=len(names)):
        keys = {
            loop: [n for n, its in zip(names, loops, strict=True) if its == loop] for loop in loops if loop != "none"
        }
        word = "_".join(loops)
        signals[f"way_{word}"] = keys or {"shard": {"replicated": True}}
        if "reduction" in loops:
            signals[f"way_{word}_scatter"] = {**keys, "output": "scatter"}
    jshard.load({"jshard": {"mesh": mesh, **jshard_keys}, **signals})
    return [name for name in signals if name != "nothing"]


def place(x, axes):
    return jshard.place(x, jshard.Layout(jshard.mesh(), *axes))


def under(name):
    def product(a, b):
        with jshard.signal(name):
            return jshard.matmul(a, b)

    return product


def compiled_bytes(f, a, b):
    """What the compiled program moves forward, and what it moves more with the gradients of both operands."""

    def both(a, b, cotangent):
        y, pull = jax.vjp(f, a, b)
        return y, pull(cotangent)

    forward = jax.jit(f).lower(a, b).compile()
    spec = jax.eval_shape(lambda a, b: jax.vjp(f, a, b)[0], a, b).sharding.spec
    cotangent = place(np.ones((len(A), B.shape[1]), np.float32), spec)
    moved = wire_bytes(forward)
    return moved, wire_bytes(jax.jit(both).lower(a, b, cotangent).compile()) - moved


def choices_with_gradients(a, b):
    """The choices where JAX traces the gradients of both operands."""
    found = []

    def f(a, b):
        found.extend(choose(a, b))
        return a.sum() + b.sum()

    jax.vjp(f, a, b)
    return found


def by_both_passes(moved):
    return sum(moved), moved[0]


PLACES = [
    *(({"w": 4}, a, b) for a in (WHOLE, ROWS, COLUMNS) for b in (WHOLE, ROWS, COLUMNS)),
    ({"w": 2, "v": 2}, ("w", "v"), ("v", None)),
    ({"w": 2, "v": 4}, (("v", "w"), None), ("w", "v")),
]


@pytest.mark.quick("('w', None)@('w', None)")
@pytest.mark.parametrize(("mesh", "a", "b"), PLACES, ids=[f"{a}@{b}" for _, a, b in PLACES])
def test_choice_is_the_least_of_all_by_what_compiled_programs_move(mesh, a, b):
    ways = load(mesh)
    placed = place(A, a), place(B, b)
    with jshard.signal("nothing"):
        forward, best = choose(*placed)[0], choices_with_gradients(*placed)[0]
    measured = {way: compiled_bytes(under(way), *placed) for way in ways}
    assert (best.wire, best.backward) == min(measured.values(), key=by_both_passes)
    assert sum(compiled_bytes(under("nothing"), *placed)) == best.wire + best.backward
    assert (
        forward.wire
        == min(wire for wire, _ in measured.values())
        == wire_bytes(jax.jit(under("nothing")).lower(*placed).compile())
    )

    result = jax.jit(under("nothing"))(*placed)
    np.testing.assert_array_equal(result, A @ B)
    assert result.sharding == forward.strategy.y(2).sharding

    ledger = explain(under("nothing"), *placed)
    assert ledger.only(phase="forward").total == best.wire
    assert ledger.total == best.wire + best.backward
    (told,) = ledger.choices
    assert (told.signal, told.words) == ("nothing", str(best))


@pytest.mark.seconds
def test_every_price_is_what_the_compiled_program_moves():
    """Not only the cheapest: the whole list, on a mesh of two axes, and 3-axis arrays split along their sequence."""
    load({"w": 2, "v": 2})
    placed = place(A, ("w", "v")), place(B, ("v", "w"))
    signal_of = {str(choice).partition(",")[0]: choice for choice in choices_with_gradients(*placed)}
    assert len(signal_of) == 16 + 7  # every loop for each mesh axis, and scatter where something is summed
    for words, choice in list(signal_of.items())[::3]:
        keys = (
            dict(word.split("=") for word in words.split())
            if words != "replicated"
            else {"shard": {"replicated": True}}
        )
        keys = {
            key: value.split("+") if isinstance(value, str) and key != "output" else value
            for key, value in keys.items()
        }
        jshard.load({"jshard": {"mesh": {"w": 2, "v": 2}}, "way": keys})
        assert compiled_bytes(under("way"), place(A, ("w", "v")), place(B, ("v", "w"))) == (
            choice.wire,
            choice.backward,
        ), words


def test_choice_among_equal_prices_moves_less_forward():
    """An all-reduce costs all of its bytes forward; a reduce-scatter costs half of them forward and the rest backward."""
    load({"w": 4})
    split = place(A, ROWS), place(B, WHOLE)
    share = "1/4 of the arithmetic"
    assert (
        str(choices_with_gradients(*split)[0]) == f"row=w, 0 B on the wire per device forward, 768 B backward, {share}"
    )
    split = place(A, COLUMNS), place(B, ROWS)
    first, second = choices_with_gradients(*split)[:2]
    assert str(first) == f"reduction=w output=scatter, 768 B on the wire per device forward, 768 B backward, {share}"
    assert str(second) == f"reduction=w, 1,536 B on the wire per device forward, 0 B backward, {share}"


def test_choice_counts_the_backward_where_a_gradient_is_traced():
    """By rows it moves as little forward, and 52,224 B backward: the gradients of the whole A are gathered, those of B summed."""
    load({"w": 4})
    a, b = place(np.ones((1024, 16), np.float32), WHOLE), place(np.ones((16, 32), np.float32), ROWS)
    best, *_ = found = choices_with_gradients(a, b)
    prices = {str(choice).partition(",")[0]: (choice.wire, choice.backward) for choice in found}
    assert prices["row=w"] == (1536, 49152 + 3072)
    assert str(best) == "replicated, 1,536 B on the wire per device forward, 0 B backward, all of the arithmetic"
    ledger = explain(jax.grad(lambda a, b: jshard.matmul(a, b).sum(), argnums=(0, 1)), a, b)
    assert ledger.total == 1536
    assert [told.words for told in ledger.choices] == [str(best)]
    assert str(choose(a, b)[0]) == "column=w, 384 B on the wire per device forward, 1/4 of the arithmetic"


def test_choice_counts_the_gradient_of_one_operand_alone():
    """The gradient of B is summed over the devices of A's rows; nobody asks for that of A, which would be gathered."""
    load({"w": 4})
    a, b = place(np.ones((1024, 16), np.float32), WHOLE), place(np.ones((16, 32), np.float32), WHOLE)
    found = []
    jax.vjp(lambda b: found.extend(choose(a, b)) or b.sum(), b)
    prices = {str(choice).partition(",")[0]: choice.backward for choice in found}
    assert prices["row=w"] == 3072 and found[0].gradients == 1
    found.clear()
    jax.vjp(jax.vmap(lambda b: found.extend(choose(a, b)) or b.sum()), b[None])
    assert found[0].gradients == 1


def test_choice_divides_work_that_takes_longer_than_the_wire():
    load({"w": 4})

    def first(size, has_gradient):
        whole = [Operand(jshard.Layout(jshard.mesh(), *WHOLE), (size, size), 4, has_gradient) for _ in "xw"]
        return str(choices(*whole, 4, jshard.mesh())[0]).partition(",")[0]

    assert [first(size, has_gradient=True) for size in (16, 1024, 4096)] == ["replicated", "replicated", "row=w"]
    assert [first(size, has_gradient=False) for size in (16, 1024, 4096)] == ["row=w"] * 3


def test_choice_without_any_signal_really_splits_the_work_of_whole_arrays():
    """G55: no YAML but the mesh, operands whole on every device."""
    jshard.load({"jshard": {"mesh": {"w": 4}}})
    whole = jax.ShapeDtypeStruct((4096, 4096), np.float32, sharding=jshard.Layout(jshard.mesh(), *WHOLE).sharding)
    compiled = jax.jit(jshard.matmul).lower(whole, whole).compile()
    assert wire_bytes(compiled) == 0
    dense = jax.jit(jnp.matmul).lower(*[jax.ShapeDtypeStruct((4096, 4096), np.float32)] * 2).compile()
    assert compiled.cost_analysis()["flops"] < dense.cost_analysis()["flops"] / 4 + 16  # and a few to find its own rows
    assert compiled.output_shardings.shard_shape((4096, 4096)) == (1024, 4096)
    (dot,) = [line for line in compiled.as_text().splitlines() if " dot(" in line]
    assert "f32[1024,4096]" in dot
    table = str(explain(jshard.matmul, whole, whole, backward=False)).splitlines()
    assert len(table) == 2 and table[1] == "total: no collectives"
    assert table[0].startswith("-  -  chosen: row=w, 0 B on the wire per device forward, 1/4 of the arithmetic")


def test_choice_and_its_price_are_told_outside_of_jit():
    """A product of plain arrays, with no YAML but a mesh, is split, and a listener hears how."""
    jshard.load({"jshard": {"mesh": {"w": 4}}})
    heard = []
    with contextlib.ExitStack() as stack:
        stack.callback(events.listen(lambda what, fields: heard.append((what, fields))))
        result = jshard.matmul(A, B)
    np.testing.assert_array_equal(result, A @ B)
    assert {shard.data.shape for shard in result.addressable_shards} == {(len(A) // 4, B.shape[1])}
    ((_, fields),) = [each for each in heard if each[0] == "chosen"]
    assert events.WORDS["chosen"][1](fields) == (
        "jshard.matmul of (32, 16) and (16, 8): row=w, 0 B on the wire per device forward, 1/4 of the arithmetic"
    )


def test_choice_that_splits_whole_arrays_gives_the_product(monkeypatch):
    """The same with small arrays, on a chip that multiplies slowly."""
    monkeypatch.setattr(matrix_product, "MULTIPLICATIONS_A_BYTE", 0.01)
    jshard.load({"jshard": {"mesh": {"w": 4}}})
    result = jax.jit(jshard.matmul)(place(A, WHOLE), place(B, WHOLE))
    assert {shard.data.shape for shard in result.addressable_shards} == {(len(A) // 4, B.shape[1])}
    np.testing.assert_array_equal(result, A @ B)


def test_choice_and_its_price_stand_in_the_ledger_beside_its_collectives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text("jshard: {mesh: {w: 4}}\n\nproduct: {}\n")
    jshard.load("one.yaml")

    def loss(a, b):
        with jshard.signal("product"):
            return jshard.matmul(a, b).astype(jnp.float32)

    ledger = explain(jax.jit(loss), place(A, ROWS), place(B, ROWS))
    source = f"(test_auto_strategy.py:{loss.__code__.co_firstlineno + 2})"
    # fmt: off
    assert str(ledger) == "\n".join([
        "one.yaml:3  product  forward   all_gather  over w (4)  1 x 512 B  float32  384 B on the wire  (chosen row=w, redistribute)",
        "one.yaml:3  product  backward  all_reduce  over w (4)  1 x 512 B  float32  768 B on the wire  (chosen row=w)",
        f"one.yaml:3  product  chosen: row=w, 384 B on the wire per device forward, 1/4 of the arithmetic  {source}",
        "total: 2 collectives, 1,152 B on the wire per device (forward 384 B, backward 768 B)",
    ])
    # fmt: on
    assert '"words": "row=w, 384 B on the wire per device forward, 1/4 of the arithmetic"' in ledger.to_json()
    assert ledger.only(phase="backward").choices == ()


def test_choice_in_a_scan_and_a_remat_is_told_once():
    jshard.load({"jshard": {"mesh": {"w": 4}}})
    square = (np.arange(16 * 16).reshape(16, 16) % 3 - 1).astype(np.float32)

    def f(a, b):
        turn = jax.checkpoint(lambda carry, _: (jshard.place(jshard.matmul(carry, b), rows), None))
        return jax.lax.scan(turn, a, length=5)[0].sum()

    rows = jshard.Layout(jshard.mesh(), *ROWS)
    ledger = explain(jax.grad(f), place(A, ROWS), place(square, WHOLE))
    assert [choice.words for choice in ledger.choices] == [
        "row=w, 0 B on the wire per device forward, 1/4 of the arithmetic"
    ]


def test_choice_of_a_sequence_that_is_split_leaves_it_split():
    load({"w": 2, "v": 2})
    x = np.arange(4 * 8 * 16).reshape(4, 8, 16).astype(np.float32) % 5
    layouts = [(("w", "v", None), "row=w sequence=v, 0 B"), ((None, ("w", "v"), None), "sequence=w+v, 0 B")]
    for axes, words in layouts:
        placed = place(x, axes), place(B, WHOLE)
        assert str(choose(*placed)[0]).startswith(words)
        result = jshard.matmul(*placed)
        assert result.sharding == jshard.Layout(jshard.mesh(), *axes).sharding
        np.testing.assert_array_equal(result, x @ B)


def test_choice_of_sizes_that_do_not_divide_is_replicated():
    load({"w": 4})
    assert [str(choice) for choice in choose(A[:3, :5], B[:5, :7])] == [
        "replicated, 0 B on the wire per device forward, all of the arithmetic"
    ]
    np.testing.assert_array_equal(jshard.matmul(A[:3, :5], B[:5, :7]), A[:3, :5] @ B[:5, :7])


def test_choice_takes_fewer_bytes_before_less_arithmetic():
    load({"w": 4})
    words = [str(choice) for choice in choices_with_gradients(A[:3], B[:, :7])]  # only the inner dimension divides
    assert words == [
        "replicated, 0 B on the wire per device forward, 0 B backward, all of the arithmetic",
        "reduction=w, 126 B on the wire per device forward, 480 B backward, 1/4 of the arithmetic",
    ]


def test_choice_of_a_vector_is_by_columns():
    load({"w": 4})
    b = place(B, COLUMNS)
    assert str(choose(A[0], b)[0]) == "column=w, 0 B on the wire per device forward, 1/4 of the arithmetic"
    result = jshard.matmul(A[0], b)
    assert result.sharding.spec == jax.P("w")
    np.testing.assert_array_equal(result, A[0] @ B)


def test_choice_on_an_auto_mesh_says_what_it_can_not_see():
    jshard.load({"jshard": {"mesh": {"w": 4}, "axis_types": "auto"}})
    placed = place(A, ROWS), place(B, ROWS)
    assert (
        str(choose(*placed)[0]) == "row=w, 384 B on the wire per device forward, 1/4 of the arithmetic"
    )  # arrays at hand tell where they lie
    (told,) = explain(jshard.matmul, *placed, backward=False).choices
    assert told.words == (
        "row=w, 0 B on the wire per device forward, 1/4 of the arithmetic, if x and w are whole (an auto mesh does not tell)"
    )
    np.testing.assert_array_equal(jax.jit(jshard.matmul)(*placed), A @ B)


def on(shape, *axes):
    return Operand(jshard.Layout(jshard.mesh(), *axes), shape, 4)


@pytest.mark.parametrize(
    ("target", "price"),
    [
        (("w", "v"), (0, 0, 0)),
        ((("w", "v"), None), (48, 48, 1)),
        ((None, None), (64 + 384, 0, 2)),
        (("v", None), (64 + 96, 96, 2)),
        (("v", "w"), (64 + 96, 96 + 64, 3)),
    ],
)
def test_moving_an_operand_costs_wire_forward_and_backward_and_steps(target, price):
    """512 B, of which each device has 64."""
    load({"w": 2, "v": 4})
    assert on((8, 16), "w", "v").moved(jshard.Layout(jshard.mesh(), *target)) == price


def priced(x, w, runs_on=None):
    """Of each choice what it says, its steps and its multiplications."""
    return [
        (
            str(choice).replace(" B on the wire per device forward", "").partition(" B backward")[0],
            choice.collectives,
            choice.multiplications,
        )
        for choice in choices(x, w, 4, runs_on or jshard.mesh())
    ]


def test_a_choice_costs_its_bytes_and_three_products_at_500_multiplications_a_byte():
    load({"w": 2})
    assert Candidate(Strategy(jshard.mesh()), wire=100, backward=50, collectives=9, multiplications=1000).cost == 156


def test_choices_of_a_vector_have_no_rows_and_leave_out_mesh_axes_of_one_device():
    load({"one": 1, "w": 2, "v": 4})
    assert priced(on((8,), None), on((8, 8), None, None)) == [
        ("replicated, 0, 0", 0, 64),
        ("column=w, 0, 160", 1, 32),
        ("reduction=w, 32, 144", 3, 32),
        ("column=v, 0, 240", 1, 16),
        ("reduction=v, 48, 216", 3, 16),
        ("column=v reduction=w, 8, 264", 4, 8),
        ("column=w+v, 0, 280", 2, 8),
        ("column=w reduction=v, 24, 256", 4, 8),
        ("reduction=w+v, 56, 252", 5, 8),
    ]


def test_choices_of_a_vector_that_is_split_need_not_leave_it_so():
    load({"w": 2})
    assert priced(on((8,), "w"), on((8, 16), None, None)) == [
        ("replicated, 16, 0", 1, 128),
        ("column=w, 16, 288", 2, 64),
        ("reduction=w, 64, 256", 2, 64),
    ]


def test_choices_of_rows_that_are_split_leave_them_split():
    load({"w": 2, "v": 4})
    assert priced(on((8, 8), "w", None), on((8, 8), None, None)) == [
        ("row=w, 0, 256", 0, 256),
        ("row=w column=v, 0, 448", 1, 64),
        ("row=w+v, 0, 544", 1, 64),
        ("row=w reduction=v output=scatter, 96, 448", 3, 64),
        ("row=w reduction=v, 192, 352", 3, 64),
    ]


def test_choices_of_three_axes_have_sequences_and_those_of_two_none():
    load({"w": 2})
    whole = on((8, 8), None, None)
    loops = [said.partition(",")[0] for said, *_ in priced(on((4, 6, 8), None, None, None), whole)]
    assert loops == ["replicated", "row=w", "sequence=w", "column=w", "reduction=w output=scatter", "reduction=w"]
    loops = [said.partition(",")[0] for said, *_ in priced(on((8, 8), None, None), whole)]
    assert loops == ["replicated", "row=w", "column=w", "reduction=w output=scatter", "reduction=w"]


def test_choices_divide_on_the_mesh_that_runs_them_too():
    load({"w": 2})
    mesh = jax.make_mesh((4,), ("w",), axis_types=(jax.sharding.AxisType.Explicit,))
    loops = [said.partition(",")[0] for said, *_ in priced(on((2, 8), None, None), on((8, 6), None, None), mesh)]
    assert loops == ["replicated", "reduction=w"]
