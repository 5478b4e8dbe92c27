"""A program on a mesh, compiled once for each kind of run, and a test of tolerances by planted
faults. A tolerance hides a fault if a collective is off by a factor and no result shows it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.inspect.ledger.jaxpr_walk import KIND_OF
from jshard.inspect.ledger.tracing import is_inexact
from jshard.inspect.verify.dataflow import leaves, on_the_way
from jshard.inspect.verify.inputs import Subject
from jshard.inspect.verify.interpreter import Evaluation, Note, quickly
from jshard.inspect.verify.verification import Finding, in_words
from jshard.layouts.gathering import on_host, raw
from jshard.layouts.mesh import build_mesh
from jshard.programs.jaxprs import Eqn, level
from jshard.signals.active_config import on_mesh

FAULT = 1.001  # the factor of a planted fault in one collective; a tolerance must show it


def of_ones(configured: Mesh) -> Mesh:
    """Return a mesh of a single device with the axes of the configured mesh."""
    here = [device for device in configured.devices.flat if device.process_index == jax.process_index()]
    grid = np.array(here[:1], object).reshape((1,) * configured.devices.ndim)  # each process has its own reference
    return Mesh(grid, configured.axis_names, axis_types=configured.axis_types)


def resized(configured: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Return the configured mesh with these sizes of its axes."""
    for name in sizes:
        if name not in configured.axis_names:
            raise JShardError(
                f'verify(meshes=...) has an axis "{name}", but the configured mesh is {in_words(configured.shape)}',
                hint=f"use {' or '.join(configured.axis_names)}",
            )
    built = build_mesh({**configured.shape, **sizes}, label="the mesh given to verify")
    return Mesh(built.devices, configured.axis_names, axis_types=configured.axis_types)


class Side:
    """The program on a mesh."""

    def __init__(self, program: Subject, mesh: Mesh, configured: Mesh, tell: Callable[[str], None]):
        self.program, self.mesh, self.configured, self.tell = program, mesh, configured, tell
        self.traced: tuple[Any, list[str], list[int]] | None = None
        self.compiled: dict[Evaluation, Any] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return dict(self.mesh.shape)

    def trace(self) -> tuple[Any, list[str], list[int]]:
        """Return the jaxpr, the names of its results, and the numbers of the computed results."""
        if self.traced is None:
            self.tell(f"traces {self.program.title} for {in_words(self.sizes)}")
            arrays = self.program.placed(self.program.natural(), self.mesh)
            with self.here():
                self.traced = self.program.trace(arrays)
        return self.traced

    def here(self) -> contextlib.AbstractContextManager[None]:
        """Return a context: this mesh stands for the configured mesh."""
        return on_mesh(self.mesh, stands_for=self.configured)

    def run(self, how: Evaluation, numbers: list[Any]) -> tuple[list[np.ndarray], list[Note]]:
        """Return the computed results and the notes, as numpy arrays."""
        jaxpr, _, made = self.trace()
        self.tell(f"{'runs' if how in self.compiled else 'compiles'} {self.program.title} on {in_words(self.sizes)}")
        if how not in self.compiled:

            def evaluated(arrays: list[Any]) -> Any:
                results, notes = how(jaxpr, arrays)
                return [raw(jnp.asarray(results[n])) for n in made], notes

            self.compiled[how] = jax.jit(evaluated, compiler_options=quickly(self.mesh.devices.flat[0]))
        with self.here(), jax.enable_x64(True) if how.wide else contextlib.nullcontext():
            results, notes = self.compiled[how](self.program.placed(numbers, self.mesh, wide=how.wide))
            return [on_host(each) for each in results], jax.tree.map(on_host, notes)

    def with_faults(self, how: Evaluation, numbers: list[Any], faulty: Sequence[Any]) -> Iterator[list[np.ndarray]]:
        """Yield the results with each of these equations in turn off by a factor."""
        jaxpr, _, made = self.trace()
        turns = {id(eqn): number for number, eqn in enumerate(faulty)}

        def evaluated(arrays: list[Any], turn: object) -> list[Any]:
            def planted(eqn: Eqn, results: Sequence[Any]) -> Sequence[Any]:
                factor = jnp.where(turn == turns.get(id(eqn), -1), FAULT, 1.0)
                return (
                    [each * factor if is_inexact(each) else each for each in results] if id(eqn) in turns else results
                )

            results, _ = dataclasses.replace(how, planted=planted)(jaxpr, arrays)
            return [raw(jnp.asarray(results[n])) for n in made]

        with self.here(), jax.enable_x64(True):
            program = jax.jit(evaluated, compiler_options=quickly(self.mesh.devices.flat[0]))
            arrays = self.program.placed(numbers, self.mesh, wide=True)
            for turn in range(len(faulty)):
                self.tell(f"looks whether a fault would be seen: {turn + 1} of {len(faulty)}")
                yield [on_host(each) for each in program(arrays, turn)]


def held_to_faults(
    side: Side, how: Evaluation, findings: Sequence[Finding], offs: Callable[[Any, Any], list[float]]
) -> list[Finding]:
    """Return the findings; mark a tolerance as unproven if it hides a fault of a collective on its way. A fault
    is hidden if no result changes by more than its tolerance. `offs` returns by how much results differ."""
    jaxpr, _, made = side.trace()
    crossing = {str(id(eqn)): (eqn, here) for eqn, here in leaves(level(jaxpr)) if eqn.primitive.name in KIND_OF}
    before = on_the_way(jaxpr, lambda eqn: frozenset(crossing.keys() & {str(id(eqn))}))
    reached = [before[n] for n in made]
    within = [n for n, finding in enumerate(findings) if finding.verdict == "within"]
    shown = [keys for keys, each in zip(reached, findings, strict=True) if each.verdict == "bitwise" and not each.zero]
    at_stake = sorted(frozenset().union(*(reached[n] for n in within)).difference(*shown), key=list(crossing).index)
    if not at_stake:
        return list(findings)
    numbers = side.program.natural()
    results, _ = side.run(how, numbers)
    found = list(findings)
    runs = side.with_faults(how, numbers, [crossing[key][0] for key in at_stake])
    for key, faulty in zip(at_stake, runs, strict=True):
        far = offs(results, faulty)
        if any(far) and all(far[n] <= findings[n].tolerance for n in within):  # an unread collective changes nothing
            eqn, here = crossing[key]
            for n in within:
                if key in reached[n]:
                    found[n] = dataclasses.replace(findings[n], verdict="unproven", hidden=here.blamed(eqn))
    return found
