"""What is split is gathered in the dtype of its use, and its gradient is scattered in its own."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jshard.layers.gather import gather

ROWS, COLUMNS, EQUAL = (
    (0, "data", True),
    (1, "tensor", True),
    (0, "data", False),
)  # the use of EQUAL is the same along data
BF16, F32 = jnp.bfloat16, jnp.float32
PERMUTED = {"kernels": (("all_gather", "permute"),)}
SCATTERED = {"kernels": (("reduce_scatter", "permute"),)}
IN_ORDER = {"kernels": (("all_gather", "in_order"), ("reduce_scatter", "xla"))}
PERMUTE = "dynamic_slice f32, ppermute f32"
ASKED = re.compile(r":(\w+)\[[^=\n]* = (all_gather|all_gather_invariant|reduce_scatter|ppermute|dynamic_slice)\[")


def shared(mesh, f, *, of=F32, check_vma=True):
    """Run on each device's part of 8 x 8 numbers, and those."""
    on, spec = mesh(data=2, tensor=4), P("data", "tensor")
    x = jax.device_put(np.arange(64.0).reshape(8, 8).astype(of), jax.NamedSharding(on, spec))
    return jax.shard_map(f, mesh=on, in_specs=spec, out_specs=spec, check_vma=check_vma), x


CASES = {  # what a gather and its gradient ask for, and whether JAX transposes the gather itself
    "as it is": ((ROWS, COLUMNS), {}, "all_gather f32, reduce_scatter f32", True),
    "of one axis": ((COLUMNS,), {}, "all_gather f32, reduce_scatter f32", True),
    "equal": ((EQUAL,), {}, "all_gather_invariant f32, dynamic_slice f32", True),
    "narrow": ((ROWS, COLUMNS), {"dtype": BF16}, "all_gather bf16, reduce_scatter f32", False),
    "narrow and equal": ((EQUAL,), {"dtype": BF16}, "all_gather_invariant bf16, dynamic_slice f32", False),
    "narrow and equal, where nobody knows": (
        (EQUAL,), {"dtype": BF16, "check_vma": False}, "all_gather_invariant bf16, reduce_scatter f32", False,
    ),
    "wide": ((ROWS, COLUMNS), {"dtype": F32, "of": BF16}, "all_gather f32, reduce_scatter bf16", False),
    "whole": ((), {"dtype": BF16}, "", True),
    "by permutes": ((ROWS,), PERMUTED, "ppermute f32, reduce_scatter f32", False),
    "scattered by permutes": ((ROWS, COLUMNS), SCATTERED, f"all_gather f32, {PERMUTE}", False),
    "nothing that is scattered": ((EQUAL,), SCATTERED, "all_gather_invariant f32, dynamic_slice f32", True),
    "in order in one process": ((ROWS,), IN_ORDER, "all_gather f32, reduce_scatter f32", True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_gather_and_its_gradient_ask_for(case, mesh):
    steps, how, wanted, by_jax = CASES[case]
    on = {key: value for key, value in how.items() if key in ("of", "check_vma")}
    how = {key: value for key, value in how.items() if key not in on}

    def both(x):
        y, pull = jax.vjp(lambda x: gather(x, steps, **how), x)
        return pull(jnp.ones_like(y))[0]

    mapped, x = shared(mesh, both, **on)
    text = str(jax.make_jaxpr(mapped)(x))
    if not on.get("check_vma", True) and jax.__version_info__ >= (0, 12):  # which knows one gather alone then
        wanted = wanted.replace("_invariant", "")
    assert ", ".join(sorted({f"{kind} {dtype}" for dtype, kind in ASKED.findall(text)})) == wanted
    assert ("name=_gather\n" not in text) == by_jax


@pytest.mark.parametrize("how", [{}, {"dtype": BF16}, PERMUTED, SCATTERED], ids=str)
def test_what_is_gathered_is_whole_and_its_gradient_the_sum_of_all_uses(how, mesh):
    def both(x):
        y, pull = jax.vjp(lambda x: gather(x, (EQUAL, COLUMNS), **how), x)
        (gradient,) = pull(y * (1 + jax.lax.axis_index("tensor")).astype(y.dtype))
        return jnp.sum(y.astype(F32)) + 0 * x, gradient

    mapped, x = shared(mesh, both)
    of_all, gradient = jax.jit(mapped)(x)
    np.testing.assert_array_equal(of_all, np.full((8, 8), 63 * 32))
    np.testing.assert_array_equal(gradient, 10 * x)
