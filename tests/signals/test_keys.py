"""Which signal asked for a collective, and which of them nobody used."""

from __future__ import annotations

import pytest

import jshard
from jshard.programs.provenance import Cause
from jshard.signals.keys import blamed, unused

CONFIG = {
    "jshard": {"mesh": {"data": 2, "tensor": 4}},
    "rows": {"row": "data"},
    "sums": {"reduction": "tensor"},
    "there": {"row": "data", "backward": "sums"},
    "gt": {"shard": {"axis": 0, "workers": None}},
    "gt rows": {"shard": {"axis": 0, "mesh": "data"}},
    "mlp/up": {"row": "data"},
    "again": {"row": "data", "remat": "full"},
    "places": {"sequence": "tensor", "reduction": "tensor"},
    "stored": {"shard": {"axis": 1, "mesh": "tensor"}, "store": "data"},
}


@pytest.fixture(autouse=True)
def loaded():
    jshard.load(CONFIG)
    yield
    jshard.unload()


@pytest.mark.parametrize(
    ("cause", "mesh_axis", "key", "asked"),
    [
        (Cause(("rows",)), "data", "row", True),
        (Cause(("rows",)), "tensor", "", False),
        (Cause(("rows",), key="output"), "tensor", "output", True),
        (Cause(("rows",), chosen="columns"), "tensor", "", True),
        (Cause(("rows",), redistributed=True), "tensor", "", True),
        (Cause(("sums",), redistributed=True), "tensor", "reduction", True),
        (Cause(("there",)), "tensor", "", True),  # where its cotangents lie
        (Cause(("gt",)), "tensor", "shard", True),
        (Cause(("gt",)), "workers", "shard", True),
        (Cause(("gt rows",)), "data", "shard", True),
        (Cause(("gt rows",)), "tensor", "shard", False),
        (Cause(("gt rows",), key="store"), "data", "shard", True),  # a layer's word for what `shard` says
        (Cause(("stored",), key="store"), "data", "store", True),
        (Cause(("stored",), key="column"), "tensor", "shard", True),
        (Cause(("again",), remat=True), "data", "remat", True),
        (Cause(("again",)), "data", "row", True),
        (Cause(("rows",), remat=True), "data", "row", True),
        (Cause(("places",), redistributed=True), "tensor", "reduction", True),
        (Cause(("places",)), "tensor", "sequence", True),
        (Cause(), "data", "", False),
        (Cause(chosen="columns"), "data", "", True),
    ],
)
def test_a_collective_is_asked_for_by_a_key_or_by_who_names_its_mesh_axis(cause, mesh_axis, key, asked):
    found = blamed(cause, (mesh_axis,))
    assert (found.key, found.asked) == (key, asked)


def test_signals_that_no_scope_means_are_unused():
    others = ["again", "places", "stored"]
    strangers = [(f"stranger {number}", "rows") for number in range(9)]
    names = lambda scopes: [signal.name for signal in unused(scopes)]
    assert names([]) == ["rows", "sums", "there", "gt", "gt rows", "mlp/up", *others]
    assert names([("mlp", "up"), *strangers]) == ["sums", "there", "gt", "gt rows", *others]
    assert names([("rows", "sums")]) == ["there", "gt", "gt rows", "mlp/up", *others]
    assert names([("there",)]) == ["rows", "gt", "gt rows", "mlp/up", *others]
