"""Parameters are born split: the numbers of nnx.Linear on every mesh, and no full copy on any device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.layouts import Layout, create
from jshard.layouts.creation import create_by
from jshard.programs.jaxprs import equations
from tests.support import cases

INITIALIZERS = {
    "lecun_normal": nnx.initializers.lecun_normal(),
    "he_normal": nnx.initializers.he_normal(),
    "xavier_uniform": nnx.initializers.xavier_uniform(),
    "normal": nnx.initializers.normal(0.02),
    "truncated_normal": nnx.initializers.truncated_normal(0.02),
    "orthogonal": nnx.initializers.orthogonal(),
    "zeros": nnx.initializers.zeros_init(),
}
LAYOUTS = {
    "8": ("data", None),
    "1x1": ("data", "tensor"),
    "2x4": ("data", "tensor"),
    "4x2": (None, ("tensor", "data")),
    "2x2x2": (("pipe", "data"), "tensor"),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    with cases.loaded({"jshard": {"mesh": cases.MESHES[request.param]}}) as grid:
        yield Layout(grid, *LAYOUTS[request.param])


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_numbers_are_those_of_one_device_bitwise(name, layout):
    key = jax.random.key(3)
    born = create(INITIALIZERS[name], key, (32, 64), jnp.float32, layout)
    np.testing.assert_array_equal(born, INITIALIZERS[name](key, (32, 64), jnp.float32))
    cases.assert_lies(born, layout.spec)


NARROW = {
    (64, 24): (None, ("data", "tensor")),
    (784, 10): (None, "tensor"),
    (20,): ("data",),
    (7, 12): (None, "tensor"),
    (101, 24): (None, ("data", "tensor")),
    (5, 3, 12): (None, None, "data"),
    (52, 4): ("data", "tensor"),
    (26, 3): ("tensor", None),
    (4, 16): ("data", "tensor"),
    (4, 3, 16): ("data", None, "tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_numbers_of_narrow_parts_are_those_of_one_device_bitwise(axis_types):
    """Drawn where they will lie, XLA for CPU rounds erf_inv otherwise at 3 to 6 elements in a row (jax 0.12)."""
    key, initializer = jax.random.key(3), INITIALIZERS["normal"]
    with cases.loaded({"jshard": {"mesh": {"data": 4, "tensor": 2}, "axis_types": axis_types}}) as grid:
        for shape, axes in list(NARROW.items())[axis_types == "auto" :: 2]:  # half of them each: a draw takes a second
            born = create(initializer, key, shape, jnp.float32, Layout(grid, *axes))
            np.testing.assert_array_equal(born, initializer(key, shape, jnp.float32))
            cases.assert_lies(born, Layout(grid, *axes).spec)


DT = ("data", "tensor")
DRAWN = [  # shape, how it lies, how it is drawn, and to which size it is padded then where it has to move
    ((64, 24), (None, DT), (DT, None), (64, 24)),
    ((101, 24), (None, DT), (DT, None), (104, 24)),
    ((7, 12), (None, "tensor"), ("tensor", None), (8, 12)),
    ((8, 12), DT, (DT, None), (8, 12)),
    ((4, 12), DT, ("data", None), None),  # one row for each device along data: split no further
    ((4, 3, 12), ("data", None, "tensor"), ("data", "tensor", None), (4, 4, 12)),
    ((5, 3, 12), (None, None, "data"), (None, "data", None), (5, 4, 12)),  # along the axis that is padded least
    ((8, 3, 12), (None, None, "data"), ("data", None, None), (8, 3, 12)),
    ((3, 8, 12), (None, None, "data"), (None, "data", None), (3, 8, 12)),
    ((20,), ("data",), (None,), None),
    ((8, 8), DT, (DT, None), (8, 8)),
    ((52, 4), DT, (), None),  # whole, where it is small
    ((2**16, 4), DT, (), None),
    ((2**16 + 4, 4), DT, None, None),
    ((64, 14), (None, "tensor"), ("tensor", None), (64, 14)),
    ((64, 32), (None, "tensor"), None, None),
    ((64, 16), (None, "tensor"), None, None),  # eight numbers are not narrow
    ((64, 8), ("data", None), None, None),
    ((64, 3), (None, None), None, None),
]


@pytest.mark.parametrize(("shape", "axes", "drawn", "padded"), DRAWN)
def test_narrow_parts_are_drawn_split_by_rows(shape, axes, drawn, padded):
    def constraints(mesh):
        zeros, layout = lambda key, shape, dtype: jnp.zeros(shape, dtype), Layout(mesh, *axes)
        jaxpr = jax.make_jaxpr(lambda key: create(zeros, key, shape, jnp.float32, layout))(jax.random.key(3))
        assert [each.shape for each in jaxpr.out_avals] == [shape]
        asked = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "sharding_constraint"]
        return [(eqn.invars[0].aval.shape, eqn.params["sharding"].spec) for eqn in asked]

    moved = [] if padded is None else [(padded, jax.P(*drawn)), (padded, jax.P(*axes))]
    with cases.loaded({"jshard": {"mesh": {"data": 4, "tensor": 2}}}) as grid:
        assert constraints(grid) == ([] if drawn is None else [(shape, jax.P(*drawn)), *moved])
        assert constraints(grid.abstract_mesh) == []  # nothing is drawn there


@pytest.mark.quick(2)
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_numbers_of_narrow_dtypes_and_old_keys(dtype, axis_types):
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}}) as grid:
        key = jax.random.PRNGKey(3)
        born = create(INITIALIZERS["he_normal"], key, (16, 24), dtype, Layout(grid, "data", "tensor"))
        cases.assert_equal(born, INITIALIZERS["he_normal"](key, (16, 24), dtype))


@pytest.mark.quick("orthogonal")
@pytest.mark.parametrize("name", ["lecun_normal", "orthogonal"])
def test_linear_draws_what_nnx_linear_draws(name):
    """From the same seed, whatever was drawn before."""
    case = cases.BY_NAME["store column"]

    def drawn(linear):
        rngs = nnx.Rngs(7)
        make = lambda: linear(16, 24, kernel_init=INITIALIZERS[name], bias_init=nnx.initializers.normal(), rngs=rngs)
        return make(), make(), rngs.params()

    expected = drawn(nnx.Linear)
    with cases.loaded(case.configuration("2x4")), jshard.signal("layer"):
        actual = drawn(jshard.Linear)
    jax.tree.map(cases.assert_equal, nnx.state(actual[:2]), nnx.state(expected[:2]))
    assert not np.array_equal(actual[0].kernel[...], actual[1].kernel[...])
    assert actual[2] == expected[2]


# -- no full copy anywhere --


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", ["lecun_normal", "xavier_uniform", "normal", "zeros"])
@pytest.mark.parametrize("layout", ["8", "2x4", "4x2", "2x2x2"], indirect=True)
def test_creation_never_holds_a_full_copy_on_a_device(name, layout):
    shape, full = (2048, 2048), 4 * 2048 * 2048
    program = jax.jit(lambda key: create(INITIALIZERS[name], key, shape, jnp.float32, layout))
    memory = program.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == full // 8
    assert memory.temp_size_in_bytes < 3 * full // 8 + 4096  # random bits, and the numbers before and after a step


@pytest.mark.parametrize("shape", [(8192, 16), (8191, 16)])
def test_narrow_parts_are_moved_and_never_whole(shape):
    full = 4 * shape[0] * shape[1]
    with cases.loaded({"jshard": {"mesh": {"data": 4, "tensor": 2}}}) as grid:
        layout = Layout(grid, None, ("data", "tensor"))
        program = jax.jit(lambda key: create(INITIALIZERS["normal"], key, shape, jnp.float32, layout))
        memory = program.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5 * full // 8 + 4096


def test_arrays_of_a_tree_are_drawn_in_parts_with_the_numbers_of_one_device():
    def draw():
        key = jax.random.key(3)
        return {
            "w": INITIALIZERS["lecun_normal"](key, (1024, 512)),
            "narrow": INITIALIZERS["normal"](key, (64, 24)),
            "scale": jnp.ones(7),
            "key": key,
        }

    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}}) as grid:
        axes = {"w": ("data", "tensor"), "narrow": (None, ("data", "tensor")), "scale": (None,), "key": ()}
        made = {name: create_by(lambda name=name: draw()[name], Layout(grid, *each)) for name, each in axes.items()}
    for name, array in draw().items():
        assert made[name].sharding == Layout(grid, *axes[name]).sharding
        np.testing.assert_array_equal(*(jax.random.key_data(x) if name == "key" else x for x in (made[name], array)))


@pytest.mark.quick("1x1", "2x2x2", "8")
def test_a_second_creation_compiles_nothing(layout):
    def make():
        return create(INITIALIZERS["he_normal"], jax.random.key(0), (16, 24), jnp.float32, layout)

    make()
    assert cases.compilations(make) == 0


SCALE = [0.0]


def filled(scale):
    """An initializer of the user's own, that reads what is not among its arguments."""
    SCALE[0] = scale
    return lambda key, shape, dtype: jnp.full(shape, SCALE[0], dtype)


