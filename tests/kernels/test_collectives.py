"""Compare each collective with a one-device reference, in value and gradient; check the sentence of each refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.errors import JShardError

LINE = {"data": 8}
GRID = {"data": 2, "tensor": 4}
GROUPS = [(LINE, "data"), (GRID, "data"), (GRID, "tensor"), (GRID, ("data", "tensor")), (GRID, ("tensor", "data"))]
GROUP_IDS = [
    f"{'x'.join(map(str, sizes.values()))}-{'+'.join([axes] if isinstance(axes, str) else axes)}"
    for sizes, axes in GROUPS
]
SHIFTED, SWAPPED = [(0, 1), (1, 0)], [(0, 1)]


# -- the dense spelling: one array [rest, group, rows, columns], all devices of a group at once --


def dense_all_reduce(x, op="sum"):
    if op == "mean":
        y = x.sum(1, keepdims=True) / x.shape[1]
    else:
        y = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op](x, axis=1, keepdims=True)
    return jnp.broadcast_to(y, x.shape)


def dense_all_gather(x, axis=0):
    joined = jnp.concatenate(list(jnp.moveaxis(x, 1, 0)), axis=1 + axis % 2)[:, None]
    return jnp.broadcast_to(joined, (x.shape[0], x.shape[1], *joined.shape[2:]))


def dense_reduce_scatter(x, axis=0):
    return jnp.stack(jnp.split(x.sum(1), x.shape[1], axis=1 + axis), axis=1)


def dense_permute(x, pairs=None, shift=1):
    group = x.shape[1]
    y = jnp.zeros_like(x)
    for source, target in pairs if pairs is not None else [(i, (i + shift) % group) for i in range(group)]:
        y = y.at[:, target].set(x[:, source])
    return y


def dense_all_to_all(x, split_axis, concat_axis):
    group = x.shape[1]
    parts = [jnp.split(x[:, source], group, axis=1 + split_axis) for source in range(group)]
    arrived = [jnp.concatenate([parts[s][t] for s in range(group)], axis=1 + concat_axis) for t in range(group)]
    return jnp.stack(arrived, axis=1)


def dense_broadcast(x, root=0):
    return jnp.broadcast_to(x[:, root : root + 1], x.shape)


DENSE = {
    "all_reduce": dense_all_reduce,
    "all_gather": dense_all_gather,
    "reduce_scatter": dense_reduce_scatter,
    "permute": dense_permute,
    "all_to_all": dense_all_to_all,
    "broadcast": dense_broadcast,
}
DEEDS = [
    ("all_reduce", {}),
    ("all_reduce", {"op": "mean"}),
    ("all_reduce", {"op": "max"}),
    ("all_reduce", {"op": "min"}),
    ("all_gather", {"axis": 0}),
    ("all_gather", {"axis": -1}),
    ("reduce_scatter", {"axis": 0}),
    ("reduce_scatter", {"axis": 1}),
    ("permute", {}),
    ("permute", {"shift": -1}),
    ("permute", {"pairs": [(0, 1)]}),
    ("all_to_all", {"split_axis": 0, "concat_axis": 1}),
    ("all_to_all", {"split_axis": 1, "concat_axis": 1}),
    ("broadcast", {"root": 1}),
]
DEED_IDS = ["-".join([name, *(f"{k}{v}".replace(" ", "") for k, v in options.items())]) for name, options in DEEDS]


def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def by_device(body, mesh):
    """`body` of one device's (8, 8) array as a function of [*mesh sizes, 8, 8]."""
    names = tuple(mesh.axis_names)

    def local(x):
        y = body(x.reshape(x.shape[len(names) :]))
        missing = tuple(name for name in names if name not in jax.typeof(y).mat.varying)
        y = lax.pcast(y, missing, to="varying") if missing else y
        return y.reshape((1,) * len(names) + y.shape)

    return jax.shard_map(local, mesh=mesh, in_specs=P(*names), out_specs=P(*names))


