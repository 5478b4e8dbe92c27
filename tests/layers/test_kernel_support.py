"""Which of the kernels that a signal names can run where it is called, and what is told of the others."""

from __future__ import annotations

import types

import pytest

from jshard.errors import JShardError, Location
from jshard.kernels import interpret
from jshard.layers.strategy import all_reduce_of, check_kernels
from jshard.signals.signal import Signal


def named(**kernel):
    return Signal("a", Location("f.yaml", 3), kernel=tuple(kernel.items()))


def mesh_of(kind, platform):
    device = types.SimpleNamespace(device_kind=kind, platform=platform)
    return types.SimpleNamespace(abstract_mesh=types.SimpleNamespace(abstract_device=device))


HERE = types.SimpleNamespace(abstract_mesh=types.SimpleNamespace(abstract_device=None))
V5P, H100, OTHER = mesh_of("TPU v5p", "tpu"), mesh_of("NVIDIA H100 80GB HBM3", "gpu"), mesh_of("chip", "xpu")


def told(signal, mesh, hindrance=lambda op: None, ops=None):
    try:
        check_kernels(signal, mesh, hindrance, ops)
    except JShardError as error:
        return str(error)
    return None


def lacks(op, word, kernels, chip):
    return f'signal "a" (f.yaml:3) takes {op} by {word}, a kernel for {kernels}, and this is {chip}; write {op}: auto'


@pytest.mark.parametrize(
    ("signal", "mesh", "sentence"),
    [
        (named(all_reduce="ring"), V5P, None),
        (named(all_reduce="ring"), HERE, lacks("all_reduce", "ring", "TPUs", "cpu")),
        (named(all_reduce="ring"), H100, lacks("all_reduce", "ring", "TPUs", "h100")),
        (named(reduce_scatter="ring"), H100, lacks("reduce_scatter", "ring", "TPUs", "h100")),
        (named(all_reduce="ring"), OTHER, lacks("all_reduce", "ring", "TPUs", "chip")),
        (named(matmul="pallas"), V5P, None),
        (named(matmul="pallas"), H100, None),
        (named(matmul="pallas"), HERE, lacks("matmul", "pallas", "TPUs, h100, h200, b200", "cpu")),
        (named(all_reduce="permute", matmul="xla"), HERE, None),
        (named(all_reduce="permute", reduce_scatter="ring"), HERE, lacks("reduce_scatter", "ring", "TPUs", "cpu")),
        (named(), HERE, None),
    ],
)
def test_a_kernel_runs_on_chips_that_have_it(signal, mesh, sentence):
    assert told(signal, mesh) == sentence
    with interpret():
        assert told(signal, mesh) is None


@pytest.mark.parametrize(
    ("signal", "ops", "op", "word"),
    [
        (named(all_reduce="ring"), None, "all_reduce", "ring"),
        (named(all_reduce="permute"), ("all_reduce",), "all_reduce", "permute"),
        (named(all_reduce="ring", matmul="pallas"), ("matmul",), "matmul", "pallas"),
        (named(all_reduce="auto", matmul="pallas"), None, "matmul", "pallas"),
    ],
)
def test_what_hinders_a_kernel_is_told_on_every_chip(signal, ops, op, word):
    for mesh in (V5P, HERE):
        assert told(signal, mesh, lambda op: f"has no {op}", ops) == (
            f'signal "a" (f.yaml:3) takes {op} by {word}, which has no {op}; write {op}: auto'
        )


@pytest.mark.parametrize("word", ["auto", "hierarchical", "in_order", "xla"])
def test_what_is_no_kernel_has_no_hindrance(word):
    assert told(named(all_reduce=word), HERE, lambda op: "is hindered") is None
    assert told(named(all_reduce="ring"), V5P, lambda op: "is hindered", ops=("matmul",)) is None


def test_an_all_reduce_is_by_what_its_signal_names():
    assert all_reduce_of(named(all_reduce="permute"), HERE) == "permute"
    assert (
        all_reduce_of(named(matmul="pallas"), HERE)
        == all_reduce_of(named(), HERE)
        == all_reduce_of(None, HERE)
        == "xla"
    )
    with pytest.raises(JShardError) as error:
        all_reduce_of(named(all_reduce="ring"), V5P, "adds")
    assert str(error.value) == 'signal "a" (f.yaml:3) takes all_reduce by ring, which adds; write all_reduce: auto'
