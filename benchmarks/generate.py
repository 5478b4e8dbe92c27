"""What reading a prompt costs, and a token behind it: a decoder of 3 million parameters, by the length of the prompt.

    python -m benchmarks.generate [--prompts 64 256 1024] [--rows 4] [--quick]

FLOP are those of products, counted in the program that makes a token: of the parameters, which every token meets once
whatever the prompt, and of attention, which goes over the cache. So does its time: it is that of attention by itself, over as
long a cache in as many layers, and what is left of a token's should be alike for all prompts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard
from jshard.inspect.plan.flops import arithmetic_of
from jshard.layers.attending import attend
from jshard.table import table
from jshard.training import generation

SIZES = {"vocabulary": 256, "width": 256, "depth": 4, "heads": 8, "hidden": 704}
SMALL = {"vocabulary": 64, "width": 32, "depth": 2, "heads": 4, "hidden": 64}


def measured(model: Any, sizes: dict[str, int], length: int, rows: int, tokens: int) -> tuple[str, ...]:
    prompts = np.random.default_rng(0).integers(1, sizes["vocabulary"], (rows, length)).tolist()
    writer = generation.Writer(model, prompts, tokens, generation.Sampling(), 0)
    token, cache = jax.block_until_ready(writer.prefill())  # compiles
    step = functools.partial(generation._decode, writer.graph, writer.room)
    products = arithmetic_of(jax.make_jaxpr(step)(writer.state, cache, token, writer.lengths)).total / rows
    attention = 4 * sizes["depth"] * sizes["width"] * writer.room
    began = time.perf_counter()
    token, cache = jax.block_until_ready(writer.prefill())
    read = time.perf_counter() - began
    token, cache = jax.block_until_ready(writer.decode(0, token, cache))  # compiles
    queries = jnp.ones((rows, 1, sizes["heads"], sizes["width"] // sizes["heads"]))
    jax.block_until_ready(_attention(queries, *cache))
    steps, by_itself = [], []
    for number in range(1, tokens):  # in turn, so that other work on this machine meets both
        began = time.perf_counter()
        token, cache = jax.block_until_ready(writer.decode(number, token, cache))
        made = time.perf_counter()
        jax.block_until_ready(_attention(queries, *cache))
        steps.append(made - began)
        by_itself.append(time.perf_counter() - made)
    each, alone = statistics.median(steps), statistics.median(by_itself)
    return (
        f"{length:,} tokens", f"{read * 1e3:,.1f} ms", f"{rows * length / read:,.0f} tokens/s", f"{each * 1e3:,.2f} ms",
        f"{rows / each:,.0f} tokens/s", f"{products - attention:,.0f} FLOP", f"{(each - alone) * 1e3:,.2f} ms",
        f"{attention:,} FLOP", f"{alone * 1e3:,.2f} ms",
    )  # fmt: skip


@jax.jit
def _attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attend over the cache of each layer in turn."""
    mask = jnp.ones((1, 1, 1, keys.shape[3]), bool)
    layer = lambda q, cache: (attend(q, *(each.swapaxes(1, 2) for each in cache), causal=False, mask=mask), None)
    return jax.lax.scan(layer, queries, (keys, values))[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description="What a token costs.")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="LENGTH")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, to see that it runs")
    chosen = parser.parse_args(arguments)
    sizes = SMALL if chosen.quick else SIZES
    jshard.unload()
    model = jshard.Decoder(sizes, rngs=nnx.Rngs(0))
    head = ("prompt", "prefill", "", "a token each", "", "all but attention", "", "attention", "")
    for line in table([head, *(measured(model, sizes, each, chosen.rows, chosen.tokens) for each in chosen.prompts)]):
        print(line)


if __name__ == "__main__":
    main()
