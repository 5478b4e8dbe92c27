"""What reading a prompt costs, and a token behind it: a decoder of 3 million parameters, by the length of the prompt.

    python -m benchmarks.generate [--prompts 64 256 1024 2048] [--rows 4] [--quick]

A token's work is of two kinds: that of the parameters, which every token meets once whatever the prompt, and that of
attention, which goes over the cache. FLOP are those of products, counted in the program that makes a token; bytes are what the
operations of the compiled program read and write that have an axis of the cache's length, and what all others do. Times, of the
processor, are those of attention by itself, over as long a cache in as many layers, and what is left of a token's. All prompts
take turns, token by token, so that other work on this machine meets all; the last line is a straight line through the times of
each turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard
from benchmarks.quartiles import quartiles
from jshard.inspect.compiled.hlo_text import NO_RESULT, HloProgram
from jshard.inspect.plan.walk import bytes_moved
from jshard.layers.attention import attend
from jshard.printing.table import table
from jshard.programs.flops import arithmetic_of
from jshard.training import generation

SIZES = {"vocabulary": 256, "width": 256, "depth": 4, "heads": 8, "hidden": 704}
SMALL = {"vocabulary": 64, "width": 32, "depth": 2, "heads": 4, "hidden": 64}


@dataclasses.dataclass
class Prompts:
    """Prompts of one length, that are gone on from token by token."""

    writer: generation.Writer
    token: Any
    cache: Any
    queries: Any
    prefill: float  # seconds
    steps: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # by the clock, and processor time
    alone: list[float] = dataclasses.field(default_factory=list)  # attention by itself, processor time

    @classmethod
    def of(cls, model: Any, sizes: dict[str, int], length: int, rows: int, tokens: int) -> Prompts:
        prompts = np.random.default_rng(0).integers(1, sizes["vocabulary"], (rows, length)).tolist()
        writer = generation.Writer(model, prompts, tokens, generation.Sampling(), 0)
        jax.block_until_ready(writer.prefill())  # compiles
        began = time.perf_counter()
        token, cache = jax.block_until_ready(writer.prefill())
        queries = jnp.ones((rows, 1, sizes["heads"], sizes["width"] // sizes["heads"]))
        return cls(writer, token, cache, queries, time.perf_counter() - began)

    def step(self, number: int) -> None:
        began, busy = time.perf_counter(), time.process_time()
        self.token, self.cache = jax.block_until_ready(self.writer.decode(number, self.token, self.cache))
        self.steps.append((time.perf_counter() - began, time.process_time() - busy))

    def attend(self) -> None:
        busy = time.process_time()
        jax.block_until_ready(_attention(self.queries, *self.cache))
        self.alone.append(time.process_time() - busy)

    @property
    def rest(self) -> list[float]:
        return [busy - alone for (_, busy), alone in zip(self.steps, self.alone, strict=True)]

    def told(self, sizes: dict[str, int], length: int) -> tuple[str, ...]:
        writer, rows = self.writer, len(self.token)
        args = writer.state, self.cache, self.token, writer.lengths
        step = functools.partial(generation._decode, writer.graph, writer.room)
        products = arithmetic_of(jax.make_jaxpr(step)(*args)).total / rows
        attention = 4 * sizes["depth"] * sizes["width"] * writer.room
        compiled = generation._decode.lower(writer.graph, writer.room, *args).compile().as_text() or ""
        others, of_attention = apart(compiled, writer.room)
        each = statistics.median(clock for clock, _ in self.steps)
        rest, alone = statistics.median(self.rest), statistics.median(self.alone)
        return (
            f"{length:,} tokens", f"{self.prefill * 1e3:,.1f} ms", f"{rows * length / self.prefill:,.0f} tokens/s",
            f"{each * 1e3:,.2f} ms", f"{rows / each:,.0f} tokens/s", f"{products - attention:,.0f} FLOP", f"{others:,} B",
            f"{rest * 1e3:,.2f} ms", f"{attention:,} FLOP", f"{of_attention:,} B", f"{alone * 1e3:,.2f} ms",
        )  # fmt: skip


def apart(text: str, room: int) -> tuple[int, int]:
    """Bytes that the operations of a compiled program read and write, as often as they run: of those without an axis of `room`
    places, and of the others."""
    program, long = HloProgram(text), re.compile(rf"[\[,]{room}[\],]")

    def of(name: str) -> np.ndarray:
        found, computation = np.zeros(2, int), program.computations[name]
        for each in computation.values():
            if each.opcode in ("while", "call", "conditional"):
                trips = program.trips(name, each) or 1 if each.opcode == "while" else 1
                found += trips * sum(map(of, each.called), np.zeros(2, int))
            elif each.opcode not in NO_RESULT:
                types = [each.type, *(computation[operand].type for operand in each.operands if operand in computation)]
                found[int(any(map(long.search, types)))] += bytes_moved(program, computation, each)
        return found

    without, with_room = of(program.entry)
    return int(without), int(with_room)


def line(lengths: Sequence[int], rest: Sequence[Sequence[float]]) -> str:
    """How what is left of a token's time goes with the prompt, turn by turn: medians, and the middle half."""
    slopes, bases = np.polyfit(lengths, rest, 1)
    low, middle, high = (each * 1e6 for each in quartiles(slopes))  # ms for 1,000 tokens
    return (
        f"all but attention: {np.median(bases) * 1e3:.2f} ms, and for each 1,000 tokens of the prompt {middle:+.2f} ms "
        f"({low:+.2f} to {high:+.2f})"
    )


@jax.jit
def _attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attend over the cache of each layer in turn."""
    mask = jnp.ones((1, 1, 1, keys.shape[3]), bool)
    layer = lambda q, cache: (attend(q, *(each.swapaxes(1, 2) for each in cache), causal=False, mask=mask), None)
    return jax.lax.scan(layer, queries, (keys, values))[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description="What a token costs.")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024, 2048], metavar="LENGTH")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, to see that it runs")
    chosen = parser.parse_args(arguments)
    sizes = SMALL if chosen.quick else SIZES
    jshard.unload()
    model = jshard.Decoder(**sizes, rngs=nnx.Rngs(0))
    every = [Prompts.of(model, sizes, each, chosen.rows, chosen.tokens) for each in chosen.prompts]
    for number in range(chosen.tokens):
        for one in every:
            one.step(number)
        for one in every:
            one.attend()
    for one in every:  # the first of each compiles
        del one.steps[0], one.alone[0]
    head = ("prompt", "prefill", "", "a token each", "", "all but attention", "", "", "attention", "", "")
    for told in table([head, *(one.told(sizes, each) for one, each in zip(every, chosen.prompts, strict=True))]):
        print(told)
    if len(every) > 1:
        print(line(chosen.prompts, [one.rest for one in every]))


if __name__ == "__main__":
    main()
