"""The plan of a program: what each equation does on each device, decided once, from layouts and claims alone, as data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from jshard.layers.partition.fused import Fused
from jshard.layers.partition.local_sizes import Choice
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import FOLDED, Eqn, bodies, level
from jshard.signals.signal import Signal

Names = frozenset[str]
Need = tuple[tuple[Any, ...], Axes, Names]  # of an array after these casts, split so, and varying over these mesh axes
Remat = str | tuple[str, ...]  # the word, or the names, of a signal


@dataclasses.dataclass(eq=False)
class Brought:
    """An array brought from `source`, or gathered from `rest`, to `target`, where it varies over `names`.

    Equations that need it alike share one."""

    variable: Any  # the array, or the `Brought` that made it; None for one made of those before it
    shape: tuple[int, ...]
    dtype: Any
    wire: Any  # the dtype that it is gathered in, if another
    source: Axes
    target: Axes
    names: Names
    rest: Axes | None
    rows: tuple[str, ...]  # the mesh axes of rows, over which the gradient of a stored shard is summed
    parts: tuple[Brought, ...]  # the operands of an operation that was put off, brought first
    before: Brought | None = None  # the same array, brought once before the loop around this


@dataclasses.dataclass(frozen=True)
class Step:
    """The decision for an equation. `how` names the way of its rule, if there are several; `inside` has the plans of
    inner programs."""

    how: str = ""
    choice: Choice = dataclasses.field(default_factory=dict)  # the mesh axes that each factor is split over
    operands: tuple[Axes, ...] = ()  # how they lie before it
    results: tuple[Axes, ...] = ()
    moves: tuple[tuple[Axes, Axes], ...] = ()  # of operands, from where they lie to where it needs them
    brought: tuple[Brought, ...] = dataclasses.field(default=(), compare=False)
    claims: tuple[Signal | None, ...] = ()  # of operands
    inside: tuple[Plan, ...] = ()
    body: Any = None  # a program that is run in the place of the equation
    fused: Fused | None = None  # of a product that is cut behind it: what the body reads and makes
    carried: tuple[Axes, ...] = ()  # by a loop
    before: tuple[tuple[Need, ...], ...] = ()  # a loop: what its turns need of each array that it closes over
    lead: tuple[str, ...] = ()  # the mesh axis of stages that a loop goes along
    remat: Remat = ""  # what of a loop's turn is computed anew
    regather: bool = False  # whether the backward pass gathers again what a turn gathers
    scattered: tuple[str, ...] = ()  # mesh axes over which the sum of its result is scattered
    once: int | None = None  # the operand of a product that nothing else reads, a stored parameter
    gathers: Signal | None = None  # whose `output` gathers the result
    claim: Signal | None = None  # the claim of the parameter used last
    claim_behind: Signal | None = None  # the same, when what is inside has run
    marks: Mapping[int, Names] = dataclasses.field(
        default_factory=dict
    )  # operands whose gradients stay unreduced, and over what


Plan = Mapping[Hashable, Step]
Steps = dict[Hashable, Step]  # a plan while it is made

CALL, PUT_OFF, AT_REST, WHOLE, DONE, SHARED = "call", "put off", "at rest", "whole", "done", "shared"
END = "end"  # the key of a program's last step, which brings its results to where they are returned


def names_of(axes: Axes) -> Names:
    return frozenset(name for each in axes for name in each)


def without(axes: Axes, names: Collection[str]) -> Axes:
    """Return the axes, no longer split over these mesh axes."""
    return tuple(tuple(name for name in each if name not in names) for each in axes)


def key_of(eqn: Eqn) -> Hashable:
    """Return the key of an equation: its first result, which it keeps in every program it is cut into."""
    return eqn.outvars[0] if eqn.outvars else id(eqn)


def steps(program: Any, plan: Plan) -> Iterator[tuple[Eqn, Step]]:
    """Yield each equation of a program with its step; equations of inner programs follow their equation."""
    for eqn in level(program):
        step = plan[key_of(eqn)]
        if step.how == DONE:
            continue
        if step.body is None:
            yield eqn, step
        held = [body for body, _ in bodies(eqn, eqn.invars)] or [eqn.params.get("jaxpr")]
        for body, inside in zip([step.body] if step.body is not None else held, step.inside, strict=False):
            yield from steps(body, inside)


def with_marks(
    plan: Plan, marks: Mapping[tuple[Hashable, ...], Mapping[int, Names]], path: tuple[Hashable, ...] = ()
) -> Plan:
    """Return the plan with the operands to mark as varying, by the path of calls to their equation."""
    return {
        key: dataclasses.replace(
            step,
            marks=marks.get((*path, key), {}),
            inside=tuple(with_marks(each, marks, (*path, key)) for each in step.inside)
            if step.how == CALL
            else step.inside,
        )
        for key, step in plan.items()
    }


def with_shared(program: Any, plan: Plan) -> Plan:
    """Return the plan with equal calls of a program as shared calls: JAX traces, linearizes and transposes it once."""
    found: dict[int, list[list[Hashable]]] = collections.defaultdict(list)  # equal calls, by the program's `id`
    plan = dict(plan)
    for eqn in level(program):
        key = key_of(eqn)
        if plan[key].how != CALL or eqn.primitive.name != FOLDED:
            continue
        body = eqn.params["jaxpr"]
        step = plan[key] = dataclasses.replace(plan[key], inside=(with_shared(body, plan[key].inside[0]),))
        alike = next((keys for keys in found[id(body)] if are_alike(plan[keys[0]], step)), None)
        if alike is None:
            found[id(body)].append([key])
        else:
            alike.append(key)
    for keys in (keys for each in found.values() for keys in each if len(keys) >= 2):
        inside = plan[keys[0]].inside
        plan.update((key, dataclasses.replace(plan[key], how=SHARED, inside=inside)) for key in keys)
    return plan


def are_alike(one: Step, other: Step) -> bool:
    """Return whether two steps are equal, names of their claims included: signals compare without names."""
    if one != other or _names_of_claims(one) != _names_of_claims(other):
        return False
    pairs = zip(one.inside, other.inside, strict=True)
    return all(are_alike(step, theirs[key]) for mine, theirs in pairs for key, step in mine.items())


def _names_of_claims(step: Step) -> list[str | None]:
    claims = (*step.claims, step.claim, step.claim_behind, step.gathers)
    return [None if claim is None else claim.name for claim in claims]
