"""Price a planned program: bytes on the wire, forward and backward, from its Steps alone.

Gradients go from results to parameters, wherever a parameter leads to a result; an array that they pass pays `back`. What a
checkpoint does not keep is paid again.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable

from jshard.kernels.collectives import COLLECTIVES
from jshard.layers.partition import Program
from jshard.layers.partition.plan import names_of
from tests.support.planned_arrays import BILINEAR, BY_INDEX, LINEAR, Anew, Bill, Local, Walk


def _residuals(x: Local, active: set[int]) -> Iterable[Local]:
    """Yield what the backward pass of an operation reads."""
    if x.eqn is None or x.name in LINEAR:
        return ()
    if x.name in BILINEAR:
        return [
            each for each in x.of if any(id(other) in active for other in x.of if other is not each) or not x.of[1:]
        ]
    if x.name == "div" and x.of[1:]:
        return x.of if id(x.of[1]) in active else x.of[1:]
    return [each for each in x.of if not each.is_smooth] if x.name in BY_INDEX else [x]


def _reached(start: Iterable[Local], follow: Callable[[Local], Iterable[Local]]) -> set[int]:
    left = list(start)
    found = set(map(id, left))
    while left:
        after = [each for each in follow(left.pop()) if id(each) not in found]
        found.update(map(id, after))
        left += after
    return found


def _enclosing(x: Local, anew: Anew | None) -> Anew | None:
    """Return the innermost of a stretch and those around it that an array is made in."""
    stretches, inside = list[Anew](), x.anew
    while inside is not None:
        stretches.append(inside)
        inside = inside.outer
    while anew is not None and anew not in stretches:
        anew = anew.outer
    return anew


def step_bytes(program: Program) -> dict[tuple[str, str, str], int]:
    """Return the bytes on the wire of each device for a program and the gradients of its parameters, by phase, collective and
    mesh axes."""
    walk, total = Walk(dict(program.mesh.shape)), collections.Counter[tuple[str, str, str]]()
    each = list(zip(program.types, program.inputs, map(names_of, program.use), strict=True))
    inputs = [walk.local([], t.dtype, names, "parameter" * (i.claim is not None)) for t, i, names in each]
    ends = walk.program(program.jaxpr, program.plan, inputs)

    def pay(phase: str, bills: Iterable[Bill], turns: int) -> None:
        for op, names, payload in bills:
            several = [name for name in names if walk.sizes[name] >= 2]
            wire = COLLECTIVES[op].wire(payload, math.prod(walk.sizes[name] for name in several))
            total[phase, op, ", ".join(sorted(several))] += wire * turns

    readers: dict[int, list[Local]] = collections.defaultdict(list)
    for x in walk.locals:
        for one in x.of if x.is_smooth else ():
            readers[id(one)].append(x)
    active = _reached((x for x in inputs if x.name and x.is_smooth), lambda x: readers[id(x)])
    live = _reached((x for x in ends if id(x) in active), lambda x: [one for one in x.of if id(one) in active])
    paid: set[tuple[int, int]] = set()
    often: dict[int, int] = {}  # JAX makes once what is the same in each turn, and has no gradient

    def again(x: Local, anew: Anew | None) -> None:
        anew = _enclosing(x, anew)
        if anew is None or x.ahead or (id(x), id(anew)) in paid or anew.keeps(x):
            return
        paid.add((id(x), id(anew)))
        pay("backward", x.bills, x.turns)
        for one in x.of:
            again(one, anew)

    for x in walk.locals:
        turns = max((often.get(id(one), 1) for one in x.of), default=1)
        often[id(x)] = x.turns if x.name == "turn" or id(x) in active else turns
        pay("forward", x.bills, often[id(x)])
        if id(x) in live:
            pay("backward", x.back, x.turns)
            pay("backward", x.bills if x.ahead else (), x.turns - x.turns // (x.ahead or 1))
            for one in _residuals(x, active) if x.anew is not None else ():
                again(one, x.anew)
    return {key: count for key, count in total.items() if count}