def dense(reference, sizes, mesh_axis, x):
    """Apply the one-device `reference` to groups of [*mesh sizes, 8, 8]."""
    group = [mesh_axis] if isinstance(mesh_axis, str) else list(mesh_axis)
    order = [list(sizes).index(name) for name in [n for n in sizes if n not in group] + group]
    extent = [x.shape[i] for i in order]
    moved = jnp.transpose(x, (*order, len(sizes), len(sizes) + 1))
    grouped = moved.reshape(-1, int(np.prod([sizes[name] for name in group])), *x.shape[len(sizes) :])
    y = reference(grouped)
    back = [order.index(i) for i in range(len(sizes))]
    return jnp.transpose(y.reshape(*extent, *y.shape[2:]), (*back, len(sizes), len(sizes) + 1))


def value_and_gradient(f, x, weights=None):
    def loss(x):
        y = f(x)
        return (y * (integers(y.shape, 1) if weights is None else weights)).sum(), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    return np.asarray(y), np.asarray(gradient)


@pytest.mark.quick(10)
@pytest.mark.parametrize(("sizes", "mesh_axis"), GROUPS, ids=GROUP_IDS)
@pytest.mark.parametrize(("name", "options"), DEEDS, ids=DEED_IDS)
def test_collective_equals_dense_in_value_and_gradient(mesh, sizes, mesh_axis, name, options):
    made = mesh(**sizes)
    x = integers((*sizes.values(), 8, 8))
    placed = jax.device_put(x, jax.NamedSharding(made, P(*sizes)))
    f = by_device(lambda x: getattr(kernels, name)(x, mesh_axis, **options), made)
    y, gradient = value_and_gradient(f, placed)
    expected, expected_gradient = value_and_gradient(
        lambda x: dense(lambda g: DENSE[name](g, **options), sizes, mesh_axis, x), x
    )
    if name == "all_reduce" and options.get("op") in ("max", "min"):
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)  # thirds of ties are not exact
    else:
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.quick(6)
@pytest.mark.parametrize(("name", "options"), DEEDS, ids=DEED_IDS)
def test_collective_takes_the_same_value_on_every_device(mesh, name, options):
    made = mesh(**GRID)
    x = integers((8, 8))

    def from_one(x):
        return by_device(lambda _: getattr(kernels, name)(x, "tensor", **options), made)(jnp.zeros((2, 4, 1)))

    def local(zeros, x):
        y = getattr(kernels, name)(x, "tensor", **options)
        return lax.pcast(y + 0 * zeros.sum(), (), to="varying")[None, None]

    f = jax.shard_map(local, mesh=made, in_specs=(P("data", "tensor"), P()), out_specs=P("data", "tensor"))
    zeros = jax.device_put(np.zeros((2, 4, 1), np.float32), jax.NamedSharding(made, P("data", "tensor")))
    placed = jax.device_put(x, jax.NamedSharding(made, P()))
    y, gradient = value_and_gradient(lambda x: f(zeros, x), placed)
    expected, expected_gradient = value_and_gradient(
        lambda x: dense(lambda g: DENSE[name](g, **options), GRID, "tensor", jnp.broadcast_to(x, (2, 4, 8, 8))), x
    )
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


def test_all_reduce_of_an_unvarying_value_is_n_times_it(mesh):
    f = jax.shard_map(lambda x: kernels.all_reduce(x, "tensor"), mesh=mesh(**GRID), in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(3.0)), [0, 4, 8])


def test_all_reduce_over_several_mesh_axes_is_one_collective_and_unvarying(mesh):
    f = jax.shard_map(
        lambda x: kernels.all_reduce(x, ("data", "tensor")),
        mesh=mesh(**GRID, axis_types="auto"),
        in_specs=P("data", "tensor"),
        out_specs=P(),  # check_vma would refuse a varying result
    )
    assert jax.jit(f).lower(jnp.ones((8, 8))).as_text().count("all_reduce") == 1


