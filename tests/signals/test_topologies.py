"""The mesh that a topology gives, and what is said where they do not fit. Names alone: tests/inspect/plan/test_plan_topology.py."""

from __future__ import annotations

import re

import pytest

from jshard.errors import JShardError, Location
from jshard.signals.config import load_configuration
from jshard.signals.topologies import SHAPES, TopologyName, devices_of, fault_of, fitted, hint_of

HERE, THERE = Location("f.yaml", 2), Location("f.yaml", 9)


def test_every_example_is_a_topology_and_its_hosts_are_full():
    assert [
        fault_of(f"{chip}:{size}")
        for chip, shapes in SHAPES.items()
        for size in shapes.examples
        if fault_of(f"{chip}:{size}")
    ] == []
    full = "its hosts have 8 GPUs each, and the last would not be full"
    assert {count: fault_of(f"h100:{count}") for count in range(1, 9)} == dict.fromkeys(range(1, 9))
    assert fault_of("h100:9") == (full, "use h100:8 or h100:16") and fault_of("h100:23") == (
        full,
        "use h100:16 or h100:24",
    )
    assert fault_of("h100:24") is None


@pytest.mark.parametrize(
    ("sizes", "name", "found"),
    [
        ({"data": 4, "tensor": 4}, "v5e:4x4", {"data": 4, "tensor": 4}),
        ({"data": -1, "tensor": 4}, "v5e:4x4", {"data": 4, "tensor": 4}),
        ({"data": -1, "tensor": 1}, "tpu7x:2x2x1", {"data": 8, "tensor": 1}),
    ],
)
def test_a_mesh_takes_all_devices_of_a_topology(sizes, name, found):
    assert fitted(sizes, HERE, name, None) == found


def test_a_mesh_takes_all_devices_of_several_slices():
    assert fitted({"slice": 2, "data": -1}, HERE, "v5e:4x4", None, slices=2) == {"slice": 2, "data": 16}
    with pytest.raises(JShardError) as error:
        fitted({"slice": 2, "data": 8}, HERE, "v5e:4x4", THERE, slices=2)
    assert str(error.value) == (
        "jshard.mesh (f.yaml:2) has 16 devices, and jshard.topology (f.yaml:9), 2 x v5e:4x4, has 32; write topology: v5e:2x4, "
        "or make its sizes multiply to 32"
    )


@pytest.mark.parametrize(
    ("sizes", "name", "place", "sentence"),
    [
        ({"data": 8}, "v5e:4x4", None,
         "jshard.mesh (f.yaml:2) has 8 devices, and v5e:4x4 has 16; use --topology v5e:2x4, or make its sizes multiply to 16"),
        ({"data": 1024}, "v5p:8x8x8", THERE, "jshard.mesh (f.yaml:2) has 1,024 devices, and jshard.topology (f.yaml:9), v5p:8x8x8, has 512; "
         "write topology: v5p:8x8x16, or make its sizes multiply to 512"),
        ({"data": 3, "tensor": -1}, "v5e:4x4", None,
         "jshard.mesh (f.yaml:2) fixes 3 devices, and v5e:4x4 has 16; make its sizes multiply to 16"),
        ({"data": 32, "tensor": -1}, "v5e:4x4", None,
         "jshard.mesh (f.yaml:2) fixes 32 devices, and v5e:4x4 has 16; use --topology v5e:4x8, or make its sizes multiply to 16"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_a_topology(sizes, name, place, sentence):
    with pytest.raises(JShardError) as error:
        fitted(sizes, HERE, name, place)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("topology", "fault"),
    [
        (3, "is 3, which is not a topology; write topology: v5e:4x4"),
        ("", 'is "", which is not a topology; write topology: v5e:4x4'),
        ("V5E:4x4", 'is "V5E:4x4", which is no topology; write topology: v5e:4x4'),
        (" v5e:4x4", 'is " v5e:4x4", which is no topology; write topology: v5e:4x4'),
        (
            "b200",
            'is "b200", which is no topology: b200 takes one count after the colon; use b200:1, b200:2, b200:4 or b200:8',
        ),
    ],
)
def test_a_key_that_names_no_topology(topology, fault):
    with pytest.raises(JShardError) as error:
        load_configuration({"jshard": {"mesh": {"data": 16}, "topology": topology}})
    assert str(error.value) == f"jshard.topology (<dict>) {fault}"


def test_an_editor_takes_the_same_names():
    pattern = TopologyName().json()["pattern"]
    names = [f"{chip}:{size}" for chip, shapes in SHAPES.items() for size in shapes.examples]
    assert all(re.fullmatch(pattern, name) for name in names)
    assert not any(re.fullmatch(pattern, name) for name in ("v5e:4", "v5p:4x4", "h100:", "h100:8x8", "v5e:0x4", "a:1"))


def test_a_hint_names_the_first_shape_that_fits():
    assert devices_of("tpu7x:2x2x2") == 16
    assert hint_of(16, "tpu7x:2x2x1", "use ", "the numbers") == "use tpu7x:2x2x2, or make the numbers multiply to 8"
    assert hint_of(5, "v5e:4x4", "use ") == "make its sizes multiply to 16"
