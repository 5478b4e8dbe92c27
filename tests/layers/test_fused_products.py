"""Which products are cut behind them and count as one for each piece of their kernel, and that the pieces are those of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.fused import fused

rng = np.random.default_rng(0)
X, KERNEL, BIAS = (rng.normal(size=shape).astype(np.float32) for shape in ((48, 16), (16, 48), (48,)))


def pieces(y, *begins, size=16, step=1):
    return [lax.slice(y, (0, at), (len(y), at + size), (1, step)) for at in begins]


def by_heads(x, w, b):
    y = (x @ w + b).reshape(48, 3, 4, 4)
    return [y[:, at] for at in range(3)]


def beside_numbers(x, w, b):
    """What is added is a product of matrices that are as long as they are wide: only their columns are cut."""
    return jnp.split(x @ w + jnp.outer(x[:, 0], b) * jnp.outer(b, x[:, 1]), 3, -1)


def added_twice(x, w, b):
    c = jnp.exp(b)
    return jnp.split((x @ w + c) * c, 3, -1)


def of_rows_and_kernels(x, w, b):
    return jnp.split(lax.dot_general(x[None], w[None], (((2,), (1,)), ((0,), (0,)))), 3, -1)


FUSED = {
    "split": lambda x, w, b: jnp.split(x @ w, 3, -1),
    "with a bias": lambda x, w, b: jnp.split(jnp.sin(x @ w + b), 3, -1),
    "with a bias that is made of it": lambda x, w, b: jnp.split(x @ w + b * jnp.exp(b), 3, -1),
    "with a bias that is added twice": added_twice,
    "less a number": lambda x, w, b: jnp.split(x @ w + (b - b[0]), 3, -1),
    "of one row": lambda x, w, b: jnp.split(x[0] @ w, 3, -1),
    "of one row and its kernel": of_rows_and_kernels,
    "scaled by a number": lambda x, w, b: jnp.split(x @ w * b[0], 3, -1),
    "beside numbers": beside_numbers,
    "by heads": by_heads,
    "beside a constant": lambda x, w, b: [*jnp.split(x @ w, 3, -1), 1.0],
    "in another order, and not all": lambda x, w, b: pieces(x @ w + b, 32, 0),
    "of a kernel whose columns are rows": lambda x, w, b: jnp.split(lax.dot_general(x, w.T, (((1,), (1,)), ((), ()))), 3, -1),
}  # fmt: skip


def returned(x, w, b):
    y = x @ w
    return [y, *jnp.split(y, 3, -1)]


def used_whole(x, w, b):
    y = x @ w
    return [jnp.sin(y), *jnp.split(y, 3, -1)]


def added_to_its_input(x, w, b):
    x, w = x[:16], w[:, :16]
    return jnp.split(x @ w + x, 2, -1)


def of_bytes(x, w, b):
    y = (x.astype(np.int8) @ w.astype(np.int8)).reshape(48, 12, 4)
    return jnp.split(lax.bitcast_convert_type(y, np.int32), 3, -1)


NOT_FUSED = {
    "cut nowhere": lambda x, w, b: [x @ w + b],
    "returned": returned,
    "used whole": used_whole,
    "unequal pieces": lambda x, w, b: jnp.split(x @ w, [16, 24], -1),
    "begins within a piece": lambda x, w, b: pieces(x @ w, 8, 24),
    "every other column": lambda x, w, b: pieces(x @ w, 0, 32, size=16, step=2),
    "all of every other column": lambda x, w, b: pieces(x @ w, 0, size=48, step=2),
    "a piece twice as long": lambda x, w, b: jnp.split(x @ w, [16], -1),
    "a piece half as long": lambda x, w, b: [y := x @ w, *pieces(y, 0), *pieces(y, 32, size=8)][1:],
    "pieces that leave a rest": lambda x, w, b: pieces(x @ w[:, :40], 0, 16),
    "cut by rows": lambda x, w, b: jnp.split(x @ w, 3, 0),
    "several axes of a kernel": lambda x, w, b: jnp.split(jnp.einsum("bd,dhk->bhk", x, w.reshape(16, 3, 16)), 2, -1),
    "its input is added": added_to_its_input,
    "times a vector": lambda x, w, b: jnp.split(x @ w[:, 0], 3),
    "with an axis more": lambda x, w, b: jnp.split(lax.broadcast_in_dim(x @ w, (48, 48, 1), (0, 1)), 3, 1),
    "reversed": lambda x, w, b: jnp.split((x @ w)[:, ::-1], 3, -1),
    "shaped twice": lambda x, w, b: jnp.split((x @ w).reshape(48, 3, 16).reshape(48, 48), 3, -1),
    "fewer rows of more": lambda x, w, b: jnp.split((x.reshape(4, 12, 16) @ w).reshape(2, 24, 48), 3, -1),
    "more rows of fewer": lambda x, w, b: jnp.split((x.reshape(4, 12, 16) @ w).reshape(8, 6, 48), 3, -1),
    "in another order": lambda x, w, b: [y := lax.reshape(x @ w, (48, 3, 16), (1, 0)), *(y[:, at] for at in range(3))][1:],
    "bytes of it": lambda x, w, b: jnp.split(lax.bitcast_convert_type(x @ w, np.uint8), 3, 1),
    "what its bytes are": of_bytes,
    "columns are joined with rows": lambda x, w, b: jnp.split((x @ w).reshape(16, 3 * 48), 3, -1),
}  # fmt: skip


def found_in(f):
    jaxpr = jax.make_jaxpr(f)(X, KERNEL, BIAS).jaxpr
    called = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    assert not any(eqn.primitive.name == "dot_general" for body in called for eqn in body.eqns)
    return jaxpr, fused(jaxpr)


@pytest.mark.parametrize("case", FUSED)
def test_pieces_of_a_kernel_give_pieces_of_its_product(case):
    jaxpr, found = found_in(FUSED[case])
    one, *others = found.values()
    assert all(each is one for each in others)
    assert (one.count, one.size) == (3, 16)
    assert one.kernel is [*one.inputs][1]
    assert jaxpr.invars[2] in one.inputs or "bias" not in case  # and not what is made of it
    assert not any(eqn.outvars[0] in one.inputs for eqn in one.chain)
    assert len({id(eqn) for eqn, _ in one.beside}) == len(one.beside)
    every = jaxpr.replace(outvars=[*one.inputs, *one.pieces], debug_info=jaxpr.debug_info.with_unknown_names())
    computed = jax.core.eval_jaxpr(every, [], X, KERNEL, BIAS)
    given, wanted = computed[: len(one.inputs)], computed[len(one.inputs) :]
    got = one.run(*given)
    for (variable, at), want in zip(one.pieces.items(), wanted, strict=True):
        np.testing.assert_allclose(got[at], want, rtol=1e-4, atol=1e-5, err_msg=str(variable))


@pytest.mark.parametrize("case", NOT_FUSED)
def test_a_product_that_pieces_of_its_kernel_do_not_give_is_left_whole(case):
    assert not found_in(NOT_FUSED[case])[1]
