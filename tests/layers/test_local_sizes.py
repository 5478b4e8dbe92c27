"""The sizes that a primitive is asked for on one device, and the places that pieces take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.local_sizes import axes_of, local_shape, localized, ranges_of
from jshard.layouts.axes import factors

X, IMAGE, AT = np.zeros((8, 16), np.float32), np.zeros((4, 4, 4, 8), np.float32), np.zeros((5, 1), np.int32)
SIZES = {"data": 2, "tensor": 4}
ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


def conv(x, w, features=1, batches=1):
    numbers, groups = ("NHWC", "HWIO", "NHWC"), {"feature_group_count": features, "batch_group_count": batches}
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **groups)


def kernel(*shape):
    return np.zeros((3, 3, *shape), np.float32)


CASES = {  # a program of one operation, the axis of its first array that is split over tensor, and what it is asked for
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, 8, 16), (1, 2)), (X,), 1, {"shape": (3, 8, 4)}),
    "reshape, split": (lambda x: x.reshape(8, 4, 4), (X,), 1, {"new_sizes": (8, 1, 4)}),
    "reshape, joined": (lambda x: x.reshape(128), (X,), 0, {"new_sizes": (32,)}),
    "dynamic slice": (
        lambda x, at: lax.dynamic_slice(x, (0, at), (8, 4), allow_negative_indices=False), (X, 2), 0, {"slice_sizes": (2, 4)},
    ),
    "slice": (lambda x: x[:, 2:6], (X,), 0, {"limit_indices": (2, 6)}),
    "slice, by steps": (lambda x: lax.slice(x, (0, 2), (8, 12), (1, 2)), (X,), 0, {"limit_indices": (2, 12)}),
    "lookup": (lambda x, at: lax.gather(x, at, ROWS, (1, 16), mode="clip"), (X, AT), 1, {"slice_sizes": (1, 4)}),
    "lookup of rows that are split": (
        lambda x, at: lax.gather(x, at, ROWS, (1, 16), mode="clip"), (X, AT), 0, {"slice_sizes": (1, 16)},
    ),
    "convolution": (
        conv, (IMAGE, kernel(8, 4)), 3, {"feature_group_count": 1, "batch_group_count": 1},
    ),
    "convolution, grouped": (
        lambda x, w: conv(x, w, features=8), (IMAGE, kernel(1, 16)), 3, {"feature_group_count": 2, "batch_group_count": 1},
    ),
    "convolution, two groups": (
        lambda x, w: conv(x, w, features=2), (IMAGE, kernel(4, 16)), 0, {"feature_group_count": 2, "batch_group_count": 1},
    ),
    "convolution, batch groups": (
        lambda x, w: conv(x, w, batches=4), (IMAGE, kernel(8, 4)), 0, {"feature_group_count": 1, "batch_group_count": 1},
    ),
    "addition": (lambda x: lax.add(x, x), (X,), 0, {}),
    "transposition": (lambda x: x.T, (X,), 0, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_of_one_devices_part(case):
    f, args, axis, wanted = CASES[case]
    (eqn,) = jax.make_jaxpr(f)(*args).eqns
    found = factors(eqn)
    assert found is not None
    choice = {found.operands[0][axis][0]: ("tensor",)}
    assert axes_of(found.operands[0], choice)[axis] == ("tensor",)
    assert localized(eqn, found, choice, SIZES) == wanted


@pytest.mark.parametrize(("groups", "number", "left"), [(2, 0, 1), (4, 0, 2), (2, 1, 2)])
def test_groups_of_a_convolution_are_fewer_where_they_are_split_and_not_within_them(groups, number, left):
    (eqn,) = jax.make_jaxpr(lambda x, w: conv(x, w, features=groups))(IMAGE, kernel(8 // groups, 16)).eqns
    found = factors(eqn)
    assert found is not None
    choice = {found.operands[0][3][number]: ("data",)}
    assert localized(eqn, found, choice, SIZES) == {"feature_group_count": left, "batch_group_count": 1}


def test_a_part_is_as_long_as_the_mesh_axes_leave():
    assert local_shape((8, 16, 3), (("data",), ("data", "tensor"), ()), SIZES) == (4, 2, 3)
    assert axes_of(((0, 2), (), (1,)), {0: ("data",), 2: ("tensor",)}) == (("data", "tensor"), (), ())


@pytest.mark.parametrize(
    ("f", "places"),
    [
        (lambda x: jnp.split(x, [2, 10], 1), {1: [range(2), range(2, 10), range(10, 16)]}),
        (lambda x: x[:, 2:6], {1: [range(2, 6)]}),
        (lambda x: lax.slice(x, (1, 0), (8, 16), (2, 3)), {0: [range(1, 8, 2)], 1: [range(0, 16, 3)]}),
        (lambda x: lax.slice(x, (0, 0), (8, 16)), {}),
    ],
)
def test_pieces_take_these_places(f, places):
    (eqn,) = jax.make_jaxpr(f)(X).eqns
    assert ranges_of(eqn, X.shape) == places
