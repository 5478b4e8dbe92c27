"""Traced functions of global arrays as a program in a shard_map, with shards on each device; on Auto axes left to
XLA."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.core as jax_core
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jshard.errors import JShardError
from jshard.layers.partition import by_hand, calls, cut, lookup, loops, product, shape
from jshard.layers.partition.choice import wanted
from jshard.layers.partition.folding import folded
from jshard.layers.partition.named import named
from jshard.layers.partition.part import Here, Part
from jshard.layers.partition.plan import Plan, with_marks, with_shared, without
from jshard.layers.partition.planner import Planner, whole
from jshard.layers.partition.readers import readers
from jshard.layers.partition.regather import regathering
from jshard.layers.partition.run import Run, SomeLayers
from jshard.layers.partition.unreduced import unreduced
from jshard.layers.partition.value import Parameter, Unplaced, Value
from jshard.layers.remat import CHUNK
from jshard.layers.roles import Placed, Use, not_stored, parameter_layouts
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.redistribution import Axes
from jshard.printing.units import size
from jshard.programs.jaxprs import Jaxpr, OpenJaxpr, Tree, bare, equations
from jshard.programs.provenance import source_of
from jshard.signals.active_config import configuration
from jshard.signals.claims import Claim
from jshard.signals.signal import Signal

PLANS = {**by_hand.PLANS, **calls.PLANS, **cut.PLANS, **lookup.PLANS, **loops.PLANS, **product.PLANS, **shape.PLANS}
RULES = {
    **by_hand.RULES, **calls.RULES, **cut.RULES, **lookup.RULES, **loops.RULES, **product.RULES,
    **shape.RULES,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a program: the parameter at `path`, placed by `claim`, or an array split by `axes`."""

    axes: Axes = ()
    claim: Claim | None = None
    path: str = ""


