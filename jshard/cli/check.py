"""`jshard check`: the mistakes of a configuration, and its promises about a training step."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show, tell
from jshard.errors import JShardError, printable
from jshard.printing.table import table
from jshard.signals.claims import Claim, claims, found_claims
from jshard.signals.config import Configuration
from jshard.signals.globs import repeats
from jshard.signals.topologies import fitted
from jshard.signals.trust import Untrusted
from jshard.training.settings import Settings

if TYPE_CHECKING:
    from jshard.inspect.ledger.claimed import Claimed

SCHEMA = "jshard.check/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard check [-h] path [path ...] [key=value ...] [--trust] [--claims] [--update] [--json]"
    parser.add_argument(
        "--claims",
        action="store_true",
        help="list the parameters of the model with the match that claims each; check nothing else",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="write the present collectives as the baseline to hold, to the path with .baseline for .yaml",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    more = [word for word in chosen.overrides if "=" not in word and word.endswith((".yaml", ".yml"))]
    chosen.overrides = [word for word in chosen.overrides if word not in more]
    first = Target.of(chosen)
    checked = []
    for target in (first, *(Target.named(path, first.overrides, chosen) for path in more)):
        configuration = target.configuration()
        found = Checked(target, configuration.meaning())
        if not chosen.json:
            show(str(configuration))
        _check(found, configuration, chosen)
        if not chosen.json:
            found.print()
        checked.append(found)
    if chosen.json:
        document = {"schema": SCHEMA, "ok": not any(each.broken for each in checked)}
        print(json.dumps({**document, "configurations": [each.document() for each in checked]}, indent=2))
    return 1 if any(each.broken for each in checked) else 0


@dataclasses.dataclass
class Checked:
    """The meaning of a configuration, and its promises: held or broken."""

    target: Target
    meaning: list[tuple[str, str]]
    claims: list[dict[str, str]] = dataclasses.field(default_factory=list)  # of each parameter, with --claims
    rows: list[Claimed] = dataclasses.field(default_factory=list)  # asked, done, and why not
    holds: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    def print(self) -> None:
        for line in (*table(list(_alike(self.claims))), *table([row.cells() for row in self.rows]), *self.holds):
            show(printable(line))
        for sentence in self.broken:
            tell(sentence)

    def document(self) -> dict[str, object]:
        means = [{"place": place, "says": words} for place, words in self.meaning]
        listed: dict[str, object] = {"claims": self.claims} if self.claims else {}
        if self.rows:
            from jshard.inspect.ledger.entries import document_of

            listed["asked"] = list(map(document_of, self.rows))
        return {
            "path": self.target.path, "function": self.target.function, "meaning": means, **listed, "holds": self.holds,
            "broken": self.broken,
        }  # fmt: skip


def _check(checked: Checked, configuration: Configuration, chosen: argparse.Namespace) -> None:
    if configuration.topology is not None and configuration.mesh is not None:
        sizes = dict(zip(configuration.mesh.names, configuration.mesh.sizes, strict=True))
        of = configuration.topology, configuration.topology_place
        fitted(sizes, configuration.mesh.place, *of, configuration.mesh.slices)
    if chosen.claims:
        return _check_claims(checked, configuration, listed=True)
    try:
        _check_step(checked, configuration, chosen.update)
    except Untrusted as error:
        if chosen.update:
            raise
        unchecked = "promises" if checked.holds else "claims, promises"
        checked.holds += [error.faults[0].rpartition("; ")[0], f"not checked: {unchecked}; add --trust"]


def _check_step(checked: Checked, configuration: Configuration, update: bool) -> None:
    """Check the experiment, its claims and its promises; these need code named by the configuration."""
    target = checked.target
    _check_experiment(configuration)
    baseline = _beside(target)
    reason = _needs_a_step(configuration, baseline, update)
    has_a_step = "model" in configuration.train or target.function is not None
    if "model" in configuration.train and configuration.has_claims:
        _check_claims(checked, configuration, listed=False)
    if reason is None and not (has_a_step and configuration.signals):  # a file to include has no signals
        return
    if not has_a_step:
        raise JShardError(
            f"{reason} needs a training step, and {configuration.source} describes none",
            hint="write model and data under jshard.train, or remove it",
        )
    _check_promises(checked, configuration, baseline, update, promised=reason is not None)


def _check_experiment(configuration: Configuration) -> None:
    """Raise an error if the experiment can't be trained, by its text and then by its components."""
    if "model" not in configuration.train:
        return
    settings = Settings(configuration)
    settings.check()
    from jshard.training.components import Component
    from jshard.training.optimizers.chain import Chain

    Chain.of(settings)
    for key in ("data", "model", "loss"):
        if "path" in settings.table(key):
            Component.of(settings, key)


