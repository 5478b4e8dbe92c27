"""Makes compiled text small enough to keep: `python tests/data/hlo/trim.py whole.hlo > small.hlo`. What is left are the
collectives, all that leads to them, and the work between them that a TPU's compiler tells the cycles of; that they read the
same before and after is checked.

`PYTHONPATH=.:tests python tests/data/hlo/trim.py v5e:2x4 > tests/data/hlo/decoder-v5e.hlo` compiles a step of
tests/support/decoder.py first, with the compilers of `make all`: so for cpu:8, tpu7x:2x2x1, h100:8 and h200:8.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jshard
from jshard.inspect.compiled import collectives_in
from jshard.inspect.compiled.hlo_text import COMPUTATION, INSTRUCTION, KIND_OF, Instruction
from jshard.inspect.plan.aot import compile_absent, exported
from jshard.inspect.plan.topology import Topology
from jshard.layouts.mesh import absent_mesh
from jshard.signals.active_config import on_mesh
from tests.support import decoder


def compiled(name: str) -> str:
    """Compile a decoder's step for chips that are not here."""
    sizes = {"data": 2, "tensor": 4}
    jshard.load(decoder.configured(**sizes))
    with on_mesh(absent_mesh(sizes)):
        step, args = decoder.training_step(decoder.TINY)
        there = Topology.of(name)
        return compile_absent(exported(step, args, {}, there), there).text


def trimmed(text: str) -> str:
    computations: dict[str, list[str]] = {}
    head = re.match(r"HloModule [^,]*, is_scheduled=true", text)
    assert head
    devices = re.findall(r"\b(?:num_partitions|replica_count)=\d+", text.splitlines()[0])
    inside: list[str] = []
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            inside = computations[found[2]] = [line]
        elif INSTRUCTION.match(line):
            inside.append(line)
    holding = {name for name, lines in computations.items() if any(map(_is_collective, lines))}
    while (
        more := {name for name, lines in computations.items() if any(_calls(line) & holding for line in lines)}
        - holding
    ):
        holding |= more
    reducers = set(re.findall(r"\bto_apply=%?([\w.\-]+)", text))  # may have what is left of a name
    called = {name for each in holding for line in computations[each] for name in _calls(line)}
    out = [", ".join([head[0], *devices]), ""]
    for name in computations:
        if name in holding | called:
            first, *rest = computations[name]
            lines = [line for line in rest if _matters(line, rest, holding, called)] if name in holding else rest
            lines = lines if name in holding | reducers or " compare(" in " ".join(rest) else []
            out += [re.sub(r"\(.*\) -> .* \{", "(p: s32[]) -> s32[] {", first), *map(_short, lines), "}", ""]
    return "\n".join(out)


KEPT = r'AsyncCollective|"estimated_cycles"'


def _matters(line: str, lines: list[str], holding: set[str], called: set[str]) -> bool:
    """A collective, what calls one, what takes its results apart, and the counting of loops."""
    each = Instruction.of(*INSTRUCTION.match(line).groups())
    opcode = each.opcode
    if _is_collective(line) or _calls(line) & holding or opcode in ("while", "parameter") or re.search(KEPT, line):
        return True
    if opcode == "tuple":
        return line.lstrip().startswith("ROOT") or any(f" while(%{each.name})" in other for other in lines)
    if opcode.endswith("-done") or (opcode == "get-tuple-element" and "op_name" in line):
        source = re.match(r"%([\w.\-]+)", each.rest)
        return bool(source) and any(_is_collective(o) and f"%{source[1]} = " in o for o in lines if o != line)
    return re.match(r"[su]32\[\]", each.type) is not None and opcode in (
        "constant",
        "add",
        "copy",
        "bitcast",
        "get-tuple-element",
    )


def _is_collective(line: str) -> bool:
    found = INSTRUCTION.match(line)
    return bool(found) and Instruction.of(*found.groups()).opcode.removesuffix("-start") in KIND_OF


def _calls(line: str) -> set[str]:
    found = INSTRUCTION.match(line)
    return set(Instruction.of(*found.groups()).called) if found else set()


def _short(line: str) -> str:
    line, _, configuration = line.partition(", backend_config=")
    said = re.findall(r'"is_sync":\w+|"known_trip_count":\{"n":"\d+"\}|"estimated_cycles":"\d+"', configuration)
    line = re.sub(
        r"\{[\d,]*(:[^}]*)?\}(?=[ ,)])(?<!\]\}\})", lambda m: "" if line[m.start() - 1] == "]" else m[0], line
    )
    line = re.sub(r" stack_frame_id=\d+| scheduling_name=\"[^\"]*\"|, sharding=\{[^}]*\}|/\*index=\d+\*/", "", line)
    return line + (f", backend_config={{{','.join(said)}}}" if said else "")


if __name__ == "__main__":
    what = sys.argv[1]
    whole = compiled(what) if ":" in what else Path(what).read_text()
    small = trimmed(whole)
    assert collectives_in(small) == collectives_in(whole), "trimming lost something"
    sys.stdout.write(small)
