"""Rules of products: what they tell of a parameter, in which dtype they sum, and where a sum or a gather lies."""

from __future__ import annotations

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard.layers import partition
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import equations
from jshard.signals.claims import Claim
from tests.support import cases

SIZES = {"data": 2, "tensor": 4}
D, T = ("data",), ("tensor",)


def numbers(*shape):
    """Whole ones, whose products and sums are exact in float32 and not in bfloat16."""
    return np.random.default_rng(math.prod(shape)).integers(-15, 15, shape).astype(np.float32)


def placed(on, program, *arrays):
    return [jax.device_put(x, Layout(on, *axes).sharding) for x, axes in zip(arrays, program.in_axes, strict=True)]


def claimed(on, f, words, w, x, split=None):
    """A program of a parameter and an array, and the two where it asks for them."""
    signals = jshard.load({"jshard": {"mesh": SIZES}, "a": {**words, "match": ["**"]}}).signals
    inputs = [partition.Input(claim=Claim(signals["a"], "**"), path="w"), partition.Input(split or ((),) * x.ndim)]
    program = partition.Program(on, jax.make_jaxpr(f)(w, x), inputs)
    return program, placed(on, program, w, x)


def conv(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


ROLES = {  # how a product by it splits a parameter
    "kernel": (lambda w, x: x @ w, (8, 8), (4, 8), (D, T)),
    "its transpose": (lambda w, x: x @ w.T, (8, 8), (4, 8), (T, D)),
    "kernels of experts": (lambda w, x: jnp.einsum("ebi,eio->ebo", x, w), (3, 8, 8), (3, 4, 8), ((), D, T)),
    "kernels of experts, before": (lambda w, x: jnp.einsum("eio,ebi->eob", w, x), (3, 8, 8), (3, 4, 8), ((), D, T)),
    "of an axis more": (lambda w, x: jnp.einsum("bi,zio->bzo", x, w.reshape(1, 8, 8)), (8, 8), (4, 8), (D, T)),
    "of a convolution": (lambda w, x: conv(x, w), (3, 3, 8, 4), (2, 4, 4, 8), ((), (), D, T)),
    "kernels of groups": (lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 0, 3])), (3, 8, 8), (4, 8), ((), D, T)),
    "image": (lambda w, x: conv(w, x), (4, 4, 4, 8), (3, 3, 8, 4), (T, (), (), D)),
    "image of groups": (lambda w, x: conv(w, x, 2), (4, 4, 4, 8), (3, 3, 4, 4), (T, (), (), ())),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLES)
def test_a_product_tells_which_axes_of_a_parameter_are_summed_and_which_kept(mesh, case):
    f, of_w, of_x, expected = ROLES[case]
    program, _ = claimed(mesh(**SIZES), f, {"column": "tensor", "reduction": "data"}, numbers(*of_w), numbers(*of_x))
    assert program.in_axes[0] == expected


NARROW, WIDE = {"compute": "bfloat16"}, {"compute": "bfloat16", "reduce": "float32"}


@pytest.mark.parametrize(
    ("word", "dtypes", "made_in"),
    [("column", WIDE, jnp.bfloat16), ("column", NARROW, jnp.bfloat16), ("reduction", WIDE, jnp.float32)],
)
def test_what_nothing_sums_is_in_the_compute_dtype_and_what_devices_sum_is_exact(mesh, word, dtypes, made_in):
    w, x = numbers(16, 8), numbers(4, 16)
    words = {word: "tensor", "dtype": dtypes}
    program, given = claimed(mesh(**SIZES), lambda w, x: x @ w, words, w, x)
    (made,) = (eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if eqn.primitive is lax.dot_general_p)
    assert made.outvars[0].aval.dtype == made_in
    (found,) = jax.jit(program)(*given)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, x @ w, rtol=0 if word == "reduction" else 2**-8)