class Program:
    """A partitioned program. A first plan has whole parameters and finds their layouts, `in_axes`. A second plan
    decides the run on parameters at rest. `axis_types: auto` needs the first only."""

    def __init__(
        self,
        mesh: Mesh,
        jaxpr: OpenJaxpr,
        inputs: Sequence[Input],
        *,
        returns_to: Mapping[int, int] = types.MappingProxyType({}),
    ):
        self.mesh, self.inputs = mesh, inputs
        stages = [i.claim.stage for i in inputs if i.claim is not None and i.claim.stage is not None]
        self.stage = next((each for each in stages if each.number is not None), next(iter(stages), None))
        if is_explicit(mesh) and self.stage is None:  # a pipeline cuts the program itself
            jaxpr = folded(jaxpr, [i.claim is not None for i in inputs])
        self.jaxpr: Any = jaxpr
        self.returns_to = returns_to  # by the number of a result: the number of the input whose layout it takes
        self.types = [v.aval for v in bare(jaxpr).invars]
        # of each input: the only primitive that reads it
        self.reader = ["gather" if {*each} == {"gather"} else "" for each in readers(jaxpr)]
        self.use = [tuple(each.axes) for each in inputs]
        self.in_axes = [*self.use]  # how inputs have to lie: parameters as they rest
        self.placed: dict[str, Placed] = {}
        self.found: dict[Any, Axes] = {}  # how variables are split
        self.unruled: dict[str, int] = {}
        self.plan: Plan = {}
        self.claim_behind: Signal | None = None  # the claim of the parameter used last
        self.out_axes: list[Axes] = []  # how results are split
        self.wanted = self._place()  # how variables will be needed
        if is_explicit(mesh) and self.stage is None:  # a pipeline cuts the program itself
            self.jaxpr = regathering(jaxpr, [value.regathers for value in self._values()])
            for number, each in enumerate(readers(self.jaxpr)):
                if each == ["dot_general"]:  # and what is gathered again is not
                    self.reader[number] = "dot_general"
        present = configuration()
        if present is None or present.axis_types != "auto":
            self._plan()

    @property
    def is_in_pieces(self) -> bool:
        return self.stage is not None and self.stage.number is not None

    def _place(self) -> dict[Any, Axes]:
        """Find how parameters lie, and return how variables will be wanted."""
        first = Planner(self.mesh, PLANS, is_first=True)
        pairs = list(zip(self.types, self.inputs, strict=True))
        parameters = [None if i.claim is None else _parameter(t, i, i.claim, first.sizes) for t, i in pairs]
        values = [
            Value(t.shape, use, t.dtype) if p is None
            else Unplaced(t.shape, whole(t.ndim), t.dtype, p, tuple(range(t.ndim)), signal=p.claim.signal)
            for t, use, p in zip(self.types, self.use, parameters, strict=True)
        ]  # fmt: skip
        first.program(self.jaxpr, values)
        self.found = first.found
        lie = parameter_layouts(each.use() for each in parameters if each is not None)
        for number, found in enumerate(parameters):
            if found is not None:
                self.use[number], self.in_axes[number] = lie[found.path].in_use.axes, lie[found.path].at_rest.axes
                unscattered = first.unscattered(found.claim.signal)
                self.placed[found.path] = Placed(found.use(), lie[found.path], found.told_by, unscattered)
        _check_remat([each.use for each in self.placed.values()], is_explicit(self.mesh))
        if not is_explicit(self.mesh):
            _check_grouped(self.jaxpr, self.mesh)
        self._warn_of_replicated()
        return wanted(self.jaxpr, self.found, first.sizes)

    def _warn_of_replicated(self) -> None:
        """Warn if more than 1 % of the parameter bytes rest replicated although their signals store them."""
        sizes = {i.path: t.size * t.dtype.itemsize for t, i in zip(self.types, self.inputs, strict=True) if i.claim}
        stored = {path: each for path, each in self.placed.items() if each.use.claim.signal.store}
        whole = {path: sizes[path] for path, each in stored.items() if not_stored(each.use, each.lies)}
        held, total = sum(whole.values()), sum(sizes.values())
        if 100 * held <= total:
            return
        placed = stored[max(whole, key=lambda path: whole[path])]
        signal, more = placed.use.claim.signal, f" and {len(whole) - 1} more" if len(whole) >= 2 else ""
        warnings.warn(
            f'signal "{signal.name}" ({signal.at("store")}) leaves {100 * held / total:.3g} % of the parameter bytes '
            f"replicated ({size(held)} of {size(total)}): {placed.use}{more}; {not_stored(placed.use, placed.lies)}",
            stacklevel=2,
        )

    def of_one_stage(self) -> tuple[Plan, Mapping[Any, Axes]]:
        """Plan the program as a stage runs it, with layers of some length; return the splits of variables there."""
        planner, stage = Planner(self.mesh, PLANS, wanted=self.wanted), self.stage
        assert stage is not None
        _, plan = planner.program(self.jaxpr, self._values({stage.mesh_axis}))
        return plan, planner.found

    def _plan(self) -> None:
        """Plan the run on parameters at rest; raise the error for operations without a rule."""
        planner = Planner(self.mesh, PLANS, wanted=self.wanted, stage=self.stage)
        values = self._values()
        ends, plan = planner.program(self.jaxpr, values)
        with planner.ending(plan):
            ends = [planner.force(value) for value in ends]
            self.out_axes = [self._out_axes(at, value.axes) for at, value in enumerate(ends)]
            for value, axes in zip(ends, self.out_axes, strict=True):
                planner.have(value, axes)
        rows = [value for value, each in zip(values, self.inputs, strict=True) if each.claim is None]
        marks = unreduced(planner.ran, rows, ends, planner.sizes) if self.stage is None else {}
        self.plan = with_shared(self.jaxpr, with_marks(plan, marks) if marks else plan)
        self.unruled, self.found, self.claim_behind = planner.unruled, planner.found, planner.nearest

    def _values(self, stages: Collection[str] = ()) -> list[Value]:
        """Return the inputs as they lie on all devices; or on one stage, without the mesh axis of `stages`."""
        found, places = [], zip(self.types, self.inputs, self.use, self.in_axes, self.reader, strict=True)
        for t, each, use, lies, reader in places:
            use, lies = without(use, stages), without(lies, stages)
            value = Value(t.shape, use, t.dtype, signal=None if each.claim is None else each.claim.signal)
            found.append(value if lies == use else value.stored(lies, reader))
        return found

    def _out_axes(self, number: int, found: Axes) -> Axes:
        """Return how a result is split: what replaces a parameter, or an array that is split, lies as that does."""
        source = self.returns_to.get(number)
        if source is None or not (self.inputs[source].claim or any(self.in_axes[source])):
            return found
        return self.in_axes[source]

    def traced(self, f: Any, in_axes: Sequence[Axes], shapes: Sequence[Any] = ()) -> None:
        """Trace a device's program for arrays in these layouts, of these shapes or the shapes of the inputs."""
        shapes = shapes or [t.shape for t in self.types]
        placed = [Layout(self.mesh, *axes) for axes in in_axes]
        each = zip(shapes, self.types, placed, strict=True)
        given = [jax.ShapeDtypeStruct(shape, t.dtype, sharding=p.sharding) for shape, t, p in each]
        specs = tuple(each.spec for each in placed)
        jax.eval_shape(jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec()), *given)

    def running(self, some_layers: SomeLayers | None = None) -> Run:
        """A run over the program, or over some of it."""
        return Run(self.mesh, PLANS, RULES, {} if self.stage is None else self.stage.by, some_layers)

    def parts(self, xs: Sequence[Array]) -> list[Here]:
        """Return each device's shards of arrays in the layouts `in_axes`."""
        return [self.part(number, x) for number, x in enumerate(xs)]

    def part(self, number: int, x: Array, stages: Collection[str] = ()) -> Here:
        """Return a device's shard of an input; or a stage's, if the input is split over the mesh axis of `stages`."""
        claim, use, lies = self.inputs[number].claim, self.use[number], without(self.in_axes[number], stages)
        part = Here(self.types[number].shape, use, x, signal=None if claim is None else claim.signal)
        return part if lies == use else part.stored(lies)

    def part_of_stage(self, number: int, x: Array) -> Here:
        """Return an input as a stage has it, or as all have it."""
        return self.part(number, x, () if self.stage is None else {self.stage.mesh_axis})

    def __call__(self, *xs: Tree) -> list[Any]:
        """Run on arrays in the layouts `in_axes`."""
        return self.call(lambda xs: self.running().run(self.jaxpr, self.parts(xs), self.plan), xs)

    def call(self, ends: Callable[[Sequence[Array]], list[Part]], xs: Sequence[Any]) -> list[Any]:
        """Return what `ends` makes of each device's shards of arrays in the layouts `in_axes`."""
        if not is_explicit(self.mesh):
            claims = [each.claim.signal if each.claim else None for each in self.inputs]
            outs = jax_core.eval_jaxpr(named(self.jaxpr, claims, self.mesh, self.found), [], *xs)
            for number in self.returns_to:
                if axes := self._out_axes(number, ()):
                    sharding = Layout(self.mesh, *axes).sharding
                    outs[number] = jax.lax.with_sharding_constraint(outs[number], sharding)
            return outs
        specs = tuple(Layout(self.mesh, *axes).spec for axes in self.in_axes)
        out_specs = [Layout(self.mesh, *axes).spec for axes in self.out_axes]

        def body(*xs: Tree) -> list[Any]:
            return self.running().lying(ends(xs), self.out_axes, self.claim_behind)

        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs)(*xs)


