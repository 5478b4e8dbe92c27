"""Statements of random programs: each draws an expression in Python over the variables so far, with random parameters.

A statement that is `whole` keeps whole numbers whole, in its value and its gradient, so that every order of a sum gives the same.
"""

# fmt: off
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

SIZES = (8, 4, 8, 16, 2, 4, 8, 6, 3, 1, 12)


class Writer(Protocol):
    """What a statement draws from: random numbers, the variables so far, new parameters and new inputs."""

    def one(self, choices: Sequence[Any]) -> Any: ...
    def chance(self, share: float) -> bool: ...
    def below(self, end: int) -> int: ...
    def some(self, choices: Sequence[Any], least: int = 0) -> list[Any]: ...
    def mixed(self, choices: Sequence[Any]) -> list[Any]: ...
    def alike(self, name: str) -> list[str]: ...
    def float(self, least: int = 0, most: int = 4) -> str: ...
    def int(self, least: int = 0, most: int = 4) -> str: ...
    def bool(self) -> str: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def parameter(self, shape: Sequence[int], summed: int | None = None, kept: int | None = None) -> str: ...
    def indices(self, shape: Sequence[int], end: int) -> str: ...
    def grows(self, by: float, *, to: float | None = None) -> None: ...


Statement = Callable[[Any], "str | None"]
WHOLE: list[Statement] = []  # also of programs of other numbers
OTHERS: list[Statement] = []


def whole(statement: Statement) -> Statement:
    WHOLE.append(statement)
    return statement


def other(statement: Statement) -> Statement:
    OTHERS.append(statement)
    return statement


# -- elementwise --

KEEP = (
    "-{x}", "jnp.abs({x})", "jax.nn.relu({x})", "jnp.sign({x})", "jnp.floor({x})", "jnp.ceil({x})", "jnp.round({x})",
    "jnp.clip({x}, -2, 2)", "lax.clamp(-1.0, {x}, 3.0)", "lax.rem({x}, 3.0)", "jnp.copy({x})", "lax.stop_gradient({x})",
    "{x}.astype(jnp.float16).astype(jnp.float32)", "lax.reduce_precision({x}, 8, 10)", "lax.optimization_barrier({x})",
    "jnp.where({x} > 0, {x}, 0)", "jnp.real(lax.complex({x}, -{x}))", "jnp.imag(lax.conj(lax.complex({x}, {x})))",
    "jnp.nan_to_num({x})", "jax.nn.relu6({x})", "jnp.trunc({x})",
)
SMOOTH = (
    "jnp.sin({x})", "jnp.cos({x})", "jnp.tanh({x})", "jnp.exp(-jnp.abs({x}))", "jax.nn.sigmoid({x})", "lax.erf({x})",
    "lax.rsqrt(1 + {x} ** 2)", "jnp.log1p(jnp.abs({x}))", "jnp.sqrt(1 + {x} ** 2)", "jnp.expm1(-jnp.abs({x}))",
    "jnp.arcsinh({x})", "jnp.logaddexp({x}, 1.0)", "jax.nn.gelu({x})", "jax.nn.silu({x})", "jax.nn.softplus({x})",
    "jnp.atan2({x}, 2.0)", "lax.lgamma(1 + {x} ** 2)", "lax.digamma(1 + {x} ** 2)", "{x} / (1 + {x} ** 2)", "jax.nn.elu({x})",
    "jnp.sinh(jnp.tanh({x}))", "jax.nn.leaky_relu({x})", "jnp.arctan({x})", "jnp.exp2(jnp.tanh({x}))", "lax.erfc({x})",
    "jnp.power(1 + {x} ** 2, 0.3)", "jnp.sinc({x})", "jax.nn.hard_swish({x})", "lax.bessel_i0e({x})", "jax.nn.mish({x})",
    "jnp.abs(lax.complex({x}, 1 + {x}))", "lax.erf_inv(jnp.tanh({x}) / 2)", "jnp.cbrt(1 + {x} ** 2)", "jnp.tan({x} / 9)",
)