def test_a_convolution_in_the_compute_dtype_is_summed_in_the_other_and_has_a_gradient(mesh):
    on, (w, x) = mesh(**SIZES), (numbers(1, 1, 16, 8), numbers(2, 2, 2, 16))
    words = {"reduction": "tensor", "dtype": {"compute": "bfloat16", "reduce": "float32"}}
    f = lambda w, x: conv(x, w)
    program, given = claimed(on, f, words, w, x)
    step = lambda f: jax.value_and_grad(lambda w, x: jnp.sum(jax.tree.leaves(f(w, x))[0]))
    traced = jax.make_jaxpr(step(program))(*given)
    (made,) = (eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if "conv_" in eqn.primitive.name)
    assert made.outvars[0].aval.dtype == jnp.bfloat16
    sums = [eqn.invars[0].aval for eqn in equations(traced) if eqn.primitive.name.startswith("psum")]
    assert {(each.shape, each.dtype.name) for each in sums if each.shape} == {((2, 2, 2, 8), "float32")}
    value, gradient = jax.jit(step(program))(*given)
    wanted = step(f)(w, x)
    np.testing.assert_allclose(value, wanted[0], rtol=0.02)
    np.testing.assert_allclose(gradient, wanted[1], rtol=0.02)


SCATTERED = {  # the shape of what is multiplied, and over which axes the product lies then
    (8,): (T,),
    (4, 8): (T, ()),
    (2, 4, 8): ((), T, ()),
    (2, 4, 3, 8): ((), T, (), ()),
    (2, 3, 8): ((), (), ()),
    (2, 5, 8): ((), (), ()),
}


@pytest.mark.parametrize("shape", SCATTERED, ids=str)
def test_a_sum_is_scattered_along_the_positions_where_they_divide(mesh, shape):
    on, (w, x) = mesh(**SIZES), (numbers(8, 8), numbers(*shape))
    program, given = claimed(on, lambda w, x: x @ w, {"reduction": "tensor", "sequence": "tensor"}, w, x)
    assert program.out_axes == [SCATTERED[shape]]
    divides = T in SCATTERED[shape]
    wanted = ("reduce_scatter", "sequence") if divides else ("psum", "reduction")
    assert cases.keys_of_collectives(jax.make_jaxpr(program)(*given)) == [wanted]


def test_of_two_mesh_axes_the_one_of_the_sequence_is_scattered_and_the_other_summed(mesh):
    on, (w, x) = mesh(**SIZES), (numbers(8, 8), numbers(2, 4, 8))
    program, given = claimed(on, lambda w, x: x @ w, {"reduction": ["data", "tensor"], "sequence": "tensor"}, w, x)
    assert program.out_axes == [((), T, ())]
    np.testing.assert_array_equal(jax.jit(program)(*given)[0], x @ w)
    found = cases.keys_of_collectives(jax.make_jaxpr(program)(*given))
    assert sorted(found) == [("psum", "reduction"), ("reduce_scatter", "sequence")]


def test_a_sum_that_no_signal_asks_for_is_under_none(mesh):
    on, (w, x) = mesh(**SIZES), (numbers(8, 8), numbers(4, 8))
    inputs = [partition.Input((T, ())), partition.Input(((), T))]
    program = partition.Program(on, jax.make_jaxpr(lambda w, x: x @ w)(w, x), inputs)
    given = placed(on, program, w, x)
    ((name, key),) = cases.keys_of_collectives(jax.make_jaxpr(program)(*given))
    assert name == "psum" and not key


