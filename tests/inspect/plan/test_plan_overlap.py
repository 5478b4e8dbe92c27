"""What of the wire is hidden: by permutes under products, and of a kernel, by its declaration, nothing."""

from __future__ import annotations

import re

import pytest

from benchmarks import overlap
from jshard.inspect.ledger import read
from jshard.inspect.plan import compare
from jshard.inspect.plan.estimate import Memory, estimate
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import Walked
from jshard.programs.flops import arithmetic_of
from tests.kernels.test_lowering import KERNELS, traced

MESH = {"t": 8}


def asked_and_flops(name):
    """The ledger and the FLOPs of a kernel, alone in a program for eight absent v5e."""
    jaxpr = traced(KERNELS[name][0], (8 * 64, 200), "bfloat16", MESH).jaxpr
    return read(jaxpr), arithmetic_of(jaxpr)


def test_kernels_work_and_wait_as_they_declare():
    ledger, _ = asked_and_flops("ring")
    _, flops = asked_and_flops("matmul")
    memory = Memory({"arguments": 1, "results that take no argument's place": 0}, 1, None, (), ())
    made = estimate(ledger, Walked(()), flops, memory, Topology.of("v5e:2x4"))
    comparison = compare(ledger, [], MESH)
    assert made is not None and comparison.got > 0 == comparison.hidden
    assert made.seconds_of("wire") == made.seconds_of("wait") == pytest.approx(comparison.got / 100e9)
    assert flops.flops == flops.in_kernels == {"bfloat16": 2 * 64 * 200 * 64}
    assert made.seconds_of("work") == pytest.approx(flops.total / 197e12)  # all of it in the kernel
    assert made.seconds == made.seconds_of("work") + made.seconds_of("wait")


def test_permutes_leave_at_most_a_quarter_of_what_waits_in_the_partitioners_program(kept_plans, capsys, extra):
    extra("v5e:4x4")
    overlap.main(["--features", "512", "--tokens", "16384"])
    told = capsys.readouterr().out
    (found,) = re.findall(
        r"^over tensor: .* not hidden by permutes, .* in the partitioner's program: (\d+) %$", told, re.M
    )
    assert int(found) <= 25, told
