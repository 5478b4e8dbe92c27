"""A resolved and checked configuration, returned by `jshard.load`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jshard.errors import JShardError, Location, nearest, quoted
from jshard.printing.table import Block, Rows, Shown
from jshard.signals.axes import Across
from jshard.signals.compose import compose
from jshard.signals.describe import component_words, signal_words
from jshard.signals.faults import Faults, listed
from jshard.signals.resolve import is_template, resolve
from jshard.signals.signal import Matcher, Signal
from jshard.signals.trust import EVERYTHING, Trust

STAGE, WORKERS = "stage", "workers"  # the mesh axes of GT's form


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The mesh requested by a configuration. One size may be -1, for all remaining devices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    place: Location = dataclasses.field(compare=False)
    places: Mapping[str, Location] = dataclasses.field(default_factory=dict, compare=False)  # by mesh axis
    across: tuple[str, ...] = ()  # the first mesh axes, across slices

    def __str__(self) -> str:
        """Return `{data: 2, tensor: 4}`, as in YAML."""
        return "{" + ", ".join(f"{name}: {self.size_in_words(name)}" for name in self.names) + "}"

    def size_in_words(self, name: str) -> str:
        size = self.sizes[self.names.index(name)]
        return f"{{size: {size}, over: dcn}}" if name in self.across else str(size)

    @property
    def slices(self) -> int:
        return math.prod(self.sizes[: len(self.across)])


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline requested by a configuration. If `chunks` is None, the schedule's default applies."""

    axis: str
    microbatches: int
    schedule: str = "1f1b"
    chunks: int | None = None
    place: Location = dataclasses.field(default=Location(""), compare=False)

    def __str__(self) -> str:
        chunks = "" if self.chunks is None else f", {self.chunks} chunks each"
        return f"stages over {self.axis}{chunks}, {self.microbatches} microbatches by {self.schedule}"


class Fingerprint:
    """The parts of a configuration with an effect on programs. Equal parts share one object, since
    JAX hashes and compares it at every traced primitive."""

    def __init__(self, says: Hashable):
        self.says = says


