"""Collectives read from what TPU, GPU and CPU compilers wrote of one decoder step (mesh data 2, tensor 4), trimmed by
`tests/data/hlo/trim.py`: TPU v5e and H200 by jax 0.12.0.1, TPU 7x, H100 and CPU by jax 0.10.2."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from jshard.inspect.compiled.schedule import collectives_in

HLO = Path(__file__).parents[2] / "data" / "hlo"
SIZES = {"data": 2, "tensor": 4}
ASKED = 282_440  # bytes on the wire, by the ledger of the same step


def read(name: str):
    return collectives_in((HLO / f"{name}.hlo").read_text())


@pytest.mark.parametrize(
    ("name", "total", "gathers", "reduces", "scatters", "asynchronous"),
    [
        ("decoder-tpu7x", ASKED, 30, 17, 16, 25),  # byte for byte what was asked
        ("decoder-v5e", 295_752, 30, 18, 5, 5),  # five reduce-scatters became an all-reduce, twice the bytes of each
        ("decoder-cpu", 563_592, 30, 17, 16, 0),  # bfloat16 travels as float32
        ("decoder-h100", 257_864, 5, 16, 3, 15),  # sums of three all-reduces are summed first, gathers are joined
        ("decoder-h200", 257_864, 5, 15, 3, 18),
    ],
)
def test_decoder_step_is_read_whole(name, total, gathers, reduces, scatters, asynchronous):
    found = read(name)
    runs = collections.Counter()
    for got in found:
        runs[got.collective] += got.count
    assert all(got.count_known for got in found)
    assert sum(got.total for got in found) == total
    assert dict(runs) == {"all_gather": gathers, "all_reduce": reduces, "reduce_scatter": scatters}
    assert sum(got.asynchronous for got in found) == asynchronous


@pytest.mark.parametrize("name", ["decoder-tpu7x", "decoder-v5e", "decoder-cpu", "decoder-h100", "decoder-h200"])
def test_groups_lead_back_to_mesh_axes(name):
    found = read(name)
    assert {got.mesh_axes(SIZES) for got in found} == {("data",), ("tensor",)}
    assert all(got.group == SIZES[got.mesh_axes(SIZES)[0]] for got in found)


def test_pieces_of_an_asynchronous_fusion_are_one_collective():
    """A v5e hides a gather behind products: start, pieces inside fusions and done each repeat the instruction."""
    text = (HLO / "decoder-v5e.hlo").read_text()
    written = sum(" all-gather(" in line for line in text.splitlines())
    found = [got for got in collectives_in(text) if got.collective == "all_gather"]
    assert (written, len(found)) == (34, 16)
    assert [len(got.causes[0].path) for got in found if got.asynchronous] == [2] * 5  # mlp/up


def test_all_reduce_scatter_fusion_is_a_reduce_scatter_of_what_goes_in():
    (first, *_) = [got for got in read("rewritten-v5e") if got.collective == "reduce_scatter"]
    assert (first.opcode, first.payloads, first.group) == ("all-reduce", (2048 * 4096 * 2,), 2)  # unpadded


def test_combined_collective_keeps_the_name_of_each_array():
    (got,) = [got for got in read("decoder-h200") if got.payloads == (8192, 2048) and got.opcode == "reduce-scatter"]
    assert [each.signal for each in got.causes] == ["embed", "head"]
    (rewritten,) = [got for got in read("decoder-v5e") if len(got.payloads) == 5]
    assert [each.key for each in rewritten.causes] == ["store"] * 5  # all that is left, in the computation that adds
    (joined, _) = [got for got in read("decoder-h200") if len(got.payloads) == 7 and got.collective == "reduce_scatter"]
    assert sorted(each.signal for each in joined.causes) == ["attn/out", *["attn/qkv"] * 3, "mlp/down", *["mlp/up"] * 2]


def test_collective_that_nobody_is_seen_to_call_is_an_assertion():
    text = (HLO / "decoder-tpu7x.hlo").read_text()
    other = re.sub(
        r"to_apply=(%called_computation[\w.]*)", r"called_computations={\1}", text
    )  # as other versions write it
    assert collectives_in(other) == collectives_in(text) != []
    with pytest.raises(AssertionError, match="jshard can't see who calls"):
        collectives_in(other.replace("called_computations={", "unheard_of={"))
