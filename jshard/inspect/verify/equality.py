"""`jshard.verify(f, *args)`: a program on the configured mesh, compared with the program on a mesh of ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console
from rich.text import Text

from jshard.errors import JShardError, in_a_line
from jshard.inspect.verify.dataflow import (
    COMPARISON,
    last_bit,
    obstacles,
    on_the_way,
    stood_in,
)
from jshard.inspect.verify.first_divergence import FirstDivergence, beginning, compared, relative
from jshard.inspect.verify.inputs import Subject, shaken
from jshard.inspect.verify.interpreter import Evaluation, is_cancelling
from jshard.inspect.verify.own_derivatives import noticed, tested
from jshard.inspect.verify.residues import modulus_for
from jshard.inspect.verify.side import FAULT, Side, held_to_faults, of_ones, resized
from jshard.inspect.verify.verification import ROUNDING, Finding, Verification, in_words
from jshard.programs.jaxprs import ClosedJaxpr, equations
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration, mesh
from jshard.signals.keys import blamed

SEEDS = (0, 1, 2)
SHAKES = 6


def verify(
    f: Callable[..., Any], *args: object, backward: bool | None = None, meshes: Sequence[Mapping[str, int]] = (),
    **kwargs: object,
) -> Verification:  # fmt: skip
    """Compare `f(*args)` on the configured mesh with one device: value and gradients, or a training step's results and state.

    The gradients are those of all floating-point arguments. Unsharded means the program on a mesh with axes of
    size 1. Both sides run on whole numbers modulo a prime in place of the arguments' numbers, with stand-ins for
    operations without a meaning there (exp, rsqrt), so that equal means equal in every bit. Where this is
    impossible, the line gives the reason and the largest deviation it could miss. `meshes` are more sizes to try:

        print(jshard.verify(loss, model, x, y, meshes=[{"data": 4, "tensor": 2}]))
    """
    with _told() as tell:
        return _verified(Subject(f, args, kwargs, backward), meshes, tell)


def _verified(program: Subject, meshes: Sequence[Mapping[str, int]], tell: Callable[[str], None]) -> Verification:
    configured = mesh()
    sides = [Side(program, configured, configured, tell)]
    with noticed() as own:
        _check_own(program, sides[0].trace()[0])
    reference = Side(program, of_ones(configured), configured, tell)
    sides += [Side(program, resized(configured, sizes), configured, tell) for sizes in meshes]
    for side in (reference, *sides[1:]):
        _traced_elsewhere(side)
    trial = _Trial(program, reference, sides)
    findings: list[Finding] = []
    begins: list[FirstDivergence] = []
    for side in sides:
        more, begin = trial.against(side)
        findings += more
        begins += [begin] if begin is not None else []
    dropped, unheld = trial.dropped(sides[0])
    return Verification(
        (*findings, *dropped), tuple(begins), trial.words, unheld, tuple(tested(*each) for each in own.items())
    )


@contextlib.contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Show the current work on a terminal; print nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal or jax.process_index():
        yield lambda what: None
        return
    with console.status("verify") as status:
        yield lambda what: status.update(Text(f"verify {what}"))


def _check_own(program: Subject, jaxpr: ClosedJaxpr) -> None:
    """Raise if `f` uses a sharded array other than its arguments: it exists on the configured mesh only."""
    for array in jaxpr.consts:
        if isinstance(array, jax.Array) and (devices := len(array.sharding.device_set)) > 1:
            raise JShardError(
                f"{program.title} uses an array of shape {array.shape} from outside, which is on {devices} devices and "
                "can't be put on another mesh",
                hint=f"pass it as an argument: jshard.verify({program.title}, ..., array)",
            )


def _traced_elsewhere(side: Side) -> None:
    """Trace on a mesh the user did not choose; raise if the program keeps the configured mesh from outside."""
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
        raise JShardError(f"{where}: {in_a_line(error).rstrip('.')}", hint=hint) from error
    for found in (eqn.params["mesh"] for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"):
        if dict(found.shape).items() - side.sizes.items():
            raise JShardError(f"{where}: it has a shard_map over {in_words(found.shape)}", hint=hint)


def _with_workers() -> JShardError | None:
    """Return the error for a signal with workers of its own: no other mesh can stand for them."""
    present = configuration()
    assert present is not None
    for signal in present.signals.values():
        if signal.shard is not None and signal.shard.workers is not None:
            return JShardError(
                f"verify can't put {signal} on another mesh: it names workers {', '.join(map(str, signal.shard.workers))}",
                hint="name a mesh axis instead: shard: {axis: 0, mesh: data}",
            )
    return None


class _Trial:
    """The reference, run once for each draw, and every other mesh against it."""

    def __init__(self, program: Subject, reference: Side, sides: Sequence[Side]):
        self.program, self.reference = program, reference
        jaxprs = [each.trace()[0] for each in (reference, *sides)]
        platform = reference.mesh.devices.flat[0].platform
        self.modulus = modulus_for([eqn for jaxpr in jaxprs for eqn in equations(jaxpr)])
        self.why = self._why(platform, jaxprs)
        self.exactly = Evaluation(self.modulus, platform=platform)
        self.truly = Evaluation(wide=True)
        self.last_bit = max(map(last_bit, jaxprs))
        # Only the true operations test numbers that must cancel: on whole numbers 0 stands for them.
        self.has_cancelling = any(is_cancelling(eqn) for jaxpr in jaxprs for eqn in equations(jaxpr))

    def _why(self, platform: str, jaxprs: Sequence[Any]) -> list[str]:
        """Return, for each computed result, the reason why it can't be proven in every bit, or ""."""
        made = self.reference.trace()[2]
        if self.modulus is None:
            return ["a sum has too many terms for any modulus"] * len(made)
        why = [""] * len(made)
        for jaxpr in jaxprs:
            if not (found := obstacles(jaxpr, platform)):
                continue
            told = lambda eqn, found=found: frozenset([found[id(eqn)]] if id(eqn) in found else [])
            reached = on_the_way(jaxpr, told)
            first = [next((words for words in found.values() if words in reached[n]), "") for n in made]
            why = [before or words for before, words in zip(why, first, strict=True)]
        return why

    @functools.cached_property
    def draws(self) -> dict[int, list[np.ndarray]]:
        """The reference's results on whole numbers, by seed."""
        if self.modulus is None:
            return {}
        return {seed: self.reference.run(self.exactly, self.program.probes(self.modulus, seed))[0] for seed in SEEDS}

    @functools.cached_property
    def stood_in(self) -> list[str]:
        """The names of the operations with a stand-in."""
        eqns = equations(self.reference.trace()[0])
        return sorted({name for eqn in eqns for name in stood_in(eqn)} - {COMPARISON})

    @functools.cached_property
    def on_the_way(self) -> list[tuple[str, ...]]:
        """The operations with a stand-in before each computed result."""
        jaxpr, _, made = self.reference.trace()
        reached = on_the_way(jaxpr, stood_in)
        return [tuple(sorted(reached[n])) for n in made]

    @functools.cached_property
    def natural(self) -> tuple[list[np.ndarray], float, list[float]]:
        """The reference's results by the true operations in 64 bits, the general tolerance, and each result's
        tolerance. A result's tolerance is at least twice its largest move under inputs moved by a rounding error."""
        numbers = self.program.natural()
        results, _ = self.reference.run(self.truly, numbers)
        tolerance = max(ROUNDING, 4 * self.last_bit)
        allowed = [tolerance] * len(results)
        for seed in range(SHAKES):
            moved, _ = self.reference.run(self.truly, shaken(numbers, max(self.last_bit, 2.0**-52) / 2, seed))
            pairs = zip(allowed, results, moved, strict=True)
            allowed = [max(most, 2 * far) if np.isfinite(far := _off(*each)) else most for most, *each in pairs]
        return results, tolerance, allowed

    @property
    def words(self) -> str:
        """The sentence about the probes."""
        if self.modulus is None:
            return f"probes: numbers near the arguments' own, as none is exact (because: {self.why[0]})"
        stand_ins = f"; stand-ins for {', '.join(self.stood_in)}" if self.stood_in else ""
        draws = f"probes: whole numbers modulo {self.modulus}, {len(SEEDS)} draws"
        return f"{draws}, every sum exact in any order{stand_ins}"

    def against(self, side: Side) -> tuple[list[Finding], FirstDivergence | None]:
        """Return the findings of a side against the reference, and the first divergence if they differ."""
        _, names, made = self.reference.trace()
        names = [names[n] for n in made]
        differs, seen = [False] * len(names), list(map(bool, self.why))
        failed: int | None = None
        for seed, reference in self.draws.items():
            assert self.modulus is not None
            results, _ = side.run(self.exactly, self.program.probes(self.modulus, seed))
            offs = _offs(reference, results, self.modulus)
            differs = [
                before or (far > 0 and not why) for before, far, why in zip(differs, offs, self.why, strict=True)
            ]
            seen = [before or bool(np.any(one)) for before, one in zip(seen, reference, strict=True)]
            failed = seed if failed is None and any(differs) else failed
        verdicts = [("bitwise", 0.0, 0.0, "")] * len(names)
        if any(self.why) or failed is not None or self.has_cancelling:  # compare by the true operations too
            reference, _, allowed = self.natural
            offs = _offs(reference, side.run(self.truly, self.program.natural())[0])
            for n, (far, most, why, stand_ins) in enumerate(zip(offs, allowed, self.why, self.on_the_way, strict=True)):
                because = why or f"{', '.join(stand_ins)} had stand-ins that do not hold here"
                if why or differs[n]:
                    is_within = far <= most and (why or stand_ins)
                    held = "within" if most < FAULT - 1 else "unproven"
                    verdicts[n] = held if is_within else "differs", far, most, because
                elif self.has_cancelling and far > most:
                    verdicts[n] = "differs", far, most, "the largest score of a ring has to cancel"
        findings = [
            Finding(
                side.sizes, name, *verdict, not any_, blamed(self._cause(name), ()),
                tuple(each for each in stand_ins if each != COMPARISON) if verdict[0] == "bitwise" else (), self._kind(name),
            )
            for name, verdict, any_, stand_ins in zip(names, verdicts, seen, self.on_the_way, strict=True)
        ]  # fmt: skip
        if all(finding.verdict != "differs" for finding in findings):
            return held_to_faults(side, self.truly, findings, _offs), None
        return findings, self._begin(side, findings, failed)

    def dropped(self, side: Side) -> tuple[list[Finding], str]:
        """Return the variables changed by a plain call but not by this call, or the reason why they are unknown."""
        if not self.program.traced.nodes:
            return [], ""
        _, names, made = side.trace()
        changed = {names[number] for number in made}
        try:
            plainly = self.program.changed_plainly()
        except Exception as error:
            return [], f"it can't be traced for one device: {in_a_line(error)}"
        return [
            Finding(side.sizes, name, "dropped", 0.0, 0.0, "", False, blamed(self._cause(name), ()), (), self._kind(name))
            for name in plainly if name.endswith(" after") and name not in changed
        ], ""  # fmt: skip

    def _cause(self, name: str) -> Cause:
        path = self.program.signals.get(name.removeprefix("gradient of ").removesuffix(" after"), ())
        return Cause(path, self._phase(name), source=name)

    def _kind(self, name: str) -> str:
        return "optimizer state" if name.removesuffix(" after") in self.program.of_optimizers else ""

    def _changes(
        self, name: str, one: np.ndarray, two: np.ndarray, numbers: list[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the change of a variable in place of its value: it shows more of an update than the parameter does."""
        if not name.endswith(" after") or one.dtype.kind not in "fi" or one.shape != two.shape:
            return one, two
        before = np.asarray(numbers[self.program.names.index(name.removesuffix(" after"))]).astype(np.float64)
        return one.astype(np.float64) - before, two.astype(np.float64) - before

    def _phase(self, name: str) -> str:
        """Return the phase of a result: with an optimizer, parameters and state after a call belong to its update."""
        if name.startswith("gradient of "):
            return "backward"
        return "update" if self.program.of_optimizers and name.endswith(" after") else "forward"

    def _begin(self, side: Side, findings: list[Finding], seed: int | None) -> FirstDivergence:
        """Run the program again, noting the outputs of signals, and return the first divergence."""
        modulus = None if seed is None or any(self.why) else self.modulus
        numbers = self.program.natural() if modulus is None or seed is None else self.program.probes(modulus, seed)
        how = dataclasses.replace(self.truly if modulus is None else self.exactly, listen=True)
        tolerance = 0.0 if modulus is not None else self.natural[1]
        (reference, heard), (results, other) = self.reference.run(how, numbers), side.run(how, numbers)
        begin = beginning(heard, other, side.sizes, tolerance, modulus)
        if begin is not None:
            return begin
        for finding, one, two in zip(findings, reference, results, strict=True):
            if finding.verdict == "differs":
                allowed = 0.0 if modulus is not None else finding.tolerance
                likeness = compared(*self._changes(finding.name, one, two, numbers), side.sizes, allowed, modulus)
                cause = blamed(finding.cause, likeness.mesh_axes)
                looks = likeness.cause or "another process has a copy that is off; this process has not"
                return FirstDivergence(side.sizes, cause, finding.off, looks)
        raise AssertionError("something differed, and then nothing did")


def _offs(reference: Sequence[np.ndarray], results: Sequence[np.ndarray], modulus: int | None = None) -> list[float]:
    """Return the largest deviation of each result over all processes: each process has compared its own replicas."""
    offs = [_off(*pair, modulus) for pair in zip(reference, results, strict=True)]
    return offs if jax.process_count() == 1 else process_allgather(np.array(offs)).max(0).tolist()


def _off(one: np.ndarray, two: np.ndarray, modulus: int | None = None) -> float:
    if one.shape != two.shape:
        return float("inf")
    if np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    one, two = one.astype(np.float64), two.astype(np.float64)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return 0.0 if np.array_equal(one, two, equal_nan=True) else float("inf")
    return relative(one, two, modulus) or 1.0  # the program's own integers may differ by the modulus
