"""Programs of arrays that are split, and what is sent in them: traced, and nothing is compiled."""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp

import jshard
from jshard.layers import partition
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import bare, inner
from jshard.signals.claims import Claim

KINDS = "psum pmax pmin all_gather reduce_scatter all_to_all ppermute".split()


def built(on, f, args, ways):
    """A program of arrays that are split in these ways; of a parameter its claim is said, or the words of its signal."""

    def given(number, way):
        if isinstance(way, dict):
            signals = jshard.load({"jshard": {"mesh": dict(on.shape)}, "a": {**way, "match": ["**"]}}).signals
            way = Claim(signals["a"], "**")
        return partition.Input(claim=way, path=f"p{number}") if isinstance(way, Claim) else partition.Input(way)

    program = partition.Program(on, jax.make_jaxpr(f)(*args), list(map(given, itertools.count(), ways)))
    layouts = [Layout(on, *axes) for axes in program.in_axes]
    return program, [jax.device_put(x, each.sharding) for x, each in zip(args, layouts, strict=True)]


def asked(jaxpr, where=""):
    """Which collectives a program has, and the loops and branches around each."""
    for eqn in bare(jaxpr).eqns:
        name = eqn.primitive.name.removesuffix("_invariant")
        if name in KINDS and eqn.invars[0].aval.shape:
            yield where + name
        for each in inner(eqn):
            yield from asked(each, where + (f"{name} " if name in ("scan", "while", "cond") else ""))


def counted(program, given, *, by=()):
    step = program if not by else jax.grad(lambda *xs: sum(jnp.sin(y).sum() for y in program(*xs)), argnums=by)
    return dict(collections.Counter(asked(jax.make_jaxpr(step)(*given))))