def _check_claims(checked: Checked, configuration: Configuration, *, listed: bool) -> None:
    """Check the claim of each parameter, and list the claims. No array is made, and no device needed."""
    if "model" not in configuration.train:
        raise JShardError(
            f"--claims lists the parameters of a model, and {configuration.source} names none",
            hint="write model: examples.digits:Model under jshard.train",
        )
    from jshard.training.experiments.experiment import parameter_shapes

    shapes = parameter_shapes(configuration)
    found = claims(configuration, shapes, _claims_by_use(checked.target, configuration, shapes))
    counts = collections.Counter(claim.signal.name for claim in found.values())
    checked.holds.append(
        f"{len(found)} parameters are claimed: {', '.join(f'{name} {n}' for name, n in counts.items())}"
    )
    if listed:
        checked.claims += [
            {
                "place": str(claim.place),
                "signal": claim.signal.name,
                "path": path,
                "array": shapes[path],
                "match": claim.glob,
            }
            for path, claim in found.items()
        ]


def _claims_by_use(
    target: Target, configuration: Configuration, paths: Mapping[str, str]
) -> dict[str, Sequence[Claim]]:
    """Return claims by use, from a trace of the training step if globs leave parameters."""
    if "data" not in configuration.train or len(found_claims(configuration, paths)) == len(paths):
        return {}
    from jshard.cli.experiment import sketched
    from jshard.signals.active_config import configuration as loaded

    with sketched(target):
        used = {} if (present := loaded()) is None else present.used
        return {path: [Claim(signal, "", line=line)] for (_, path), (signal, line) in used.items()}


def _alike(claimed: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each claim, and a single row for repeated blocks."""
    entries = [((each["place"], each["signal"], each["array"]), each["path"]) for each in claimed]
    for (place, signal, array), path, count in repeats(entries):
        yield place, signal, path, array, f"x {count}" if count >= 2 else ""


def _beside(target: Target) -> str:
    """Return the path of the baseline of a configuration, or of a function under it."""
    function = "" if target.function is None else f".{target.function.replace(':', '.')}"
    return f"{os.path.splitext(target.path)[0]}{function}.baseline"


def _needs_a_step(configuration: Configuration, baseline: str, wanted: bool) -> str | None:
    """Return the first promise about a training step, in words, or None."""
    for signal in configuration.signals.values():
        if signal.expect:
            return f'expect of signal "{signal.name}" ({signal.at("expect")})'
    if configuration.budget is not None:
        return f"jshard.budget ({configuration.budget_place})"
    return f"the baseline {baseline}" if wanted or os.path.exists(baseline) else None


def _check_promises(checked: Checked, configuration: Configuration, name: str, update: bool, *, promised: bool) -> None:
    from jshard.cli.experiment import sketched
    from jshard.inspect.ledger.promises import Baseline, added, check_promises, over_budget
    from jshard.inspect.ledger.whole import whole
    from jshard.training.experiments.experiment import Experiment

    target = checked.target
    with sketched(target) as program:
        if isinstance(program, Experiment) and program.apart and not promised:
            checked.holds.append(program.apart)
            return
        ledger = program.explain()
        # `unsplit` reports signals without split arrays, with a remedy
        is_whole = whole(program.model, ledger.placed) if isinstance(program, Experiment) and not ledger.unsplit else []
    checked.rows += ledger.claims
    checked.holds += map(str, (*ledger.left, *ledger.unsplit, *is_whole))
    try:
        if kept := check_promises(ledger, configuration):
            checked.holds.append(f"{kept} of {kept} expectations hold")
    except JShardError as promises:
        checked.broken += promises.faults
    if configuration.budget is not None and not ledger.memory:
        checked.holds.append(
            "the budget is not checked: without an optimizer among the arguments, memory at rest is unknown"
        )
    elif configuration.budget is not None:
        too_much = over_budget(ledger, configuration)
        checked.broken += [too_much] if too_much else []
        if not too_much:
            checked.holds.append(f"{ledger.held:,} B at rest on each device, of {configuration.budget:,} B")
    command = f"jshard check {dataclasses.replace(target, overrides=())}"
    mesh = str(configuration.mesh)[1:-1] if configuration.mesh is not None else ""
    if update:
        with open(name, "w") as file:
            file.write(Baseline.of(ledger, mesh).text(command))
        checked.holds.append(f"{name} is written: {ledger.summary().removeprefix('total: ')}")
    elif os.path.exists(name):
        with open(name) as file:
            was = Baseline.read(file.read(), name, command)
        more = list(added(was, ledger, mesh, name=name, command=command))
        checked.broken += more
        is_less = Baseline.of(ledger, mesh) != was
        as_much = f"less than {name} holds; to keep it so: {command} --update" if is_less else f"as {name} holds"
        checked.holds += [as_much] if not more else []
