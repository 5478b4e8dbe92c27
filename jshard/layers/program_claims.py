"""The claim of each parameter of a traced program: by the layer around it, the signal that is active at its use, or a glob."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flax import nnx

from jshard.errors import JShardError
from jshard.layers.layer import built_arrays
from jshard.layers.strategy import check_kernels
from jshard.layouts.mesh import is_explicit
from jshard.programs.jaxprs import Eqn, Jaxpr, bare, bodies, evaluate
from jshard.programs.provenance import Cause, source_of
from jshard.signals.active_config import configuration, mesh
from jshard.signals.claims import Claim, claims, staged
from jshard.signals.config import Configuration
from jshard.signals.globs import below
from jshard.signals.plain_layers import LAYERS
from jshard.signals.signal import Signal

Names = tuple[str, ...]  # of nested signals, outermost first
Source = frozenset[str] | None  # the parameters that a value is computed from; None: from data too
KERNELS = ("all_gather", "all_reduce", "reduce_scatter")  # ops whose algorithm a signal may name


def program_claims(
    layers: Mapping[str, tuple[str, ...]],
    owners: Mapping[str, type | None],
    active: Mapping[str, Sequence[ActiveSignal]],
) -> dict[str, Claim]:
    """Find the claim of each parameter of a program, by path.

    `layers` has the signal that the layer of jshard around it was built under, which comes first, `owners` the class of its
    model, and `active` the signals that are active where the program uses it. A parameter that another program uses under a
    signal keeps that claim.
    """
    present = configuration()
    assert present is not None
    left = [path for path, layer in layers.items() if not layer]
    by_use = {path: found for path, found in claims_by_use(present, active).items() if not layers[path]}
    for path in left:
        if path not in by_use and (key := (owners[path], below(path))) in present.used:
            signal, line = present.used[key]
            by_use[path] = [Claim(signal, "", line=line)]
    if present.workers:  # in GT's form the first use decides
        by_use = {path: found[:1] for path, found in by_use.items()}
    in_vain = not present.workers and (by_use or (present.splits_parameters and not any(layers.values())))
    must = present.has_claims or present.default or in_vain
    found = claims(present, left, by_use) if left and must else {path: first for path, (first, *_) in by_use.items()}
    found |= {path: Claim(present.lookup(layer), "") for path, layer in layers.items() if layer}
    for path, claim in found.items():
        _check_words(claim.signal, path)
    return staged(present, found)


def _check_words(signal: Signal, path: str) -> None:
    """Refuse what a signal asks for and the partition does not do."""
    asked = {
        **{f"dtype.{key}": getattr(signal.dtype, key) for key in ("compute", "reduce") if not is_explicit(mesh())},
        **{
            f"kernel.{op}": op not in KERNELS or not (is_explicit(mesh()) or word in ("auto", "xla"))
            for op, word in signal.kernel
        },
        "output": signal.output in ("scatter", "sum"), "backward": signal.backward and not signal.stage.isdecimal(),
        "shard.workers": signal.shard is not None and signal.shard.workers is not None,
    }  # fmt: skip
    for key in (key for key, said in asked.items() if said):
        raise JShardError(
            f"{signal.label(key)} says {key}, which jshard.shard does not do yet, for {path}",
            hint=f"remove {key}, or build that layer with jshard.Linear and call the model without jshard.shard",
        )
    check_kernels(signal, mesh(), lambda op: None)


def is_run_by_claims(present: Configuration, built: Callable[[], nnx.Module]) -> bool:
    """Whether `jshard.shard` is to run a model: signals claim parameters by globs or on stages, or split the parameters of
    a model that has no layer of jshard's."""
    if present.has_claims or present.workers:
        return True
    return present.splits_parameters and not any(
        each.signal_path for each in built_arrays(nnx.eval_shape(built)).values()
    )


# -- which signals are active where a program uses its parameters --


