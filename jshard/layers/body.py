"""The per-device program of `x @ w + b` under a strategy: the product, and the strategy's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.kernels.all_reduction import all_reduce, pvary_summed
from jshard.kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jshard.kernels.collectives import check_vma_enabled, pvary
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import matmul
from jshard.kernels.select_algorithm import is_psum
from jshard.layers.gather import gather
from jshard.layers.remat import activation, recomputed
from jshard.layers.strategy import Names, Strategy
from jshard.programs.provenance import scope


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtype, precision and product functions of a multiplication, as the arguments of `nnx.Linear`."""

    dtype: Any = None
    precision: Any = None
    preferred_element_type: Any = None
    dot_general: Callable[..., jax.Array] = lax.dot_general
    promote_dtype: Callable[..., Any] | None = None

    def promoted(
        self, x: jax.Array, w: jax.Array, b: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        if self.promote_dtype is None:
            return x, w, b
        return self.promote_dtype((x, w, b), dtype=self.dtype)

    @property
    def is_plain(self) -> bool:
        """True if a kernel may replace the product."""
        return self.dot_general is lax.dot_general and self.precision is None

    def product(self, x: jax.Array, w: jax.Array, preferred: Any, algorithm: Any = "xla") -> jax.Array:
        preferred = self.preferred_element_type if preferred is None else preferred
        if self.dot_general is lax.dot_general:
            return matmul(x, w, precision=self.precision, preferred_element_type=preferred, algorithm=algorithm)
        more = {} if preferred is None else {"preferred_element_type": preferred}
        return self.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision, **more)


@dataclasses.dataclass(frozen=True)
class Body:
    """The per-device program of a product; `x_mk`, `w_kn`, `b_n` and the result are a device's shards."""

    strategy: Strategy
    arithmetic: Arithmetic

    def __call__(self, x_mk: jax.Array, w_kn: jax.Array, b_n: jax.Array | None) -> jax.Array:
        s = self.strategy
        return recomputed(self._run, s.remat, regather=bool(s.store) and not s.keep)(x_mk, w_kn, b_n)

    def _run(self, x_mk: jax.Array, w_kn: jax.Array, b_n: jax.Array | None) -> jax.Array:
        s, rank, reduce_dtype = self.strategy, x_mk.ndim, self.strategy.reduce_dtype
        x_mk, w_kn, b_n = self._operands_at_compute_dtype(x_mk, w_kn, b_n)
        y_mn = self._product(x_mk, w_kn, reduce_dtype if s.reduction else None)
        if s.reduction:
            summed = tuple(name for name in s.reduction if name not in s.scattered)
            if not self._fuses_scatter:
                with scope(key=self._scatter_key):
                    y_mn = reduce_scatter(
                        y_mn, s.scattered, axis=s.scatter_axis(rank), algorithm=s.algorithm("reduce_scatter")
                    )
            with scope(key="output" if s.output == "sum" else "reduction"):
                y_mn = all_reduce(y_mn, summed, algorithm=s.algorithm("all_reduce"))
            if reduce_dtype is not None:
                y_mn = y_mn.astype(self.arithmetic.preferred_element_type or x_mk.dtype)
        if b_n is not None:
            with jax.numpy_rank_promotion("allow"):  # a stricter setting is for the user's own code
                y_mn = y_mn + b_n
        if s.output == "gather":
            how = s.algorithm("all_gather")
            with scope(key="output"):
                y_mn = all_gather(y_mn, s.column, axis=rank - 1, result="invariant", algorithm=how)
        return y_mn

    @property
    def _fuses_gather(self) -> bool:
        s = self.strategy
        asked = bool(s.gathered) and s.algorithm("all_gather_matmul") != "xla"
        return asked and s.reduce_dtype is None and self.arithmetic.is_plain and not self._fuses_scatter

    @property
    def _fuses_scatter(self) -> bool:
        s = self.strategy
        return bool(s.scattered) and s.algorithm("matmul_reduce_scatter") != "xla" and self.arithmetic.is_plain

    @property
    def _scatter_key(self) -> str:
        return "output" if self.strategy.output == "scatter" else "sequence"

    def _product(self, x: jax.Array, w: jax.Array, preferred: Any) -> jax.Array:
        """Compute the product, fused with the gather before it or the scatter after it if kernels are named."""
        s = self.strategy
        out = self.arithmetic.preferred_element_type if preferred is None else preferred
        if self._fuses_gather:
            how = s.algorithm("all_gather_matmul")
            return all_gather_matmul(x, w, s.gathered, axis=s.sequence_axis(x.ndim), out_dtype=out, algorithm=how)
        if self._fuses_scatter:
            how = s.algorithm("matmul_reduce_scatter")
            with scope(key=self._scatter_key):
                return matmul_reduce_scatter(
                    x, w, s.scattered, axis=s.scatter_axis(x.ndim), out_dtype=out, algorithm=how
                )
        return self.arithmetic.product(x, w, preferred, s.algorithm("matmul"))

    def _operands_at_compute_dtype(self, x: Any, w: Any, b: Any) -> tuple[Any, Any, Any]:
        """Cast the operands to the compute dtype, and gather operands sharded at rest. An operand's
        gradient is summed here in the reduce dtype, over the shard at rest."""
        s, wide = self.strategy, self.strategy.reduce_dtype
        if wide is None:
            x, w, b = self.arithmetic.promoted(x, w, b)
        placed = [  # operand, mesh axes it varies over, mesh axes that split it at rest, the split axis, the YAML key
            (x, s.column, () if self._fuses_gather else s.gathered, s.sequence_axis(x.ndim), "sequence"),
            (w, s.batch, s.store, s.kernel_store_axis, "store"),
            *([] if b is None else [(b, s.bias_batch, s.store, 0, "store")]),
        ]
        compute = self.arithmetic.dtype or jnp.result_type(*(operand for operand, *_ in placed))
        arrays = [x if wide is None or not (over or names) else x.astype(wide) for x, over, names, *_ in placed]
        if check_vma_enabled():
            arrays = _pvary_summed(arrays, [over for _, over, *_ in placed], s.algorithm("all_reduce"))
        operands, kernels = [], tuple((op, s.algorithm(op)) for op in ("all_gather", "reduce_scatter"))
        for array, (_, over, names, axis, key) in zip(arrays, placed, strict=True):
            array = pvary(array, over)
            steps = tuple((axis, name, name in s.batch) for name in names)
            with scope(key=key):
                full = gather(array, steps, dtype=compute if wide else None, kernels=kernels)
            operands.append(activation(full) if names and key == "sequence" else full)
        x, w, b = (*operands, None)[:3]
        return (x, w, b) if wide is None else self.arithmetic.promoted(x, w, b)


def _pvary_summed(arrays: Sequence[jax.Array], varies_over: Sequence[Names], algorithm: str) -> list[jax.Array]:
    """Mark operands as varying over their mesh axes if their gradients are summed by an algorithm
    other than JAX's. These are sums between slices, and sums in device order (bitwise
    reproducible). Gradients of operands that vary over the same mesh axes are summed together."""
    results = list(arrays)
    missing = [
        tuple(name for name in over if name not in jax.typeof(array).mat.varying)
        for array, over in zip(arrays, varies_over, strict=True)
    ]
    for names in dict.fromkeys(missing):
        if not names or is_psum(algorithm, names):
            continue
        alike = [place for place, others in enumerate(missing) if others == names]
        marked: Any = pvary_summed(tuple(arrays[place] for place in alike), names, algorithm)
        for place, array in zip(alike, marked, strict=True):
            results[place] = array
    return results
