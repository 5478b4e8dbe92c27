"""What the body of a product computes, and in which dtypes it sums: traced, and nothing is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jshard
from jshard.programs.jaxprs import equations


def traced(words, of="value", d=2, **arguments):
    """The equations of a layer's value, or of the gradients of its parameters and input."""
    jshard.load({"jshard": {"mesh": {"d": d, "t": 8 // d}}, "layer": words})
    with jshard.signal("layer"):
        graph, state = nnx.split(jshard.Linear(8, 16, rngs=nnx.Rngs(0), **arguments))
    value = lambda state, x: nnx.merge(graph, state)(x)
    gradient = jax.grad(lambda state, x: value(state, x).astype(jnp.float32).sum(), argnums=(0, 1))
    x = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
    return [*equations(jax.make_jaxpr({"value": value, "gradient": gradient}[of])(state, x))]


def names(words, **arguments):
    return {eqn.primitive.name.removesuffix("_invariant") for eqn in traced(words, **arguments)}


GATHERED, SCATTERED = {"column": "t", "sequence": "t"}, {"reduction": "t", "sequence": "t"}
MIXED = {"dtype": {"compute": "bfloat16", "reduce": "float32"}}
FUSED = {
    "a gather": (GATHERED, {}, {"all_gather"}),
    "a gather by permutes": (GATHERED, {"all_gather_matmul": "permute"}, {"ppermute"}),
    "no gather": ({"column": "t"}, {"all_gather_matmul": "permute"}, set()),
    "a scatter": (SCATTERED, {}, {"reduce_scatter"}),
    "a scatter by permutes": (SCATTERED, {"matmul_reduce_scatter": "permute"}, {"ppermute"}),
    "no scatter": ({"reduction": "t"}, {"matmul_reduce_scatter": "permute"}, {"psum"}),
    "a gather and a scatter": (
        {**GATHERED, "reduction": "d", "output": "scatter"}, {"matmul_reduce_scatter": "permute"}, {"all_gather", "ppermute"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FUSED)
def test_a_product_goes_with_its_gather_or_scatter_where_the_signal_names_how(case):
    words, kernel, expected = FUSED[case]
    found = names({**words, "kernel": kernel}) & {"all_gather", "reduce_scatter", "psum", "ppermute"}
    assert found == expected


@pytest.mark.parametrize("words", [{"column": "t"}, {"row": "d"}], ids=str)
def test_a_product_without_a_gather_or_scatter_is_that_of_its_own_kernel(words):
    with jshard.kernels.interpret():
        found = names(
            {
                **words,
                "kernel": {"matmul": "pallas", "all_gather_matmul": "permute", "matmul_reduce_scatter": "permute"},
            }
        )
    assert "pallas_call" in found and not found & {"ppermute", "all_gather", "reduce_scatter"}


def test_a_product_that_goes_with_its_gather_or_scatter_is_of_the_dtype_that_is_asked_for():
    by = {"kernel": {"all_gather_matmul": "permute", "matmul_reduce_scatter": "permute"}}
    for words, arguments, expected in (
        ({**GATHERED, **by}, {"preferred_element_type": jnp.bfloat16}, "float32"),
        ({**SCATTERED, **by}, {"preferred_element_type": jnp.bfloat16}, "bfloat16"),
        ({**SCATTERED, **MIXED, **by}, {}, "float32"),
    ):
        every = traced(words, **arguments)
        assert {v.aval.dtype.name for eqn in every if eqn.primitive.name == "ppermute" for v in eqn.invars} == {
            expected
        }


@pytest.mark.parametrize("words", [{}, {"reduce": "float32"}], ids=str)
def test_operands_are_promoted_once(words):
    asked = []

    def promote(arrays, *, dtype=None):
        asked.append(dtype)
        return arrays

    traced({"row": "d", "dtype": words}, promote_dtype=promote)
    assert len(asked) == 1


def test_a_product_of_ones_own_is_given_a_dtype_where_one_is_asked_for():
    asked = []

    def dot_general(x, w, numbers, precision=None, **more):
        asked.append(more)
        return lax.dot_general(x, w, numbers, precision=precision, **more)

    traced({"row": "d"}, dot_general=dot_general)
    traced({"row": "d"}, dot_general=dot_general, preferred_element_type=jnp.bfloat16)
    traced({"reduction": "t", "dtype": {"reduce": "float32"}}, dot_general=dot_general, dtype=jnp.bfloat16)
    assert asked == [{}, {"preferred_element_type": jnp.bfloat16}, {"preferred_element_type": "float32"}]


@pytest.mark.parametrize("rests", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "words", [{"row": "d"}, {"row": "d", "column": "t"}, {"row": "d", "store": "d"}, GATHERED], ids=str
)
def test_products_are_narrow_and_sums_wide(words, rests):
    every = traced({**words, **MIXED}, "gradient", param_dtype=rests)
    products = {v.aval.dtype.name for eqn in every if eqn.primitive.name == "dot_general" for v in eqn.invars}
    sums = {
        v.aval.dtype.name
        for eqn in every
        if eqn.primitive.name.startswith(("psum", "reduce_scatter", "all_to_all"))
        for v in eqn.invars
        if v.aval.ndim
    }
    assert (products, sums) == ({"bfloat16"}, {"float32"})


@pytest.mark.parametrize(("how", "sums"), [("auto", []), ("in_order", [("d", 4 * (8 * 8 + 8))])])
def test_gradients_over_the_same_devices_are_summed_together_where_the_order_counts(how, sums):
    """Those of the kernel and the bias. That of the input is over two devices, whose order is none."""
    every = traced({"row": "d", "column": "t", "kernel": {"all_reduce": how}}, "gradient", d=4)
    found = [eqn for eqn in every if eqn.primitive.name == "all_to_all"]
    assert [(*eqn.params["axis_name"], eqn.invars[0].aval.size) for eqn in found] == sums
    forward = traced({"row": "d", "kernel": {"all_reduce": how}}, d=4)
    marked = [eqn for eqn in forward if eqn.primitive.name == "custom_vjp_call" and len(eqn.invars) == 2]
    assert bool(marked) == bool(sums)  # else JAX marks them
    left = [eqn.params["axes"] for eqn in every if eqn.primitive.name.startswith("psum")]
    assert sorted(left) == ([("t",)] if sums else [("d",), ("d",), ("t",)])
