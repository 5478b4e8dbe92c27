"""An interpreter of jaxprs, on true numbers or on whole numbers modulo a
prime. It notes the outputs of signals, and the equations that make a NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jshard.inspect.ledger.jaxpr_walk import Around
from jshard.inspect.ledger.tracing import is_array, is_inexact
from jshard.inspect.verify.dataflow import asked_dtypes, narrowed_for_a_sum
from jshard.inspect.verify.residues import (
    SUMS,
    coarse,
    embedded,
    is_float,
    is_opaque,
    opaque,
    results_of,
    touches_floats,
    wide_results,
    widened,
)
from jshard.layers.ring import jshard_largest_seen
from jshard.programs import jaxprs
from jshard.programs.jaxprs import Eqn, Jaxpr, Shaped, bare, bound, called, evaluate, inner, is_in, variables
from jshard.programs.provenance import Cause


@dataclasses.dataclass(frozen=True)
class Where:
    """The place of a note in the program. `lead` are the axes before the array's own:
    the trips of a scan, or the mesh axes of a shard_map, whose devices are stacked."""

    cause: Cause
    primitive: str
    lead: tuple[tuple[str, ...], ...] = ()  # () is a scan; a shard_map has its mesh axes
    of_sum: bool = True  # whether a sum goes into it: if it is right, earlier sums are right too


@dataclasses.dataclass(frozen=True)
class Note:
    """A value of a run, and its place in the program."""

    value: Any
    where: Where

    def behind(self, lead: tuple[str, ...]) -> Note:
        """Return the note with axes put before its own."""
        return Note(self.value, dataclasses.replace(self.where, lead=(lead, *self.where.lead)))


jax.tree_util.register_dataclass(Note, data_fields=["value"], meta_fields=["where"])


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A way to run a jaxpr: by the true operations, in 64 bits if `wide`, or on whole numbers modulo the prime
    `modulus`. `listen` notes the outputs of signals. `nan_origins` notes, for every equation, whether its results hold a
    NaN and its operands none. `planted` gets each equation and its results, and returns the results to continue with."""

    modulus: int | None = None
    wide: bool = False
    listen: bool = False
    nan_origins: bool = False
    platform: str = "cpu"
    planted: Callable[[Any, Sequence[Any]], Sequence[Any]] = lambda eqn, results: results

    def __call__(self, jaxpr: Jaxpr, arrays: Sequence[Any]) -> tuple[list[Any], list[Note]]:
        """Return the results of a closed jaxpr, and the notes, in program order."""
        return _Level(self, jaxpr, Around()).run(arrays)


def quickly(device: Any) -> dict[str, Any] | None:
    """Return compiler options for a program of few runs: on CPUs, LLVM does not optimize."""
    return {"xla_backend_optimization_level": 0} if device.platform == "cpu" else None


# These make no NaN; they pass on a NaN of their operands.
BEARS_NO_NAN = frozenset(
    "abs broadcast_in_dim clamp concatenate convert_element_type copy copy_p dynamic_slice expand_dims gather max min neg "
    "invariant_cast one_device_cast one_device_sum "
    "optimization_barrier pad pcast pvary reduce_max reduce_min reshape reshard rev select_n sharding_constraint sign slice "
    "split squeeze stop_gradient tanh transpose".split()
)


HELD = frozenset(("shard_map", "scan", "cond"))  # their equations run one by one


