"""The value and gradients of a program over microbatches.

Parameters are marked as varying before the loop, so gradients add up on each device, and are summed over devices once
after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jshard.layers.partition.part import vary
from jshard.layers.partition.plan import Names, names_of
from jshard.layers.partition.planner import whole
from jshard.layers.partition.program import Program
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import Tree
from jshard.programs.provenance import scope


class Microbatches:
    """A program over microbatches: `run(xs)` returns the mean loss, the mean gradients, and the last microbatch's
    variables.

    The program returns a loss, or a vector of the loss and of numbers without a gradient, and its variables. Inputs
    `batch` have a leading axis of microbatches; `parameters` are differentiated, and their gradients lie as the
    parameters rest. A parameter split by `store` is gathered for each microbatch and its gradient scattered: it is
    never whole between them.
    """

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        self.program, self.parameters, self.variables, self.batch = program, parameters, variables, batch

    @functools.cached_property
    def marked(self) -> list[Names]:
        """Return, for each parameter, the mesh axes over which all its uses vary, from a forward trace of a
        microbatch."""
        asked: list[set[Names]] = [set() for _ in self.parameters]

        def once(*xs: Tree) -> Array:
            self._loss([x[0] if number in self.batch else x for number, x in enumerate(xs)], asked)
            return jnp.zeros(())

        shapes = [(1, *t.shape) if n in self.batch else t.shape for n, t in enumerate(self.program.types)]
        self.program.traced(once, self._in_axes, shapes)
        return [frozenset.intersection(*each) if each else frozenset() for each in asked]

    @property
    def _in_axes(self) -> list[Any]:
        return [((), *axes) if number in self.batch else axes for number, axes in enumerate(self.program.in_axes)]

    def run(self, xs: Sequence[Any]) -> tuple[Array, list[Array], list[Array]]:
        marked, mesh = self.marked, self.program.mesh
        specs = [Layout(mesh, *axes).spec for axes in self._in_axes]
        out = PartitionSpec(), [specs[n] for n in self.parameters], [specs[n] for n in self.variables]
        body = functools.partial(self._body, marked)
        return jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=out)(*xs)

    def _body(self, marked: Sequence[Names], *xs: Array) -> tuple[Array, list[Array], list[Array]]:
        parameters = [vary(xs[n], names) for n, names in zip(self.parameters, marked, strict=True)]
        batch = {number: xs[number] for number in self.batch}

        def turn(carry: Tree, each: dict[int, Array]) -> tuple[Any, None]:
            total, sums, variables = carry
            value, gradients, variables = self._gradients(parameters, variables, xs, each)
            return (total + value, list(map(jnp.add, sums, gradients)), variables), None

        zeros = [vary(jnp.zeros_like(x), jax.typeof(x).mat.varying) for x in parameters]
        value = self.program.jaxpr.outvars[0].aval
        start = jnp.zeros(value.shape, value.dtype), zeros, [xs[n] for n in self.variables]
        (total, sums, variables), _ = lax.scan(turn, start, batch)
        count = next(iter(batch.values())).shape[0]
        gradients = [self._summed(n, x / count) for n, x in zip(self.parameters, sums, strict=True)]
        return total / count, gradients, variables

    def _gradients(
        self, parameters: list[Array], variables: Sequence[Array], xs: Sequence[Array], each: dict[int, Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        """Return a microbatch's loss and this device's share of its gradients."""
        known = {**dict(enumerate(xs)), **dict(zip(self.variables, variables, strict=True)), **each}

        def loss(parameters: list[Array]) -> tuple[Array, list[Array]]:
            return self._loss([*(known | dict(zip(self.parameters, parameters, strict=True))).values()])

        value, back, state = jax.vjp(loss, parameters, has_aux=True)
        return value, back(jnp.ones_like(value))[0], state

    def _loss(self, xs: Sequence[Any], asked: Sequence[set[Names]] = ()) -> tuple[Array, list[Array]]:
        """Return a microbatch's loss and variables."""
        program, run, parts = self.program, self.program.running(), self.program.parts(xs)
        for number, uses in zip(self.parameters, asked or [set() for _ in self.parameters], strict=True):
            parts[number].uses.asked = uses
        value, *state = run.run(program.jaxpr, parts, program.plan)
        kept = run.lying(state, [program.in_axes[n] for n in self.variables], program.claim_behind)
        return run.local(value, whole(len(value.shape)), program.claim_behind), kept

    def _summed(self, number: int, gradient: Array) -> Array:
        claim, at_rest = self.program.inputs[number].claim, names_of(self.program.in_axes[number])
        varying = jax.typeof(gradient).mat.varying - at_rest
        names = tuple(name for name in self.program.mesh.axis_names if name in varying)
        if not names:
            return gradient
        signal = None if claim is None else claim.signal
        fields = {} if signal is None else {"claim": signal.name}
        wide = None if signal is None else signal.dtype.reduce
        with scope(**fields, phase="backward"):
            summed = self.program.running().reduce(gradient.astype(wide or gradient.dtype), names, "sum", signal)
            return summed.astype(gradient.dtype)
