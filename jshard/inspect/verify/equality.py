"""`jshard.verify(f, *args)`: the same program on the configured mesh and on a mesh of ones, held against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.inspect.verify.dataflow import inexact_on_the_way, inexact_operations, meshes_in
from jshard.inspect.verify.first_divergence import FirstDivergence, beginning, compared, relative
from jshard.inspect.verify.inputs import RANGES, InputRange, Program
from jshard.inspect.verify.interpreter import Evaluation, quickly
from jshard.inspect.verify.records import Note, excess
from jshard.inspect.verify.verification import Finding, Verification, in_words
from jshard.layers.training_step import Untyped
from jshard.layouts.mesh import build_mesh, with_axis_types
from jshard.layouts.put import on_host, raw
from jshard.provenance import Cause
from jshard.signals.active_config import configuration, mesh, on_mesh
from jshard.signals.keys import blamed

SEEDS = (0, 1, 2)
SHAKES = 6


def verify(
    f: Callable[..., Any], *args: Any, backward: bool | None = None, meshes: Sequence[Mapping[str, int]] = (),
    tolerance: float = 1e-5, **kwargs: Any,
) -> Verification:  # fmt: skip
    """Whether `f(*args)` is the same on the configured mesh as on one device: the value and the gradients of all
    floating-point arguments, or what a training step returns and leaves behind.

    Unsharded is the same program on a mesh of the same axes, each of size one. Both run on the same small whole numbers
    instead of the arguments' own, with stand-ins for what is not exact on them, so that equal means equal in every bit;
    where that can't be had, the line says why and within which tolerance. `meshes` are further sizes to try:

        print(jshard.verify(loss, model, x, y, meshes=[{"data": 4, "tensor": 2}]))
    """
    configured = mesh()
    program = Program(f, args, kwargs, backward)
    sides = [_Side(program, configured, configured)]
    try:
        sides[0].trace()
    except Untyped:  # a jshard.step on an auto mesh: the same, where types say how arrays lie
        configured = with_axis_types(configured, "explicit")
        sides = [_Side(program, configured, configured)]
    _check_own(program, sides[0].trace()[0])
    trial = _Trial(program, _Side(program, _of_ones(configured), configured), tolerance)
    sides += [_Side(program, _resized(configured, sizes), configured) for sizes in meshes]
    for side in (trial.reference, *sides[1:]):
        _traced_elsewhere(side)
    findings: list[Finding] = []
    begins: list[FirstDivergence] = []
    for side in sides:
        more, begin = trial.against(side)
        findings += more
        begins += [begin] if begin is not None else []
    return Verification(tuple(findings), tuple(begins), trial.words)


def _check_own(program: Program, jaxpr: Any) -> None:
    """Arrays that f keeps from outside lie on the configured mesh only."""
    for array in jaxpr.consts:
        if isinstance(array, jax.Array) and (devices := len(array.sharding.device_set)) > 1:
            raise JShardError(
                f"{program.title} uses an array of shape {array.shape} from outside, which lies on {devices} devices and "
                "can't be put on another mesh",
                hint=f"hand it over as an argument: jshard.verify({program.title}, ..., array)",
            )


def _traced_elsewhere(side: _Side) -> None:
    """Traces on a mesh that the user did not choose. Whoever keeps the configured mesh from outside is told so."""
    where = f"{side.program.title} runs on the configured mesh and not on one of {in_words(side.sizes)}"
    hint = "call jshard.mesh() inside it, instead of keeping a mesh from outside"
    try:
        jaxpr = side.trace()[0]
    except JShardError as error:
        fault = _with_workers() if "names worker" in str(error) else None
        if fault is None:
            raise
        raise fault from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise JShardError(f"{where}: {type(error).__name__}: {lines[0].rstrip('.')}", hint=hint) from error
    for found in meshes_in(jaxpr):
        if dict(found.shape).items() - side.sizes.items():
            raise JShardError(f"{where}: it has a shard_map over {in_words(found.shape)}", hint=hint)


def _with_workers() -> JShardError | None:
    """Make the error of a signal with devices of its own, which no other mesh can stand for."""
    present = configuration()
    assert present is not None
    for signal in present.signals.values():
        if signal.shard is not None and signal.shard.workers is not None:
            return JShardError(
                f"verify can't put {signal} on another mesh: it names workers {', '.join(map(str, signal.shard.workers))}",
                hint="name a mesh axis instead: shard: {axis: 0, mesh: data}",
            )
    return None


def _of_ones(configured: Mesh) -> Mesh:
    here = [device for device in configured.devices.flat if device.process_index == jax.process_index()]
    grid = np.array(here[:1], object).reshape((1,) * configured.devices.ndim)  # each process has a reference of its own
    return Mesh(grid, configured.axis_names, axis_types=configured.axis_types)


def _resized(configured: Mesh, sizes: Mapping[str, int]) -> Mesh:
    for name in sizes:
        if name not in configured.axis_names:
            raise JShardError(
                f'verify was given a mesh with an axis "{name}", but the configured one is {in_words(configured.shape)}',
                hint=f"use {' or '.join(configured.axis_names)}",
            )
    built = build_mesh({**configured.shape, **sizes}, label="the mesh given to verify")
    return Mesh(built.devices, configured.axis_names, axis_types=configured.axis_types)


class _Side:
    """The program on one mesh."""

    def __init__(self, program: Program, mesh: Mesh, configured: Mesh):
        self.program, self.mesh, self.configured = program, mesh, configured
        self.traced: tuple[Any, list[str], list[int]] | None = None
        self.compiled: dict[Evaluation, Any] = {}

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    def trace(self) -> tuple[Any, list[str], list[int]]:
        if self.traced is None:
            arrays = self.program.placed(self.program.probes(RANGES[0], 0), self.mesh)
            with self.here():
                self.traced = self.program.trace(arrays)
        return self.traced

    @contextlib.contextmanager
    def here(self) -> Any:
        is_set = not jax.sharding.get_abstract_mesh().empty  # by the caller's jax.set_mesh
        with (
            on_mesh(self.mesh, stands_for=self.configured),
            jax.set_mesh(self.mesh) if is_set else contextlib.nullcontext(),
        ):
            yield

    def run(self, how: Evaluation, numbers: list[Any]) -> tuple[list[np.ndarray], list[Note]]:
        """The results that are made, and the notes, as numpy arrays."""
        jaxpr, _, made = self.trace()
        if how not in self.compiled:

            def evaluated(arrays: list[Any]) -> Any:
                results, notes = how(jaxpr, arrays)
                return [raw(jnp.asarray(results[n])) for n in made], notes

            self.compiled[how] = jax.jit(evaluated, compiler_options=quickly(self.mesh.devices.flat[0]))
        with self.here():
            results, notes = self.compiled[how](self.program.placed(numbers, self.mesh))
        return [on_host(each) for each in results], jax.tree.map(on_host, notes)


class _Trial:
    """The reference, run once for each draw, and every other mesh against it."""

    def __init__(self, program: Program, reference: _Side, tolerance: float):
        self.program, self.reference, self.tolerance = program, reference, tolerance
        self.certified = Evaluation(certify=True, asked=_asked)

    @functools.cached_property
    def draws(self) -> tuple[InputRange | None, dict[int, list[np.ndarray]], str]:
        """The largest numbers for which every sum is exact, the reference's results on them by seed; else why not."""
        why = ""
        for input_range in RANGES:
            results, notes = self.reference.run(self.certified, self.program.probes(input_range, SEEDS[0]))
            why = _why_inexact(notes)
            if not why:
                found = {SEEDS[0]: results}
                for seed in SEEDS[1:]:
                    results, notes = self.reference.run(self.certified, self.program.probes(input_range, seed))
                    if not _why_inexact(notes):
                        found[seed] = results
                return input_range, found, ""
        return None, {}, why

    @functools.cached_property
    def stood_in(self) -> list[str]:
        return inexact_operations(self.reference.trace()[0])

    @functools.cached_property
    def on_the_way(self) -> list[tuple[str, ...]]:
        """For each result that is made, the operations before it that run by a stand-in."""
        jaxpr, _, made = self.reference.trace()
        reached = inexact_on_the_way(jaxpr)
        return [tuple(sorted(reached[n])) for n in made]

    @functools.cached_property
    def natural(self) -> tuple[list[np.ndarray], float, list[float]]:
        """The reference's results by the true operations, the tolerance that its narrowest sums allow, and what each of the
        results allows: rounding may move it as far as it moves when the numbers that go in are moved by as much."""
        how, numbers = dataclasses.replace(self.certified, stand_ins=False), self.program.natural()
        results, notes = self.reference.run(how, numbers)
        kinds = [jnp.finfo(note.where.dtype) for note in notes if note.where.kind in ("sum", "narrowing")]
        last_bit = max([float(kind.eps) for kind in kinds if kind.bits < 32], default=0.0)
        tolerance = max(self.tolerance, 4 * last_bit)
        allowed = [tolerance] * len(results)
        for seed in range(SHAKES):
            shaken, _ = self.reference.run(how, _shaken(numbers, max(last_bit, 2.0**-23) / 2, seed))
            pairs = zip(allowed, results, shaken, strict=True)
            allowed = [max(most, 2 * far) if np.isfinite(far := _off(*each)) else most for most, *each in pairs]
        return results, tolerance, allowed

    @property
    def words(self) -> str:
        input_range, found, why = self.draws
        if input_range is None:
            return f"probes: none is exact (because: {why}), so numbers near the arguments' own"
        stand_ins = f"; stand-ins for {', '.join(self.stood_in)}" if self.stood_in else ""
        draws = f"{len(found)} draw" + "s" * (len(found) != 1)
        return f"probes: {input_range}, {draws}, every sum exact in any order{stand_ins}"

    def against(self, side: _Side) -> tuple[list[Finding], FirstDivergence | None]:
        input_range, found, why = self.draws
        _, names, made = self.reference.trace()
        names = [names[n] for n in made]
        off: dict[str, float] = dict.fromkeys(names, 0.0)
        seen: dict[str, bool] = dict.fromkeys(names, False)
        failed: int | None = None
        for seed, reference in found.items():
            assert input_range is not None
            results, _ = side.run(Evaluation(), self.program.probes(input_range, seed))
            for name, one, far in zip(names, reference, _offs(reference, results), strict=True):
                seen[name] |= bool(np.any(one))
                off[name] = max(off[name], far)
            failed = seed if failed is None and any(off.values()) else failed
        verdicts = {name: ("differs" if off[name] else "bitwise", off[name], 0.0, "") for name in names}
        loose = input_range is None or (failed is not None and bool(self.stood_in))
        if loose:
            reference, _, allowed = self.natural
            results, _ = side.run(Evaluation(stand_ins=False), self.program.natural())
            because = why or f"{', '.join(self.stood_in)} had stand-ins that do not hold here"
            for name, far, most in zip(names, _offs(reference, results), allowed, strict=True):
                if input_range is None or off[name]:
                    verdicts[name] = ("differs" if not far <= most else "within", max(far, off[name]), most, because)
                    seen[name] = True
        findings = [
            Finding(
                side.sizes, name, *verdicts[name], not seen[name], blamed(self._cause(name), ()),
                stand_ins if verdicts[name][0] == "bitwise" else (), self._kind(name),
            )
            for name, stand_ins in zip(names, self.on_the_way, strict=True)
        ]  # fmt: skip
        if all(finding.verdict != "differs" for finding in findings):
            return findings, None
        return findings, self._begin(side, findings, input_range, failed)

    def _cause(self, name: str) -> Cause:
        path = self.program.signals.get(name.removeprefix("gradient of ").removesuffix(" after"), ())
        return Cause(path, self._phase(name), source=name)

    def _kind(self, name: str) -> str:
        return "optimizer state" if name.removesuffix(" after") in self.program.of_optimizers else ""

    def _changes(
        self, name: str, one: np.ndarray, two: np.ndarray, numbers: list[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of what is left behind, by how much it was changed: that tells more of an update than the parameter it is
        added to."""
        if not name.endswith(" after") or one.dtype.kind != "f" or one.shape != two.shape:
            return one, two
        before = np.asarray(numbers[self.program.names.index(name.removesuffix(" after"))]).astype(np.float64)
        return one.astype(np.float64) - before, two.astype(np.float64) - before

    def _phase(self, name: str) -> str:
        """Of a result. What an optimizer leaves behind, and the parameters that it gives to the next step, it makes in its
        update."""
        if name.startswith("gradient of "):
            return "backward"
        return "update" if self.program.of_optimizers and name.endswith(" after") else "forward"

    def _begin(
        self, side: _Side, findings: list[Finding], input_range: InputRange | None, seed: int | None
    ) -> FirstDivergence:
        """The program again, listening to what each signal hands on."""
        exact = input_range is not None and seed is not None
        numbers = (
            self.program.natural() if input_range is None or seed is None else self.program.probes(input_range, seed)
        )
        how = Evaluation(stand_ins=exact, listen=True)
        tolerance = 0.0 if exact else self.natural[1]
        (reference, heard), (results, other) = self.reference.run(how, numbers), side.run(how, numbers)
        begin = beginning(heard, other, side.sizes, tolerance)
        if begin is not None:
            return begin
        for finding, one, two in zip(findings, reference, results, strict=True):
            if finding.verdict == "differs":
                allowed = 0.0 if exact else finding.tolerance
                likeness = compared(*self._changes(finding.name, one, two, numbers), side.sizes, allowed)
                cause = blamed(finding.cause, likeness.mesh_axes)
                looks = likeness.cause or "another process has a copy that is off, and this one has not"
                return FirstDivergence(side.sizes, cause, finding.off, looks)
        raise AssertionError("something differed, and then nothing did")


def _shaken(numbers: list[Any], size: float, seed: int) -> list[Any]:
    """Move each number by up to this part of itself."""
    random = np.random.default_rng(seed)
    return [
        each * random.uniform(1 - size, 1 + size, each.shape) if getattr(each, "dtype", None) == np.float64 else each
        for each in numbers
    ]


def _offs(reference: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> list[float]:
    """How far each result is off on any process, so that all go on alike: each has read its own copy of what is replicated."""
    offs = [_off(*pair) for pair in zip(reference, results, strict=True)]
    return offs if jax.process_count() == 1 else process_allgather(np.array(offs)).max(0).tolist()


def _off(one: np.ndarray, two: np.ndarray) -> float:
    if one.shape != two.shape:
        return float("inf")
    if np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    one, two = one.astype(np.float64), two.astype(np.float64)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return 0.0 if np.array_equal(one, two, equal_nan=True) else float("inf")
    return relative(one, two)


def _why_inexact(notes: list[Note]) -> str:
    """Which sum may not be exact: the one that is furthest from it. Empty when all are."""
    worst = max(notes, key=lambda note: float(np.max(excess(note))), default=None)
    if worst is None or float(np.max(excess(worst))) <= 0:
        return ""
    where, cause = worst.where, worst.where.cause
    at = f' in signal "{cause.signal}"' if cause.path else f" at {cause.source}" if cause.source else ""
    if where.kind == "opaque":
        return f"{where.primitive}{at} has no exact stand-in"
    if where.kind == "narrowing":
        return f"a value{at} does not fit {where.dtype}"
    return f"a sum of {where.primitive}{at} needs more bits than {where.dtype} has"


def _asked(path: tuple[str, ...]) -> frozenset[str]:
    """The dtypes that a signal asks for by name."""
    present = configuration()
    if present is None or not path:
        return frozenset()
    dtype = present.lookup(path).dtype
    return frozenset(str(jnp.dtype(name)) for name in (dtype.compute, dtype.reduce) if name is not None)
