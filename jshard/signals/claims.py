"""Claims of parameters by signals: by the globs of `match`, or by the signal active at a use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jshard.errors import JShardError, Location, nearest, quoted
from jshard.signals.config import Configuration
from jshard.signals.faults import Faults, listed
from jshard.signals.globs import LONGEST, OTHERS, Glob, ParameterPath, below, narrowed, patterns, respelt, spellings
from jshard.signals.signal import Signal


@dataclasses.dataclass(frozen=True)
class Stage:
    """The stages of a parameter: a stage number, or None where its layers are split over stages."""

    mesh_axis: str
    signal: Signal
    number: int | None = None

    @property
    def by(self) -> dict[str, str]:
        """The cause of transfers between stages."""
        return {"claim": self.signal.name, "key": "stage"}

    @property
    def is_equal(self) -> bool:
        """True if every stage has equally many layers, so that layers are stored where they run."""
        return self.signal.stage == "equal"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A signal's claim of a parameter, by a glob or by the line of a use."""

    signal: Signal
    glob: str
    stage: Stage | None = None
    line: str = ""  # model.py:12

    @property
    def place(self) -> Location:
        """The line of the glob, or of the signal."""
        return self.signal.at(f"match.{self.glob}")

    def __str__(self) -> str:
        how = f"as {quoted(self.glob, LONGEST)}" if self.glob else f"at {self.line}"
        return f'signal "{self.signal.name}" ({self.place}) {how}'


def claims(
    configuration: Configuration, paths: Iterable[str], by_use: Mapping[str, Sequence[Claim]] | None = None
) -> dict[str, Claim]:
    """Return the claim of each parameter, in the order of `paths`: names in a model, joined by slashes.

    `by_use` has the claims by active signals. `"**"` alone claims all parameters without another
    claim. Faults are raised as one error: a parameter without a claim or with two, and a glob, or
    an alternative in it, without a parameter.
    """
    paths, faults = list(paths), Faults()
    heads = _heads(configuration)
    found = {path: first for path, (first, *_) in (by_use or {}).items()}
    contested: dict[tuple[Claim, Claim], list[str]] = {}
    for path, (first, *others) in (by_use or {}).items():
        for other in others[:1]:
            contested.setdefault((first, other), []).append(path)
    for claim, glob in _globs(configuration):
        here = [path for path in paths if glob.fits(path)]
        if claim.glob == OTHERS:
            here = [path for path in here if path not in found or found[path].glob == OTHERS]
        if claim.signal.is_stage_alone:  # `staged` checks these globs
            here = [path for path in here if path not in found or found[path].signal.is_stage_alone]
        if claim.glob != OTHERS and not claim.signal.is_stage_alone:
            _add_misfits(faults, claim.signal, claim.glob, here, paths, heads)
        for path in here:
            first = found.setdefault(path, claim)
            if first.signal != claim.signal or (first.glob and first.signal is not claim.signal):
                contested.setdefault((first, claim), []).append(path)
    for signal in configuration.signals.values():
        whole = [Glob(glob.text) for glob in patterns(signal.match)]
        for text in (text for text in signal.match if text.startswith("!")):
            theirs = [path for path in paths if any(glob.fits(path) for glob in whole)]
            _add_misfits(faults, signal, text, [*filter(Glob(text[1:]).fits, theirs)], theirs, heads)
    for (first, second), both in contested.items():
        what, verb = ("parameters", "are") if both[1:] else ("parameter", "is")
        says = f"{_some(both, 1)} {verb} claimed by {first} and by {second}"
        globs = [each for each in (first, second) if each.glob]
        hint = "make one of the globs narrower" if globs[1:] else "make the glob narrower, or use that signal there"
        faults.add(what, second.place, says, hint if globs else "use one signal at both")
    if configuration.default is not None:
        found = dict.fromkeys(paths, Claim(configuration.lookup((configuration.default,)), "")) | found
    if left := [path for path in paths if path not in found]:
        place, says = Location(configuration.source), f"claims {len(left)} of {len(paths)} parameters: {_some(left, 3)}"
        faults.add(f"no signal of {place}", place, says, 'claim them, or write rest: {match: ["**"]}')
    faults.stop()
    return {path: found[path] for path in paths}


def check_globs(configuration: Configuration, paths: Collection[str]) -> None:
    """Raise the faults of the globs for a model without a known program. Globs may begin with an
    argument's name: one name without faults is enough. If a signal has no `match`, it may be active
    around a use, so a parameter without a glob is no fault."""
    others: dict[str, list[Claim]] = {}
    if not all(signal.match for signal in configuration.signals.values()):
        by_globs = found_claims(configuration, paths)
        others = {path: [Claim(Signal("-"), "")] for path in paths if path not in by_globs}
    if not paths:
        return
    tops = {path.partition("/")[0] for path in paths}
    try:
        claims(configuration, paths, others)
    except JShardError:
        for head in (head for head in _heads(configuration) if head.isidentifier() and nearest(head, tops) is None):
            with contextlib.suppress(JShardError):  # if no name helps, the first error is raised
                claims(configuration, [ParameterPath.of(head, path) for path in paths], others)
                return
        raise