def test_all_reduce_keeps_the_dtype_it_was_given(mesh):
    f = jax.shard_map(
        lambda x: kernels.all_reduce(x, "tensor"),
        mesh=mesh(**GRID, axis_types="auto"),
        in_specs=P("tensor"),
        out_specs=P(),
    )
    x = jnp.asarray([256, 1, 1, 1], jnp.bfloat16)
    text = jax.jit(f).lower(x).as_text()
    assert "bf16" in text and "f32" not in text
    assert jax.jit(f)(x).dtype == jnp.bfloat16


def test_all_gather_invariant_has_a_slice_for_its_gradient(mesh):
    x = integers((8, 8))
    texts = {}
    for result in ("varying", "invariant"):

        def local(x, w, result=result):
            full = kernels.all_gather(x, "tensor", axis=1, result=result)
            y = (full * w).sum()
            return y if result == "invariant" else kernels.all_reduce(y, "tensor", op="mean")

        f = jax.shard_map(
            local, mesh=mesh(tensor=4, axis_types="auto"), in_specs=(P(None, "tensor"), P()), out_specs=P()
        )
        gradient = jax.jit(jax.grad(f))
        np.testing.assert_array_equal(gradient(x, 2 * x), 2 * x)
        texts[result] = gradient.lower(x, x).as_text()
    assert "reduce_scatter" in texts["varying"]
    assert "reduce_scatter" not in texts["invariant"] and "all_reduce" not in texts["invariant"]


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float32"])
def test_broadcast_changes_no_bit_and_hears_nothing_else(mesh, dtype):
    x = jnp.asarray(np.arange(8).reshape(4, 2) % 3 - 1, dtype)
    if dtype in ("bfloat16", "float32"):
        x = x.at[2].set(jnp.asarray([1e-30, jnp.nan], dtype)).at[1].set(jnp.nan).at[3].set(jnp.inf)
    f = jax.shard_map(
        lambda x: kernels.broadcast(x, "tensor", root=2),
        mesh=mesh(tensor=4, axis_types="auto"),
        in_specs=P("tensor"),
        out_specs=P(),
    )
    y = jax.jit(f)(x)
    assert y.dtype == x.dtype
    assert np.asarray(y).tobytes() == np.asarray(x[2:3]).tobytes()


def test_axis_index_counts_major_first_and_axis_size_multiplies(mesh):
    def local():
        assert kernels.axis_size("data") == 2
        assert kernels.axis_size(("data", "tensor")) == 8
        return kernels.axis_index(("data", "tensor"))[None], kernels.axis_index(("tensor", "data"))[None]

    spec = P(("data", "tensor"))
    f = jax.shard_map(local, mesh=mesh(**GRID), in_specs=(), out_specs=(spec, spec))
    data_major, tensor_major = jax.jit(f)()
    np.testing.assert_array_equal(data_major, np.arange(8))
    np.testing.assert_array_equal(tensor_major, [0, 2, 4, 6, 1, 3, 5, 7])


def test_no_mesh_axis_is_the_identity():
    x = jnp.arange(4.0).reshape(2, 2)
    for name, options in DEEDS:
        if "pairs" not in options and "root" not in options:
            np.testing.assert_array_equal(getattr(kernels, name)(x, (), **options), x)


def test_collectives_work_with_check_vma_off_too(mesh):
    def local(x):
        gathered = kernels.all_gather(x, "tensor", axis=1, result="invariant")
        return kernels.all_reduce(x, ("data", "tensor")), gathered, kernels.reduce_scatter(gathered, "data", axis=1)

    x = integers((8, 8))
    f = jax.shard_map(
        local,
        mesh=mesh(**GRID, axis_types="auto"),
        in_specs=P("data", "tensor"),
        out_specs=(P(), P("data"), P(None, "data")),
        check_vma=False,  # the subject of this test
    )
    total, gathered, scattered = jax.jit(f)(x)
    np.testing.assert_array_equal(total, x.reshape(2, 4, 4, 2).sum((0, 2)))
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_array_equal(scattered, x[:4] + x[4:])