def _check_grouped(jaxpr: Jaxpr, mesh: Mesh) -> None:
    """Raise an error for a grouped convolution on several automatic mesh axes: XLA's partitioner multiplies the gradient of its
    kernel by the size of an axis that splits nothing. JAX 0.10.2 and 0.12.0 do so without jshard as well."""
    if sum(size >= 2 for size in mesh.shape.values()) < 2:
        return
    for eqn in equations(jaxpr):
        counts = [eqn.params.get(name, 1) for name in ("feature_group_count", "batch_group_count")]
        if eqn.primitive.name == "conv_general_dilated" and max(counts) >= 2:
            raise JShardError(
                f"XLA gives wrong gradients of a grouped convolution ({source_of(eqn)}) on axis_types: auto and mesh "
                f"{dict(mesh.shape)}",
                hint="write axis_types: explicit, or a mesh of one axis",
            )


def _check_remat(uses: Sequence[Use], is_explicit: bool) -> None:
    """Raise an error for a signal whose `remat` or `store.prefetch` would do nothing: both are for layers of a loop."""
    signals = {use.claim.signal.name: use.claim.signal for use in uses}
    in_loops = {use.claim.signal.name for use in uses if "scan" in use.roles and is_explicit}
    staged = {use.claim.signal.name for use in uses if use.claim.stage and use.claim.stage.number is None}
    for name in [name for name, signal in signals.items() if signal.remat or signal.store_prefetch]:
        signal = signals[name]
        if signal.remat == CHUNK and name not in staged:
            raise JShardError(
                f'signal "{name}" ({signal.at("remat")}) says remat: chunk, of layers of a jshard.stack on the stages of a '
                "pipeline, and claims none of them",
                hint="write remat: full",
            )
        if name in in_loops:
            continue
        key = "remat" if signal.remat else "store.prefetch"
        why = "and none of its parameters is in a loop" if is_explicit else "and not on axis_types: auto"
        raise JShardError(
            f'signal "{name}" ({signal.at(key)}) says {key}, which jshard.shard does for layers in a loop, {why}',
            hint="build the layers with jshard.stack"
            if is_explicit
            else "remove remat, and wrap the layer in nnx.remat"
            if signal.remat
            else "remove prefetch",
        )


def _parameter(aval: Any, given: Input, claim: Claim, sizes: Mapping[str, int]) -> Parameter:
    found = Parameter(given.path, claim, tuple(aval.shape), sizes, [None] * aval.ndim)
    if claim.signal.shard is not None:
        found.decide(found.roles)
    return found
