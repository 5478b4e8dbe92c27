"""Runs random programs sharded and on one device, and compares values and gradients: `make fuzz-programs`.

FUZZ_SEED is the first seed, FUZZ_COUNT how many, FUZZ_SECONDS when to stop. A fault is shrunk and printed with its command.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    os.environ.setdefault("PJRT_NPROC", "32")
    from tests.support import compiled_before

import jax
import numpy as np

import jshard
from jshard.errors import JShardError
from jshard.signals.active_config import unload
from tests.support import random_programs
from tests.support.random_programs import Array, Program, Statement

TOLERANCE = {np.float32: 3e-5, np.float64: 1e-9}  # of the largest number of an array, and of one at least
EXACT = 2.0**20  # whole numbers below this had no sum that float32 rounds


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: equal, refused, rounding (equal in float64) or fault; and what there is to say."""

    kind: str
    text: str = ""

    @property
    def cause(self) -> str:
        """What stays the same while a program is shrunk."""
        return self.text.partition(":")[0] if self.kind == "fault" else self.kind


def called(program: Program, f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The loss and the results; and the gradients by the parameters and inputs."""
    smooth = (0, *(at for at, each in enumerate(program.inputs.values(), 1) if not each.end))
    if program.how == "value":
        return f(*args)
    return jax.jit(jax.value_and_grad(f, smooth, has_aux=True))(*args)


def expected(program: Program, dtype: Any = np.float32) -> Any:
    """The answer of one device, by plain JAX."""
    unload()
    f = program.function()
    return called(program, jax.jit(f) if program.how == "value" else f, program.data(dtype))


def sharded(program: Program, dtype: Any = np.float32) -> Any:
    """The answer of the mesh, by jshard."""
    jshard.load(program.configuration)
    try:
        params, *inputs = program.data(dtype)
        for at, name in enumerate(program.inputs):
            if name in program.placed:
                spec = jax.P(*(names or None for names in program.placed[name]))
                inputs[at] = jax.device_put(inputs[at], jax.NamedSharding(jshard.mesh(), spec))
        return jax.tree.map(np.asarray, called(program, jshard.shard(program.function()), [params, *inputs]))
    finally:
        unload()


def differences(program: Program, want: Any, got: Any, dtype: Any) -> Iterator[str]:
    """The arrays that differ: exactly where whole numbers are small, else by more than rounding."""
    names = jax.tree_util.tree_leaves_with_path(want)
    numbers = [np.asarray(x) for _, x in names]
    is_exact = program.is_whole and all(_is_whole(x[np.isfinite(x)]) for x in numbers)
    for (path, _), x, y in zip(names, numbers, jax.tree.leaves(got), strict=True):
        label = ("gradient" if path[0].idx and program.how == "gradient" else "value") + jax.tree_util.keystr(path[1:])
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"{label} is {y.dtype}{list(y.shape)}, not {x.dtype}{list(x.shape)}"
            continue
        off = np.where((x == y) | ((x != x) & (y != y)), 0, 1.0 * y - 1.0 * x)
        limit = TOLERANCE[dtype] * max(1, np.abs(x[np.isfinite(x)]).max(initial=0))
        limit = 0 if is_exact else limit
        if not (np.abs(off) <= limit).all():
            at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(off), nan=np.inf)), x.shape)
            yield f"{label} at {tuple(map(int, at))} is {y[at]}, not {x[at]} ({int((np.abs(off) > limit).sum())} of {x.size} differ)"


def _is_whole(x: np.ndarray) -> bool:
    """Small whole numbers, or such parts of them as ties leave, of which float32 rounds no sum."""
    return bool((np.abs(x) < EXACT).all() and (16 * x == np.round(16 * x)).all())


def outcome(program: Program) -> Outcome:
    """Run a program both ways. What differs in float32 is held against float64 too, where rounding turns no comparison."""
    found = compared(program, np.float32)
    if found.kind == "fault" and found.cause == "differs":
        with jax.enable_x64(True):
            precise = compared(program, np.float64)
        if precise.kind == "equal":
            return Outcome("rounding", found.text)
    return found


def compared(program: Program, dtype: Any) -> Outcome:
    try:
        want = expected(program, dtype)
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    try:
        got = sharded(program, dtype)
    except JShardError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        ours = [f"{os.path.relpath(each.filename)}:{each.lineno}" for each in lines if "/jshard/" in each.filename]
        return Outcome(
            "fault", f"{type(error).__name__}: {str(error)[:600]} (raised below {ours[-1] if ours else '?'})"
        )
    wrong = list(differences(program, want, got, dtype))
    return Outcome("fault", "differs: " + "; ".join(wrong)) if wrong else Outcome("equal")


# -- shrinking --


def pruned(program: Program) -> Program:
    """Without statements, parameters, inputs and signals that nothing reads."""
    needed, kept = set(program.results), list[Statement]()
    for statement in reversed(program.statements):
        if needed & set(statement.targets):
            needed |= set(re.findall(r"\w+", statement.source))
            kept.insert(0, statement)
    text = "".join(map(str, kept))
    parameters = {
        layer: some for layer, each in program.parameters.items()
        if (some := {name: a for name, a in each.items() if f'["{layer}"]["{name}"]' in text})
    }  # fmt: skip
    inputs = {name: each for name, each in program.inputs.items() if name == "x" or name in needed}
    configuration = {
        name: words for name, words in program.configuration.items()
        if name in ("jshard", "rest") or words["match"][0].split("/")[0] in parameters
    }  # fmt: skip
    claimed = {words["match"][0].split("/")[0] for words in list(configuration.values())[1:]}
    if claimed >= {"**", *parameters}:
        configuration.pop("rest")
    return dataclasses.replace(
        program, statements=tuple(kept), parameters=parameters, inputs=inputs, configuration=configuration,
        placed={name: axes for name, axes in program.placed.items() if name in inputs},
    )  # fmt: skip


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    change = lambda **what: pruned(dataclasses.replace(program, **what))
    if len(program.results) > 1:
        for name in program.losses:
            yield change(results=(name,), losses=(name,))
    types = variables(program)
    for number, statement in enumerate(program.statements):
        given = {
            name: Array(tuple(types[name].shape), 0 if types[name].dtype.kind == "f" else 8)
            for name in statement.targets
        }
        if all(types[name].dtype.kind in "fi" for name in given):
            rest = program.statements[:number] + program.statements[number + 1 :]
            if rest:
                yield change(statements=rest, inputs={**program.inputs, **given})
    if program.how == "gradient":
        yield change(how="value")
    if program.placed:
        yield change(placed={})
    for name, words in list(program.configuration.items())[1:]:
        for word in words.keys() - {"match"}:
            fewer = {key: value for key, value in words.items() if key != word}
            yield change(configuration={**program.configuration, name: fewer})
            for axis in words[word] if len(words[word]) > 1 else ():
                fewer = {**words, word: [each for each in words[word] if each != axis]}
                yield change(configuration={**program.configuration, name: fewer})


def variables(program: Program) -> dict[str, Any]:
    """The types of all variables."""
    params = {layer: {name: a.type for name, a in some.items()} for layer, some in program.parameters.items()}
    types: dict[str, Any] = {name: each.type for name, each in program.inputs.items()}
    for statement in program.statements:
        made = jax.eval_shape(
            lambda given, source=statement.source: random_programs.evaluated(source, given), {**types, "params": params}
        )
        types |= dict(zip(statement.targets, made if isinstance(made, (list, tuple)) else [made], strict=True))
    return types


def shrunk(program: Program, found: Outcome, seconds: float = 60) -> tuple[Program, Outcome]:
    """The smallest program found with the same fault."""
    end, again = time.monotonic() + seconds, True
    while again and time.monotonic() < end:
        again = False
        for each in smaller(program):
            with contextlib.suppress(Exception):  # one that is no program on one device either
                now = outcome(each)
                if now.kind == found.kind and now.cause == found.cause:
                    program, found, again = each, now, True
                    break
    return program, found


# -- the command --


def main(first: int, count: int, seconds: float) -> int:
    begin, told = time.monotonic(), time.monotonic()
    kinds, refused = collections.Counter[str](), collections.Counter[str]()
    print(f"seeds {first} to {first + count - 1}, jax {jax.__version__}, Python {sys.version.split()[0]}", flush=True)
    seed = first
    for seed in range(first, first + count):
        program = random_programs.program(seed)
        found = outcome(program)
        kinds[found.kind] += 1
        if found.kind == "refused":
            refused[re.sub(r'\d+|"[^"]*"', "_", found.text)[:150]] += 1
        if found.kind == "fault":
            small, still = shrunk(program, found)
            print(
                f"\nFAULT {still.text}\n{small}\nrepeat: make fuzz-programs FUZZ_SEED={seed} FUZZ_COUNT=1\n", flush=True
            )
        if found.kind in ("rounding", "invalid"):
            print(f"seed {seed} {found.kind}: {found.text[:200]}", flush=True)
        if not kinds.total() % 50:
            jax.clear_caches()
        if time.monotonic() - told > 20 or seed == first + count - 1 or time.monotonic() - begin > seconds:
            told = time.monotonic()
            print(
                f"{summary(kinds)} of seeds {first} to {seed}, {kinds.total() / (told - begin):.1f} a second, "
                f"{time.process_time() / kinds.total():.2f} s of processor each",
                flush=True,
            )
        if time.monotonic() - begin > seconds:
            break
    for text, times in refused.most_common():
        print(f"refused {times} times: {text}")
    return min(kinds["fault"], 1)


def summary(kinds: Mapping[str, int]) -> str:
    share = kinds["refused"] / max(1, sum(kinds.values()))
    return f"{kinds['equal']} equal, {kinds['refused']} refused ({share:.1%}), {kinds['rounding']} rounding, {kinds['invalid']} invalid, {kinds['fault']} faults"


if __name__ == "__main__":
    compiled_before.compile_quickest()
    compiled_before.reuse_contexts()
    words = os.environ
    sys.exit(
        main(
            int(words.get("FUZZ_SEED", "0")),
            int(words.get("FUZZ_COUNT", "1000")),
            float(words.get("FUZZ_SECONDS", "inf")),
        )
    )