def test_initializer_made_again_draws_by_the_program_of_the_first_and_no_other_does():
    alike = (nnx.initializers.normal, nnx.initializers.constant, nnx.initializers.variance_scaling)
    arguments = [(0.5,), (0.0,), (1.0, "fan_in", "uniform", [-2])]
    others = [
        nnx.initializers.normal(0.25),
        nnx.initializers.constant(-0.0),
        nnx.initializers.constant(np.arange(24)),
        nnx.initializers.constant(np.arange(24) + 1),
        nnx.initializers.variance_scaling(1.0, "fan_out", "uniform", [-2]),
        nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", [-1], [-2]),
    ]
    key, shape = jax.random.key(3), (16, 24)
    with cases.loaded({"jshard": {"mesh": {"data": 2}}}) as grid:
        made = functools.partial(create, key=key, shape=shape, dtype=jnp.float32, layout=Layout(grid, "data", None))
        for count in (1, 0):
            for make, given in zip(alike, arguments, strict=True):
                assert cases.compilations(functools.partial(made, make(*given))) == count
        for each in others:
            np.testing.assert_array_equal(made(each), each(key, shape, jnp.float32))
            np.testing.assert_array_equal(np.signbit(made(each)), np.signbit(each(key, shape, jnp.float32)))
        assert [float(made(filled(scale)).mean()) for scale in (1.0, 2.0)] == [1.0, 2.0]


def test_layer_under_another_signal_or_configuration_is_drawn_by_the_same_programs():
    rngs = nnx.Rngs(0)

    def drawn(first):
        signals = {"a": first, "b": {"column": "tensor"}}
        with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals}):
            for name in signals:
                with jshard.signal(name):
                    layer = jshard.Linear(16, 24, rngs=rngs)
            return layer.kernel[...]

    drawn({"row": "data", "column": "tensor"})
    assert cases.compilations(lambda: drawn({"column": "tensor", "output": "gather"})) == 0


def test_a_new_array_that_does_not_divide():
    with (
        cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}}) as grid,
        pytest.raises(jshard.JShardError) as error,
    ):
        create(INITIALIZERS["normal"], jax.random.key(0), (16, 250), jnp.float32, Layout(grid, None, "tensor"))
    assert str(error.value) == (
        'a new array splits axis 1 of size 250 over mesh axis "tensor" of size 4; use 248 or 252, or pad'
    )
