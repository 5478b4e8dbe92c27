"""The claim of each parameter of a traced program: by the layer around it, the signal that is active at its use, or a glob."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flax import nnx

from jshard.errors import JShardError
from jshard.layers.active_signals import ActiveSignal, claims_by_use
from jshard.layers.kernel_support import check_kernels
from jshard.layers.layer import built_arrays
from jshard.layouts.mesh import is_explicit
from jshard.signals.active_config import configuration, mesh
from jshard.signals.claims import Claim, claims, staged
from jshard.signals.config import Configuration
from jshard.signals.parameter_path import below
from jshard.signals.signal import Signal

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
            f'signal "{signal.name}" ({signal.at(key)}) says {key}, which jshard.shard does not do yet, for {path}',
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
