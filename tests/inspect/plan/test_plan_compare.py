"""Asked against got: one decoder step's ledger against what five compilers made of it (tests/data/hlo)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.compiled.schedule import collectives_in
from jshard.inspect.ledger.entries import Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan import explain
from jshard.inspect.plan.comparison import compare
from jshard.layouts.mesh import absent_mesh
from jshard.programs.provenance import Cause, cause
from jshard.signals.active_config import on_mesh, unload
from tests.support import decoder

HLO = Path(__file__).parents[2] / "data" / "hlo"
SIZES = {"data": 2, "tensor": 4}


@pytest.fixture(scope="module")
def ledger():
    jshard.load(decoder.configured(**SIZES))
    try:
        with on_mesh(absent_mesh(SIZES)):
            step, args = decoder.training_step(decoder.TINY)
            return explain(step, *args)
    finally:
        unload()


@pytest.fixture(params=["tpu7x", "v5e", "cpu", "h100", "h200"])
def both(request, ledger):
    got = collectives_in((HLO / f"decoder-{request.param}.hlo").read_text())
    return request.param, got, compare(ledger, got, SIZES)


def told(comparison, **columns):
    rows = [row for row in comparison.rows if all(getattr(row, key) == value for key, value in columns.items())]
    return [(row.asked, row.got, [str(each) for each in row.differences]) for row in rows]


def test_every_byte_of_both_sides_is_in_a_row(both, ledger):
    _, got, comparison = both
    assert comparison.asked == ledger.total == sum(row.wire_asked for row in comparison.rows)
    assert comparison.got == sum(each.total for each in got)
    assert sum(row.asked for row in comparison.rows) == ledger.count


def test_nothing_is_added_and_what_differs_has_a_name(both):
    name, _, comparison = both
    kinds = {difference.kind for _, difference in comparison.differences}
    assert (
        kinds
        == {
            "tpu7x": {"merged"},
            "v5e": {"merged", "rewritten"},
            "cpu": {"merged", "recast"},
            "h100": {"merged", "dropped", "recast"},
            "h200": {"merged", "dropped", "recast"},
        }[name]
    )


def test_reduce_scatters_that_became_an_all_reduce_are_named(ledger):
    comparison = compare(ledger, collectives_in((HLO / "decoder-v5e.hlo").read_text()), SIZES)
    row = {"signal": "attn/qkv", "collective": "reduce_scatter"}
    assert told(comparison, **row) == [(6, 6, ["6 run as all_reduce", "6 merged into 2"])]
    (found,) = [each for each in comparison.rows if (each.signal, each.collective) == tuple(row.values())]
    assert (found.wire_asked, found.wire_got) == (6_144, 12_288)
    rewritten = sum(each.times for _, each in comparison.differences if each.kind == "rewritten")
    assert rewritten == 11 and comparison.got - comparison.asked == 13_312


def test_sums_that_were_added_up_before_one_all_reduce_are_dropped_and_recast(ledger):
    comparison = compare(ledger, collectives_in((HLO / "decoder-h200.hlo").read_text()), SIZES)
    assert told(comparison, signal="attn/qkv", phase="backward", collective="all_reduce") == [
        (6, 2, ["4 dropped", "2 in float32 instead of bfloat16"])
    ]
    # one array behind the other, in the loop's first trip and its last
    assert told(comparison, signal="-", phase="backward") == [(5, 5, ["5 merged into 1"])]

    assert comparison.hidden == 0  # nobody has walked through it


def test_hidden_share_of_each_run_is_its_rows():
    asked = [line(elements=8), line(elements=24, signal="down"), line("all_gather", signal="head")]
    found = [run(elements=(32,), signal="", hidden=0.5)]
    found += [
        run("permute", elements=(2,), count=count, signal="head", hidden=hidden)
        for count, hidden in ((3, 1.0), (1, 0.0))
    ]
    rows = compare(Ledger(tuple(asked)), found, SIZES).rows
    assert [(row.wire_got, row.hidden) for row in rows] == [(48, 24), (144, 72), (32, 24)]


# -- differences that no stored text shows --


def line(collective="all_reduce", elements=8, count=1, dtype="float32", signal="up", **more) -> Line:
    fields = {
        "cause": Cause((signal,)),
        "primitive": "psum",
        "mesh_axes": ("tensor",),
        "group": 4,
        "count_known": True,
    }
    return Line(
        collective=collective, count=count, payload=4 * elements, dtype=dtype, shape=(elements,), **{**fields, **more}
    )  # fmt: skip


def run(
    collective="all_reduce", elements=(8,), count=1, signal="up", members=(0, 1, 2, 3), **more
) -> CompiledCollective:
    name = f"jit(f)/jshard[signal={signal}]/shard_map/psum" if signal else ""
    return CompiledCollective(
        collective, collective, len(members), tuple(4 * each for each in elements), ("f32",) * len(elements), count, True,
        (cause(name),) * len(elements), members=members, **more,
    )  # fmt: skip


def words(asked, got):
    comparison = compare(Ledger(tuple(asked)), got, SIZES)
    return [(row.signal, row.asked, row.got, "; ".join(map(str, row.differences))) for row in comparison.rows]


def test_as_asked_is_no_difference():
    assert words([line(count=3)], [run(count=3)]) == [("up", 3, 3, "")]


def test_dropped_and_added_are_named():
    assert words([line(count=3)], [run(count=2)]) == [("up", 3, 2, "1 dropped")]
    assert words([line()], [run(), run("all_to_all", signal="")]) == [
        ("up", 1, 1, ""),
        ("-", 0, 1, "1 that nobody asked for"),
    ]


def test_other_mesh_axes_are_another_collective():
    assert words([line()], [run(members=(0, 4))]) == [
        ("up", 1, 0, "1 dropped"),
        ("up", 0, 1, "1 that nobody asked for"),
    ]


def test_mesh_axes_of_one_size_are_told_apart():
    square = {"data": 4, "tensor": 4}
    for members, times in (((0, 1, 2, 3), 1), ((0, 4, 8, 12), 0)):
        (row, *_) = compare(Ledger((line(),)), [run(members=members)], square).rows
        assert row.got == times


def test_split_is_named():
    assert words([line(elements=8)], [run(elements=(4,)), run(elements=(4,))]) == [("up", 1, 1, "1 split into 2 parts")]


def test_ring_of_permutes_for_a_gather_is_named():
    assert words([line("all_gather")], [run("permute", elements=(2,), count=3)]) == [("up", 1, 1, "1 run by permute")]


def test_permutes_around_each_row_of_a_torus_are_those_of_the_axis_that_has_all_rows():
    torus = {"data": 16, "tensor": 2}
    asked = line("permute", count=6, mesh_axes=("data",), group=16)
    rows, columns = (0, 2, 4, 6), (0, 8, 16, 24)
    found = [run("permute", count=3, members=members) for members in (rows, columns)]
    (row,) = compare(Ledger((asked,)), found, torus).rows
    assert (row.asked, row.got, row.wire_asked, row.differences) == (6, 6, row.wire_got, ())
    over_tensor, *_ = compare(Ledger((asked,)), [run("permute", members=(0, 1))], torus).rows
    assert over_tensor.got == 0
    gathered, *_ = compare(Ledger((line("all_gather", group=16),)), [run("all_gather", members=rows)], torus).rows
    assert gathered.got == 0  # of some of an axis a gather is another


def test_permutes_along_one_of_two_axes_are_those_asked_over_both():
    asked = line("permute", count=2, mesh_axes=("data", "tensor"), group=8)
    assert words([asked], [run("permute", count=2, members=(0, 4))]) == [("up", 2, 2, "")]
    assert words([line("permute")], [run("permute", members=tuple(range(8)))])[0][2] == 0


def test_one_array_behind_the_other_is_merged():
    asked = [line(elements=8), line(elements=24, signal="down")]
    assert words(asked, [run(elements=(32,), signal="")]) == [
        ("up", 1, 1, "1 merged with others"),
        ("down", 1, 1, "1 merged with others"),
    ]


def test_one_sum_over_two_axes_runs_for_one_along_each():
    asked = [line(elements=1, signal="-"), line(elements=1, signal="-", mesh_axes=("data",), group=2)]
    both = run(elements=(1,), signal="", members=tuple(range(8)))
    assert words(asked, [both]) == [("-", 1, 1, "1 merged with others"), ("-", 1, 1, "1 merged with others")]
    assert compare(Ledger(tuple(asked)), [both], SIZES).got == both.total
    assert words(asked[:1], [both]) == [("-", 1, 0, "1 dropped"), ("-", 0, 1, "1 that nobody asked for")]


def test_sequence_parallel_layout_has_no_red_word():
    """The loss is summed over both axes at once, as compilers for accelerators do: here they are joined by hand."""
    keys = {"row": "data", "sequence": "tensor"}
    signals = {"up": {**keys, "column": "tensor"}, "down": {**keys, "reduction": "tensor"}}
    jshard.load({"jshard": {"mesh": SIZES}, **signals})
    try:
        model = jshard.MLP(8, 16, 8, rngs=nnx.Rngs(0))
        x = jax.device_put(jnp.ones((4, 8, 8)), jax.NamedSharding(jshard.mesh(), jax.P("data", "tensor")))
        loss = jax.jit(lambda state, x: jnp.square(nnx.merge(graph, state)(x)).sum())
        graph, state = nnx.split(model)
        ledger = explain(loss, state, x, backward=False)
        found = collectives_in(loss.lower(state, x).compile())
    finally:
        unload()
    scalars = [each for each in found if each.payloads == (4,)]
    assert len(scalars) == 2
    one = dataclasses.replace(scalars[0], group=8, members=tuple(range(8)))
    for got in (found, [each for each in found if each not in scalars] + [one]):
        comparison = compare(ledger, got, SIZES)
        assert not {each.kind for _, each in comparison.differences} & {"dropped", "added"}
        assert {row.collective for row in comparison.rows} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_what_a_kernel_declares_is_taken_at_its_word():
    kernel = line("all_reduce", count=2, declared=100)
    assert words([kernel], []) == [("up", 2, 2, "2 inside a kernel, as it declares")]
    assert compare(Ledger((kernel,)), [], SIZES).got == 200
