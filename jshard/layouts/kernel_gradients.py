"""Gradients of kernels without copies, for XLA on CPUs.

JAX writes the gradient of `w` in `x @ w` as the transpose of `g^T x`. XLA for CPUs folds this
transpose into the product: it writes a transposed copy of `g`, number by number, and multiplies by
its slower library. `x^T g` is the same float32 sums in half the time (docs/design/0006-speed.md).
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

KNOWN = {"stablehlo.transpose": {"permutation"}, "stablehlo.dot_general": {"dot_dimension_numbers", "precision_config"}}


def turn_products(operation: Any) -> None:
    """Replace the transpose of a product, not used elsewhere, by the product with swapped operands."""
    if not _is_plain(operation, "stablehlo.transpose"):
        return
    product = operation.operands[0].owner
    if not _is_plain(product, "stablehlo.dot_general") or [*product.results[0].uses][1:]:
        return
    left, right = product.operands
    if any(not isinstance(each.type.element_type, ir.F32Type) for each in (left, right, *product.results)):
        return
    of = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    batch, summed = len(of.lhs_batching_dimensions), len(of.lhs_contracting_dimensions)
    one, other = (len(each.type.shape) - batch - summed for each in (left, right))
    turned = [*range(batch), *range(batch + one, batch + one + other), *range(batch, batch + one)]
    if [*ir.DenseI64ArrayAttr(operation.attributes["permutation"])] != turned:
        return
    with ir.InsertionPoint(operation), product.location:
        numbers = stablehlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=of.rhs_batching_dimensions,
            rhs_batching_dimensions=of.lhs_batching_dimensions,
            lhs_contracting_dimensions=of.rhs_contracting_dimensions,
            rhs_contracting_dimensions=of.lhs_contracting_dimensions,
        )
        precision = None
        if "precision_config" in product.attributes:  # of each operand
            precision = ir.ArrayAttr.get([*product.attributes["precision_config"]][::-1])
        new = stablehlo.dot_general(operation.results[0].type, right, left, numbers, precision_config=precision)
    operation.results[0].replace_all_uses_with(new)
    operation.erase()
    product.erase()


def _is_plain(operation: Any, name: str) -> bool:
    """Return whether an operation has this name, and only attributes known to this module."""
    if getattr(operation, "name", "") != name:  # a block's argument has none
        return False
    return {getattr(each, "name", each) for each in operation.attributes} <= KNOWN[name]
