"""Names of topologies, the figures behind them, and what is said of a name that means nothing."""

from __future__ import annotations

import pytest

import jshard
from jshard.errors import JShardError
from jshard.hardware.chips import CHIPS, GIB
from jshard.inspect.plan.topology import Topology
from jshard.kernels.chip import chip
from jshard.signals.active_config import configuration, unload


@pytest.mark.parametrize(
    ("name", "devices", "memory"),
    [
        ("v5e:4x4", 16, 15.75),
        ("v5p:8x8x16", 1024, 95.74),
        ("v6e:16x16", 256, 31.25),
        ("tpu7x:2x2x2", 16, 94.75),  # a chip is two devices, each with half its memory
        ("v4:2x2x1", 4, 30.75),
        ("h100:8", 8, 79.1),
        ("h200:8", 8, 141.0),
        ("b200:8", 8, 178.36),
    ],
)
def test_topology_has_devices_and_memory(name, devices, memory):
    topology = Topology.of(name)
    assert (topology.name, topology.devices) == (name, devices)
    assert topology.chip.device_memory / GIB == pytest.approx(memory, abs=0.01)


def test_topology_is_told_in_words():
    assert str(Topology.of("V5e:4x4")) == "v5e:4x4 (16 devices of TPU v5 lite)"
    assert str(Topology.of("tpu7x:2x2x1")) == "tpu7x:2x2x1 (8 devices of TPU7x, 2 to a chip)"
    assert str(Topology.of("cpu:1")) == "cpu:1 (1 device, pretended)"
    assert str(Topology.of("v5e:16x16", slices=2)) == "2 x v5e:16x16 (512 devices of TPU v5 lite)"


def test_topology_of_several_slices_is_told_to_its_compiler():
    two = Topology.of("v5e:2x2", slices=2)
    assert (two.devices, two.slice_devices, two.target) == (8, 4, {"num_slices": 2})
    assert [two.spans_slices(members) for members in ((0, 1, 2, 3), (4, 5), (3, 4), range(8))] == [
        False,
        False,
        True,
        True,
    ]
    assert Topology.of("v4:2x2x1", slices=3).target == {"chip_config_name": "megacore", "num_slices": 3}
    assert Topology.of("h100:16", slices=2).target["topology"] == "1x4x8"
    jshard.load({"jshard": {"mesh": {"a": {"size": 3, "over": "dcn"}, "b": {"size": 2, "over": "dcn"}, "c": 4}}})
    for name in ("v5e:2x2", None):
        chosen = Topology.chosen(name, configuration())
        assert (None if chosen is None else chosen.slices) == (name and 6)
    unload()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("v5x:4x4", '"v5x:4x4" is no topology: there is no chip "v5x"; use v5e:4x4, v6e:4x4 or v5p:4x4x8'),
        ("v7x:2x2x2", '"v7x:2x2x2" is no topology: there is no chip "v7x"; use v5p:2x2x2, v4:2x2x2 or v5e:2x2'),
        ("h300:8", '"h300:8" is no topology: there is no chip "h300"; use h200:8 or h100:8'),
        ("", '"" is no topology: there is no chip ""; use v5e:4x4, v5p:2x4x4 or v6e:4x4'),
        ("v5p:4x4", '"v5p:4x4" is no topology: v5p takes 3 sizes after the colon; use v5p:2x2x1, v5p:2x2x2, v5p:2x2x4 or v5p:2x4x4'),
        ("v5e:0x4", '"v5e:0x4" is no topology: v5e takes 2 sizes after the colon; use v5e:1x1, v5e:2x2, v5e:2x4 or v5e:4x4'),
        ("b200", '"b200" is no topology: b200 takes one count after the colon; use b200:1, b200:2, b200:4 or b200:8'),
        ("h100:12", '"h100:12" is no topology: its hosts have 8 GPUs each, and the last would not be full; use h100:8 or h100:16'),
    ],
)  # fmt: skip
def test_name_that_means_nothing_lists_near_ones(name, sentence):
    with pytest.raises(JShardError) as error:
        Topology.of(name)
    assert str(error.value) == sentence


def test_gpu_is_described_to_its_compiler_by_the_table():
    target = Topology.of("h100:16").target
    assert target["topology"] == "1x2x8"  # hosts of eight
    assert "core_count: 132" in target["target_config"]
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in target["target_config"]
    assert Topology.of("v4:2x2x1").target == {"chip_config_name": "megacore"}  # two cores, one device
    assert Topology.of("v5e:4x4").target == {}
    assert Topology.of("v5e:1x1").target == {"chips_per_host_bounds": [1, 1, 1]}


def test_peaks_are_those_of_a_device_and_of_the_next_wider_dtype_where_none_is_stated():
    assert CHIPS["tpu7x"].peak("bfloat16") == 2307e12 / 2
    assert CHIPS["v5e"].peak("float32") == CHIPS["v5e"].peak("bfloat16") == 197e12  # a TPU multiplies in bfloat16
    assert CHIPS["h100"].peak("float32") == 494.7e12
    assert CHIPS["h100"].peak("float16") == 989e12
    assert all(chip.source for chip in CHIPS.values())


def test_link_speed_is_stated_once_and_both_the_estimate_and_the_choice_of_kernels_read_it():
    assert chip("TPU v6 lite") is CHIPS["v6e"] is Topology.of("v6e:4x4").chip
    assert {name: each.link / 1e9 for name, each in CHIPS.items() if each.platform == "tpu"} == {
        "v4": 50, "v5e": 50, "v5p": 100, "v6e": 100, "tpu7x": 100,
    }  # fmt: skip
