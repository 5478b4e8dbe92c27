"""What a kernel's own products hide of its wire, by its declaration and the chip's figures; and that it is enough."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks import overlap
from jshard.hardware.chips import CHIPS
from jshard.inspect.ledger import Ledger
from jshard.inspect.plan import compare, explain
from jshard.inspect.plan.estimate import estimate
from jshard.inspect.plan.memory import Memory
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import Walked
from jshard.kernels.kernel_traffic import Schedule, declare, declared
from jshard.programs.flops import arithmetic_of

MESH = {"data": 4, "tensor": 4}
HALF = {"row": "data", "sequence": "tensor", "dtype": {"compute": "bfloat16"}}
FUSED = {
    "up": {**HALF, "column": "tensor", "kernel": {"all_gather_matmul": "fused"}},
    "down": {**HALF, "reduction": "tensor", "kernel": {"matmul_reduce_scatter": "fused"}},
}


def fused(hidden, features=1024):
    """The forward of the two layers on an absent v5e:4x4: its ledger and its FLOPs."""
    with overlap.on("v5e:4x4", {"mesh": MESH}, **FUSED):
        model = nnx.eval_shape(lambda: overlap.MLP(features, hidden, nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct(
            (4, 2048, features), jnp.bfloat16, sharding=NamedSharding(jshard.mesh(), P("data", "tensor"))
        )
        graph, state = nnx.split(model)
        flops = arithmetic_of(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x))
        return explain(lambda model, x: model(x), model, x, backward=False), flops


def test_wire_is_hidden_as_far_as_the_products_beside_a_hop_take_as_long():
    v5e = CHIPS["v5e"]  # 197 TFLOP/s, 50 GB/s a link
    hop = 50e9 * 1e-3  # bytes that take a millisecond
    for flops, share in ((197e9, 1.0), (98.5e9, 0.5), (400e9, 1.0), (0, 0.0)):
        assert Schedule(3, 2, int(flops), "bfloat16").hidden(int(6 * hop), v5e) == pytest.approx(share * 6 * hop)
    assert Schedule(3, 2, 10**12, "bfloat16").hidden(6000, CHIPS["cpu"]) == 0  # no figures, no claim
    assert Schedule(3, 2, 10**12, "bfloat16").hidden(0, v5e) == 0


def test_schedule_travels_with_the_declaration_and_its_document():
    under = Schedule(3, 2, 10**9, "bfloat16")
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    said = declared({"metadata": declare("all_gather_matmul", "t", x, algorithm="fused", wire=96, schedule=under)})
    assert said is not None and Schedule(**said["schedule"]) == under
    ledger, _ = fused(2048)
    assert [line.schedule is not None for line in ledger] == [True, True]
    assert Ledger.from_json(ledger.to_json()).lines == ledger.lines


def test_fused_kernels_hide_what_their_tiles_say():
    ledger, flops = fused(8192)  # 2,048 columns, or rows of the second weight, on each device
    comparison = compare(ledger, [], MESH, CHIPS["v5e"])
    shares = {row.signal: row.hidden / row.wire_got for row in comparison.rows}
    # Of a gather, 3 of the 4 tiles of two halves; of a scatter, in float32, the one tile of the other half.
    balance = 197e12 / 50e9
    assert shares["up"] == pytest.approx(min(1, (2 * 2048 - 1024) / balance), abs=1e-3)
    assert shares["down"] == pytest.approx(2048 / balance / 2, abs=1e-3)
    wider = compare(fused(8192, features=4096)[0], [], MESH, CHIPS["v5e"]).rows[1]  # four tiles, beside them five
    assert wider.hidden / wider.wire_got == pytest.approx(5 / 4 * 2048 / balance / 2, abs=1e-3)
    words = [str(each) for _, each in comparison.differences]
    assert words[1] == "1 inside a kernel, by its own word, 25 % of it under its products"
    assert flops.flops == {"bfloat16": 2 * 2 * 2048 * 1024 * 2048}
    assert comparison.hidden == sum(row.hidden for row in comparison.rows) < comparison.got
    assert compare(ledger, [], MESH).hidden == 0  # of a chip that nothing is known of


def test_kernels_work_and_wait_as_they_declare():
    ledger, flops = fused(8192)
    memory = Memory({"arguments": 1, "results that take no argument's place": 0}, 1, None, (), ())
    made = estimate(ledger, Walked(()), flops, memory, Topology.of("v5e:4x4"))
    comparison = compare(ledger, [], MESH, CHIPS["v5e"])
    assert made is not None
    assert made.seconds_of("wire") == pytest.approx(comparison.got / 100e9)
    assert made.seconds_of("wait") == pytest.approx((comparison.got - comparison.hidden) / 100e9)
    assert made.seconds_of("work") == pytest.approx(flops.total / 197e12)  # all of it in the kernels
    assert made.seconds == made.seconds_of("work") + made.seconds_of("wait")


def test_fused_kernels_leave_at_most_a_quarter_of_what_waits_in_the_partitioners_program(kept_plans, capsys, extra):
    extra("v5e:4x4")
    overlap.main(["--features", "512", "--tokens", "16384"])
    told = capsys.readouterr().out
    found = re.findall(
        r"^over tensor: .* not hidden (by fused kernels|by permutes), .* in the partitioner's program: (\d+) %$",
        told,
        re.MULTILINE,
    )
    assert [name for name, _ in found] == [overlap.FUSED, overlap.PERMUTES]
    assert int(found[0][1]) <= 25, told
