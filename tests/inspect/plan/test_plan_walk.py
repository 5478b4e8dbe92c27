"""The walk through a compiled schedule, against schedules that were read by hand: three programs that libtpu 0.0.42.1 compiled
for v5e (tests/data/hlo), and short ones. A v5e does 1.5e9 cycles a second, and a ring of its links carries 100 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from jshard.hardware.chips import HOP
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import walked

HLO = Path(__file__).parents[2] / "data" / "hlo"
MIB, GHZ, RING = 2**20, 1.5e9, 100e9


def walk_of(name: str, topology: str):
    return walked((HLO / f"{name}.hlo").read_text(), Topology.of(topology))


def late(found) -> float:
    """MiB that are not hidden."""
    return sum(each.total * (1 - each.hidden) for each in found.collectives) / MIB


# -- three programs, read by hand --


def test_weights_gathered_in_each_layer_wait_for_the_wire():
    """`store` with remat, 8 layers. Forward a trip: a synchronous gather, then one in pieces beside a product. Backward a trip:
    a synchronous gather, one beside two products, and the gradients of both weights in one synchronous all-reduce."""
    found = walk_of("store-v5e", "v5e:4x4")
    gather = 30 * MIB / RING
    under = 272_304 / GHZ  # fusion.103
    assert (274_436 + 280_500) / GHZ > gather  # fusion.110 and fusion.115
    assert [(each.collective, each.count, each.total // MIB) for each in found.collectives] == [
        ("all_gather", 8, 240), ("all_gather", 8, 240), ("all_reduce", 1, 0),
        ("all_gather", 8, 240), ("all_gather", 8, 240), ("all_reduce", 8, 960),
    ]  # fmt: skip
    shares = [each.hidden for each in found.collectives]
    assert shares == pytest.approx([0, under / gather, 0, 0, 1, 0], abs=1e-6)
    trips = (
        2 * 15_377 + 38_514 + 272_304 + 269_106,
        2 * 15_377 + 29_986 + 2 * 274_436 + 280_500 + 302_812 + 2 * 15_121 + 286_000,
    )
    once = 2 * 286_880 + 31_010 + 2 * 184_480 + 232_291 + 163_001
    assert found.work == pytest.approx((8 * sum(trips) + once) / GHZ)
    wait = 8 * (gather + (gather - under) + gather + 4 * gather)
    assert found.wait == pytest.approx(wait, rel=1e-6)


def test_windowed_products_hide_permutes_that_queue_for_their_links():
    """XLA's partitioner: rings of permutes, both ways at once, beside slices of products. A pair queues, so that beside a slice
    shorter than the pair the second is late; beside longer ones none is."""
    found = walk_of("windowed-v5e", "v5e:4x4")
    permute = 2 * MIB / RING
    short, long = 38_748 / GHZ, 85_207 / GHZ  # a slice of the second product, and of the first
    assert permute < short < 2 * permute < long
    second = 1 - (2 * permute - short) / permute
    forward = found.collectives[:10]
    assert [each.count for each in forward] == [8, 8, *[8 * 4] * 8]  # a counter from 0 to 8 by 2
    assert [each.hidden for each in forward] == pytest.approx([1] * 7 + [second, 1, second], abs=1e-6)
    trip = 2 * (2 * permute - short)  # forward's second product; its first waits for nothing
    trip += 2 * (2 * permute - (37_682 + 2 * 8_852) / GHZ)  # of the input's gradient
    trip += 2 * (2 * permute - (15_633 + 38_748) / GHZ + 2 * permute - short)  # of both weights' gradients
    layer = 4 * trip + 15 * permute  # the one gather that is left, synchronous
    layer += permute  # collective-permute-start.12, on the wire before that gather while the device waits for it
    layer += permute - 15_633 / GHZ  # collective-permute-start.14 is before the first of a loop on the links
    assert late(found) == pytest.approx(8 * layer * RING / MIB, rel=1e-4)  # 526 of 1,600
    assert 1e3 * found.work == pytest.approx(22.53, abs=0.01)
    assert 1e3 * (found.work + found.wait) == pytest.approx(28.05, abs=0.01)


def test_chain_that_crosses_a_loop_is_one_collective_that_all_trips_hide():
    """The head's gather begins before the loop over 8 layers, runs in pieces inside its products, and is waited for after it."""
    found = walk_of("cross-v5e", "v5e:2x4")
    (gather,) = found.collectives
    assert (gather.count, gather.total) == (1, 2048 * 32_000 * 2 * 7 // 8)
    under = 8 * 2 * 75_448 / GHZ
    assert gather.hidden == pytest.approx(under / (gather.total / RING))
    assert found.work == pytest.approx(under + 1_062_580 / GHZ)
    assert found.wait == pytest.approx(gather.total / RING - under)


@pytest.mark.parametrize(("name", "topology"), [("decoder-h100", "h100:8"), ("decoder-h200", "h200:8")])
def test_pairs_with_nothing_between_are_not_hidden(name, topology):
    """All that is left of these texts are starts and dones, and scalars that are copied beside some."""
    waits = [each for each in walk_of(name, topology).collectives if each.asynchronous]
    assert len(waits) >= 13 and sum(not each.hidden for each in waits) >= 10
    assert max(each.hidden for each in waits) < 0.01


# -- short ones --

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
UNIT = 100e-6  # seconds of each piece of work and of each permute here
TENSOR, DATA = "{{0,1},{1,0}}", "{{0,4},{4,0}}"


def start(name: str, pairs: str = TENSOR) -> str:
    type_ = "(f32[2500000]{0}, f32[2500000]{0}, u32[], u32[])"
    return f"%{name} = {type_} collective-permute-start(%p), source_target_pairs={pairs}"


def done(name: str) -> str:
    return f"%{name}.done = f32[2500000]{{0}} collective-permute-done(%{name})"


def work(name: str, units: float = 1) -> str:
    cycles = f'backend_config={{"window_config":{{"estimated_cycles":"{units * UNIT * GHZ:.0f}"}}}}'
    return f"%{name} = f32[8]{{0}} add(%p, %p), {cycles}"


def short(*instructions: str, others: str = "", topology: str = "v5e:2x4"):
    lines = "\n".join(f"  {each}" for each in instructions)
    found = walked(f"{HEAD}{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n", Topology.of(topology))
    shares = [round(each.hidden, 6) for each in found.collectives]
    return shares, pytest.approx(found.work / UNIT), pytest.approx(found.wait / UNIT)


def test_work_between_start_and_done_hides_and_no_other():
    assert short(start("a"), work("w"), done("a")) == ([1], 1, 0)
    assert short(start("a"), work("w", 0.25), done("a")) == ([0.25], 0.25, 0.75)
    assert short(work("w"), start("a"), done("a"), work("v")) == ([0], 2, 1)
    assert short(start("a"), work("w", 0.25)) == ([0.25], 0.25, 0.75)  # the program ends with its wire


def test_work_beside_two_collectives_of_the_same_links_counts_once():
    assert short(start("a"), start("b"), work("w"), done("a"), done("b")) == ([1, 0], 1, 1)
    assert short(start("a"), start("b"), work("w", 2), done("b"), done("a")) == ([1, 1], 2, 0)
    assert short(start("a"), start("b", DATA), work("w"), done("a"), done("b")) == ([1, 1], 1, 0)  # other links


def test_collective_that_waits_for_a_synchronous_one_is_late_too():
    sync = f"%s = f32[2500000]{{0}} collective-permute(%p), source_target_pairs={TENSOR}"
    assert short(start("a"), sync, done("a"), work("w")) == ([0, 0], 1, 2)


def test_links_of_a_gpu_are_the_same_for_every_group():
    between = start("a"), start("b", DATA), done("a"), done("b")
    found = walked(
        f"{HEAD}ENTRY %main (p: f32[8]) -> f32[8] {{\n  " + "\n  ".join(between) + "\n}\n", Topology.of("h100:8")
    )
    assert found.wait == pytest.approx(2 * 1e7 / 450e9)


def loop(trips: int, *body: str) -> tuple[str, str]:
    inside = "\n".join(f"  {each}" for each in body)
    others = (
        f"%body (a: f32[8]) -> f32[8] {{\n{inside}\n}}\n\n"
        "%cond (a: f32[8]) -> pred[] {\n  ROOT %lt = pred[] compare(%i, %n), direction=LT\n}\n"
    )
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%w = f32[8]{{0}} while(%p), condition=%cond, body=%body, {config}", others


def test_loop_of_many_trips_is_that_many_walks():
    """What one trip leaves on the links delays the next: the work beside `a` hides the `b` before it, but in the first trip."""
    for trips in (1, 2, 3, 50, 1000):
        each, others = loop(trips, start("a"), work("x"), done("a"), start("b"))
        shares, worked, waited = short(each, others=others)
        assert shares == pytest.approx([1 / trips, 1 - 1 / trips], abs=1e-6)
        assert (worked, waited) == (trips, trips)


def test_time_of_a_loop_hides_what_stands_open_around_it():
    each, others = loop(3, work("x", 0.25))
    assert short(start("a"), each, done("a"), others=others) == ([0.75], 0.75, 0.25)


def test_longest_branch_is_walked_on_and_wire_of_each_counts():
    others = (
        f"%one (a: f32[8]) -> f32[8] {{\n  {start('a')}\n  {work('x', 0.5)}\n  {done('a')}\n}}\n\n"
        f"%two (a: f32[8]) -> f32[8] {{\n  {start('b')}\n  {done('b')}\n  {work('y', 0.25)}\n}}\n"
    )
    each = "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%one, %two}"
    assert short(each, others=others) == ([0.5, 0], 0.25, 1)


def test_branch_that_some_turns_take_costs_its_share_of_each():
    """Of four turns this device takes it in one, and waits in another for those that do."""
    op_name = 'metadata={op_name="jit(f)/while/body/jshard[times=1,turns=2]/cond"}'
    branch = f"%one (a: f32[8]) -> f32[8] {{\n  {work('x', 0.5)}\n  {start('a')}\n  {done('a')}\n}}\n\n"
    taken = f"%c = f32[8]{{0}} conditional(%i, %p, %p), branch_computations={{%one, %none}}, {op_name}"
    each, others = loop(4, taken, work("y", 0.25))
    none = "%none (a: f32[8]) -> f32[8] {\n}\n\n"
    hidden, worked, waited = short(each, others=branch + none + others)
    assert (hidden, worked, waited) == ([0], 4 * 0.25 + 0.5, 1 + 0.5 + 1)  # the wire twice, and the other's work


def test_unknown_devices_hide_nothing():
    assert short(start("a"), work("w"), done("a"), topology="cpu:8") == ([0], 0, 0)


# -- work by peak figures --

FUSIONS = """%product (x: bf16[1024,2048], w: bf16[24,2048,4096], i: s32[]) -> bf16[1024,4096] {
  %x = bf16[1024,2048]{1,0} parameter(0)
  %w = bf16[24,2048,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %slice = bf16[1,2048,4096]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,2048,4096}
  %flat = bf16[2048,4096]{1,0} bitcast(%slice)
  ROOT %dot = bf16[1024,4096]{1,0} dot(%x, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (all: f32[24,1024,1024], new: f32[1,1024,1024], i: s32[]) -> f32[24,1024,1024] {
  %all = f32[24,1024,1024]{2,1,0} parameter(0)
  %new = f32[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %done = f32[24,1024,1024]{2,1,0} dynamic-update-slice(%all, %new, %i, %i, %i)
}
"""


def test_gpu_works_as_long_as_its_products_or_its_bytes_take_at_the_peak():
    """Of an array that a fusion slices, or writes a slice of, the slice moves."""

    def seconds(instruction: str) -> float:
        return walked(
            f"{HEAD}{FUSIONS}\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {instruction}\n}}\n", Topology.of("h100:8")
        ).work

    product = "%a = bf16[1024,4096]{1,0} fusion(%x, %w, %i), kind=kCustom, calls=%product"
    assert seconds(product) == pytest.approx(2 * 1024 * 2048 * 4096 / 989e12)
    update = "%b = f32[24,1024,1024]{2,1,0} fusion(%all, %new, %i), kind=kLoop, calls=%update"
    assert seconds(update) == pytest.approx((2 * 2**22 + 4) / 3352e9)


# -- two slices of four chips --


def sent(name: str, target: str, kind: str = "ALL_REDUCE", numbers: int = 2_500_000) -> list[str]:
    """What libtpu writes of a transfer between slices: it is sent, received, and waited for."""
    said = (
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    )
    said = (
        f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",{said}}}'
    )
    type_ = f"(f32[{numbers}]{{0}}, u32[], token[])"
    return [
        f"%{name}.send = {type_} send(%p, %token), channel_id=2, {said}",
        f"%{name}.recv = {type_} recv(%token), channel_id=1, {said}",
        f"%{name}.sent = token[] send-done(%{name}.send), channel_id=2",
        f"%{name}.done = (f32[{numbers}]{{0}}, token[]) recv-done(%{name}.recv), channel_id=1",
    ]


def between(*instructions: str, slices: int = 2):
    lines = "\n".join(f"  {each}" for each in instructions)
    text = f"HloModule f, is_scheduled=true, num_partitions=4\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"
    return walked(text, Topology.of("v5e:2x2", slices=slices))


EACH = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
BOTH = '"{1,2}x{0:3}"'


@pytest.mark.parametrize(
    ("kind", "target", "members", "total", "hops"),
    [
        ("ALL_REDUCE", BOTH, (0, 4), 10_000_000, 2),
        ("ALL_REDUCE", EACH, (0, 4), 10_000_000, 2),
        ("ALL_REDUCE", '"{1,2,3,4}x{0:3}"', (0, 4, 8, 12), 15_000_000, 6),
        ("ALL_GATHER", EACH, (0, 4), 5_000_000, 1),
        ("REDUCE_SCATTER", EACH, (0, 4), 5_000_000, 1),
        ("ALL_TO_ALL", EACH, (0, 4), 5_000_000, 1),
        ("ONE_TO_ONE", "{{100000->300000},{300000->100000},{200000->400000},{400000->200000}}", (0, 8), 10_000_000, 1),
    ],
)
def test_transfer_between_slices_is_a_collective_at_the_networks_rate_and_a_hop_for_each_wait(
    kind, target, members, total, hops
):
    first, *rest = sent("sum", target, kind)
    found = between(first, work("under", 4), *rest, slices=4)
    (one,) = found.collectives
    assert (one.members, one.group, one.total, one.asynchronous) == (members, len(members), total, True)
    seconds = total / 3.125e9 + hops * HOP
    assert one.hidden == pytest.approx(4 * UNIT / seconds, abs=1e-6)
    assert found.wait == pytest.approx(seconds - 4 * UNIT)


def test_network_between_slices_is_no_link_of_the_torus():
    send, receive, left, arrived = sent("sum", BOTH)
    other = sent("other", EACH)
    pairs = "{{0,1},{1,0}}"
    found = between(send, start("p1", pairs), done("p1"), other[0], receive, left, arrived, *other[1:])
    seconds = 10_000_000 / 3.125e9 + 2 * HOP
    assert found.wait == pytest.approx(2 * seconds)  # one after the other, and the permute beside them
