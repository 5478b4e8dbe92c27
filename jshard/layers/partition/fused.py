"""Products with equal pieces cut from their result, such as queries, keys and values: one product for each piece of
the kernel.

A shard of the kernel is no shard of each piece. Cutting the kernel instead costs no activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.extend.core import Literal

from jshard.layers.partition.local_sizes import ranges_of
from jshard.layouts.primitives import ELEMENTWISE
from jshard.programs.jaxprs import OpenJaxpr, level, makers, uses, variables

SHAPED = frozenset(("broadcast_in_dim", "reshape"))


@dataclasses.dataclass(frozen=True)
class Fused:
    """A product with its cuts: the equations on the way (`chain`, the product first), the makers of added vectors
    (`beside`), and the piece of each later variable."""

    chain: tuple[Any, ...]
    beside: tuple[tuple[Any, int], ...]  # and along which axis of its result that is cut
    count: int
    axis: int  # of the product's result, and of all behind it
    inputs: dict[Any, int | None]  # what all these read, and along which axis it is cut
    pieces: dict[Any, int]

    @property
    def kernel(self) -> Any:
        return self.chain[0].invars[1]

    @property
    def size(self) -> int:
        """The number of the kernel's columns in a piece."""
        return self.chain[0].outvars[0].aval.shape[self.axis] // self.count

    def run(self, *given: Array) -> list[Array]:
        """Return all pieces, in order."""
        each = [
            [x] * self.count if axis is None else lax.split(x, [x.shape[axis] // self.count] * self.count, axis)
            for x, axis in zip(given, self.inputs.values(), strict=True)
        ]
        return [self._piece(dict(zip(self.inputs, some, strict=True))) for some in zip(*each, strict=True)]

    def _piece(self, known: dict[Any, Array]) -> Array:
        for eqn, at in (*self.beside, *((eqn, self.axis) for eqn in self.chain)):
            xs = [atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
            key = {"reshape": "new_sizes", "broadcast_in_dim": "shape"}.get(eqn.primitive.name)
            shape = tuple(n // self.count if axis == at else n for axis, n in enumerate(eqn.outvars[0].aval.shape))
            known[eqn.outvars[0]] = eqn.primitive.bind(*xs, **eqn.params | ({key: shape} if key else {}))
        return known[self.chain[-1].outvars[0]]


def fused(jaxpr: OpenJaxpr) -> dict[int, Fused]:
    """Return the products with cut results, by the `id` of the last equation of each."""
    readers, made, found = uses(jaxpr), makers(jaxpr), dict[int, Fused]()
    for eqn in level(jaxpr):
        if eqn.primitive.name == "dot_general" and (chain := _followed(eqn, readers)):
            cuts = readers[chain[-1].outvars[0]]
            if (one := _cut_by(cuts, chain, made)) is not None:
                found |= {id(each): one for each in (*chain, *cuts)}
    return found


def _followed(product: Any, readers: Mapping[Any, list[Any]]) -> list[Any]:
    """Follow a product to the cuts along its kernel's axis; return None if there are none."""
    (_, summed), (_, batch) = product.params["dimension_numbers"]
    kernel, made, chain = product.invars[1], product.outvars[0], [product]
    axis = made.aval.ndim - 1
    if isinstance(kernel, Literal) or len(summed) + len(batch) != kernel.aval.ndim - 1:
        return []
    while True:
        after, shape = readers[made], made.aval.shape
        if None in after or not after:
            return []
        if all(each.primitive.name in ("slice", "split") for each in after):
            return chain
        (use, *more), to = after, after[0].outvars[0].aval.shape
        split_up = use.primitive.name == "reshape" and use.params["dimensions"] is None and to[:axis] == shape[:axis]
        if more or not ((split_up and not shape[axis + 1 :]) or (use.primitive.name in ELEMENTWISE and to == shape)):
            return []
        chain.append(use)
        made = use.outvars[0]


def _cut_by(cuts: Sequence[Any], chain: Sequence[Any], makers: dict[Any, Any]) -> Fused | None:
    (product, *behind), shape, pieces = chain, chain[-1].outvars[0].aval.shape, {}
    axis = product.outvars[0].aval.ndim - 1
    for eqn in cuts:
        ranges = ranges_of(eqn, shape)
        if set(ranges) != {axis}:
            return None
        pieces |= dict(zip(eqn.outvars, ranges[axis], strict=True))
    size = len(next(iter(pieces.values())))
    if not size or shape[axis] % size:
        return None
    if any(some.step >= 2 or len(some) != size or some.start % size for some in pieces.values()):
        return None
    (_, summed), (_, batch) = product.params["dimension_numbers"]
    kept = next(at for at in range(product.invars[1].aval.ndim) if at not in (*summed, *batch))
    inputs: dict[Any, int | None] = {product.invars[0]: None, product.invars[1]: kept}
    beside: list[tuple[Any, int]] = []
    for eqn in behind:
        for atom in variables(eqn.invars):
            if atom in product.invars:
                return None  # what is added is cut, what goes into the product is not
            if not any(atom is each.outvars[0] for each in chain):
                _read(atom, axis, makers, beside, inputs)
    places = {variable: some.start // size for variable, some in pieces.items()}
    return Fused(tuple(chain), tuple(beside), shape[axis] // size, axis, inputs, places)


def _read(atom: Any, axis: int, makers: Any, beside: list[tuple[Any, int]], inputs: dict[Any, int | None]) -> None:
    """Follow the readers of a value to its cuts along `axis`. A vector is cut at its source, so that a bias lies as
    its kernel does."""
    shape, maker = atom.aval.shape, makers.get(atom)
    if atom in inputs or any(atom is eqn.outvars[0] for eqn, _ in beside):
        return
    if not shape:
        inputs[atom] = None
        return
    given = [] if maker is None else [each.aval.shape for each in maker.invars]
    vectors = all(math.prod(some) == shape[axis] in some for some in given)
    if maker is None or maker.primitive.name not in ELEMENTWISE | SHAPED or not vectors:
        inputs[atom] = axis
        return
    for each, some in zip(maker.invars, given, strict=True):
        _read(each, some.index(shape[axis]), makers, beside, inputs)
    beside.append((maker, axis))