BIAS = np.arange(8, dtype=np.float32)
GATHERED = {  # what is done with columns, in order
    "nothing": (lambda w, x: x @ w, ["gather"]),
    "a bias": (lambda w, x: x @ w + BIAS, ["add", "gather"]),
    "a bias of one row": (lambda w, x: x[0] @ w + BIAS, ["add", "gather"]),
    "a number": (lambda w, x: x @ w + 2.0, ["gather", "add"]),
    "rows": (lambda w, x: x @ w + x, ["gather", "add"]),
    "a factor": (lambda w, x: x @ w * BIAS, ["gather", "mul"]),
    "a bias, and it is read once more": (lambda w, x: (lambda y: (y + BIAS) * y)(x @ w), ["gather", "add", "mul"]),
    "a bias, and it is a result too": (lambda w, x: (lambda y: (y, y + BIAS))(x @ w), ["gather", "add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", GATHERED)
def test_columns_are_gathered_behind_a_bias_and_before_all_else(mesh, case):
    f, order = GATHERED[case]
    program, given = claimed(mesh(**SIZES), f, {"column": "tensor", "output": "gather"}, numbers(8, 8), numbers(4, 8))
    assert not any(name for axes in program.out_axes for names in axes for name in names)
    made = [eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if eqn.outvars[0].aval.shape]
    done = [eqn.primitive.name.removeprefix("all_").removesuffix("_invariant") for eqn in made]
    assert [name for name in done if name in ("gather", "add", "mul")] == order


PERMUTE = {"all_gather": "permute", "reduce_scatter": "permute"}


@pytest.mark.quick("twice")
@pytest.mark.parametrize(("f", "scatters"), [
    (lambda w, x: jax.checkpoint(jnp.sin)(x @ w), 1),
    (lambda w, x: jax.checkpoint(jnp.sin)(w @ x.T), 1),
    (lambda w, x: jax.checkpoint(jnp.sin)(x @ w) + x[::-1] @ w, 1),
], ids=["behind", "before", "twice"])  # fmt: skip
def test_a_stored_kernels_gradient_is_scattered_once_by_permutes(mesh, f, scatters):
    on, (w, x) = mesh(**SIZES), (numbers(8, 8), numbers(4, 8))
    words = {"row": "data", "store": "data", "kernel": PERMUTE}
    program, given = claimed(on, f, words, w, x, (D, ()))
    step = lambda f: jax.grad(lambda w, x: jnp.sum(jnp.sin(jax.tree.leaves(f(w, x))[0])))
    traced = jax.make_jaxpr(step(program))(*given)
    forward = sum(name == "ppermute" for name, _ in cases.keys_of_collectives(jax.make_jaxpr(program)(*given)))
    assert sum(name == "ppermute" for name, _ in cases.keys_of_collectives(traced)) - forward == scatters
    np.testing.assert_allclose(jax.jit(step(program))(*given), step(f)(w, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "waits"), [(8, True), (16, False), (32, False)])
@pytest.mark.parametrize("chip", ["v5e", None])
def test_a_gradient_is_sent_first_on_tpus_where_a_kernel_is_larger_than_what_it_multiplies(mesh, rows, waits, chip):
    """Of a kernel of 64 numbers that waits in memory; a device has half of the rows."""
    on, (w, x) = mesh(**SIZES), (numbers(8, 8), numbers(rows, 8))
    with contextlib.nullcontext() if chip is None else jshard.kernels.interpret(chip=chip):
        f = lambda w, x: jax.checkpoint(jnp.sin)(x @ w)
        program, given = claimed(on, f, {"row": "data", "store": "data"}, w, x, (D, ()))
        step = jax.grad(lambda w, x: jnp.sum(program(w, x)[0]), argnums=(0, 1))
        names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(*given))]
    assert ("min" in names) == (waits and chip is not None)


@pytest.mark.parametrize(
    "words", [{"column": "tensor"}, {"reduction": "tensor"}, {"row": "data", "store": "data"}], ids=str
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_product_of_groups_is_that_of_one_device(mesh, words, compute):
    w, x, sizes = numbers(3, 8, 8), numbers(8, 8), np.array([3, 0, 5], np.int32)

    def loss(f):
        return jax.jit(
            jax.value_and_grad(lambda w, x: sum((jnp.abs(y) / 512).sum() for y in jax.tree.leaves(f(w, x))), (0, 1))
        )

    f = lambda w, x: lax.ragged_dot(x, w, sizes)
    program, given = claimed(
        mesh(**SIZES), f, {**words, "dtype": {"compute": compute, "reduce": "float32"}}, w, x, (D, ())
    )
    found, wanted = loss(program)(*given), loss(f)(w, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6 if compute == "float32" else 2e-2)
