"""Runs a jaxpr on each device's part of its arrays, inside a shard_map, as its plan says."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import source_info_util
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from jshard.kernels.all_reduction import all_reduce
from jshard.kernels.invariant_cast import over_one_device
from jshard.layers.gather import Kernels
from jshard.layers.partition.choice import asked_of
from jshard.layers.partition.local_sizes import Choice, axes_of, localized
from jshard.layers.partition.part import Deferred, Here, Moving, Part, filled, here_of, moving_as, vary
from jshard.layers.partition.plan import AT_REST, CALL, DONE, PUT_OFF, SHARED, WHOLE, Names, Plan, Step, key_of
from jshard.layers.partition.planner import CASTS, Planner, PlanRule, known, sums_early, whole
from jshard.layers.partition.value import Value, claim_of
from jshard.layouts.axes import Factors
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP, unknown_parameters
from jshard.layouts.redistribution import Axes, Move
from jshard.programs.jaxprs import FOLDED, Eqn, Jaxpr, OpenJaxpr, bare, called, evaluate
from jshard.programs.provenance import placed_in, scope
from jshard.signals.signal import Signal


class SomeLayers(NamedTuple):
    """The number of layers to run of a loop, fewer than its length: the number here, and by stage, in words."""

    loop: Eqn
    number: Array
    times: str


class Run:
    """Runs equations by their steps. Of a loop over layers only the first may run: as many as `some_layers` says."""

    def __init__(
        self,
        mesh: Mesh,
        plans: Mapping[str, PlanRule],
        rules: Mapping[str, Rule],
        by: Mapping[str, str] = types.MappingProxyType({}),
        some_layers: SomeLayers | None = None,
    ):
        self.mesh, self.plans, self.rules, self.some_layers = mesh, plans, rules, some_layers
        self.shared: dict[Any, Callable[..., list[Array]]] = {}  # calls of one program on parts that lie alike
        self.by = by  # the fields of the scope in which what is carried goes from stage to stage

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    # -- a jaxpr --

    def run(self, program: Jaxpr | OpenJaxpr, args: Sequence[Part], plan: Plan) -> list[Part]:
        """Run a jaxpr, closed or open, on parts of its arguments."""
        known, pieces = dict[Any, Part](), dict[Any, Part]()

        def run(eqn: Eqn, parts: list[Part]) -> Sequence[Any]:
            step = plan[key_of(eqn)]
            if step.fused is not None:
                made = self.equation(eqn, [known[atom] for atom in step.fused.inputs], step)
                pieces.update((variable, made[at]) for variable, at in step.fused.pieces.items())
            if step.fused is not None or step.how == DONE:
                return [pieces.get(variable) for variable in eqn.outvars]
            results = self.equation(eqn, parts, step)
            assert tuple(part.axes for part in parts) == step.operands, (eqn, parts, step)
            assert tuple(part.axes for part in results) == step.results, (eqn, results, step)
            return results

        consts = map(self.constant, getattr(program, "consts", ()))
        literal = lambda atom: self.constant(atom.val, atom.aval.dtype)
        return evaluate(bare(program), [*consts, *args], run, literal, known)

    def equation(self, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
        """Run an equation under the user's line and scopes, and under the nearest claim if no scope names a signal."""
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        if step.claim is not None:
            stack = placed_in(stack, step.claim.name)
        # not `eqn.ctx.manager`: it would bring back the mesh of the trace, and the axes of this shard_map would be gone
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
            if step.how in (CALL, SHARED):
                return self._call(eqn, parts, step)
            for at, names in step.marks.items():
                parts = [*parts[:at], parts[at].varying(names, self.moving(step.claim)), *parts[at + 1 :]]
            if step.body is not None:
                return self.run(step.body, parts, step.inside[0])
            name = eqn.primitive.name
            is_known = name in self.rules and not unknown_parameters(eqn)
            return self.rules[name](self, eqn, parts, step) if is_known else self.by_table(eqn, parts, step)

    def _call(self, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
        program, (inside,) = called(eqn), step.inside
        if eqn.primitive.name != FOLDED:
            return self.run(program, parts, inside)
        arrays = [self.array(part, step.claim) for part in parts]
        if step.how == CALL or any(part.is_followed for part in arrays):
            return [self.force(part, step.claim_behind) for part in self.run(program, arrays, inside)]
        places = filled(arrays, [None] * len(arrays))

        def layer(*xs: Array) -> list[Array]:
            made = self.run(program, filled(places, xs), inside)
            return [self.force(part, step.claim_behind).x for part in made]

        key = id(inside), tuple((type(p), p.shape, p.axes, p.lies) for p in places)
        if key not in self.shared:
            self.shared[key] = jax.jit(layer)
        return here_of(eqn.outvars, step.results, self.shared[key](*(part.x for part in arrays)))

    def planned(self, program: Jaxpr, parts: Sequence[Here], claim: Signal | None) -> list[Part]:
        """Plan and run a program made by JAX just now, such as the derivative of a function."""
        values = [Value(p.shape, p.axes, p.dtype, signal=p.signal) for p in parts]
        _, plan = Planner(self.mesh, self.plans, nearest=claim).program(program, values)
        return self.run(program, parts, plan)

    def constant(self, x: ArrayLike, dtype: DTypeLike | None = None) -> Here:
        x = jnp.asarray(x, dtype)
        return Here(tuple(x.shape), whole(x.ndim), x)

    # -- an equation --

    def by_table(self, eqn: Eqn, parts: Sequence[Part], step: Step) -> Sequence[Part]:
        if step.how == WHOLE:
            outs = self.bind(eqn, [self.local(part, whole(len(part.shape)), step.claim) for part in parts])
            return here_of(eqn.outvars, (whole(x.ndim) for x in outs), outs)
        if step.how == PUT_OFF:
            return self.later(eqn, parts, step)
        name = eqn.primitive.name
        if step.how == AT_REST or (name in CASTS and parts[0].uses.asked is not None):
            part = self.array(parts[0], step.claim)
            if name == "convert_element_type":
                return [part.cast_by_program(eqn.params["new_dtype"])]
            return [part.renewed(x=self.bind(eqn, [part.x])[0])]
        found = known(eqn)
        return self.results(eqn, self.bind(eqn, self.placed(parts, found, step), found, step.choice), found, step)

    def later(self, eqn: Eqn, parts: Sequence[Part], step: Step) -> Sequence[Part]:
        """Put an operation off: it is done where a result of it is needed, as that needs it split."""
        found, signal, (early, count) = known(eqn), claim_of(parts), sums_early(eqn, parts)

        def result(number: int) -> Deferred:
            shape = tuple(eqn.outvars[number].aval.shape)

            def make(axes: Axes, names: Names, moving: Moving) -> Array:
                choice = asked_of(found, number, axes, self.sizes)
                xs = self.split(parts, found, choice, moving, names if early[number] else frozenset())
                out = self.bind(eqn, xs, found, choice)[number]
                return Here(shape, axes_of(found.results[number], choice), out).local(axes, names, moving)

            made_of = count if early[number] else math.prod(shape)
            return Deferred(shape, step.results[number], make, made_of, signal=signal)

        return [result(number) for number in range(len(eqn.outvars))]

    def placed(self, parts: Sequence[Part], found: Factors, step: Step) -> list[Array]:
        """Bring the operands to how they are split by the choice of a step."""
        return self.split(parts, found, step.choice, self.moving(step.claim))

    def split(
        self, parts: Sequence[Part], found: Factors, choice: Choice, moving: Moving, names: Names = frozenset()
    ) -> list[Array]:
        """Bring operands to how they are split by a choice, varying over `names` too."""
        names = names.union(*choice.values(), *(part.beyond for part in parts))
        return [p.local(axes_of(of, choice), names, moving) for p, of in zip(parts, found.operands, strict=True)]

    def results(self, eqn: Eqn, outs: Sequence[Array], found: Factors, step: Step) -> list[Here]:
        """Reduce over devices as the table of axes says, and return the results with their layouts."""
        results = []
        for number, (variable, out, of) in enumerate(zip(eqn.outvars, outs, found.results, strict=True)):
            for factor, kind in enumerate(found.kinds):
                if number in found.sums and not any(factor in each for each in of):
                    kind = "sum"
                if kind not in (KEPT, FIXED, LOOKUP) and factor in step.choice:
                    out = self.reduce(out, step.choice[factor], kind, step.claim)
            results.append(Here(tuple(variable.aval.shape), axes_of(of, step.choice), out))
        return results

    def reduce(self, x: Array, names: tuple[str, ...], kind: str, claim: Signal | None, key: str = "") -> Array:
        """Reduce over devices, by the algorithm of the claim."""
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return self.reduce(x.astype(jnp.int32), names, kind, claim, key).astype(jnp.bool_)
        x = over_one_device(x, names, varies=False, is_sum=kind == "sum")
        names = tuple(name for name in names if self.sizes[name] >= 2)
        algorithm: Any = "auto" if claim is None else dict(claim.kernel).get("all_reduce", "auto")
        fields = {"key": key} if key else {}
        with scope(**fields):
            return all_reduce(x, names, op=kind, algorithm=algorithm if kind == "sum" else "auto")  # type: ignore[arg-type]  # kinds are its words

    def local(self, part: Part, axes: Axes, claim: Signal | None, names: Names = frozenset()) -> Array:
        return part.local(axes, names, self.moving(claim))

    def force(self, part: Part, claim: Signal | None) -> Here:
        """Return an array in use: what was put off is made, and a stored parameter gathered."""
        if isinstance(part, Here) and not part.is_stored:
            return part
        return self.place(part, part.axes, claim)

    def place(self, part: Part, axes: Axes, claim: Signal | None) -> Here:
        return Here(part.shape, axes, self.local(part, axes, claim))

    def array(self, part: Part, claim: Signal | None) -> Here:
        """Return an array for another trace. A stored parameter is gathered at its use."""
        return part if isinstance(part, Here) else self.force(part, claim)

    def lying(self, parts: Sequence[Part], axes: Sequence[Axes], claim: Signal | None) -> list[Array]:
        """Return arrays as they are split by `axes`."""
        return [self.local(part, each, claim) for part, each in zip(parts, axes, strict=True)]

    def moving(self, claim: Signal | None) -> Moving:
        """Set the cause of moves: `sequence` for its own scatters, else the operation that needs them; and their
        algorithms."""
        kernels, scattered = ((), ()) if claim is None else (claim.kernel, claim.sequence)

        def moving(steps: tuple[Move, ...]) -> AbstractContextManager[Kernels]:
            if scattered and all(s.kind == "slice" or s.mesh_axis in scattered for s in steps):
                return moving_as(kernels, key="sequence")
            return moving_as(kernels, reason="redistribute")

        return moving

    def bind(
        self,
        eqn: Eqn,
        xs: Sequence[Any],
        found: Factors | None = None,
        choice: Choice | None = None,
        **others: Any,
    ) -> list[Any]:
        """Run the primitive on shards, with its sizes made local."""
        names = frozenset().union(*(jax.typeof(x).mat.varying for x in xs))
        params = {**eqn.params, **{key: None for key in ("out_sharding", "sharding") if key in eqn.params}}
        if found is not None and choice:
            params |= localized(eqn, found, choice, self.sizes)
        params |= others
        out = eqn.primitive.bind(*(vary(x, names) for x in xs), **eqn.primitive.get_bind_params(params))
        # NVIDIA's attention does not hand on over which mesh axes its operands vary
        return [vary(x, names) for x in out] if eqn.primitive.multiple_results else [out]


def shape_of(eqn: Eqn) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


Rule = Callable[[Run, Eqn, list[Part], Step], Sequence[Part]]
