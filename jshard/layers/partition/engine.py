"""Runs a jaxpr on each device's part of its arrays, inside a shard_map, by the table of what each primitive does to axes.

What is split in an operand stays split in the result, where the table says that it may: greedy, and the same on every run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import source_info_util
from jax.extend.core import Literal
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.kernels.all_reduction import all_reduce
from jshard.kernels.invariant_cast import over_one_device
from jshard.layers.gather import Kernels
from jshard.layers.partition.fused import fused
from jshard.layers.partition.local_sizes import Choice, axes_of, local_shape, localized
from jshard.layers.partition.part import Names, Part, vary, whole
from jshard.layers.partition.unreduced import Marks, Step
from jshard.layouts.axes import Factored, Factors, factors, spread
from jshard.layouts.primitives import ELEMENTWISE, FIXED, KEPT, LOOKUP, unknown_parameters
from jshard.layouts.redistribution import Axes, Move
from jshard.programs.jaxprs import bare, called
from jshard.programs.provenance import placed_in, scope, source_of
from jshard.signals.claims import Stage
from jshard.signals.signal import Signal

# Operations after which a parameter is at rest still, those after which it is one still, or pieces of one, and those that are
# put off where all that goes into them is.
CASTS = frozenset("convert_element_type copy stop_gradient".split())
STAYS = CASTS | frozenset("reshape slice split squeeze transpose unstack".split())
PUT_OFF = ELEMENTWISE | STAYS | frozenset("concatenate pad rev stack tile".split())


class SomeLayers(NamedTuple):
    """That the first layers of a loop run, fewer than it is long: how many here, and by stage, in words."""

    loop: Any
    number: Array
    times: str


class Partition:
    """One run over one jaxpr. `unruled` counts the primitives that no rule was known for. One that finds `only_axes` traces the
    body of a loop no more often than that takes; one that only looks for where parameters lie makes zeros for the results of
    what has no rule."""

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, Rule],
        wanted: Mapping[Any, Axes] | None = None,
        stage: Stage | None = None,
        *,
        only_axes: bool,
        only_looks: bool = False,
    ):
        self.found: dict[Any, Axes] = {}  # how variables are split
        self.wanted = wanted or {}  # how they will be needed
        self.mesh, self.sizes, self.rules = mesh, dict(mesh.shape), rules
        self.only_axes, self.only_looks = only_axes, only_looks
        self.stage = stage  # that layers of its parameters are on
        self.some_layers: SomeLayers | None = None
        self.unruled: dict[str, int] = {}
        self.nearest: Signal | None = None  # the claim of the parameter used last
        self.eqn: Any = None
        self.jaxpr: Any = None  # that `eqn` is in
        self.path: tuple[int, ...] | None = ()  # the calls around it; None in what holds a program of its own
        self.gathered_behind: dict[int, Signal] = {}  # additions of a bias, by the `id`: their results are gathered
        self.marks: Marks = {}
        self.steps: list[Step] | None = None  # kept where somebody wants to read them
        self.moves: list[tuple[Part, Axes, Names]] = []
        # by signal and mesh axis: "" where a sum is scattered as `sequence` asks, or why it is not
        self.scattered: dict[tuple[str, str], str] = {}

    # -- a jaxpr --

    def run(self, jaxpr: Any, args: Sequence[Part]) -> list[Part]:
        """Run a jaxpr, closed or open, on parts of its arguments."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), bare(jaxpr)
        known: dict[Any, Part] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        self.found.update((variable, part.axes) for variable, part in known.items())

        def read(atom: Any) -> Part:
            return self.literal(atom) if isinstance(atom, Literal) else known[atom]

        products = fused(jaxpr)
        for eqn in jaxpr.eqns:
            one = products.get(id(eqn))
            if (
                one is not None
                and (claim := read(one.kernel).signal) is not None
                and claim.column
                and not one.size % self.ways(claim.column)
            ):
                if eqn is one.chain[-1]:
                    parts = [read(atom) for atom in one.inputs]
                    with self._traced_at(eqn, parts), self._step(eqn, parts) as (parts, pieces):
                        pieces += self.run(traced_whole(one.run, [atom.aval for atom in one.inputs]), parts)
                    known.update((variable, pieces[at]) for variable, at in one.pieces.items())
                continue
            self.jaxpr = jaxpr
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            for variable, part in zip(eqn.outvars, results, strict=True):
                if part.make is not None and part.signal is not None and not any(part.axes):
                    part.axes = self.wanted.get(variable, part.axes)
                self.found[variable] = part.axes
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, parts: list[Part]) -> list[Part]:
        for part in parts:
            part.settle()
        with self._traced_at(eqn, parts):
            if eqn.primitive.name not in self.rules and called(eqn) is not None and not unknown_parameters(eqn):
                with self._within(None if self.path is None else (*self.path, id(eqn))):
                    return self.run(called(eqn), parts)
            with self._step(eqn, parts) as (parts, results):
                results += self.rule(eqn, parts)
            return results

    @contextlib.contextmanager
    def _within(self, path: tuple[int, ...] | None) -> Iterator[None]:
        before, self.path = self.path, path
        try:
            yield
        finally:
            self.path = before

    @contextlib.contextmanager
    def _step(self, eqn: Any, parts: list[Part]) -> Iterator[tuple[list[Part], list[Part]]]:
        """Let operands vary whose gradients stay unreduced, and take the results; where steps are kept, keep this one, and
        nothing of what it runs itself."""
        key, results, begin = None if self.path is None else (*self.path, id(eqn)), list[Part](), len(self.moves)
        for at, names in self.marks.get(key, {}).items():
            parts = [*parts[:at], parts[at].varying(names, self.moving), *parts[at + 1 :]]
        with self._within(None):
            yield parts, results
        if self.steps is not None and key is not None:
            is_open = factors(eqn) is not None or eqn.primitive.name == "custom_jvp_call"
            self.steps.append(Step(key, is_open, parts, results, self.moves[begin:]))

    def _traced_at(self, eqn: Any, parts: Sequence[Part]) -> Any:
        """The user's line and scopes, and the nearest claim where no scope names a signal."""
        self.eqn = eqn
        claim = next((part.signal for part in parts if part.signal is not None), None)
        self.nearest = claim or self.nearest
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        if self.nearest is not None:
            stack = placed_in(stack, self.nearest.name)
        # not `eqn.ctx.manager`: it would bring back the mesh of the trace, and the axes of this shard_map would be gone
        return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)

    def literal(self, atom: Any) -> Part:
        return self.constant(jnp.asarray(atom.val, atom.aval.dtype))

    def constant(self, x: Any) -> Part:
        x = jnp.asarray(x)
        return Part(tuple(x.shape), whole(x.ndim), x)

    # -- an equation --

    def rule(self, eqn: Any, parts: list[Part]) -> list[Part]:
        name = eqn.primitive.name
        is_known = name in self.rules and not unknown_parameters(eqn)
        return self.rules[name](self, eqn, parts) if is_known else self.by_table(eqn, parts)

    def by_table(self, eqn: Any, parts: list[Part]) -> list[Part]:
        name, found = eqn.primitive.name, factors(eqn)
        if found is None:
            return self.gathered(eqn, parts)
        # what is made of nothing but numbers and what was put off is put off too
        if name in PUT_OFF and any(part.make for part in parts) and all(part.make or not part.shape for part in parts):
            return self.later(eqn, parts, found)
        if name in STAYS and (still := self._parameter(eqn, parts[0], found)):
            return still
        return self.by_factors(eqn, parts, found)

    def _parameter(self, eqn: Any, part: Part, found: Factors) -> list[Part] | None:
        """Return a parameter that is cast, which stays at rest, or shaped anew: put off, so that it is gathered and marked once
        for all its uses. None where it is no parameter."""
        name = eqn.primitive.name
        if part.is_undecided:
            return self._still_undecided(eqn, part, found)
        is_parameter = part.signal is not None or part.asked is not None
        if is_parameter and name == "convert_element_type":
            return [part.cast_by_program(eqn.params["new_dtype"])]
        if is_parameter and name in CASTS:
            return [part.at_rest(self.bind(eqn, [part.x])[0], part.shape, range(len(part.shape)))]
        if name in CASTS or part.signal is None:
            return None
        return self.later(eqn, [part], found)

    def _still_undecided(self, eqn: Any, part: Part, found: Factors) -> list[Part] | None:
        """Return a parameter in its new shape, or pieces of it. An axis that is cut is split by no word. None where axes are
        not the same axes any more."""
        was = {of: at for at, of in enumerate(found.operands[0]) if of}
        orders = [[was.get(of) if of else None for of in result] for result in found.results]
        shapes = [tuple(variable.aval.shape) for variable in eqn.outvars]
        if eqn.primitive.name in ("slice", "split") and part.signal is not None:
            words = {*part.signal.column, *part.signal.reduction}
            ways = self.ways(words)
            for order, shape in zip(orders, shapes, strict=True):  # pieces that can be split as well
                order[:] = [
                    at if old is None and words and not shape[at] % ways else old for at, old in enumerate(order)
                ]
        for of, at in was.items():
            if any(at in order for order in orders):
                continue
            if len(of) >= 2 or (part.shape[at] >= 2 and not part.shape[1:]):
                return None
            if part.parameter is not None and (axis := part.of[at]) is not None:
                part.parameter.roles[axis] = "scan"
        xs = self.bind(eqn, [part.x])
        return [part.at_rest(x, shape, order) for x, shape, order in zip(xs, shapes, orders, strict=True)]

    def by_factors(self, eqn: Any, parts: Sequence[Part], found: Factors) -> list[Part]:
        choice = self.choose(found, parts)
        if eqn.primitive.name in ELEMENTWISE:
            choice = self._foreseen(eqn, parts, found, choice)
        xs = self.placed(parts, found, choice)
        return self.results(eqn, self.bind(eqn, xs, found, choice), found, choice)

    def placed(self, parts: Sequence[Part], found: Factors, choice: Choice, names: Names = frozenset()) -> list[Array]:
        """Bring the operands to how they are split by this choice, varying over `names` too."""
        names = names.union(*choice.values(), *(part.beyond for part in parts))
        return [self.local(p, axes_of(f, choice), names) for p, f in zip(parts, found.operands, strict=True)]

    def results(self, eqn: Any, outs: Sequence[Array], found: Factors, choice: Choice) -> list[Part]:
        """Reduce over devices what the table says, and say how the results are split."""
        results = []
        for number, (variable, out, of) in enumerate(zip(eqn.outvars, outs, found.results, strict=True)):
            for factor, kind in enumerate(found.kinds):
                if number in found.sums and not any(factor in each for each in of):
                    kind = "sum"
                if kind not in (KEPT, FIXED, LOOKUP) and factor in choice:
                    out = self.reduce(out, choice[factor], kind)
            results.append(Part(tuple(variable.aval.shape), axes_of(of, choice), out))
        return results

    def reduce(self, x: Array, names: tuple[str, ...], kind: str, key: str = "") -> Array:
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return self.reduce(x.astype(jnp.int32), names, kind, key).astype(jnp.bool_)
        x = over_one_device(x, names, varies=False, is_sum=kind == "sum")
        names = tuple(name for name in names if self.sizes[name] >= 2)
        algorithm: Any = "auto" if self.nearest is None else dict(self.nearest.kernel).get("all_reduce", "auto")
        fields = {"key": key} if key else {}
        with scope(**fields):
            return all_reduce(x, names, op=kind, algorithm=algorithm if kind == "sum" else "auto")  # type: ignore[arg-type]  # kinds are its words

    def unscattered(self, signal: Signal) -> str:
        """Return why no sum is scattered as the signal's `sequence` asks; "" where one is."""
        found: dict[str, str] = {}
        for name in signal.sequence:
            others = [fault for (_, over), fault in self.scattered.items() if over == name]
            fault = min(others, default=f"nothing sums over {name}")  # "" where a sum is scattered
            found[name] = self.scattered.get((signal.name, name)) or fault
        return ", ".join(fault for name, fault in found.items() if fault and self.sizes[name] >= 2)

    def local(self, part: Part, axes: Axes, names: Names) -> Array:
        if self.steps is not None:
            self.moves.append((part, axes, names))
        return part.local(axes, names, self.moving)

    def force(self, part: Part) -> Part:
        """The part itself: what was put off is made, and a stored parameter gathered."""
        if part.make is None and part.rest is None and not part.is_undecided:
            return part
        return Part(part.shape, part.axes, self.local(part, part.axes, frozenset()))

    def place(self, part: Part, axes: Axes) -> Part:
        return Part(part.shape, axes, self.local(part, axes, frozenset()))

    @contextlib.contextmanager
    def moving(self, steps: tuple[Move, ...]) -> Iterator[Kernels]:
        """Say who asks for the moves: `sequence` for what it has scattered, else the operation that can't take it as it is; and
        by which algorithms."""
        claim = self.nearest
        kernels = () if claim is None else claim.kernel
        if (
            claim is not None
            and claim.sequence
            and all(s.kind == "slice" or s.mesh_axis in claim.sequence for s in steps)
        ):
            with scope(key="sequence"):
                yield kernels
            return
        with scope(reason="redistribute"):
            yield kernels

    def choose(self, found: Factors, parts: Sequence[Part]) -> Choice:
        """Choose the mesh axes of each factor: as claimed parameters are split, then as the larger operands are, and of those
        the ones that the others have been moved to before."""
        order = sorted(
            (
                part.signal is None or not any(part.axes),
                part.make is not None,
                -self.local_size(part),
                any(part.has_been(other.axes) for other in parts if other is not part),
                number,
            )
            for number, part in enumerate(parts)
            if not part.is_undecided
        )
        choice: Choice = {}
        left = {factor for result in found.results for of in result for factor in of}
        # An axis of one element, over one device, may be squeezed.
        fixed = {f for f, n in enumerate(found.sizes) if found.kinds[f] == FIXED or (n == 1 and f not in left)}
        for *_, number in order:
            used = {name for names in choice.values() for name in names}
            for of, names in zip(found.operands[number], parts[number].axes, strict=True):
                free = tuple(itertools.takewhile(lambda name, used=used: name not in used, names))
                for factor, some in spread(of, free, found.sizes, self.sizes):
                    if factor not in fixed and factor not in choice:
                        choice[factor] = some
        return self.moved_over(found, parts, self._contiguous(found, choice))

    def moved_over(self, found: Factors, parts: Sequence[Part], choice: Choice) -> Choice:
        """Keep the mesh axes that an axis can't keep: behind those that split it already, or on an axis before it. What would
        be gathered, and lie whole behind the operation, costs an all-to-all and stays split."""
        for part, of in zip(parts, found.operands, strict=True):
            if part.make is not None or part.signal is not None:
                continue
            for axis, names in enumerate(part.axes):
                for at, name in enumerate(names):
                    own = [factor for factor in of[axis] if at and choice.get(factor) == names[:at]]
                    for factor in (*own, *(factor for each in of[:axis] for factor in each)):
                        more = {**choice, factor: (*choice.get(factor, ()), name)}
                        if (
                            not any(name in names for names in choice.values())
                            and found.kinds[factor] == KEPT
                            and not found.sizes[factor] % self.ways(more[factor])
                            and self._contiguous(found, dict(more)) == more
                        ):
                            choice = more
        return choice

    def _foreseen(self, eqn: Any, parts: Sequence[Part], found: Factors, choice: Choice) -> Choice:
        """Split what is larger than its operands as it will be needed, so that not it is cut later, but they are."""
        choice, axes = dict(choice), self.wanted.get(eqn.outvars[0], ())
        size = math.prod(local_shape(shape_of(eqn), axes_of(found.results[0], choice), self.sizes))
        for of, names in zip(found.results[0], axes, strict=False):
            for factor, some in spread(of, names, found.sizes, self.sizes):
                have = [
                    p for p, each in zip(parts, found.operands, strict=True) if any(factor in count for count in each)
                ]
                used = {name for names in choice.values() for name in names}
                if factor not in choice and not used.intersection(some) and sum(map(self.local_size, have)) < size:
                    choice[factor] = some
        return self._contiguous(found, choice)

    def ways(self, names: Iterable[str]) -> int:
        return math.prod(self.sizes[name] for name in names)

    def local_size(self, part: Part) -> float:
        return math.prod(local_shape(part.shape, part.axes, self.sizes))

    def _contiguous(self, found: Factors, choice: Choice) -> Choice:
        """Leave out what would not be one piece of an axis: a minor factor is split only below major ones split to the end. A
        factor left out for one array may be a major one of another."""
        before = len(choice) + 1
        while len(choice) < before:
            before = len(choice)
            for of in (of for each in (*found.operands, *found.results) for of in each):
                open_ = False
                for factor in of:
                    if open_:
                        choice.pop(factor, None)
                    open_ |= self.ways(choice.get(factor, ())) != found.sizes[factor]
        return choice

    def later(self, eqn: Any, parts: Sequence[Part], found: Factors) -> list[Part]:
        """Put an operation off: it is done where a result of it is needed, as that needs it split. Of several arrays that all
        devices have, and no fewer numbers than the result, the gradient of the result is summed, not that of each."""
        choice = self.choose(found, parts)
        signal = next((part.signal for part in parts if part.signal is not None), None)
        sources = [part.made_of if part.make else math.prod(part.shape) for part in parts if part.shape]
        is_stored = signal is not None and bool(signal.store)

        def result(number: int, of: Factored) -> Part:
            shape = tuple(eqn.outvars[number].aval.shape)
            is_early = is_stored or len(sources) < 2 or math.prod(shape) > sum(sources)
            made_of = sum(sources) if is_early else math.prod(shape)

            def make(axes: Axes, names: Names) -> Array:
                asked = {
                    f: some
                    for at, n in zip(of, axes, strict=True)
                    for f, some in spread(at, n, found.sizes, self.sizes)
                }
                choice = {f: some for f, some in asked.items() if found.kinds[f] != FIXED}
                choice = self._contiguous(found, choice)
                early = names if is_early else frozenset()
                out = self.bind(eqn, self.placed(parts, found, choice, early), found, choice)[number]
                return self.local(Part(shape, axes_of(of, choice), out), axes, names)

            return Part(shape, axes_of(of, choice), make=make, signal=signal, made_of=made_of)

        return [result(number, of) for number, of in enumerate(found.results)]

    def gathered(self, eqn: Any, parts: Sequence[Part]) -> list[Part]:
        """Run what no rule is known for on whole arrays, where that moves nothing or the nearest claim allows it."""
        name, split = eqn.primitive.name, [part for part in parts if any(part.axes)]
        self.unruled[name] = self.unruled.get(name, 0) + 1
        if self.only_looks:
            return self.skipped(eqn)
        if split and name not in (self.nearest.allow if self.nearest is not None else ()):
            over = "+".join(dict.fromkeys(mesh_axis for names in split[0].axes for mesh_axis in names))
            where = "any signal" if self.nearest is None else f"{self.nearest}"
            unknown = " and ".join(unknown_parameters(eqn))
            why = (
                f" with {unknown}, which jshard.shard does not know,"
                if unknown
                else ", for which jshard.shard has no rule,"
            )
            raise JShardError(
                f"{source_of(eqn)} calls {name}{why} on an array {split[0].shape} that is "
                f"split over {over}, nearest to {where}",
                hint=f"write allow: [{name}] under that signal, to have the array gathered there, or axis_types: auto under "
                "jshard, to leave the program to XLA",
            )
        outs = self.bind(eqn, [self.local(part, whole(len(part.shape)), frozenset()) for part in parts])
        return [Part(tuple(v.aval.shape), whole(len(v.aval.shape)), x) for v, x in zip(eqn.outvars, outs, strict=True)]

    def skipped(self, eqn: Any) -> list[Part]:
        shapes = [(tuple(v.aval.shape), v.aval.dtype) for v in eqn.outvars]
        return [Part(shape, whole(len(shape)), jnp.zeros(shape, dtype)) for shape, dtype in shapes]

    def bind(
        self, eqn: Any, xs: Sequence[Any], found: Factors | None = None, choice: Choice | None = None, **others: Any
    ) -> list[Any]:
        """Run the primitive on local parts, with the parameters that say sizes made local."""
        names = frozenset().union(*(jax.typeof(x).mat.varying for x in xs))
        params = {**eqn.params, **{key: None for key in ("out_sharding", "sharding") if key in eqn.params}}
        if found is not None and choice:
            params |= localized(eqn, found, choice, self.sizes)
        params |= others
        out = eqn.primitive.bind(*(vary(x, names) for x in xs), **eqn.primitive.get_bind_params(params))
        # NVIDIA's attention does not hand on over which mesh axes its operands vary
        return [vary(x, names) for x in out] if eqn.primitive.multiple_results else [out]


def traced_whole(f: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Trace a function on global arrays, where no mesh is."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(f)(*given)


def known(eqn: Any) -> Factors:
    """Return the factors of an equation of the table."""
    found = factors(eqn)
    assert found is not None
    return found


def shape_of(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


Rule = Callable[[Partition, Any, list[Part]], list[Part]]