_fingerprints: weakref.WeakValueDictionary[Hashable, Fingerprint] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configuration(Shown):
    """A checked configuration, immutable and equal only to itself; `fingerprint` compares layouts."""

    source: str
    mesh: MeshPlan | None  # None when neither jshard.mesh nor a `shard` over workers is written
    axis_types: str
    strict: bool
    default: str | None
    signals: Mapping[str, Signal]
    train: Mapping[str, Any]
    train_places: Mapping[str, Location]
    budget: int | None = None  # bytes on each device
    budget_place: Location | None = None
    topology: str | None = None  # v5e:4x4
    topology_place: Location | None = None
    pipeline: Pipeline | None = None
    workers: tuple[tuple[int, ...], ...] = ()  # devices of each stage, in GT's form
    trust: Trust = EVERYTHING  # the code it may run
    # The scopes of arrays placed by `jshard.signal.tensor`: data, in no trace of the function that
    # receives it. Reports don't name these signals "unused"; no layout depends on this set.
    placed: set[tuple[str, ...]] = dataclasses.field(default_factory=set, init=False)
    # The signals that claim parameters by use, with the line, by class of the NNX model and path:
    # other functions of the model keep this layout. Trees have no class: each function has claims.
    used: dict[tuple[type | None, str], tuple[Signal, str]] = dataclasses.field(default_factory=dict, init=False)
    _looked_up: dict[tuple[str, ...], Signal] = dataclasses.field(default_factory=dict, init=False)
    _digests: dict[tuple[str, ...], Hashable] = dataclasses.field(default_factory=dict, init=False)

    def blocks(self) -> Iterator[Block]:
        yield Rows(self.meaning())

    def meaning(self) -> list[tuple[str, str]]:
        """Return the place and meaning of the mesh, the experiment and each signal."""
        mesh, train, lines = self.mesh, self.train, list[tuple[object, str]]()
        if mesh is not None:
            count = math.prod(mesh.sizes)
            devices = "all devices" if -1 in mesh.sizes else "1 device" if count == 1 else f"{count} devices"
            lines.append((mesh.place, f"mesh {mesh} of {devices}, {self.axis_types}"))
        if self.pipeline is not None:
            lines.append((self.pipeline.place, str(self.pipeline)))
        elif self.workers:
            stages = " and ".join(", ".join(map(str, each)) for each in self.workers)
            lines.append(
                (mesh.place if mesh else "", f"workers {stages} are stages, one after the other, of one microbatch")
            )
        if self.budget is not None:
            lines.append((self.budget_place, f"at most {self.budget:,} B on each device"))
        if self.topology is not None:
            lines.append((self.topology_place, f"plans are made for {self.topology}"))
        if "model" in train:
            named = {key: train[key] for key in ("model", "data", "optimizer") if key in train}
            named = {key: component_words(it) for key, it in named.items()}
            named |= {key: train[key] for key in ("batch", "steps", "seed") if key in train}
            words = ", ".join(f"{key} {value}" for key, value in named.items())
            lines.append((self.train_places["model"], f"experiment {words}"))
        for signal in self.signals.values():
            backward = signal if signal.backward is None else self.lookup((signal.backward,))
            lines.append((signal.place, f"{signal.name}: {'; '.join(signal_words(signal, backward))}"))
        return [(str(place), says) for place, says in lines]

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The part with an effect on programs, without lines, comments, `expect` and `train`."""
        named = tuple(sorted(self.signals.items()))
        says = (self.mesh, self.axis_types, self.strict, self.default, self.pipeline, self.workers, named)
        return _fingerprints.setdefault(says, Fingerprint(says))

    @functools.cached_property
    def devices(self) -> int | None:
        """The least number of devices: a mesh size of -1 counts as 1, and workers count by number."""
        numbers = [max(s.shard.workers) + 1 for s in self.signals.values() if s.shard is not None and s.shard.workers]
        numbers += [max(each) + 1 for each in self.workers]
        if self.mesh is None:
            return None
        return max([math.prod(map(abs, self.mesh.sizes)), *numbers])

    @property
    def stage_axis(self) -> str | None:
        """The mesh axis of stages, or None."""
        return self.pipeline.axis if self.pipeline is not None else STAGE if self.workers else None

    @functools.cached_property
    def by_stages(self) -> Configuration | None:
        """The configuration in GT's form on a single mesh, where each list of workers is a stage.
        Split arrays are split over the workers of their stage. None for another form, for a single
        list, and for lists that overlap or differ in length."""
        named = [s.shard.workers for s in self.signals.values() if s.shard is not None and s.shard.workers]
        lists = tuple(sorted(set(named)))
        numbers = [number for each in lists for number in each]
        if self.mesh is None or self.mesh.places or len(lists) < 2 or len({*map(len, lists)}) > 1:
            return None
        if len({*numbers}) < len(numbers):
            return None

        def staged(signal: Signal) -> Signal:
            if signal.shard is None:
                return signal
            of_all = (STAGE, WORKERS) if signal.shard.workers is None and not signal.shard.replicated else (WORKERS,)
            stage = "" if signal.shard.workers is None else str(lists.index(signal.shard.workers))
            return dataclasses.replace(
                signal, stage=stage, shard=dataclasses.replace(signal.shard, workers=None, mesh=of_all)
            )

        return dataclasses.replace(
            self,
            mesh=MeshPlan((STAGE, WORKERS), (len(lists), len(lists[0])), self.mesh.place),
            axis_types="explicit",
            signals=MappingProxyType({name: staged(signal) for name, signal in self.signals.items()}),
            workers=lists,
        )

    @property
    def has_claims(self) -> bool:
        """True if a signal claims parameters by `match`."""
        return any(signal.match for signal in self.signals.values())

    @property
    def splits_parameters(self) -> bool:
        """True if a signal splits parameters."""
        words = ("column", "reduction", "store", "expert", "shard")
        return any(getattr(signal, word) for signal in self.signals.values() for word in words)

    @functools.cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self.signals.values())

    def names(self, path: tuple[str, ...]) -> bool:
        """Return whether a signal matches these nested names or a suffix of them."""
        return bool(self._matcher.find(_components(path))[1])

    def lookup(self, path: tuple[str, ...]) -> Signal:
        """Return the signal of nested names, outermost first: by the whole path, else by a shorter suffix."""
        if path not in self._looked_up:
            self._looked_up[path] = self._find(path)
        return self._looked_up[path]

    def _find(self, path: tuple[str, ...]) -> Signal:
        parts = _components(path)
        end, found = self._matcher.find(parts)
        name = "/".join(parts)
        if len(found) > 1:
            both = " and ".join(f"{quoted(signal.name)} ({signal.place})" for signal in found[:2])
            raise JShardError(
                f"signal {quoted(name)} is matched by both {both}", hint=f"write {quoted('/'.join(end))} itself"
            )
        if found:
            [signal], concrete = found, "/".join(end)
            return signal if signal.name == concrete else dataclasses.replace(signal, name=concrete)
        if self.default is not None:
            return self.lookup((self.default,))
        if not self.strict or not path:
            return Signal(name, Location(self.source))
        fault = f"signal {quoted(name)} is not in {self.source}"
        last = parts[-1]
        inside = next((each for each in self.signals if each.startswith(f"{last}/")), None)
        if inside is not None:
            raise JShardError(fault, hint=f"write {last}: {{}} beside {quoted(inside)}")
        near = nearest(last, self.signals) or nearest(name, self.signals)
        if near is not None:
            raise JShardError(fault, hint=f"did you mean {quoted(near)}?")
        if is_template(name):
            raise JShardError(fault, hint='names that start with "_" are only templates: use another')
        raise JShardError(fault, hint=f"use {listed(self.signals)}" if self.signals else f"write {name}: {{}} in it")

    def digest(self, path: tuple[str, ...]) -> Hashable:
        """Return all inputs from the configuration to a program in this scope: equal digests may
        share a trace. Names count only if they affect the match of names inside the scope."""
        if path not in self._digests:
            parts = _components(path)
            self._digests[path] = (self.lookup(path) if path else None, self._matcher.below(parts))
        return self._digests[path]


def _components(path: tuple[str, ...]) -> tuple[str, ...]:
    """Split names at slashes: a scope may be named "decoder/attn" at once."""
    return tuple(component for name in path for component in name.split("/"))


def load_configuration(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = (), trust: Trust = EVERYTHING
) -> Configuration:
    """Read and check a configuration: a path to a YAML file, or a mapping. `overrides` are
    `path=value` words as on the command line. The configuration may run the code in `trust`. All
    faults are one JShardError, a line each, in the order of the files."""
    faults = Faults()
    name, root = compose(source, overrides, faults)
    resolved = resolve(root, name, faults) if root is not None else None
    faults.stop()
    assert resolved is not None
    head, places, signals = resolved
    prefix = "jshard.train."
    in_train = {key.removeprefix(prefix): place for key, place in places.items() if key.startswith(prefix)}
    configuration = Configuration(
        source=name,
        mesh=_mesh(head.get("mesh"), places, signals),
        axis_types=head.get("axis_types", "explicit" if "mesh" in head else "auto"),
        strict=head.get("strict", True),
        default=head.get("default"),
        signals=MappingProxyType(signals),
        train=MappingProxyType(head.get("train", {})),
        train_places=MappingProxyType(in_train),
        budget=head.get("budget"),
        budget_place=places.get("jshard.budget"),
        topology=head.get("topology"),
        topology_place=places.get("jshard.topology"),
        pipeline=None if "pipeline" not in head else _pipeline(head, places),
        trust=trust,
    )
    if configuration.pipeline is None or "mesh" in head:
        return configuration
    if configuration.by_stages is None:
        raise JShardError(
            f"jshard.pipeline ({configuration.pipeline.place}) has no jshard.mesh, and the signals name no workers that could "
            "be its stages",
            hint="write mesh: {stage: 4, tensor: 2} beside it, or disjoint lists of workers of one length",
        )
    return configuration.by_stages


def _pipeline(head: Mapping[str, Any], places: Mapping[str, Location]) -> Pipeline:
    return Pipeline(**head["pipeline"], microbatches=head["train"]["microbatches"], place=places["jshard.pipeline"])


def _mesh(
    sizes: Mapping[str, int] | None, places: Mapping[str, Location], signals: Mapping[str, Signal]
) -> MeshPlan | None:
    """Return the mesh as written, or for GT's form without a mesh, a single axis over all devices."""
    if sizes is not None:
        of_axes = {name: places[f"jshard.mesh.{name}"] for name in sizes}
        across = tuple(name for name, size in sizes.items() if isinstance(size, Across))
        return MeshPlan(tuple(sizes), tuple(map(int, sizes.values())), places["jshard.mesh"], of_axes, across)
    shards = [signal.at("shard") for signal in signals.values() if signal.shard is not None]
    return MeshPlan((WORKERS,), (-1,), shards[0]) if shards else None
