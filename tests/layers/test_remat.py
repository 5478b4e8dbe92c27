"""What a word of `remat` keeps for the backward pass, one operation at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import jshard
from jshard.kernels.kernel_traffic import declare
from jshard.layers.remat import CHUNK, recomputed
from jshard.programs.jaxprs import equations

W = np.ones((4, 4), np.float32)


def two(x):
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ W, "a")) @ W, "b")) @ W


def products_backward(remat, **how):
    program = jax.make_jaxpr(jax.grad(lambda x: recomputed(two, remat, **how)(x).sum()))(W)
    return [eqn.primitive.name for eqn in equations(program)].count("dot_general")


@pytest.mark.parametrize(
    ("remat", "regather", "anew"),
    [
        ("full", False, 2),
        ("full", True, 2),
        ("products", False, 0),
        ("", True, 0),
        (("a", "b"), False, 0),
        (("b",), False, 1),
    ],
)
def test_a_word_says_which_products_are_computed_anew(remat, regather, anew):
    assert products_backward(remat, regather=regather) == 3 + anew + 3


def test_what_keeps_all_stays_as_it_is_and_no_loop_is_guarded():
    assert recomputed(two, "") is two and recomputed(two, CHUNK) is two
    (eqn,) = jax.make_jaxpr(recomputed(two, "full"))(W).eqns
    assert eqn.params["prevent_cse"]


def kernel(op):
    def add_one(x, y):
        y[...] = x[...] + 1

    metadata = op and declare(op, "data", jax.typeof(W), algorithm="one_shot", wire=0)
    return lambda x: pl.pallas_call(add_one, jax.typeof(W), interpret=True, metadata=metadata)(x)


def cast(dtype):
    return lambda x: x.astype(dtype)


def gather(x):
    return lax.all_gather(x, "data")


def gather_kernel(x):
    """As that of jshard, by its name."""
    return jnp.sin(x)


CASES = {
    "a product": (lambda x: x @ W, True),
    "a gather": (gather, False),
    "another shape": (lambda x: x.reshape(-1), False),
    "a smaller dtype": (cast(jnp.bfloat16), True),
    "a wider dtype": (lambda x: cast(jnp.float32)(x), False),
    "another dtype as wide": (cast(jnp.int32), False),
    "a kernel that says nothing": (kernel(None), True),
    "a kernel that gathers": (kernel("all_gather"), False),
    "a kernel that sums": (kernel("all_reduce"), True),
    "a kernel that multiplies": (kernel("permute"), True),
    "a gather in a smaller dtype": (jax.jit(lambda x: gather(cast(jnp.bfloat16)(x))), False),
    "a sum inside of a call": (jax.jit(lambda x: x + x), True),
    "a sine inside of a call": (jax.jit(jnp.sin), True),
    "a gather by a kernel": (jax.jit(gather_kernel), False),
}


@pytest.mark.parametrize("case", CASES)
def test_where_what_was_gathered_is_gathered_again_all_else_is_kept(case):
    f, is_kept = CASES[case]
    x = W.astype(jnp.bfloat16) if case == "a wider dtype" else W
    jshard.load({"jshard": {"mesh": {"data": 8}}})
    eqn = jax.make_jaxpr(f, axis_env=[("data", 8)])(x).eqns[-1]
    policy = jax.make_jaxpr(recomputed(jnp.sin, "", regather=True))(x).eqns[0].params["policy"]
    assert policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params) == is_kept


@pytest.mark.parametrize("remat", ["full", "products", "", ("a",)])
def test_complex_numbers_are_computed_anew_from_real_ones(remat):
    """JAX has no rounding of complex numbers, which it does to what a checkpoint keeps."""

    def waves(x, z):
        y = checkpoint_name(jnp.sin(jnp.fft.fft(checkpoint_name(x @ W, "a")) * z), "b")
        return jnp.abs(jnp.fft.ifft(y @ W))

    x = jnp.arange(16.0).reshape(4, 4) / 16
    slopes = [
        jax.grad(lambda x, z, f=f: f(x, z).sum(), (0, 1))(x, x * (1 + 1j))
        for f in (recomputed(waves, remat, regather=True), waves)
    ]
    for one, other in zip(*slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
