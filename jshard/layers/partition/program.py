"""A traced function of global arrays as one program in one shard_map, in which each device runs its part; on Auto axes it is
left to XLA."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jshard.errors import JShardError
from jshard.layers.partition import by_hand, calls, cut, extremes, lookup, product, shape
from jshard.layers.partition.engine import Partition
from jshard.layers.partition.named import named
from jshard.layers.partition.part import Parameter, Part, whole
from jshard.layers.partition.pieces import Pieces
from jshard.layers.partition.readers import readers
from jshard.layers.partition.regather import regathering
from jshard.layers.partition.unreduced import Marks, unreduced
from jshard.layers.partition.wanted import wanted
from jshard.layers.remat import CHUNK
from jshard.layers.roles import Placed, Use, not_stored, parameter_layouts
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.redistribution import Axes
from jshard.printing.units import size
from jshard.programs.jaxprs import bare, equations
from jshard.programs.provenance import source_of
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.claims import Claim

RULES = {
    **by_hand.RULES, **calls.RULES, **cut.RULES, **extremes.RULES, **lookup.RULES, **product.RULES, **shape.RULES,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Input:
    """What goes into a program: the parameter at `path`, as `claim` says, or an array that is split as `axes` say."""

    axes: Axes = ()
    claim: Claim | None = None
    path: str = ""


class Program:
    """Where everything lies is found by a first trace, in which parameters are whole; `in_axes` is how they have to rest. On
    `axis_types: auto` that is all that is asked. The second trace comes with it, but for a program that is called at once:
    `find_out_axes` makes one of both."""

    def __init__(
        self,
        mesh: Mesh,
        jaxpr: Any,
        inputs: Sequence[Input],
        *,
        is_called: bool = False,
        returns_to: Mapping[int, int] = types.MappingProxyType({}),
    ):
        self.mesh, self.jaxpr, self.inputs = mesh, jaxpr, inputs
        self.returns_to = returns_to  # by the number of a result: the number of the input whose layout it takes
        self.types = [v.aval for v in bare(jaxpr).invars]
        self.only_looked_up = [{*each} == {"gather"} for each in readers(jaxpr)]
        self.multiplied_once = [False] * len(inputs)  # and not gathered again
        self.use = [tuple(each.axes) for each in inputs]
        self.rest: list[Axes | None] = [None] * len(inputs)
        self.placed: dict[str, Placed] = {}
        stages = [i.claim.stage for i in inputs if i.claim is not None and i.claim.stage is not None]
        self.stage = next((each for each in stages if each.number is not None), next(iter(stages), None))
        self.found: dict[Any, Axes] = {}  # how variables are split
        self.unruled: dict[str, int] = {}
        self.marks: Marks = {}  # what varies, so that its gradient stays unreduced
        self._place()
        if is_explicit(mesh) and self.stage is None:  # a pipeline cuts the program itself
            self.jaxpr = regathering(jaxpr, [part.regathers for part in self.parts(self.types)])
            self.multiplied_once = [each == ["dot_general"] for each in readers(self.jaxpr)]
        self.pieces = None
        if self.stage is not None and self.stage.number is not None:
            self.pieces = Pieces(self, mesh_to_choose_for().shape[self.stage.mesh_axis])
        self.out_axes: list[Axes] | None = None  # how results are split
        if not is_called:
            self.find_out_axes()

    @property
    def in_axes(self) -> list[Axes]:
        return [use if rest is None else rest for use, rest in zip(self.use, self.rest, strict=True)]

    def _place(self) -> None:
        trial = Partition(self.mesh, RULES, only_axes=True, only_looks=True)
        parameters = [
            None if i.claim is None else _parameter(t, i, trial) for t, i in zip(self.types, self.inputs, strict=True)
        ]

        def first(*xs: Any) -> Any:
            parts = [
                Part(t.shape, use, x) if p is None
                else Part(t.shape, whole(t.ndim), x, signal=p.claim.signal, parameter=p, of=tuple(range(t.ndim)))
                for t, use, x, p in zip(self.types, self.use, xs, parameters, strict=True)
            ]  # fmt: skip
            trial.run(self.jaxpr, parts)
            return jnp.zeros(())

        self.traced(first, self.use)
        self.found = trial.found
        self.wanted = wanted(self.jaxpr, self.found, trial.sizes)
        lie = parameter_layouts(each.use() for each in parameters if each is not None)
        for number, found in enumerate(parameters):
            if found is not None:
                self.use[number], self.rest[number] = lie[found.path].in_use.axes, lie[found.path].at_rest.axes
                unscattered = trial.unscattered(found.claim.signal)
                self.placed[found.path] = Placed(found.use(), lie[found.path], found.told_by, unscattered)
        _check_remat([each.use for each in self.placed.values()], is_explicit(self.mesh))
        if not is_explicit(self.mesh):
            _check_grouped(self.jaxpr, self.mesh)
        self._warn_of_replicated()

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

    def find_out_axes(self, compiled: Any = None, xs: Sequence[Any] = ()) -> None:
        """Find how results are split, and what varies, by a second trace, in which parameters lie where they rest; what no rule
        takes is told here. Where this program, compiled, is called on `xs` next, that trace is the one of the call."""
        present = configuration()
        if self.out_axes is not None or (present is not None and present.axis_types == "auto"):
            return
        is_sequence = any(each.claim is not None and each.claim.signal.sequence for each in self.inputs)
        if compiled is not None and is_explicit(self.mesh) and self.stage is None and not is_sequence:
            compiled.trace(*xs)
            if self.marks:  # it was traced without
                compiled.clear_cache()
            return
        run = self.partition(only_axes=True)

        def second(*xs: Any) -> Any:
            self._found_by(run, xs)
            return jnp.zeros(())

        self.traced(second, self.in_axes)

    def _found_by(self, run: Partition, xs: Sequence[Any]) -> list[Part]:
        """Run the program, keep what that finds, and return its results."""
        run.steps, parts = [], self.parts(xs)
        ends = list(map(run.force, run.run(self.jaxpr, parts)))
        rows = [part for part, each in zip(parts, self.inputs, strict=True) if each.claim is None]
        marks = unreduced(run.steps, rows, ends, run.sizes) if self.stage is None else {}
        self.unruled, self.found, self.marks = run.unruled, run.found, marks
        self.out_axes = [self._out_axes(number, part.axes) for number, part in enumerate(ends)]
        return ends

    def _out_axes(self, number: int, found: Axes) -> Axes:
        """Return how a result is split: what replaces a parameter, or an array that is split, lies as that does."""
        source = self.returns_to.get(number)
        if source is None or not (self.inputs[source].claim or any(self.in_axes[source])):
            return found
        return self.in_axes[source]

    def traced(self, f: Any, in_axes: Sequence[Axes], shapes: Sequence[Any] = ()) -> None:
        """Trace what each device does with arrays that lie so, of these shapes or of those of the inputs."""
        shapes = shapes or [t.shape for t in self.types]
        placed = [Layout(self.mesh, *axes) for axes in in_axes]
        each = zip(shapes, self.types, placed, strict=True)
        given = [jax.ShapeDtypeStruct(shape, t.dtype, sharding=p.sharding) for shape, t, p in each]
        specs = tuple(each.spec for each in placed)
        jax.eval_shape(jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec()), *given)

    def partition(self, *, only_axes: bool = False) -> Partition:
        """A run over the program, or over some of it."""
        run = Partition(self.mesh, RULES, self.wanted, self.stage, only_axes=only_axes)
        run.marks = self.marks
        return run

    def parts(self, xs: Sequence[Any]) -> list[Part]:
        """What each device holds of arrays that lie as `in_axes` say."""
        return [self.part(number, x) for number, x in enumerate(xs)]

    def part(self, number: int, x: Any) -> Part:
        use, rest, claim = self.use[number], self.rest[number], self.inputs[number].claim
        signal = None if claim is None else claim.signal
        return Part(
            self.types[number].shape, use, x, rest=None if rest == use else rest, signal=signal,
            is_only_looked_up=self.only_looked_up[number], is_multiplied_once=self.multiplied_once[number],
        )  # fmt: skip

    def part_of_stage(self, number: int, x: Any) -> Part:
        """An input as one stage has it, or all have."""
        part, stage = self.part(number, x), self.stage
        if part.rest is not None and stage is not None:
            rest = tuple(tuple(name for name in names if name != stage.mesh_axis) for names in part.rest)
            part.rest = None if rest == part.axes else rest
        return part

    def __call__(self, *xs: Any) -> list[Any]:
        """Run on arrays that lie as `in_axes` say."""
        if not is_explicit(self.mesh):
            claims = [each.claim.signal if each.claim else None for each in self.inputs]
            outs = jax_core.eval_jaxpr(named(self.jaxpr, claims, self.mesh, self.found), [], *xs)
            for number in self.returns_to:
                if axes := self._out_axes(number, ()):
                    sharding = Layout(self.mesh, *axes).sharding
                    outs[number] = jax.lax.with_sharding_constraint(outs[number], sharding)
            return outs
        specs = tuple(Layout(self.mesh, *axes).spec for axes in self.in_axes)
        out_specs: list[PartitionSpec] = []  # the body tells them

        def body(*xs: Any) -> list[Any]:
            run = self.partition()
            if self.out_axes is None:
                ends = self._found_by(run, xs)
            else:
                ends = run.run(self.jaxpr, self.parts(xs)) if self.pieces is None else self.pieces.run(xs)
            assert self.out_axes is not None
            out_specs[:] = [Layout(self.mesh, *axes).spec for axes in self.out_axes]
            return [run.place(part, axes).x for part, axes in zip(ends, self.out_axes, strict=True)]

        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs)(*xs)


def _check_grouped(jaxpr: Any, mesh: Mesh) -> None:
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
    """Raise an error for a signal whose `remat` or `store.prefetch` would do nothing: they are for the layers of a loop."""
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


def _parameter(aval: Any, given: Input, run: Partition) -> Parameter:
    assert given.claim is not None
    roles: list[str | None] = [None] * aval.ndim
    found = Parameter(given.path, given.claim, tuple(aval.shape), run.sizes, roles, lambda: run.eqn)
    if given.claim.signal.shard is not None:
        found.decide(found.roles)
    return found
