"""Descriptions of signals in words."""

from __future__ import annotations

from collections.abc import Iterator

from jshard.signals.globs import OTHERS
from jshard.signals.signal import Shard, Signal

OUTPUTS = {
    "keep": "y stays split",
    "gather": "y is gathered by an all-gather",
    "sum": "y is summed by an all-reduce",
    "scatter": "y is summed and split by a reduce-scatter",
}


def signal_words(signal: Signal, backward: Signal) -> Iterator[str]:
    """Yield the layout of a signal and its options in words; `backward` is the signal of its cotangents."""
    if signal.shard is not None:
        yield _shard(signal.shard)
    loops = {"rows": signal.row, "columns": signal.column, "reduction": signal.reduction}
    split = [f"{loop} over {' x '.join(names)}" for loop, names in loops.items() if names]
    if split:
        yield ", ".join(split)
    elif signal.shard is None:
        yield "replicated"
    output = signal.output or ("sum" if signal.reduction and not signal.sequence else None)
    if output is not None:
        yield OUTPUTS[output]
    if signal.sequence:
        yield f"activations between layers split by sequence over {' x '.join(signal.sequence)}"
    if signal.stage:
        kinds = {"equal": "split over the stages of the pipeline", "balance": "on stages of about equal FLOP"}
        layers = f"layers {kinds.get(signal.stage) or f'on stages ({signal.stage})'}"
        yield f"on stage {signal.stage} of the pipeline" if signal.stage.isdecimal() else layers
    if signal.expert:
        yield f"experts over {' x '.join(signal.expert)}"
    if signal.ring:
        yield f"places split over {' x '.join(signal.ring)}, attention by {signal.attention or 'ring'}"
    if signal.store:
        kept = ", and what is gathered of them is kept for backward" if signal.store_keep else ""
        kept = ", gathered one layer ahead" if signal.store_prefetch else kept
        yield f"parameters and optimizer state rest split over {' x '.join(signal.store)}{kept}"
    elif signal.store_prefetch:
        yield "gradients of layers summed one layer late"
    if signal.store_optimizer:
        yield f"optimizer state rests split over {' x '.join(signal.store_optimizer)}"
    if signal.backward is not None:
        yield f'cotangents laid out as "{signal.backward}"'
    for what, dtype in (("kept", "param"), ("computed", "compute"), ("summed over devices", "reduce")):
        if (name := getattr(signal.dtype, dtype)) is not None:
            yield f"{what} in {name}"
    if signal.remat:
        words = {"full": "", "products": ", except products", "chunk": " of each chunk of layers"}
        kept = words.get(str(signal.remat), f", except {', '.join(signal.remat)}")
        yield f"activations recomputed in backward{kept}"
    if signal.compile:
        elsewhere = (backward.shard and backward.shard.workers) != (signal.shard and signal.shard.workers)
        yield (
            "not compiled as one program, as the backward is on other workers"
            if elsewhere
            else "each layer compiled as one program, its backward as another"
        )
    if signal.kernel:
        yield f"kernels: {', '.join(f'{op} {word}' for op, word in signal.kernel)}"
    if signal.match:
        words = {glob: f"not {glob[1:]}" if glob.startswith("!") else glob for glob in signal.match}
        yield f"claims {', '.join((words | {OTHERS: 'all other parameters'})[glob] for glob in signal.match)}"
    for collective, count in signal.expect:
        yield f"at most {count} bytes on the wire" if collective == "bytes" else f"{count} {collective} expected"


def _shard(shard: Shard) -> str:
    if shard.mesh:
        where = f"mesh axis {' x '.join(shard.mesh)}"
    elif shard.workers is None:
        where = "all workers"
    else:
        where = f"workers {', '.join(map(str, shard.workers))}"
    if shard.replicated or shard.axis is None:
        return f"whole on {where}"
    return f"axis {shard.axis} of every array over {where}"


def component_words(named: object) -> str:
    """Return the name of a component of `jshard.train`: a path, or the links of an optimizer's chain."""
    if not isinstance(named, dict):
        return str(named)
    return str(named.get("path") or named.get("name") or named.get("text") or " + ".join(named))