def test_wire_is_what_the_design_says():
    table = {name: kernels.COLLECTIVES[name].wire(256, 8) for name in kernels.COLLECTIVES}
    assert table == {
        "all_reduce": 448,
        "all_gather": 224,
        "reduce_scatter": 224,
        "all_to_all": 224,
        "permute": 256,
        "broadcast": 256,
    }
    assert all(collective.wire(256, 1) == 0 for collective in kernels.COLLECTIVES.values())
    assert kernels.COLLECTIVES["all_reduce"].wire(4, 3) == 6  # 5 1/3, rounded up


def test_no_primitive_is_two_collectives():
    primitives = [name for collective in kernels.COLLECTIVES.values() for name in collective.primitives]
    assert len(primitives) == len(set(primitives))


@pytest.mark.parametrize("w_shape", [(6, 5), (6, 2, 5)])
@pytest.mark.parametrize("x_shape", [(6,), (4, 6), (2, 3, 6)])
def test_matmul_compiles_to_what_dot_compiles_to(x_shape, w_shape):
    x, w = integers(x_shape), integers(w_shape)
    np.testing.assert_array_equal(kernels.matmul(x, w), jnp.tensordot(x, w, 1))
    if len(w_shape) == 2:
        text = jax.jit(lambda x, w: kernels.matmul(x, w)).lower(x, w).compile().as_text()
        assert _body(text) == _body(jax.jit(lambda x, w: x @ w).lower(x, w).compile().as_text())


def test_matmul_hands_on_the_dtype_it_sums_in():
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert kernels.matmul(x, x.T).dtype == jnp.bfloat16
    assert kernels.matmul(x, x.T, preferred_element_type=jnp.float32).dtype == jnp.float32
    assert "HIGHEST" in jax.jit(lambda x: kernels.matmul(x, x.T, precision="highest")).lower(x).as_text()


def _body(text):
    """The instructions of a compiled program, without names and metadata."""
    import re

    lines = [line for line in text.splitlines() if " = " in line]
    return [re.sub(r", metadata=\{[^}]*\}|%[\w.\-]+", "", line) for line in lines]


# -- what is refused, and how --


def refused(call, mesh=None, **options):
    with pytest.raises(JShardError) as error:
        if mesh is None:
            call(jnp.ones((6, 8)))
        else:
            jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), **options)(jnp.ones((6, 8)))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n, o in DEEDS if n != "all_reduce"] + [("all_reduce", {})], ids=lambda v: str(v)
)
def test_collective_outside_a_mesh_is_refused_with_advice(name, options):
    assert refused(lambda x: getattr(kernels, name)(x, "tensor", **options)) == (
        f'{name} over mesh axis "tensor" was called outside a shard_map that has that axis; '
        "call it inside jax.shard_map(f, mesh=jshard.mesh(), in_specs=..., out_specs=...)"
    )


def test_axis_size_outside_a_mesh_is_refused_with_advice():
    for ask in (kernels.axis_size, kernels.axis_index):
        assert refused(lambda x, ask=ask: ask("tensor")) == (
            f'{ask.__name__} over mesh axis "tensor" was called outside a shard_map that has that axis; '
            "call it inside jax.shard_map(f, mesh=jshard.mesh(), in_specs=..., out_specs=...)"
        )


def test_unknown_mesh_axis_is_refused_with_the_nearest(mesh):
    assert refused(lambda x: kernels.all_reduce(x, "tensr"), mesh(**GRID)) == (
        'all_reduce over mesh axis "tensr" inside a shard_map over "data", "tensor"; did you mean "tensor"?'
    )
    assert refused(lambda x: kernels.all_reduce(x, "zz"), mesh(**GRID)) == (
        'all_reduce over mesh axis "zz" inside a shard_map over "data", "tensor"; use "data" or "tensor"'
    )


