"""The claim of each parameter of a traced program: by its layer, the active signal at its use, or a glob."""

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
Source = frozenset[str] | None  # the parameters from which a value is computed; None if from data too
KERNELS = ("all_gather", "all_reduce", "reduce_scatter")  # ops with an algorithm in a signal


def program_claims(
    layers: Mapping[str, tuple[str, ...]],
    owners: Mapping[str, type | None],
    active: Mapping[str, Sequence[ActiveSignal]],
) -> dict[str, Claim]:
    """Return the claim of each parameter of a program, by path.

    For each parameter, `layers` holds the signal its jshard layer was built under, which takes precedence, `owners` the class
    of its model, and `active` the active signals at its uses in the program. A parameter used under a signal in another
    program keeps that claim.
    """
    present = configuration()
    assert present is not None
    free = [path for path, layer in layers.items() if not layer]
    by_use = {path: uses for path, uses in claims_by_use(present, active).items() if not layers[path]}
    for path in free:
        if path not in by_use and (key := (owners[path], below(path))) in present.used:
            signal, line = present.used[key]
            by_use[path] = [Claim(signal, "", line=line)]
    if present.workers:  # in GT's form the first use decides
        by_use = {path: uses[:1] for path, uses in by_use.items()}
    in_vain = not present.workers and (by_use or (present.splits_parameters and not any(layers.values())))
    must = present.has_claims or present.default or in_vain
    claimed = claims(present, free, by_use) if free and must else {path: first for path, (first, *_) in by_use.items()}
    claimed |= {path: Claim(present.lookup(layer), "") for path, layer in layers.items() if layer}
    for path, claim in claimed.items():
        _check_words(claim.signal, path)
    return staged(present, claimed)


def _check_words(signal: Signal, path: str) -> None:
    """Raise an error for a word of a signal that the partition does not support."""
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
    """Return True if `jshard.shard` must run a model. Then signals claim parameters by globs or
    stages, or split the parameters of a model without jshard's layers."""
    if present.has_claims or present.workers:
        return True
    if not present.splits_parameters:
        return False
    return not any(array.signal_path for array in built_arrays(nnx.eval_shape(built)).values())


# -- the active signals at the uses of a program's parameters --


@dataclasses.dataclass(frozen=True)
class ActiveSignal:
    """The names of the active signals at a parameter's use, and the line of the program."""

    names: Names
    line: str
    rank: int  # of the parameter at its first use: in a loop, without the loop's axis
    is_layer: bool  # True for a product or a lookup


def active_signals(
    program: Any, paths: Sequence[str], lines: Mapping[Names, Collection[str]], around: Names
) -> dict[str, list[ActiveSignal]]:
    """Return the active signals at each parameter's uses, in program order.

    `paths` names the parameters among the inputs ("" for data), `lines` has the lines of each `with`, and the signals `around`
    are active for the whole program. A use combines a parameter with data. A parameter without a use under a signal has the
    signals of its casts, reshapes and scalings instead.
    """
    walk = _Walk(lines)
    walk.run(bare(program), [frozenset((path,)) if path else None for path in paths], Cause(around))
    return {path: list((walk.uses.get(path) or walk.changes[path]).values()) for path in {**walk.uses, **walk.changes}}


def claims_by_use(present: Configuration, active: Mapping[str, Sequence[ActiveSignal]]) -> dict[str, list[Claim]]:
    """Return the claims of each parameter: first by its first use, then by products and lookups
    under different signals. A name missing in the configuration claims nothing."""
    claimed: dict[str, list[Claim]] = {}
    for path, uses in active.items():
        for use in uses:
            if not present.names(use.names):
                continue
            claims = claimed.setdefault(path, [])
            claim = Claim(present.lookup(use.names), "", line=use.line)
            if not claims or (use.is_layer and claim.signal not in [other.signal for other in claims]):
                claims.append(claim)
    return claimed


class _Walk:
    """A walk over a program from its parameters, through casts, loops and calls, to their uses."""

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
        if not any(sources):  # no operand comes from a parameter
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
        # a scalar computed from a parameter, such as its norm, is not an array of a layer
        return [parameters if getattr(v.aval, "ndim", 0) else frozenset() for v in eqn.outvars]


def _nearest(source: str, lines: Collection[str]) -> str:
    """Return the line of the `with` around a program line: the last above it in its file, else any, else the line."""
    number = lambda line: int(line.rpartition(":")[2] or 0)
    in_file = [line for line in lines if line.rpartition(":")[0] == source.rpartition(":")[0]]
    above = [line for line in in_file if number(line) <= number(source)]
    return max(above, key=number, default=min(lines, default=source))
