"""What is loaded: its mesh, GT's lists of workers as stages of one, and a mesh that stands for another."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from jshard.layouts.mesh import build_mesh, present_mesh
from jshard.runs import events
from jshard.signals.active_config import configuration, load, mesh, mesh_to_choose_for, on_mesh, unload, use_stages

pytestmark = pytest.mark.usefixtures("nothing_loaded")

GT = Path(__file__).parents[2] / "examples" / "gt"
SIZES = {"jshard": {"mesh": {"data": 2, "tensor": 4}}}


def test_workers_become_stages_of_one_mesh_and_it_is_told():
    load(GT / "pipeline.yaml")
    told = []
    stop = events.listen(lambda what, fields: told.append((what, dict(fields))))
    use_stages()
    stop()
    workers = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert told == [("stages", {"workers": workers, "mesh": "{stage: 4, workers: 2}", "microbatches": 1})]
    assert (mesh().axis_names, mesh().axis_types) == (("stage", "workers"), (AxisType.Explicit, AxisType.Explicit))
    assert [[device.id for device in row] for row in mesh().devices] == workers


def test_what_has_no_lists_of_workers_stays_as_it_is():
    before = load(SIZES)
    use_stages()
    assert configuration() is before
    unload()
    use_stages()
    assert configuration() is None


def test_the_mesh_that_is_loaded_is_present_where_none_is_set():
    load(SIZES)
    assert present_mesh() == mesh()
    load({"a": {}})  # which describes none
    assert present_mesh() is None
    unload()
    assert present_mesh() is None


def test_a_mesh_stands_for_the_one_by_which_is_chosen():
    load(SIZES)
    loaded, ones = mesh(), build_mesh({"data": 1, "tensor": 1})
    assert mesh_to_choose_for() is loaded
    with on_mesh(ones, stands_for=loaded):
        assert (mesh(), mesh_to_choose_for()) == (ones, loaded)
    with on_mesh(ones):
        assert (mesh(), mesh_to_choose_for()) == (ones, ones)
    assert mesh() is loaded and mesh_to_choose_for() is loaded


def test_what_is_loaded_is_part_of_what_jit_knows_a_program_by():
    traces = []
    program = jax.jit(lambda x: traces.append(1) or x)
    for said in (SIZES, SIZES, {"jshard": {"mesh": {"data": 8}}}, SIZES):
        load(said)
        program(0.0)
    assert len(traces) == 2