def test_mesh_axis_left_to_the_partitioner_is_refused(mesh):
    assert refused(lambda x: kernels.all_gather(x, "tensor"), mesh(**GRID), axis_names={"data"}) == (
        'all_gather over mesh axis "tensor" inside a shard_map over "data" only; '
        'use jax.shard_map(..., axis_names={"data", "tensor"})'
    )


def test_mesh_axis_named_twice_is_refused(mesh):
    assert refused(lambda x: kernels.all_reduce(x, ("data", "tensor", "data")), mesh(**GRID)) == (
        'all_reduce names mesh axis "data" twice; use ("data", "tensor",)'
    )


def test_sizes_that_do_not_divide_are_refused(mesh):
    assert refused(lambda x: kernels.reduce_scatter(x, "tensor"), mesh(**GRID)) == (
        'reduce_scatter splits axis 0 of size 6 over mesh axis "tensor" of size 4; use 4 or 8, or pad'
    )
    assert refused(lambda x: kernels.reduce_scatter(x, ("data", "tensor")), mesh(**GRID)) == (
        'reduce_scatter splits axis 0 of size 6 over mesh axis "data", "tensor" of size 8; use 8, or pad'
    )
    assert refused(lambda x: kernels.all_to_all(x, "tensor", split_axis=0, concat_axis=1), mesh(**GRID)) == (
        'all_to_all splits axis 0 of size 6 over mesh axis "tensor" of size 4; use 4 or 8, or pad'
    )


def test_axis_the_array_does_not_have_is_refused(mesh):
    assert refused(lambda x: kernels.all_gather(x, "tensor", axis=2), mesh(**GRID)) == (
        "all_gather joins axis 2 of a rank-2 array; use 0 or 1"
    )
    assert refused(lambda x: kernels.reduce_scatter(x, "tensor", axis=-3), mesh(**GRID)) == (
        "reduce_scatter splits axis -3 of a rank-2 array; use 0 or 1"
    )
    assert refused(lambda x: kernels.reduce_scatter(x.sum(), "tensor"), mesh(**GRID)) == (
        "reduce_scatter splits axis 0 of a rank-0 array; give it an array with axes"
    )


def test_word_that_is_no_choice_is_refused(mesh):
    assert refused(lambda x: kernels.all_reduce(x, "tensor", op="summ"), mesh(**GRID)) == (
        'all_reduce has no op "summ"; did you mean "sum"?'
    )
    assert refused(lambda x: kernels.all_gather(x, "tensor", result="same"), mesh(**GRID)) == (
        'all_gather has no result "same"; use "varying" or "invariant"'
    )


def test_permute_refuses_pairs_that_do_not_fit(mesh):
    assert refused(lambda x: kernels.permute(x, "tensor", pairs=[(0, 4)]), mesh(**GRID)) == (
        'permute names target 4 over mesh axis "tensor" of size 4; use 0 to 3'
    )
    assert refused(lambda x: kernels.permute(x, "tensor", pairs=[(0, 1), (0, 2)]), mesh(**GRID)) == (
        "permute names source 0 more than once in pairs=[(0, 1), (0, 2)]; give each source one pair"
    )
    assert refused(lambda x: kernels.permute(x, "tensor", shift=1, pairs=[(0, 1)]), mesh(**GRID)) == (
        "permute takes a shift or pairs, not both; write permute(..., shift=1)"
    )


def test_broadcast_refuses_a_root_that_is_not_there(mesh):
    assert refused(lambda x: kernels.broadcast(x, "tensor", root=4), mesh(**GRID)) == (
        'broadcast from device 4 over mesh axis "tensor" of size 4; use a root from 0 to 3'
    )


def test_matmul_refuses_shapes_that_do_not_meet():
    assert refused(lambda x: kernels.matmul(x, jnp.ones((6, 3)))) == (
        "matmul of x(6, 8) and w(6, 3): the last axis of x does not match the first of w; "
        "use a w with as many rows as x has columns"
    )