def found_claims(configuration: Configuration, paths: Iterable[str], model: type | None = None) -> dict[str, Claim]:
    """Return the claims of parameters without checks: by globs, or by use in an earlier trace.
    `model` is the class of the model in the earlier trace."""
    globs, used = _globs(configuration), configuration.used
    found = {
        path: Claim(used[model, below(path)][0], "", line=used[model, below(path)][1])
        if (model, below(path)) in used
        else next((claim for claim, glob in globs if glob.fits(path)), None)
        for path in paths
    }
    return {path: claim for path, claim in found.items() if claim is not None}


def staged(configuration: Configuration, found: dict[str, Claim]) -> dict[str, Claim]:
    """Return the claims with their stages, from the claim's signal or from a stage-only signal."""
    mesh_axis = configuration.stage_axis
    if mesh_axis is None:
        return found
    after, faults = dict(found), Faults()
    globs = [(claim, glob) for claim, glob in _globs(configuration) if claim.signal.is_stage_alone]
    for claim, glob in globs:
        if claim.glob != OTHERS:
            fits = [*filter(glob.fits, found)]
            _add_misfits(faults, claim.signal, claim.glob, fits, found, _heads(configuration))
    for path, claim in found.items():
        by = [each for each, glob in globs if glob.fits(path)]
        by = [claim, *by] if claim.signal.stage else by
        if not by:
            continue
        first, *others = by
        for other in (each for each in others if each.signal is not first.signal and each.glob != OTHERS):
            says = f"{quoted(path, LONGEST)} is on a stage by {first} and by {other}"
            faults.add("parameter", other.place, says, "make one of the globs narrower")
        number = int(first.signal.stage) if first.signal.stage.isdecimal() else None
        after[path] = dataclasses.replace(claim, stage=Stage(mesh_axis, first.signal, number))
    faults.stop()
    return after


def _globs(configuration: Configuration) -> list[tuple[Claim, Glob]]:
    """Return every glob with its claim: `"**"` after other globs, and stage-only signals last."""
    signals = configuration.signals.values()
    every = [(Claim(signal, glob.text), glob) for signal in signals for glob in patterns(signal.match)]
    return sorted(every, key=lambda one: (one[0].signal.is_stage_alone, one[0].glob == OTHERS))


def _heads(configuration: Configuration) -> set[str]:
    """Return the first parts of all globs: each may be the name of an argument."""
    return {head for _, glob in _globs(configuration) for head in glob.heads}


def _is_of_another(glob: str, paths: Collection[str], heads: Collection[str]) -> bool:
    """Return whether a glob begins with the name of a model outside this program. Names of
    arguments are recognized only if every argument of the program begins a glob."""
    arguments = {path.argument if isinstance(path, ParameterPath) else "" for path in paths}
    known = arguments | {below(path).partition("/")[0] for path in paths}
    others = (each.isidentifier() and nearest(each, known) is None for each in Glob(glob).heads)
    return arguments <= {*heads} and all(others)


def _add_misfits(
    faults: Faults, signal: Signal, text: str, fits: Collection[str], paths: Collection[str], heads: Collection[str]
) -> None:
    """Note a fault for a glob without a matching path, or for each such alternative in it. `heads`
    are the first parts of all globs. Globs of models outside the program are skipped."""
    sign, glob = text[: text.startswith("!")], text.removeprefix("!")
    none = "fits no parameter of its globs" if sign else "fits no parameter"

    def add(says: str, hint: str) -> None:
        faults.add((signal.name,), signal.at(f"match.{text}"), f"has match {quoted(text, LONGEST)}, {says}", hint)

    if not fits and any(map(Glob(glob).fits, paths)):
        add("whose exceptions leave it no parameter", "remove one of them")
    elif not fits:
        if not _is_of_another(glob, paths, heads):
            add(f"which {none}", _meant(glob, paths, sign))
    else:
        for alternative, alone in narrowed(glob):
            if not any(map(Glob(alone).fits, paths)) and not _is_of_another(alone, paths, heads):
                add(f"whose alternative {quoted(alternative)} {none}", _meant(alone, paths, sign))


def _meant(glob: str, paths: Collection[str], sign: str) -> str:
    """Return a hint: the glob in our notation, or names for its first wrong part."""
    if meant := next((each for each in respelt(glob) if any(map(Glob(each).fits, paths))), None):
        return f"did you mean {quoted(sign + meant, LONGEST)}?"
    parts = next(spellings(glob)).split("/")
    paths = [*map(below, paths), *(path.led for path in paths if isinstance(path, ParameterPath))]
    leads = (any(map(Glob("/".join([*parts[: at + 1], "**"])).fits, paths)) for at in range(len(parts)))
    number = next(number for number, one in enumerate(leads) if not one)
    before, after = parts[:number], parts[number + 1 :]
    steps = [path.split("/") for path in filter(Glob("/".join([*before, "**"])).fits, paths)]
    there = {name for path in steps for name in (path if "**" in before else path[number : number + 1])}
    near = nearest(parts[number], sorted(there))
    if near is not None and any(map(Glob("/".join([*before, near, *after])).fits, paths)):
        return f"did you mean {quoted(sign + '/'.join([*before, near, *after]), LONGEST)}?"
    where = f"after {quoted('/'.join(before), LONGEST)}" if before else "first"
    return f"write {listed(sorted(there))} {where}" if there else "remove it"


def _some(paths: Collection[str], most: int) -> str:
    """Return the first `most` paths, and the number of the others."""
    first = list(paths)[:most]
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(quoted(path, LONGEST) for path in first) + more