class _Level:
    """A jaxpr of the nest, closed or not. With `is_body` all its results are noted, as the equation around wraps them."""

    def __init__(self, evaluation: Evaluation, jaxpr: Jaxpr, around: Around, *, is_body: bool = False):
        self.how, self.around, self.is_body = evaluation, around, is_body
        self.jaxpr, self.consts = bare(jaxpr), getattr(jaxpr, "consts", ())
        self.notes: list[Note] = []
        self.of_sums: set[Any] = set()  # if it listens: the variables that depend on a sum
        self.handed_on = self._handed_on() if evaluation.listen else set()
        self.summed_narrow = narrowed_for_a_sum(self.jaxpr) if evaluation.modulus or evaluation.wide else set()

    def run(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Note]]:
        """Return the results of the jaxpr and the notes."""
        consts = map(self._constant, self.jaxpr.constvars, self.consts)
        literal = lambda atom: self._constant(atom, atom.val)
        return evaluate(self.jaxpr, [*consts, *arrays], self._step, literal), self.notes

    def _step(self, eqn: Eqn, x: list[Any]) -> Sequence[Any]:
        """Run an equation on these operands, and note its results."""
        here = self.around.entering(eqn)
        with eqn.ctx.manager:
            results = self.how.planted(eqn, self._results(eqn, x, here))
        for variable, result in zip(eqn.outvars, results, strict=True):
            if variable in self.handed_on and is_float(variable.aval):
                self._note(result, eqn, here, of_sum=variable in self.of_sums)
        is_noted_inside = eqn.primitive.name in ("shard_map", "scan") or called(eqn) is not None
        if self.how.nan_origins and not is_noted_inside and eqn.primitive.name not in BEARS_NO_NAN:
            if any(map(is_inexact, map(jax.typeof, results))):
                self._note(_hold_nan(results) & ~_hold_nan(x), eqn, here)
        return results

    def _constant(self, variable: Any, value: Any) -> Any:
        if self.how.modulus and is_inexact(variable.aval):
            return embedded(np.real(value), self.how.modulus)
        if self.how.wide and (is_inexact(variable.aval) or isinstance(value, int)):
            return jnp.asarray(value, widened(variable.aval.dtype))
        return value

    def _typed(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the values as arrays of their variables' dtypes."""
        return [jnp.asarray(each, self._dtype(v.aval)) for each, v in zip(values, variables, strict=True)]

    def _dtype(self, aval: Any) -> Any:
        if self.how.wide:
            return widened(aval.dtype)
        return jnp.int32 if self.how.modulus and is_inexact(aval) else aval.dtype

    # -- one equation --

    def _results(self, eqn: Eqn, x: list[Any], here: Around) -> Sequence[Any]:
        name = eqn.primitive.name
        if called(eqn) is not None:
            return self._call(eqn, x, here)
        if self.how.modulus and eqn.outvars and is_opaque(eqn, self.how.platform) and name not in HELD:
            return opaque(eqn, x, self.how.modulus)
        if name in ("shard_map", "scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, x, here)
        if self.how.modulus and touches_floats(eqn):
            if not eqn.outvars:  # a print
                return []
            results = results_of(eqn, self._typed(x, eqn.invars), self.how.modulus)
            return [coarse(each, self.how.modulus) for each in results] if self._rounds(eqn, here) else results
        if self.how.wide and touches_floats(eqn) and eqn.outvars:
            return wide_results(eqn, x, rounds=self._rounds(eqn, here))
        return bound(eqn, x)

    def _rounds(self, eqn: Any, here: Around) -> bool:
        """Return True if a cast lowers precision only for a sum, and no signal asks for it."""
        if eqn.primitive.name != "convert_element_type" or eqn.outvars[0] not in self.summed_narrow:
            return False
        return str(eqn.outvars[0].aval.dtype) not in asked_dtypes(here.cause.path)

    def _note(self, value: Shaped, eqn: Any, here: Around, of_sum: bool = True) -> None:
        self.notes.append(Note(value, Where(here.blamed(eqn), eqn.primitive.name, of_sum=of_sum)))

    # -- equations that hold jaxprs --

    def _call(self, eqn: Eqn, x: list[Any], here: Around) -> list[Any]:
        if self.how.modulus and is_cancelling(eqn):
            zero = sum(each.ravel()[0] * 0 for each in x)  # it varies over the mesh as the operands do
            return [jnp.broadcast_to(zero, v.aval.shape) for v in eqn.outvars]
        results, notes = _Level(self.how, called(eqn), here).run(x)
        self.notes += notes
        return [_typed_as(result, variable.aval) for result, variable in zip(results, eqn.outvars, strict=True)]

    def _shard_map(self, eqn: Eqn, x: list[Any], here: Around) -> list[Any]:
        asked, mesh = eqn.params, eqn.params["mesh"]
        manual = asked["newly_manual_axes"]
        names = tuple(name for name in mesh.axis_names if name in manual)

        def body(*parts: Any) -> tuple[list[Any], list[Note]]:
            results, notes = _Level(self.how, asked["jaxpr"], here, is_body=True).run(parts)
            return results, [Note(jnp.expand_dims(note.value, 0), note.where) for note in notes]

        results, notes = jax.shard_map(
            body, mesh=mesh, in_specs=asked["in_specs"], out_specs=(list(asked["out_specs"]), PartitionSpec(names)),
            axis_names=manual, check_vma=asked["check_vma"],
        )(*x)  # fmt: skip
        self.notes += [note.behind(names) for note in notes]
        return results

    def _scan(self, eqn: Eqn, x: list[Any], here: Around) -> list[Any]:
        asked, (consts, carried) = eqn.params, jaxprs.scanned(eqn)

        def body(carry: list[Any], each: list[Any]) -> tuple[list[Any], Any]:
            results, notes = _Level(self.how, asked["jaxpr"], here, is_body=True).run([*x[:consts], *carry, *each])
            return results[:carried], (results[carried:], notes)

        first = self._typed(x[consts : consts + carried], eqn.invars[consts : consts + carried])
        last, (stacked, notes) = lax.scan(
            body, first, x[consts + carried :], length=asked["length"], reverse=asked["reverse"], unroll=asked["unroll"]
        )
        if self.how.nan_origins:
            self.notes += [Note(note.value.any(0), note.where) for note in notes]
        else:
            self.notes += [note.behind(()) for note in notes]
        return [*last, *stacked]

    def _while(self, eqn: Eqn, x: list[Any], here: Around) -> Any:
        asked = eqn.params
        held, kept = asked["cond_nconsts"], asked["body_nconsts"]
        parts = x[:held], x[held : held + kept]
        quiet = dataclasses.replace(self.how, listen=False, nan_origins=False)

        def run(inner: Any, constants: list[Any], carry: Sequence[Any]) -> list[Any]:
            return _Level(quiet, inner, here).run([*constants, *carry])[0]

        first = self._typed(x[held + kept :], eqn.invars[held + kept :])
        return lax.while_loop(
            lambda carry: run(asked["cond_jaxpr"], parts[0], carry)[0],
            lambda carry: run(asked["body_jaxpr"], parts[1], carry),
            first,
        )

    def _cond(self, eqn: Eqn, x: list[Any], here: Around) -> Any:
        how = dataclasses.replace(self.how, listen=False, nan_origins=False)

        def branch(inner: Any) -> Callable[..., list[Any]]:
            return lambda *arrays: self._typed(_Level(how, inner, here).run(arrays)[0], eqn.outvars)

        return lax.switch(x[0], [branch(inner) for inner in eqn.params["branches"]], *x[1:])

    # -- outputs of signals --

    def _handed_on(self) -> set[Any]:
        """Return the values used outside their signal, the results of shard_maps, and every sum.
        A sum counts after its product, and again after the collective that adds its parts."""
        made: dict[Any, Cause] = {}  # the signal of each variable
        found, outside = set[Any](), self.around.cause.path
        for eqn in jaxprs.level(self.jaxpr):
            name, cause = eqn.primitive.name, self.around.entering(eqn).cause
            if name in SUMS or any(inner(eqn)) or any(is_in(v, self.of_sums) for v in eqn.invars):
                self.of_sums.update(eqn.outvars)
            for variable in variables(eqn.invars):
                made_in = made.get(variable)
                if made_in is not None and made_in.path != outside and not made_in.is_like(cause):
                    found.add(variable)
            arrays = [variable for variable in eqn.outvars if is_array(variable.aval)]
            made |= dict.fromkeys(arrays, cause)
            found.update(arrays if name == "shard_map" or name in SUMS else ())
        returned = [variable for variable in variables(self.jaxpr.outvars) if variable in made]
        return found.union(each for each in returned if self.is_body or made[each].path != outside)


def is_cancelling(eqn: Eqn) -> bool:
    """Return True for a number without effect on the result, as the largest score of a ring: 0 stands for it."""
    return eqn.params.get("name") == jshard_largest_seen.__name__  # type: ignore[attr-defined]  # of a jitted function


def _hold_nan(values: Sequence[Any]) -> jax.Array:
    """Return True if any value holds a NaN."""
    inexact = [each for each in values if is_inexact(jax.typeof(each))]
    return functools.reduce(jnp.logical_or, (jnp.isnan(each).any() for each in inexact), jnp.bool_(False))


def _typed_as(result: object, aval: object) -> Any:
    """Reshard the result of a call if its type has another sharding: its `out_shardings`."""
    wanted, got = getattr(aval, "sharding", None), getattr(jax.typeof(result), "sharding", None)
    if wanted is None or got is None or wanted.mesh.empty or not wanted.mesh.are_all_axes_explicit or wanted == got:
        return result
    return jax.sharding.reshard(result, wanted)
