"""A chunk of layers as programs, each traced once: its forward, what that leaves for the backward, and the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshard.layers.partition.halves import Halves, Place, traced
from jshard.programs.jaxprs import dependent, entry, is_in, makers
from jshard.programs.provenance import scope

Tree = Any
Kept = Sequence[Any]  # of a microbatch: arrays, or the places of them


class Chunk:
    """A chunk of layers: `run(own, edges, given, number, x)` inside a shard_map, and its gradients by `x`, `own` and,
    if it `shares` them, `edges`.

    `kept` is the part of JAX's residuals made from the microbatch, `given` and `x`. The backward reads or makes again
    parameters, values made of parameters alone (casts, gathers), and `given`. If it `splits`, parameters' gradients
    are made later, from the values that the backward has `left`; if it `recomputes`, from the chunk's input.
    """

    def __init__(self, run: Callable[..., Tree], args: Sequence[Tree], *, shares: bool, splits: bool, recomputes: bool):
        leaves, tree = jax.tree.flatten(tuple(args))
        own, edges, given, _, x = (len(jax.tree.leaves(each)) for each in args)
        self.of_x = range(len(leaves) - x, len(leaves))
        of_microbatch = {*range(own + edges, own + edges + given), *self.of_x}
        pulled: Any = None
        keys: list[Any] = []

        def forward(*leaves: Any) -> tuple[Tree, list[Any]]:
            nonlocal pulled
            own, edges, given, number, x = jax.tree.unflatten(tree, leaves)
            y, pull = jax.vjp(lambda x, own, edges=edges: run(own, edges, given, number, x), x, own, *[edges] * shares)
            residuals, pulled = jax.tree.flatten(pull)
            keys[:] = [jax.random.key_impl(x) if _is_key(x) else None for x in residuals]
            return y, [jax.random.key_data(x) if _is_key(x) else x for x in residuals]

        def backward(residuals: list[Any], by_y: Tree) -> Tree:
            pairs = zip(residuals, keys, strict=True)
            back = [x if key is None else jax.random.wrap_key_data(x, impl=key) for x, key in pairs]
            return jax.tree.unflatten(pulled, back)(by_y)

        self.program, (self.y, residuals) = traced(forward, *leaves)
        self.outputs, self.recomputes = len(jax.tree.leaves(self.y)), recomputes
        jaxpr = self.program.jaxpr
        made = dependent(jaxpr, tuple(n in of_microbatch for n in range(len(leaves))))
        if recomputes:  # all of it, by the same program
            made = set(makers(jaxpr))
        keeps = made.difference(jaxpr.invars).union(jaxpr.invars[n] for n in self.of_x)
        program, gradients = traced(backward, residuals, self.y)
        self.tree, count = jax.tree.structure(gradients), len(jax.tree.leaves(gradients))
        of_y = tuple(n >= len(residuals) for n in range(len(program.jaxpr.invars)))
        late = tuple(splits and n >= x for n in range(count))
        soon, none = tuple(not each for each in late), (False,) * count
        halves = [(soon, none), (late, none)] if recomputes else [(soon, late)]
        self.halves = [Halves(program, *each, of_y) for each in halves]
        reads = [each.reads[0] for each in self.halves] if recomputes else self.halves[0].reads
        self.reads = [[n for n in range(len(residuals)) if each[n]] for each in reads]  # by slot B, and by W
        read = [self._residual(n) for n in sorted({*self.reads[0], *self.reads[1]})]
        self.places = {v: place for place, v in enumerate(dict.fromkeys(v for v in read if is_in(v, keeps)))}
        zeros = {id(self._residual(n)): x for n, x in enumerate(residuals)}
        self.kept = [zeros[id(v)] for v in self.places]
        first = lambda *xs: self.halves[0].first(xs)[1]
        self.left = traced(first, *residuals, *jax.tree.leaves(self.y))[1] if splits and not recomputes else None
        numbers = self._numbers(range(len(residuals)))
        self.stores = self._halves({*range(self.outputs), *numbers.values()}), numbers

    def forward(self, args: Tree, kept: Sequence[Place]) -> tuple[Tree, list[Array]]:
        """Return the output, and the buffers of residuals."""
        halves, numbers = self.stores
        outs, _ = halves.first(jax.tree.leaves(args), results={numbers[n]: place for n, place in enumerate(kept)})
        return self._output(outs), [outs[numbers[n]] for n in range(len(kept))]

    def again(self, half: int, args: Tree) -> tuple[Tree, Kept]:
        """Return the output, and the residuals read by a half of the backward."""
        numbers, outs = self._numbers(self.reads[half]), () if half else range(self.outputs)
        made = self._made([*outs, *numbers.values()], jax.tree.leaves(args))
        kept = [made[numbers[n]] if n in numbers else None for n in range(len(self.kept))]
        return self._output(made) if outs else None, kept

    def backward(self, half: int, args: Tree, kept: Kept, by_y: Tree, left: Any = None) -> tuple[Tree, Any]:
        """Return the gradients, None for the other half's, and the values left for the second half, in their places
        or as buffers. `args` are the arguments before x."""
        numbers = [n for n in self.reads[half] if self._place(n) is None]
        with scope(again="remat"):
            again = self._made([self.outputs + n for n in numbers], [*jax.tree.leaves(args), *[None] * len(self.of_x)])
        residuals: list[Any] = [None] * (len(self.program.jaxpr.outvars) - self.outputs)
        for n in self.reads[half]:
            place = self._place(n)
            residuals[n] = again[self.outputs + n] if place is None else kept[place]
        xs = [*residuals, *jax.tree.leaves(by_y)]
        if half and not self.recomputes:
            outs = self.halves[0].second(xs, left)
        else:
            outs, left = self.halves[half].first(xs, left)
        return jax.tree.unflatten(self.tree, outs), None if self.left is None else left

    def _output(self, outs: Any) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(self.y), [outs[n] for n in range(self.outputs)])

    def _numbers(self, residuals: Iterable[int]) -> dict[int, int]:
        """Return, by their place, the results of the forward program equal to some residuals."""
        return {place: self.outputs + n for n in residuals if (place := self._place(n)) is not None}

    def _residual(self, number: int) -> Any:
        return self.program.jaxpr.outvars[self.outputs + number]

    def _place(self, number: int) -> int | None:
        return entry(self.places, self._residual(number))

    def _halves(self, outs: Collection[int]) -> Halves:
        """Some results of the forward program, with nothing left for later."""
        every, leaves = range(len(self.program.jaxpr.outvars)), len(self.program.jaxpr.invars)
        return Halves(self.program, tuple(n in outs for n in every), (False,) * len(every), (False,) * leaves)

    def _made(self, outs: Sequence[int], leaves: Sequence[Any]) -> dict[int, Array]:
        """Some results of the forward program."""
        made, _ = self._halves(outs).first(leaves)
        return {n: made[n] for n in outs}


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