@whole
def keeps(d: Writer) -> str:
    return d.one(KEEP).format(x=d.float())


@whole
def square(d: Writer) -> str:
    x, power = d.float(), d.one((2, 2, 3))
    d.grows(1, to=power)
    return d.one(("{x} ** {n}", "lax.integer_pow({x}, {n})")).format(x=x, n=power)


@other
def smooth(d: Writer) -> str:
    return d.one(SMOOTH).format(x=d.float())


@whole
def bias(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    kept = d.below(len(shape)) if d.chance(0.3) else 0
    small = [1 if d.chance(0.2) else n for n in shape[kept:]]
    word = d.one(("+", "+", "-", "*", "*"))
    d.grows(3 if word == "*" else 2)
    b = d.parameter(small, kept=small[-1])
    return f"{x} {word} {b}" if d.chance(0.7) else f"{b} {word} {x}"


@whole
def two(d: Writer) -> str:
    x = d.float()
    y = d.one([x, *d.alike(x)])
    f = d.one(("{x} + {y}", "{x} - {y}", "{x} * {y}", "jnp.maximum({x}, {y})", "jnp.minimum({x}, {y})", "lax.clamp(-jnp.abs({y}), {x}, jnp.abs({y}) + 1)", "lax.select_n({y} > 1, {x}, {y})", "jnp.where({x} > {y}, {x}, -{y})"))
    d.grows(2, to=2 if "*" in f else None)
    return f.format(x=x, y=y)


@other
def two_smooth(d: Writer) -> str:
    x = d.float()
    y = d.one([x, *d.alike(x)])
    return d.one((
        "{x} / (1 + jnp.abs({y}))", "jnp.atan2({x}, 1 + {y} ** 2)", "jnp.logaddexp({x}, {y})", "jnp.hypot({x}, 1 + {y})",
        "jnp.power(1 + {x} ** 2, jnp.tanh({y}))", "jnp.abs(lax.complex({x}, {y}) + 1)",
        "jax.scipy.special.betainc(1 + lax.stop_gradient({x}) ** 2, 2.0, jax.nn.sigmoid({y}))",
        "lax.igamma(1 + lax.stop_gradient({x}) ** 2, 1 + {y} ** 2)", "lax.zeta(2 + lax.stop_gradient({x}) ** 2, 1 + lax.stop_gradient({y}) ** 2) * {x}",
    )).format(x=x, y=y)


@whole
def outer(d: Writer) -> str:
    x = d.float(1)
    axis = d.below(len(d.shape(x)))
    d.grows(2)
    return f"{x} {d.one('+-')} jnp.{d.one(('max', 'min', 'sum'))}({x}, axis={axis}, keepdims=True)" if d.chance(0.8) else f"{x} + {x}.max()"


@whole
def integers(d: Writer) -> str:
    i = d.int()
    d.grows(1, to=0)
    return d.one((
        "{i} & 3", "{i} | 2", "{i} ^ 5", "~{i} % 7", "lax.population_count({i})", "lax.clz({i}) - 20", "jnp.abs({i}) << 1",
        "lax.shift_right_logical(jnp.abs({i}), jnp.ones_like({i}))", "{i} >> 1", "{i} // 2", "{i} % 3", "jnp.gcd({i}, 6)",
        "lax.bitcast_convert_type({i}, jnp.uint32).astype(jnp.int32) % 8", "jnp.sign({i})", "lax.rem({i}, jnp.full_like({i}, 3))",
        "jnp.where({i} > 1, {i}, 1)", "jnp.cumsum({i} % 2, axis=-1) if {i}.ndim else {i}", "lax.div({i}, jnp.full_like({i}, 2))",
    )).format(i=i)


@whole
def converts(d: Writer) -> str:
    if d.chance(0.5):
        return f"{d.int()}.astype(jnp.float32)"
    x = d.float()
    return d.one(("{x}.astype(jnp.int32)", "({x} > 0)", "jnp.isfinite({x})", "({x} != 1)", "({x} >= {x}.mean())")).format(x=x)


@whole
def chosen(d: Writer) -> str:
    b = d.bool()
    shape = d.shape(b)
    if d.chance(0.3):
        i = d.int()
        return f"lax.select_n(jnp.abs({i}) % 3, {i} * 1.0, -{i} * 1.0, {i} * 2.0)"
    return d.one(("jnp.where({b}, 2.0, -1.0)", "lax.select({b}, jnp.full({s}, 3.0), jnp.zeros({s}))", "(~{b}).astype(jnp.float32)",
                  "jnp.logical_xor({b}, True)")).format(b=b, s=shape)


@whole
def counted(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    at = d.below(len(shape))
    d.grows(1, to=0) if d.chance(0.5) else d.grows(2)
    made = f"lax.broadcasted_iota(jnp.float32, {shape}, {at})"
    return f"{x} * ({made} % 3)" if d.chance(0.5) else f"{x} + {made}"


# -- shapes --


def refactored(d: Writer, size: int) -> tuple[int, ...]:
    """A random shape of `size` elements."""
    shape = []
    for _ in range(d.below(3)):
        n = d.one([n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16) if size % n == 0])
        shape.append(n)
        size //= n
    return tuple(d.mixed([*shape, size]))


@whole
def reshape(d: Writer) -> str:
    x = d.float(1)
    old = d.shape(x)
    new = refactored(d, math.prod(old))
    if len(old) >= 2 and d.chance(0.5):
        order = tuple(d.mixed(range(len(old))))
        return f"lax.reshape({x}, {new}, dimensions={order})"
    return d.one(("{x}.reshape({n})", "lax.reshape({x}, {n})", 'jnp.reshape({x}, {n}, order="F")', "jnp.ravel({x})", 'jnp.ravel({x}, order="F")')).format(x=x, n=new)


@whole
def transpose(d: Writer) -> str:
    x = d.float(2)
    rank = len(d.shape(x))
    one, to = d.below(rank), d.below(rank)
    return d.one((
        f"lax.transpose({x}, {tuple(d.mixed(range(rank)))})", f"jnp.swapaxes({x}, {one}, {to})", f"jnp.moveaxis({x}, {one}, {to})",
        f"{x}.T", f"jnp.rot90({x}, {d.below(3) + 1})",
    ))


@whole
def ones(d: Writer) -> str:
    x = d.float()
    shape = d.shape(x)
    at = d.below(len(shape) + 1)
    if 1 in shape and d.chance(0.5):
        return f"jnp.squeeze({x}, {shape.index(1)})"
    return d.one(("jnp.expand_dims({x}, {at})", "lax.expand_dims({x}, ({at},))")).format(x=x, at=at)


@whole
def broadcast(d: Writer) -> str:
    x = d.float(0, 3)
    shape = d.shape(x)
    if d.chance(0.5):
        n, at = d.one(SIZES[:6]), d.below(len(shape) + 1)
        new = (*shape[:at], n, *shape[at:])
        return f"lax.broadcast_in_dim({x}, {new}, {tuple(a for a in range(len(new)) if a != at)})"
    grown = tuple(d.one((4, 8)) if n == 1 else n for n in shape)
    return f"jnp.broadcast_to({x}, {(d.one((2, 4)), *grown)})"


@whole
def repeated(d: Writer) -> str:
    x = d.float(1)
    rank = len(d.shape(x))
    at = d.below(rank)
    times = tuple(d.one((1, 2)) for _ in range(rank))
    return d.one((
        f"jnp.tile({x}, {times})", f"jnp.repeat({x}, 2, axis={at})", f"jnp.flip({x}, {at})", f"lax.rev({x}, {tuple(sorted(d.some(range(rank), 1)))})",
        f"jnp.roll({x}, {d.below(5) - 2}, axis={at})", f"lax.tile({x}, {times})" if rank else "",
    ))


@whole
def joined(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    at = d.below(len(shape))
    more = [x, *d.alike(x)][:3]
    more = [d.one(more) for _ in range(d.one((2, 2, 3)))]
    some = "[" + ", ".join(more) + "]"
    cut = f"lax.slice_in_dim({x}, 0, {max(1, shape[at] // 2)}, axis={at})"
    return d.one((
        f"jnp.concatenate({some}, {at})", f"jnp.stack({some}, {d.below(len(shape) + 1)})", f"lax.concatenate([{more[0]}, {cut}], {at})",
        f"jnp.hstack({some})", f"jnp.vstack({some})", f"jnp.dstack({some})", f"jnp.column_stack({some})",
        f"jnp.{d.one(('hstack', 'dstack', 'column_stack', 'concatenate', 'vstack'))}({x})" if len(shape) >= 2 else f"jnp.concatenate({some})",
    ))


@whole
def cut(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    at = d.below(len(shape))
    n = shape[at]
    begin = [d.below(n) if d.chance(0.5) else 0 for n in shape]
    end = [low + 1 + d.below(n - low) if d.chance(0.5) else n for low, n in zip(begin, shape, strict=True)]
    steps = [d.one((1, 1, 2, 3)) for _ in shape]
    pieces = sorted(d.below(n + 1) for _ in range(2))
    sizes = (pieces[0], pieces[1] - pieces[0], n - pieces[1])
    ways = d.one([k for k in (1, 2, 3, 4) if n % k == 0])
    colons = ":, " * at
    return d.one((
        f"lax.slice({x}, {tuple(begin)}, {tuple(end)}, {tuple(steps)})", f"lax.slice({x}, {tuple(begin)}, {tuple(end)})",
        f"lax.split({x}, {sizes}, {at})" if min(sizes) else f"jnp.split({x}, {ways}, {at})", f"jnp.split({x}, {ways}, {at})",
        f"{x}[{colons}{d.below(n)}]", f"{x}[{colons}::-1]", f"{x}[{colons}{begin[at]}:{end[at]}]", f"{x}[..., None, {begin[-1]}:]",
        f"lax.index_in_dim({x}, {d.below(n)}, {at}, keepdims={d.chance(0.5)})", f"jnp.unstack({x}, axis={at})[:2]" if n <= 4 else f"jnp.array_split({x}, 3, {at})",
    ))


@whole
def padded(d: Writer) -> str:
    x = d.float(1)
    config = []
    for n in d.shape(x):
        inside = d.one((0, 0, 0, 1, 2))
        low, high = d.one((0, 0, 1, 2, -1)), d.one((0, 0, 1, 3, -1))
        config.append((low, high, inside) if n + low + high + inside * (n - 1) >= 1 else (0, 0, 0))
    plain = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    mode = d.one(("constant", "edge", "wrap", "reflect", "symmetric"))
    if mode == "reflect" and min(d.shape(x)) < 4:
        mode = "edge"
    return f"lax.pad({x}, 2.0, {tuple(config)})" if d.chance(0.7) else f'jnp.pad({x}, {plain}, mode="{mode}")'


@whole
def moving(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    size = tuple(n if d.chance(0.5) else 1 + d.below(n) for n in shape)
    starts = [d.indices((), n - s + 1) if s < n else "0" for n, s in zip(shape, size, strict=True)]
    begin = "(" + ", ".join(starts) + ",)"
    if d.chance(0.5):
        return f"lax.dynamic_slice({x}, {begin}, {size})"
    at = d.below(len(shape))
    part = f"lax.slice({x}, {(0,) * len(size)}, {size})" if d.chance(0.6) else d.parameter(size, kept=size[-1])
    return d.one((
        f"lax.dynamic_update_slice({x}, {part}, {begin})", f"lax.dynamic_index_in_dim({x}, {d.indices((), shape[at])}, {at}, keepdims=False)",
    ))


@whole
def triangles(d: Writer) -> str:
    x = d.float(2)
    k = d.below(5) - 2
    return d.one((f"jnp.tril({x}, {k})", f"jnp.triu({x}, {k})", f"jnp.diagonal({x}, {min(max(k, 0), d.shape(x)[1] - 1)})"))
