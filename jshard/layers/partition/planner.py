"""Plans a jaxpr: reads it once with layouts in the place of arrays, and says for each equation how devices run it.

What is split in an operand stays split in the result, where the table of axes says that it may: greedily, and always alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.layers.partition.choice import asked_of, choose, foreseen, ways
from jshard.layers.partition.fused import Fused, fused
from jshard.layers.partition.local_sizes import Choice, axes_of
from jshard.layers.partition.plan import AT_REST, CALL, DONE, END, PUT_OFF, WHOLE, Brought, Names, Step, Steps, key_of
from jshard.layers.partition.unreduced import Ran
from jshard.layers.partition.value import Later, Lying, Unplaced, Uses, Value, claim_of, values_of
from jshard.layouts.axes import Factors, factors
from jshard.layouts.primitives import ELEMENTWISE, unknown_parameters
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import FOLDED, Eqn, bare, called, evaluate
from jshard.programs.provenance import source_of
from jshard.signals.claims import Stage
from jshard.signals.signal import Signal

# Operations after which a parameter is at rest still, those after which it is one still, or pieces of one, and those that are
# put off where all that goes into them is.
CASTS = frozenset("convert_element_type copy stop_gradient".split())
STAYS = CASTS | frozenset("reshape slice split squeeze transpose unstack".split())
PUT_OFF_WITH = ELEMENTWISE | STAYS | frozenset("concatenate pad rev stack tile".split())

Planned = tuple[list[Value], Step]  # the results of an equation, and how it is run
PlanRule = Callable[["Planner", Eqn, list[Value]], Planned]


class Planner:
    """A pass over a program. The first pass finds the layouts of parameters, and may meet operations without a rule."""

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, PlanRule],
        *,
        wanted: Mapping[Any, Axes] | None = None,
        stage: Stage | None = None,
        nearest: Signal | None = None,
        is_first: bool = False,
    ):
        self.mesh, self.sizes, self.rules = mesh, dict(mesh.shape), rules
        self.wanted = wanted or {}  # how variables will be needed
        self.stage = stage  # that layers of its parameters are on
        self.nearest = nearest  # the claim of the parameter used last
        self.is_first = is_first
        self.found: dict[Any, Axes] = {}  # how variables are split
        self.unruled: dict[str, int] = {}  # the primitives that no rule is known for, and how often
        self.gathered_behind: dict[Hashable, Signal] = {}  # additions of a bias: their results are gathered
        # by signal and mesh axis: "" where a sum is scattered as `sequence` asks, or why it is not
        self.scattered: dict[tuple[str, str], str] = {}
        self.made: dict[Hashable, Any] = {}  # once: what is run in the place of equations, and pieces of arrays
        self.eqn: Eqn | None = None  # that is read now
        self.jaxpr: Any = None  # that it is in
        self.path: tuple[Hashable, ...] | None = ()  # the calls around it; None in what holds a program of its own
        self.ran: list[Ran] = []
        self.needs: list[tuple[Value, Axes, Names]] = []
        self.brought: list[Brought] = []  # by the equation that is read now

    # -- a jaxpr --

    def program(self, program: Any, values: Sequence[Value]) -> tuple[list[Value], Steps]:
        """Plan a jaxpr, closed or open, for arguments in these layouts."""
        jaxpr, outer, products = bare(program), self.jaxpr, fused(bare(program))
        known, pieces, plan = dict[Any, Value](), dict[Any, Value](), dict[Hashable, Step]()

        def step(eqn: Eqn, values: list[Value]) -> list[Any]:
            one, self.jaxpr = products.get(id(eqn)), jaxpr
            if one is None or not self._is_cut_behind(one, known[one.kernel]):
                results, plan[key_of(eqn)] = self.equation(eqn, values)
                return results
            plan[key_of(eqn)] = Step(DONE)
            if eqn is one.chain[-1]:
                made, plan[key_of(eqn)] = self._fused(eqn, one, [known[atom] for atom in one.inputs])
                pieces.update(made)
            return [pieces.get(variable) for variable in eqn.outvars]

        given = [*(number(v.aval) for v in jaxpr.constvars), *values]
        self.found |= {v: value.axes for v, value in zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True)}
        of_caller = [value.uses.variable for value in given]
        for variable, value in zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True):
            value.uses.variable = variable
        ends = evaluate(jaxpr, given, step, lambda literal: number(literal.aval), known)
        for value, variable in zip(given, of_caller, strict=True):
            value.uses.variable = variable
        self.jaxpr = outer
        return ends, plan

    def equation(self, eqn: Eqn, values: list[Value]) -> Planned:
        """Plan an equation."""
        self._use(eqn, values)
        claim, begin, outer, self.brought = self.nearest, len(self.needs), self.brought, []
        operands = tuple(value.axes for value in values)
        if eqn.primitive.name not in self.rules and called(eqn) is not None and not unknown_parameters(eqn):
            step, results = self._call(eqn, values)
        else:
            with self._ran(eqn, values) as results:
                made, step = self.rule(eqn, values)
                results += made
        for variable, value in zip(eqn.outvars, results, strict=True):
            if value.is_put_off and value.signal is not None and not any(value.axes):
                value.axes = self.wanted.get(variable, value.axes)
            self.found[variable], value.uses.variable = value.axes, variable
        needs = [] if step.inside else self.needs[begin:]
        brought, self.brought = tuple(self.brought), outer
        return results, dataclasses.replace(
            step,
            brought=brought,
            operands=operands,
            results=tuple(value.axes for value in results),
            moves=tuple((v.axes, axes) for v, axes, _ in needs if not v.is_put_off and v.axes != axes),
            claims=tuple(value.signal for value in values),
            claim=claim,
            claim_behind=self.nearest,
        )

    def _call(self, eqn: Eqn, values: list[Value]) -> tuple[Step, list[Value]]:
        """Plan a call. What goes into one that others share, and comes out of it, is an array or a stored parameter."""
        is_folded = eqn.primitive.name == FOLDED
        values = [self.array(value) for value in values] if is_folded else values
        with self._within(None if self.path is None else (*self.path, key_of(eqn))):
            results, inside = self.program(called(eqn), values)
            with self.ending(inside):
                results = [self.force(value) for value in results] if is_folded else results
        return Step(CALL, inside=(inside,)), results

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Make the replacement of an equation, once for all calls of its program."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _is_cut_behind(self, one: Fused, kernel: Value) -> bool:
        claim = kernel.signal
        return claim is not None and bool(claim.column) and not one.size % ways(claim.column, self.sizes)

    def _fused(self, eqn: Eqn, one: Fused, values: list[Value]) -> tuple[dict[Any, Value], Step]:
        """Plan the rewritten form of a product with a cut result."""
        self._use(eqn, values)
        claim, body = (
            self.nearest,
            self.once(key_of(eqn), lambda: traced_whole(one.run, [atom.aval for atom in one.inputs])),
        )
        with self._ran(eqn, values) as results:
            made, inside = self.program(body, values)
            results += made
        pieces = {variable: results[at] for variable, at in one.pieces.items()}
        self.found.update((variable, value.axes) for variable, value in pieces.items())
        return pieces, Step(inside=(inside,), body=body, fused=one, claim=claim, claim_behind=self.nearest)

    def _use(self, eqn: Eqn, values: Sequence[Value]) -> None:
        self.eqn = eqn
        for value in values:
            if isinstance(value, Unplaced):
                value.settle()
        self.nearest = claim_of(values) or self.nearest

    @contextlib.contextmanager
    def _within(self, path: tuple[Hashable, ...] | None) -> Iterator[None]:
        before, self.path = self.path, path
        try:
            yield
        finally:
            self.path = before

    @contextlib.contextmanager
    def _ran(self, eqn: Eqn, values: Sequence[Value]) -> Iterator[list[Value]]:
        """Take the results of an equation, and record its step without its inner programs."""
        path, results, begin = self.path, list[Value](), len(self.needs)
        with self._within(None):
            yield results
        if path is not None:
            is_open = factors(eqn) is not None or eqn.primitive.name == "custom_jvp_call"
            self.ran.append(Ran((*path, key_of(eqn)), is_open, values, results, self.needs[begin:]))

    # -- an equation --

    def rule(self, eqn: Eqn, values: list[Value]) -> Planned:
        name = eqn.primitive.name
        is_known = name in self.rules and not unknown_parameters(eqn)
        return self.rules[name](self, eqn, values) if is_known else self.by_table(eqn, values)

    def by_table(self, eqn: Eqn, values: list[Value]) -> Planned:
        name, found = eqn.primitive.name, factors(eqn)
        if found is None:
            return self._whole(eqn, values)
        # what is made of nothing but numbers and what was put off is put off too
        any_is_put_off = name in PUT_OFF_WITH and any(value.is_put_off for value in values)
        if any_is_put_off and all(value.is_put_off or not value.shape for value in values):
            return self.later(eqn, values, found)
        if name in STAYS and (still := self._parameter(eqn, values[0], found)):
            return still
        choice = choose(found, values, self.sizes)
        if name in ELEMENTWISE:
            wanted, shape = self.wanted.get(eqn.outvars[0], ()), tuple(eqn.outvars[0].aval.shape)
            choice = foreseen(wanted, shape, values, found, choice, self.sizes)
        self.placed(values, found, choice)
        return self.results(eqn, found, choice), Step(choice=choice)

    def _parameter(self, eqn: Eqn, value: Value, found: Factors) -> Planned | None:
        """Plan a cast parameter, left at rest, or a reshaped parameter, deferred: it is gathered and marked once for
        all its uses. Return None for other arrays."""
        name = eqn.primitive.name
        if isinstance(value, Unplaced) and value.is_undecided:
            return self._still_undecided(eqn, value, found)
        if value.signal is not None and name == "convert_element_type":
            return [value.cast_by_program(eqn.params["new_dtype"])], Step(AT_REST)
        if value.signal is not None and name in CASTS:
            return [value.renewed()], Step(AT_REST)
        if name in CASTS or value.signal is None:
            return None
        return self.later(eqn, [value], found)

    def _still_undecided(self, eqn: Eqn, value: Unplaced, found: Factors) -> Planned | None:
        """Return a parameter in its new shape, or pieces of it. An axis that is cut is split by no word. None where axes are
        not the same axes any more."""
        was = {of: at for at, of in enumerate(found.operands[0]) if of}
        orders = [[was.get(of) if of else None for of in result] for result in found.results]
        shapes = [tuple(variable.aval.shape) for variable in eqn.outvars]
        if eqn.primitive.name in ("slice", "split") and value.signal is not None:
            words = {*value.signal.column, *value.signal.reduction}
            for order, shape in zip(orders, shapes, strict=True):  # pieces that can be split as well
                order[:] = [
                    at if old is None and words and not shape[at] % ways(words, self.sizes) else old
                    for at, old in enumerate(order)
                ]
        for of, at in was.items():
            if any(at in order for order in orders):
                continue
            if len(of) >= 2 or (value.shape[at] >= 2 and not value.shape[1:]):
                return None
            value.scan(at)
        made = zip(eqn.outvars, shapes, orders, strict=True)
        return [value.shaped(v.aval.dtype, shape, order) for v, shape, order in made], Step(AT_REST)

    def later(self, eqn: Eqn, values: Sequence[Value], found: Factors) -> Planned:
        """Put an operation off: it is done where a result of it is needed, as that needs it split. Of several arrays that all
        devices have, and no fewer numbers than the result, the gradient of the result is summed, not that of each."""
        choice = choose(found, values, self.sizes)
        signal, (early, sources) = claim_of(values), sums_early(eqn, values)

        def result(at: int, variable: Any) -> Value:
            shape = tuple(variable.aval.shape)

            def recipe(axes: Axes, names: Names) -> None:
                choice = asked_of(found, at, axes, self.sizes)
                self.placed(values, found, choice, names if early[at] else frozenset())
                self.need(Value(shape, axes_of(found.results[at], choice), variable.aval.dtype), axes, names)

            axes = axes_of(found.results[at], choice)
            made_of = sources if early[at] else math.prod(shape)
            return Later(shape, axes, variable.aval.dtype, recipe, made_of, signal=signal)

        return [result(at, variable) for at, variable in enumerate(eqn.outvars)], Step(PUT_OFF)

    def results(self, eqn: Eqn, found: Factors, choice: Choice) -> list[Value]:
        return values_of(eqn.outvars, (axes_of(of, choice) for of in found.results))

    def _whole(self, eqn: Eqn, values: Sequence[Value]) -> Planned:
        """Plan an operation without a rule on whole arrays, if that moves nothing or the nearest claim allows it."""
        name, split = eqn.primitive.name, [value for value in values if any(value.axes)]
        self.unruled[name] = self.unruled.get(name, 0) + 1
        if split and not self.is_first and name not in (() if self.nearest is None else self.nearest.allow):
            over = "+".join(dict.fromkeys(mesh_axis for names in split[0].axes for mesh_axis in names))
            where = "any signal" if self.nearest is None else f"{self.nearest}"
            unknown = " and ".join(unknown_parameters(eqn))
            why = (
                f" with {unknown}, which jshard.shard does not know,"
                if unknown
                else ", for which jshard.shard has no rule,"
            )
            raise JShardError(
                f"{source_of(eqn)} calls {name}{why} on an array {split[0].shape} that is split over {over}, nearest to "
                f"{where}",
                hint=f"write allow: [{name}] under that signal, to have the array gathered there, or axis_types: auto under "
                "jshard, to leave the program to XLA",
            )
        for value in () if self.is_first else values:
            self.need(value, whole(len(value.shape)))
        return [number(v.aval) for v in eqn.outvars], Step(WHOLE)

    # -- what an equation needs --

    def placed(self, values: Sequence[Value], found: Factors, choice: Choice, names: Names = frozenset()) -> None:
        """Record the operands' layouts under this choice, varying over `names` too."""
        names = names.union(*choice.values())
        for value, of in zip(values, found.operands, strict=True):
            self.need(value, axes_of(of, choice), names)

    def need(self, value: Value, axes: Axes, names: Names = frozenset()) -> None:
        self.needs.append((value, axes, names))
        self.have(value, axes, names)

    @contextlib.contextmanager
    def ending(self, plan: Steps) -> Iterator[None]:
        """Add the last step of a program to its plan: it brings results to where they are returned."""
        outer, self.brought = self.brought, []
        yield
        plan[END], self.brought = Step(brought=tuple(self.brought)), outer

    def have(self, value: Value, axes: Axes, names: Names = frozenset()) -> None:
        """Bring a value to where it is needed: once for all uses that need it alike."""
        if value.uncast is not None and value.signal is not None:
            return self.have(value.summed_in(value.signal.dtype.reduce, value.dtype), axes, names)
        names = names.union(*axes)
        if (axes, names) in value.uses.needed:
            self.brought.append(value.uses.needed[axes, names])
            return None
        outer, self.brought = self.brought, []
        if isinstance(value, Later):
            value.recipe(axes, names)
        elif isinstance(value, Unplaced):
            if value.is_undecided:
                words = {value.parameter.claim.signal.axes(word): word for word in ("reduction", "column")}
                value.decide([words.get(split_by) if split_by else None for split_by in axes], self.eqn)
            value.settle()
        value.uses.needed[axes, names] = value.brought(axes, names, tuple(self.brought))
        outer.append(value.uses.needed[axes, names])
        self.brought = outer
        return None

    def force(self, value: Value) -> Value:
        """Return a value in use: what was put off is made, and a stored parameter gathered."""
        is_in_use = not (value.is_put_off or value.is_stored or value.is_undecided)
        return value if is_in_use else self.place(value, value.axes)

    def place(self, value: Value, axes: Axes) -> Value:
        self.need(value, axes)
        return Value(value.shape, axes, value.dtype, uses=Uses(variable=self.brought[-1]))

    def array(self, value: Value) -> Value:
        """Return an array for another program. A stored parameter stays at rest, and is gathered at its use."""
        return self.force(value) if value.is_put_off else value

    def unscattered(self, signal: Signal) -> str:
        """Return the reason why no sum is scattered for the signal's `sequence`; "" if a sum is."""
        found: dict[str, str] = {}
        for name in signal.sequence:
            others = [fault for (_, over), fault in self.scattered.items() if over == name]
            fault = min(others, default=f"nothing sums over {name}")  # "" where a sum is scattered
            found[name] = self.scattered.get((signal.name, name)) or fault
        return ", ".join(fault for name, fault in found.items() if fault and self.sizes[name] >= 2)


def sums_early(eqn: Eqn, operands: Sequence[Lying]) -> tuple[list[bool], int]:
    """Return, for each deferred result, whether its operands begin to vary instead of it, and its number of elements."""
    sources = [each.made_of if each.is_put_off else math.prod(each.shape) for each in operands if each.shape]
    claim = claim_of(operands)
    is_stored = claim is not None and bool(claim.store)
    sizes = [math.prod(variable.aval.shape) for variable in eqn.outvars]
    return [is_stored or len(sources) < 2 or size > sum(sources) for size in sizes], sum(sources)


def number(aval: Any) -> Value:
    """Return an array known to all devices."""
    return Value(tuple(aval.shape), whole(len(aval.shape)), aval.dtype)


def whole(rank: int) -> Axes:
    return ((),) * rank


def known(eqn: Eqn) -> Factors:
    """Return the factors of an equation of the table."""
    found = factors(eqn)
    assert found is not None
    return found


def traced_whole(f: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Trace a function on global arrays, where no mesh is."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(f)(*given)
