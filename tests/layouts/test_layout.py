"""`jshard.Layout`: how an array lies, to and from NamedSharding, and what does not fit is one sentence."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jshard
from jshard.layouts import Layout, build_mesh
from jshard.layouts.mesh import (
    absent_mesh,
    check_slices,
    homes_of,
    in_place_of_set,
    is_explicit,
    present_mesh,
    with_axis_types,
    workers_mesh,
)
from jshard.signals.active_config import unload
from tests.support import cases

P = jax.P


@pytest.fixture(scope="module")
def grid():
    return build_mesh({"data": 2, "tensor": 4})


def laid_out(axes, rank):
    """Every mesh axis goes to an axis of the array, or to none."""
    found = [[] for _ in range(rank)]
    for name, axis in axes:
        if axis < rank:
            found[axis].append(name)
    return [tuple(names) for names in found]


ANY = st.integers(1, 4).flatmap(
    lambda rank: st.tuples(
        st.permutations(["data", "tensor", "pipe"]), st.lists(st.integers(0, rank), min_size=3, max_size=3)
    ).map(lambda drawn: laid_out(zip(*drawn, strict=True), rank))
)


@given(ANY)
@settings(max_examples=50, deadline=None)
def test_layout_goes_to_named_sharding_and_back(axes):
    mesh = build_mesh(cases.MESHES["2x2x2"])
    layout = Layout(mesh, *axes)
    assert Layout.from_sharding(layout.sharding, len(axes)) == layout
    shape = tuple(8 * (axis + 1) for axis in range(len(axes)))
    assert layout.shard_shape(shape) == layout.sharding.shard_shape(shape)
    assert layout.rank == len(axes) and sorted(layout.mesh_axes) == sorted(sum(axes, ()))


def test_layout_reads_like_what_it_means(grid):
    layout = Layout(grid, "data", None, ("tensor",))
    assert repr(layout) == "Layout([data, whole, tensor] on {data: 2, tensor: 4})"
    assert repr(Layout(grid, ("tensor", "data"))) == "Layout([tensor+data] on {data: 2, tensor: 4})"
    assert layout.spec == P("data", None, "tensor")
    assert (layout.ways(0), layout.ways(1), layout.ways(2)) == (2, 1, 4)
    assert layout.with_axis(1, None) == layout
    assert layout.with_axis(0, None).with_axis(1, "data") == Layout(grid, None, "data", "tensor")


def test_what_is_split_further_is_split_along_its_first_whole_axis_that_divides(mesh):
    cube = mesh(data=2, tensor=2, pipe=2)
    for axes, over, shape, keep, expected in (
        ((None, None), "data", None, (), ("data", None)),
        (("data", None), "pipe", None, (), ("data", "pipe")),
        (("data", "tensor"), "pipe", None, (), (("data", "pipe"), "tensor")),
        ((None, "tensor"), ("data", "pipe"), (6, 8), (), (None, ("tensor", "data", "pipe"))),
        ((None, None), ("data", "pipe"), (2, 4), (), (None, ("data", "pipe"))),
        ((None, "tensor"), "data", (3, 2), (), (None, "tensor")),  # divides nowhere
        ((None, None), ("data", "pipe"), (6, 2), (), ("data", "pipe")),  # both divide no axis, and each divides one
        ((None,), ("data", "pipe"), (6,), (), ("data",)),
        ((None, None, None), "data", None, (0,), (None, "data", None)),
        ((None,), "data", None, (0,), (None,)),
        ((), "data", None, (), ()),
        ((None,), None, None, (), (None,)),
    ):
        assert Layout(cube, *axes).also_over(over, shape, keep) == Layout(cube, *expected)
    assert Layout(cube, "data", None).spare_axis() == 1


def test_layouts_are_equal_by_mesh_and_axes(grid):
    layout = Layout(grid, "data", None)
    assert layout == Layout(grid, ("data",), ()) and hash(layout) == hash(Layout(grid, ("data",), ()))
    assert layout != Layout(grid, None, "data") and layout != Layout(
        with_axis_types(auto(grid), "explicit"), None, None
    )
    assert layout != Layout(auto(grid), "data", None)
    assert layout != "data"
    assert copy.deepcopy(layout.axes) == layout.axes and pickle.loads(pickle.dumps(layout.axes)) == layout.axes


def auto(grid):
    return jax.sharding.Mesh(grid.devices, grid.axis_names)


def test_layout_of_an_array_in_and_out_of_jit(grid):
    layout = Layout(grid, "data", "tensor")
    x = jax.device_put(np.ones((8, 8)), layout.sharding)
    seen = []
    jax.jit(lambda x: seen.append(Layout.of(x)) or x)(x)
    assert Layout.of(x) == layout
    assert seen[0].axes == layout.axes
    assert Layout.of(jnp.ones((8, 8))) is None
    there = jax.device_put(np.ones((8, 8)), Layout(auto(grid), "data", None).sharding)
    jax.jit(lambda x: seen.append(Layout.of(x)) or x)(there)
    assert Layout.of(there).axes == (("data",), ())
    assert seen[1] is None  # on an auto mesh a type does not tell


def test_spec_shorter_than_the_array_leaves_the_rest_whole(grid):
    layout = Layout.from_sharding(jax.NamedSharding(grid, P("data")), 3)
    assert layout == Layout(grid, "data", None, None)


def test_twins_and_slices_of_a_mesh(grid):
    assert is_explicit(grid) and not is_explicit(auto(grid))
    assert with_axis_types(grid, "explicit") is grid
    assert with_axis_types(auto(grid), "explicit") == grid
    whole, names = workers_mesh(grid, None, label="it")
    assert whole is grid and names == ("data", "tensor")
    for workers in ((2, 3), (0, 1), (1, 0, 2, 3, 4, 5, 6, 7)):
        part, names = workers_mesh(grid, workers, label="it")
        assert tuple(device.id for device in part.devices.flat) == workers and names == ("workers",)


def test_homes_are_one_mesh_for_each_set_of_devices(grid):
    """Numbers on the host, and arrays that are traced, have none."""
    part, _ = workers_mesh(grid, (2, 3), label="it")
    ours, others = (jax.device_put(1.0, jax.NamedSharding(of, P())) for of in (auto(grid), part))
    assert homes_of([1.0, ours, ours, others], grid) == [grid, part] and homes_of([others], grid) == [part]
    seen = []
    jax.jit(lambda x: seen.append(homes_of([x, others], grid)))(jax.device_put(1.0, jax.NamedSharding(grid, P())))
    assert seen == [[part]]
    absent = absent_mesh({"data": 2})
    assert homes_of([np.ones(2)], grid) == [grid] and homes_of([ours], absent) == [absent]


def test_the_mesh_that_is_set_is_present(grid):
    assert present_mesh() is None
    with jax.set_mesh(grid):
        assert present_mesh() == grid
        assert jax.eval_shape(lambda: jnp.ones(present_mesh().size)).shape == (8,)


def test_another_mesh_takes_the_place_of_one_that_is_set(grid):
    other, set_now = auto(grid), jax.sharding.get_mesh
    with in_place_of_set(other):
        assert set_now().empty
    with jax.set_mesh(grid):
        with in_place_of_set(other):
            assert set_now() == other
        with in_place_of_set(absent_mesh({"data": 2})):
            assert set_now() == grid
        assert set_now() == grid
        seen = []

        def traced(x):
            with in_place_of_set(other):
                seen.append(jax.sharding.get_abstract_mesh())
            return x

        jax.jit(traced)(1.0)
        assert seen == [grid.abstract_mesh]


def test_mesh_takes_what_is_left_for_an_open_size():
    assert dict(build_mesh({"data": -1, "tensor": 4}).shape) == {"data": 2, "tensor": 4}
    assert [*build_mesh({"tensor": 4, "data": -1}).shape.items()] == [("tensor", 4), ("data", 2)]
    assert dict(build_mesh({"data": -1, "tensor": 1}).shape) == {"data": 8, "tensor": 1}
    assert dict(build_mesh({"data": 2}).shape) == {"data": 2}
    assert [device.id for device in build_mesh({"data": 2, "tensor": 4}).devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("platform", "sizes", "across", "slices"),
    [
        ("tpu", {"slice": 2, "data": 2}, ["slice"], [0, 0, 1, 1]),
        ("gpu", {"slice": 2, "data": 2}, ["slice"], [0, 0, 1, 1]),
        ("gpu", {"data": 4}, [], [0, 1, 0, 1]),
    ],
)
def test_devices_of_a_slice_stand_together_where_the_mesh_knows_of_slices(monkeypatch, platform, sizes, across, slices):
    monkeypatch.setattr(jax, "devices", lambda: [Chip(number, platform) for number in (0, 1, 0, 1)])
    monkeypatch.setattr(jshard.layouts.mesh, "Mesh", lambda grid, names, axis_types: grid)
    assert [chip.slice_index for chip in build_mesh(sizes, across=across).ravel()] == slices


# -- what does not fit --


def sentence(f, *args, **kwargs):
    with pytest.raises(jshard.JShardError) as error:
        f(*args, **kwargs)
    return str(error.value)


def test_a_mesh_axis_that_is_not_there(grid):
    assert sentence(Layout, grid, None, "model") == (
        'axis 1 is laid over mesh axis "model", which the mesh does not have; use one of data, tensor'
    )


def test_a_mesh_axis_used_twice(grid):
    assert sentence(Layout, grid, "data", ("tensor", "data")) == (
        'mesh axis "data" splits both axis 0 and axis 1 of one array; take "data" away from one of them'
    )


def test_a_rank_that_is_another(grid):
    assert sentence(Layout(grid, "data").shard_shape, (8, 8), label="it") == (
        "it lays out 1 axes, but the array (8, 8) has 2; give 2 axes"
    )


def test_sizes_that_do_not_divide(grid):
    assert sentence(Layout(grid, "data", "tensor").shard_shape, (8, 250)) == (
        'a layout splits axis 1 of size 250 over mesh axis "tensor" of size 4; use 248 or 252, or pad'
    )
    assert sentence(Layout(grid, ("data", "tensor")).shard_shape, (3,)) == (
        'a layout splits axis 0 of size 3 over mesh axes "data" x "tensor" of size 8; use 8, or pad'
    )


def test_a_mesh_that_does_not_fit_the_machine():
    assert sentence(build_mesh, {"data": 4, "tensor": 4}) == (
        "the mesh asks for data 4 x tensor 4 = 16 devices, but 8 are here; "
        "make it smaller, or pretend with JAX_NUM_CPU_DEVICES=16 PJRT_NPROC=32 JAX_PLATFORMS=cpu"
    )
    assert sentence(build_mesh, {"data": -1, "tensor": 3}) == (
        'the mesh leaves mesh axis "data" open, but 8 devices do not divide by 3; give sizes whose product divides 8'
    )


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_that_no_mesh_axis_has(size):
    assert sentence(build_mesh, {"tensor": 1, "data": size}) == (
        f'the mesh has {size} devices along mesh axis "data"; use 1 or more, or -1 for all that are left'
    )


@pytest.mark.parametrize(("count", "are"), [(1, "1 is"), (2, "2 are")])
def test_a_mesh_that_does_not_fit_one_device_or_two(monkeypatch, count, are):
    some = jax.devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda: some)
    assert sentence(build_mesh, {"data": 4}) == (
        f"the mesh asks for data 4 = 4 devices, but {are} here; "
        "make it smaller, or pretend with JAX_NUM_CPU_DEVICES=4 PJRT_NPROC=8 JAX_PLATFORMS=cpu"
    )


@pytest.mark.parametrize("worker", [-1, 8, 9])
def test_a_worker_that_is_not_there(grid, worker):
    assert sentence(workers_mesh, grid, (1, worker), label="it") == (
        f"it names worker {worker}, but the mesh has 8 devices; use numbers from 0 to 7"
    )


@dataclasses.dataclass
class Chip:
    slice_index: int
    platform: str = "tpu"


@pytest.mark.parametrize(
    ("slices", "sizes", "across", "fault"),
    [
        ([0, 0, 1, 1], {"slice": 2, "data": 2}, ["slice"], None),
        ([3, 3, 1, 1], {"a": 2, "data": 2}, ["a"], None),
        ([0, 0, 1, 1, 2, 2, 3, 3], {"a": 2, "b": 2, "data": 2}, ["a", "b"], None),
        ([0, 0, 0, 0], {"data": 4}, [], None),
        ([0, 0, 0, 0], {"slice": 2, "data": 2}, ["slice"],
         'the mesh has "slice" over dcn for 2 slices, and its 4 devices are in one slice; write slice: 2'),
        ([0, 0, 1, 1], {"data": 4}, [],
         "the mesh has no mesh axis over dcn, and its 4 devices are in 2 slices; "
         "write slice: {size: 2, over: dcn}, and make the other sizes multiply to 2"),
        ([0] * 4 + [1] * 4, {"data": 8}, [],
         "the mesh has no mesh axis over dcn, and its 8 devices are in 2 slices; "
         "write slice: {size: 2, over: dcn}, and make the other sizes multiply to 4"),
        ([0, 1, 0, 1], {"slice": 2, "data": 2}, ["slice"],
         'the mesh has "slice" over dcn for 2 slices, and its 4 devices are in 2 slices; '
         "write slice: {size: 2, over: dcn}, and make the other sizes multiply to 2"),
        ([0], {"data": 1}, [], None),
        ([0, 0, 1, 1], {"a": 2, "b": 2}, ["a", "b"],
         'the mesh has "a" and "b" over dcn for 4 slices, and its 4 devices are in 2 slices; '
         "write slice: {size: 2, over: dcn}, and make the other sizes multiply to 2"),
    ],
)  # fmt: skip
def test_mesh_axes_over_dcn_are_those_that_cross_slices(slices, sizes, across, fault):
    chips = [Chip(number) for number in slices]
    if fault is None:
        return check_slices(chips, sizes, across, "the mesh")
    assert sentence(check_slices, chips, sizes, across, "the mesh") == fault


def test_slices_of_gpus_may_go_unsaid_and_pretended_devices_are_in_none():
    for platform in ("METAL", "gpu", "xpu"):
        chips = [Chip(0, platform), Chip(1, platform)]
        check_slices(chips, {"data": 2}, [], "the mesh")
        assert "in 2 slices" in sentence(check_slices, chips, {"slice": 1, "data": 2}, ["slice"], "the mesh")
    check_slices(jax.devices(), {"slice": 2, "data": 4}, ["slice"], "the mesh")
    jshard.load({"jshard": {"mesh": {"slice": {"size": 2, "over": "dcn"}, "data": 4}}})
    assert [device.id for device in jshard.mesh().devices[1]] == [4, 5, 6, 7]
    unload()