@dataclasses.dataclass(frozen=True)
class ActiveSignal:
    """The names of the signals that are active where an equation uses a parameter, and the line of the program."""

    names: Names
    line: str
    rank: int  # of the parameter where it is used first: in a loop without the axis of its trips
    is_layer: bool  # whether the equation is a product or a lookup


def active_signals(
    program: Any, paths: Sequence[str], lines: Mapping[Names, Collection[str]], around: Names
) -> dict[str, list[ActiveSignal]]:
    """Find the signals that each parameter is used under, in program order.

    `paths` names the parameters among the inputs ("" for data), `lines` has the lines of each `with`, and the signals `around`
    are active for the whole program. A use combines a parameter with data. A parameter without such a use under a signal has
    the signals that it is cast, reshaped or scaled under.
    """
    walk = _Walk(lines)
    walk.run(bare(program), [frozenset((path,)) if path else None for path in paths], Cause(around))
    return {path: list((walk.uses.get(path) or walk.changes[path]).values()) for path in {**walk.uses, **walk.changes}}


def claims_by_use(present: Configuration, found: Mapping[str, Sequence[ActiveSignal]]) -> dict[str, list[Claim]]:
    """Return the claim of each parameter by the signal that its first use is under, then those of products and lookups under
    signals that say something else. A name that the configuration does not have claims nothing."""
    claimed: dict[str, list[Claim]] = {}
    for path, uses in found.items():
        for use in uses:
            if not present.names(use.names):
                continue
            claims = claimed.setdefault(path, [])
            claim = Claim(present.lookup(use.names), "", line=use.line)
            if not claims or (use.is_layer and claim.signal not in [each.signal for each in claims]):
                claims.append(claim)
    return claimed


class _Walk:
    """A walk over a program that follows its parameters, through casts, loops and calls, to where they are used."""

    def __init__(self, lines: Mapping[Names, Collection[str]]):
        self.lines = lines
        self.uses: dict[str, dict[tuple[Names, bool], ActiveSignal]] = {}
        self.changes: dict[str, dict[tuple[Names, bool], ActiveSignal]] = {}
        self.ranks: dict[str, int] = {}

    def run(self, jaxpr: Jaxpr, sources: Sequence[Source], around: Cause) -> list[Source]:
        step = lambda eqn, operands: self.results(eqn, operands, around.inside(eqn.source_info.name_stack.stack))
        given = [*[frozenset()] * len(jaxpr.constvars), *sources]
        return evaluate(jaxpr, given, step, constant=lambda literal: frozenset())

    def results(self, eqn: Eqn, sources: list[Source], here: Cause) -> list[Source]:
        if not any(sources):  # no parameter goes in
            return [None if None in sources else frozenset()] * len(eqn.outvars)
        outs: list[Source] = []
        for body, operands in bodies(eqn, sources):
            outs = self.run(body, operands, here)
        if outs:
            return outs
        parameters = frozenset[str]().union(*filter(None, sources))
        table = self.uses if None in sources else self.changes
        for path in parameters:
            at = next(at for at, of in enumerate(sources) if path in (of or ()))
            rank = self.ranks.setdefault(path, len(eqn.invars[at].aval.shape))
            if here.path:
                key = here.path, eqn.primitive.name in LAYERS
                line = _nearest(source_of(eqn), self.lines.get(here.path, ()))
                table.setdefault(path, {}).setdefault(key, ActiveSignal(here.path, line, rank, key[1]))
        if None in sources:
            return [None] * len(eqn.outvars)
        # a number that is computed from a parameter, as its norm, is no layer's array
        return [parameters if getattr(v.aval, "ndim", 0) else frozenset() for v in eqn.outvars]


def _nearest(source: str, lines: Collection[str]) -> str:
    """The line of the `with` around a line of the program: the last above it in its file, else any, else that line itself."""
    number = lambda line: int(line.rpartition(":")[2] or 0)
    above = [
        each
        for each in lines
        if each.rpartition(":")[0] == source.rpartition(":")[0] and number(each) <= number(source)
    ]
    return max(above, key=number, default=min(lines, default=source))
