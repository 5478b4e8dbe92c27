"""More statements of random programs: sums, products, lookups, calls and loops, linear algebra."""

# fmt: off
from __future__ import annotations

import math
import string

from tests.support.random_statements import SIZES, WHOLE, Statement, Writer, bias, other, reshape, whole

# -- sums --


def axes_of(d: Writer, x: str) -> tuple[int, ...]:
    return tuple(sorted(d.some(range(len(d.shape(x))), 1)))


@whole
def reduced(d: Writer) -> str:
    x = d.float(1)
    shape, axes = d.shape(x), axes_of(d, x)
    count = math.prod(shape[a] for a in axes)
    word = d.one(("sum", "sum", "max", "min", "ptp", "count_nonzero", "any", "all"))
    d.grows(count if word in ("sum", "count_nonzero") else 2)
    keep = d.chance(0.3)
    if word == "ptp":
        return f"jnp.ptp({x}, axis={axes[0]})"
    return f"jnp.{word}({x}, axis={axes}, keepdims={keep})" if d.chance(0.9) or word != "sum" else f"jnp.sum({x}, axis={axes}, where={x} > 0)"


@whole
def so_far(d: Writer) -> str:
    x = d.float(1)
    at = d.below(len(d.shape(x)))
    word = d.one(("cumsum", "cumsum", "cummax", "cummin"))
    d.grows(d.shape(x)[at] if word == "cumsum" else 1)
    if word == "cumsum" and d.chance(0.2):
        return f"lax.associative_scan(jnp.add, {x}, reverse={d.chance(0.5)}, axis={at})"
    return f"lax.{word}({x}, axis={at}, reverse={d.chance(0.5)})"


@other
def reduced_smooth(d: Writer) -> str:
    x = d.float(1)
    axes, at = axes_of(d, x), d.below(len(d.shape(x)))
    keep = d.chance(0.4)
    return d.one((
        f"jnp.mean({x}, axis={axes}, keepdims={keep})", f"jnp.var({x}, axis={axes}, keepdims={keep})", f"jnp.std(1 + {x}, axis={at})",
        f"jax.nn.logsumexp({x}, axis={axes}, keepdims={keep})", f"jnp.prod(jnp.tanh({x}), axis={axes})", f"jnp.linalg.norm(1 + {x}, axis={at})",
        f"jax.nn.softmax({x}, axis={axes})", f"jax.nn.log_softmax({x}, axis={at})", f"jax.nn.standardize({x}, axis={axes})",
        f"jax.nn.softmax({x}, axis={at}, where={x} > -1)", f"lax.cumlogsumexp({x}, axis={at}, reverse={d.chance(0.5)})",
        f"lax.cumprod(jnp.tanh({x}), axis={at}, reverse={d.chance(0.5)})", f"jnp.median({x}, axis={at})", f"jnp.average({x}, axis={at}, weights=jnp.arange(1.0, {d.shape(x)[at] + 1}))",
    ))


@other
def norm(d: Writer) -> str:
    x = d.float(1)
    n = d.shape(x)[-1]
    scale, shift = d.parameter((n,), kept=n), d.parameter((n,), kept=n)
    return d.one((
        f"{x} * lax.rsqrt(jnp.mean({x} ** 2, -1, keepdims=True) + 1e-2) * {scale}",
        f"jax.nn.standardize({x}, axis=-1, epsilon=1e-2) * {scale} + {shift}",
        f"({x} - {x}.mean(0)) * lax.rsqrt({x}.var(0) + 1e-2) * {scale} + {shift}",
    ))


@whole
def places(d: Writer) -> str:
    x = d.float(1)
    at = d.below(len(d.shape(x)))
    d.grows(1, to=0)
    return d.one((
        f"jnp.argmax({x}, {at})", f"jnp.argmin({x}, {at}, keepdims=True)", f"lax.argmax({x}, {at}, jnp.int32)", f"jnp.argsort({x}, axis={at})",
        f"jnp.searchsorted(jnp.arange(-2.0, 3.0), {x}, side='{d.one(('left', 'right'))}')", f"lax.top_k({x}, {1 + d.below(d.shape(x)[-1])})[1]",
        f"lax.reduce((lax.stop_gradient({x}),) * 2, (jnp.inf, -jnp.inf), lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])), ({at},))",
        f"lax.reduce_xor({x}.astype(jnp.int32), ({at},))", f"jnp.bincount({x}.astype(jnp.int32).ravel() % 4, length=4)",
    ))


@whole
def ordered(d: Writer) -> str:
    x = d.float(1)
    at = d.below(len(d.shape(x)))
    y = d.one([x, *d.alike(x)])
    return d.one((
        f"jnp.sort({x}, axis={at}, descending={d.chance(0.5)})", f"lax.sort({x}, dimension={at})", f"lax.top_k({x}, {1 + d.below(d.shape(x)[at])}, axis={at})[0]",
        f"lax.sort(({x}, {y}), dimension={at}, num_keys={d.one((1, 2))})", f"lax.sort(({x}, {y}, {x} * 2), dimension={at}, num_keys={d.one((1, 2, 3))})[1]",
    ))


@whole
def windows(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    window = tuple(d.one((1, 1, 2, 3)) for _ in shape)
    more = [tuple(d.one((1, 1, 2)) for _ in shape) for _ in range(3)]
    padding = d.one(('"SAME"', '"VALID"', str(tuple((d.below(2), d.below(3)) for _ in shape))))
    spread = [(n - 1) * b + 1 for n, b in zip(shape, more[1], strict=True)]
    if any((w - 1) * k + 1 > n for w, k, n in zip(window, more[2], spread, strict=True)):
        return f"lax.reduce_window({x}, -jnp.inf, lax.max, {(1,) * len(shape)}, {more[0]}, 'SAME')"
    plain = d.chance(0.5)
    word = d.one(("0.0, lax.add", "-jnp.inf, lax.max", "jnp.inf, lax.min"))
    if word[0] != "0" and (not plain or "SAME" not in padding):  # a window of nothing is infinite, and its gradient unknown
        padding, more[1] = '"VALID"', (1,) * len(shape)
        more[2] = (1,) * len(shape)
    d.grows(math.prod(window))
    rest = "" if plain else f", base_dilation={more[1]}, window_dilation={more[2]}"
    return f"lax.reduce_window({x}, {word}, {window}, {more[0]}, {padding}{rest})"


# -- products --


@whole
def product(d: Writer) -> str:
    x = d.float(1)
    k, n = d.shape(x)[-1], d.one(SIZES)
    d.grows(2 * k)
    return f"{x} @ {d.parameter((k, n), summed=k, kept=n)}"


@whole
def dot_general(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    axes = d.mixed(range(len(shape)))
    batch = axes[: d.one((0, 0, 1))] if len(shape) >= 2 else []
    summed = axes[len(batch) : len(batch) + d.one((1, 1, 2, 0))]
    if d.chance(0.25) and math.prod(shape) <= 64:  # by itself, or by another of its shape
        rest = [a for a in range(len(shape)) if a not in (*batch, *summed)]
        d.grows(math.prod(shape[a] for a in summed), to=2)
        return f"lax.dot_general({x}, {d.one([x, *d.alike(x)])}, (({tuple(summed)}, {tuple(summed)}), ({tuple(batch)}, {tuple(batch)})))" if rest else None
    free = [d.one(SIZES) for _ in range(d.one((1, 1, 2, 0)))]
    order = d.mixed([*(("b", a) for a in batch), *(("k", a) for a in summed), *(("n", n) for n in free)])
    sizes = [n if kind == "n" else shape[n] for kind, n in order]
    at = {(kind, a): place for place, (kind, a) in enumerate(order) if kind != "n"}
    d.grows(2 * math.prod(shape[a] for a in summed))
    w = d.parameter(sizes, summed=shape[summed[0]] if summed else None, kept=free[0] if free else None)
    numbers = ((tuple(summed), tuple(at["k", a] for a in summed)), (tuple(batch), tuple(at["b", a] for a in batch)))
    more = d.one(("", "", ', precision="highest"', ", preferred_element_type=jnp.float32"))
    if d.chance(0.25):
        (s, s2), (b, b2) = numbers
        return f"lax.dot_general({w}, {x}, {((s2, s), (b2, b))}{more})"
    return f"lax.dot_general({x}, {w}, {numbers}{more})"


@whole
def einsum(d: Writer) -> str:
    x = d.float(1, 3)
    shape = d.shape(x)
    letters = string.ascii_lowercase[: len(shape)]
    summed = d.some(letters, 1)[:2]
    batch = [a for a in letters if a not in summed and d.chance(0.3)]
    new = "xyz"[: d.one((1, 1, 2))]
    sizes = dict(zip(letters, shape, strict=True)) | {a: d.one(SIZES) for a in new}
    of_w = d.mixed([*summed, *batch, *new])
    out = d.mixed([a for a in (*letters, *new) if a not in summed])
    d.grows(2 * math.prod(sizes[a] for a in summed))
    w = d.parameter([sizes[a] for a in of_w], summed=sizes[next(a for a in of_w if a in summed)], kept=sizes[new[0]])
    return f'jnp.einsum("{letters},{"".join(of_w)}->{"".join(out)}", {x}, {w})'


@other
def attention(d: Writer) -> str | None:
    x = d.float(3, 3)
    (_, length, n), heads, size = d.shape(x), d.one((2, 4)), d.one((2, 4))
    q, k, v = (d.parameter((n, heads, size), summed=n, kept=heads) for _ in range(3))
    out = d.parameter((heads, size, n), summed=heads, kept=n)
    mask = d.one((f"jnp.tril(jnp.ones(({length}, {length}), bool))", "True"))
    return f"attend({x}, {q}, {k}, {v}, {out}, {mask})"


@whole
def convolution(d: Writer) -> str | None:
    x = d.float(3, 4)
    shape, space = d.shape(x), "HW"[: len(d.shape(x)) - 2]
    orders = ["".join(d.mixed(letters)) for letters in ("NC" + space, "IO" + space, "NC" + space)]
    if d.chance(0.5):
        orders = [f"N{space}C", f"{space}IO", f"N{space}C"]
    size = dict(zip(orders[0], shape, strict=True))
    groups = d.one([g for g in (1, 1, 2, 4, size["C"]) if size["C"] % g == 0])
    batches = d.one([g for g in (1, 1, 2) if size["N"] % g == 0]) if groups == 1 else 1
    made = groups * batches * d.one((1, 2, 4))
    kernel = {"I": size["C"] // groups, "O": made, **{s: d.one((1, 2, 3)) for s in space}}
    lists = [tuple(d.one((1, 1, 2)) for _ in space) for _ in range(3)]
    padding = d.one(('"SAME"', '"VALID"', str([(d.below(3), d.below(3)) for _ in space])))
    if any(b >= 2 for b in lists[1]):
        padding = str([(d.below(3), d.below(3)) for _ in space])
    if any((size[s] - 1) * b + 1 < (kernel[s] - 1) * k + 1 for s, b, k in zip(space, lists[1], lists[2], strict=True)):
        return None
    d.grows(2 * math.prod(kernel[a] for a in kernel if a != "O"))
    w = d.parameter([kernel[a] for a in orders[1]], summed=kernel["I"], kept=made)
    return (
        f"lax.conv_general_dilated({x}, {w}, {lists[0]}, {padding}, lhs_dilation={lists[1]}, rhs_dilation={lists[2]}, "
        f"dimension_numbers={tuple(orders)}, feature_group_count={groups}, batch_group_count={batches})"
    )


# -- lookups --


@whole
def lookup(d: Writer) -> str:
    rows, n = d.one((8, 16, 12)), d.one(SIZES)
    table = d.parameter((rows, n), summed=rows, kept=n)
    i = d.int()
    return d.one((f"jnp.take({table}, {i} % {rows}, axis=0)", f"{table}[jnp.abs({i}) % {rows}]", f"jnp.take({table}, {i}, axis=0, mode='{d.one(('clip', 'wrap'))}')",
                  f"jax.nn.one_hot({i} % {rows}, {rows}) @ {table}"))


@whole
def taken(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    at = d.below(len(shape))
    n, mode = shape[at], d.one(("clip", "fill", "fill", "wrap"))
    i = d.indices(d.one(((4,), (8,), (3,), (2, 4))), n)
    full = d.indices((*shape[:at], d.one((1, 2, 8)), *shape[at + 1 :]), n)
    width = 1 + d.below(n)
    start = d.indices((4,), n - width + 1)
    d.grows(3)
    second = d.indices((shape[0], d.one((1, 2, 4))), shape[1]) if len(shape) >= 2 else ""
    batched = f"jax.vmap(lambda a, i: a[i])({x}, {second})", f"jax.vmap(lambda a, i: a.at[i].add(2.0))({x}, {second})", f"{x}[jnp.arange({shape[0]})[:, None], {second}]"
    both = d.indices((4,), shape[0]), d.indices((4,), shape[1]) if len(shape) >= 2 else ""
    begins = ", ".join("i" if a == at else "0" for a in range(len(shape)))
    sizes = tuple(width if a == at else m for a, m in enumerate(shape))
    return d.one((
        f'jnp.take({x}, {i}, axis={at}, mode="{mode}", fill_value=1)' if mode == "fill" else f'jnp.take({x}, {i}, axis={at}, mode="{mode}")',
        f"jnp.take_along_axis({x}, {full}, {at})", f'{x}.at[{":, " * at}{i}].get(mode="{"clip" if mode == "wrap" else mode}")', f"{x}[{':, ' * at}{i}]",
        f"jax.vmap(lambda i: lax.dynamic_slice({x}, ({begins},), {sizes}))({start})",
        *(each for each in batched if len(shape) >= 2), *(f"{x}[{i}, {j}]" for i, j in [both] if len(shape) >= 2),
    ))


@whole
def scattered(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    at = d.below(len(shape))
    n, count = shape[at], d.one((1, 2, 4))
    colons = ":, " * at
    rows = (*shape[:at], count, *shape[at + 1 :])
    u = d.parameter(rows, kept=rows[-1]) if d.chance(0.4) else str(float(d.below(4)))
    i, mode = d.indices((count,), n), d.one(("drop", "clip", "promise_in_bounds"))
    unique = f"jnp.array({sorted(d.mixed(range(n))[:count])})"
    words = f'indices_are_sorted={d.chance(0.5)}, unique_indices={d.chance(0.5)}, mode="{mode}"'
    fits = len(d.mixed(range(n))[:count]) == count or "." in u and "params" not in u
    d.grows(5 * shape[0])
    choices = [f'{x}.at[{colons}{i}].add({u}, mode="{mode}")', f'{x}.at[{colons}{i}].{d.one(("min", "max"))}({u if "params" not in u else "1.0"})']
    if fits:
        choices += [f"{x}.at[{colons}{unique}].set({u}, {words})", f"{x}.at[{colons}{unique}].multiply({u}, unique_indices=True)"]
    choices += [f"{x}.at[{colons}{d.below(n)}].set({float(d.below(3))})", f"{x}.at[{colons}::2].add(1.0)", f"lax.stop_gradient({x}).at[{colons}{i}].apply(lambda t: t + 1)"]
    choices += [f"{x}.at[{colons}{i}, {n // 3}:].add(1.0)" for n in shape[at + 1 : at + 2]]
    segments = d.indices((shape[0],), 4)
    choices += [f"jax.ops.segment_sum({x}, {segments}, 4)"]
    return d.one(choices)


# -- calls --

BODIES = (
    "t * 2", "t + 1", "-t", "jax.nn.relu(t)", "jnp.flip(t, 0) if t.ndim else t", "jnp.abs(t) - t", "jnp.where(t > 0, t, 1 - t)",
    "jnp.sort(t, axis=-1) if t.ndim else t", "lax.rem(t + t, 3.0)", "t - t.max()", "jnp.roll(t, 1, axis=-1) if t.ndim else t",
)


@whole
def called(d: Writer) -> str:
    x, body = d.float(), d.one(BODIES)
    d.grows(2)
    policy = d.one(("", ", policy=jax.checkpoint_policies.dots_saveable", ", prevent_cse=False"))
    return d.one((
        f"lax.platform_dependent({x}, cpu=lambda t: {body}, default=lambda t: t)", f"jax.jit(lambda t: {body})({x})", f"jax.checkpoint(lambda t: {body}{policy})({x})", f"own_jvp({x})", f"own_vjp({x})",
        f"jax.grad(lambda t: ({body.replace('jnp.flip(t, 0)', 't')} * t).sum())({x})", f"jax.checkpoint(lambda t: jax.jit(lambda t: {body})(t) * t{policy})({x})",
        f"jax.jvp(lambda t: {body}, ({x},), (jnp.ones_like({x}),))[1]", f"jax.vmap(lambda t: {body})({x})" if d.shape(x) else f"jnp.vectorize(lambda t: t + 1)({x})",
    ))


@whole
def called_with_parameters(d: Writer) -> str:
    """A product by a parameter inside of a call, which closes over it or takes it."""
    x = d.float(1)
    n, times = d.shape(x)[-1], d.one((1, 2))
    is_product = d.chance(0.7)
    w = d.parameter((n, n), summed=n, kept=n) if is_product else d.parameter((n,), kept=n)
    body, policy = f"t {'@' if is_product else '*'} w", d.one(("", ", policy=jax.checkpoint_policies.dots_saveable"))
    by = body.replace("w", w)
    d.grows((2 * n) ** times)
    return d.one((
        f"jax.checkpoint(lambda t, w: jax.nn.relu({body}){policy})({x}, {w})", f"jax.checkpoint(lambda t: {by} + 1{policy})({x})", f"jax.jit(lambda t, w: {body})({x}, {w})",
        f"lax.cond({x}.sum() > 0, lambda t: {by}, lambda t: t, {x})", f"lax.cond({d.indices((), 2)} > 0, lambda t, w: {body}, lambda t, w: t - w.sum(), {x}, {w})",
        f"lax.switch({d.indices((), 3)}, [lambda t: {by}, lambda t: t * 2, lambda t: -t], {x})", f"lax.fori_loop(0, {times}, lambda i, t: {by}, {x})",
        f"lax.fori_loop(0, {times}, lambda i, c: (c[0] @ c[1] if c[1].ndim > 1 else c[0] * c[1], c[1] * 1), ({x}, {w}))", f"jax.vmap(lambda t, w: {body}, (0, None))({x}, {w})" if d.shape(x)[1:] else f"jax.jit(lambda t: {by})({x})",
        f"lax.while_loop(lambda c: c[0] < {times}, lambda c: (c[0] + 1, c[1] {by[2:]}), (0, lax.stop_gradient({x})))[1]".replace(w, f"lax.stop_gradient({w})"),
        f"own_vjp({by.replace('t', x, 1)})", f"own_jvp({by.replace('t', x, 1)})", f"jax.grad(lambda t: ({by} * t).sum())({x})", f"jax.grad(lambda w: (({body.replace('t', x, 1)}) ** 2).sum())({w})",
        f"lax.scan(lambda c, t: (c, {by}), 0.0, {x})[1]" if d.shape(x)[1:] else f"({by.replace('t', x, 1)})", f"lax.map(lambda t: {by}, {x})" if d.shape(x)[1:] else f"({by.replace('t', x, 1)})",
    ))


@whole
def branched(d: Writer) -> str:
    x, one, two, three = d.float(), d.one(BODIES), d.one(BODIES), d.one(BODIES)
    d.grows(2)
    which = d.one((f"{x}.sum() > 0", f"{x}.max() >= 2", "True", f"({d.indices((), 2)} > 0)"))
    return d.one((
        f"lax.cond({which}, lambda t: {one}, lambda t: {two}, {x})",
        f"lax.switch({d.indices((), 3)}, [lambda t: {one}, lambda t: {two}, lambda t: {three}], {x})",
    ))


@whole
def looped(d: Writer) -> str:
    x, body, n = d.float(), d.one(BODIES), d.one((1, 2, 3))
    d.grows(2**n)
    return d.one((
        f"lax.fori_loop(0, {n}, lambda i, t: {body}, {x})", f"lax.fori_loop(0, {n}, lambda i, t: ({body}) + i, {x})",
        f"lax.while_loop(lambda c: c[0] < {n}, lambda c: (c[0] + 1, (lambda t: {body})(c[1])), (0, lax.stop_gradient({x})))[1]",
        f"lax.while_loop(lambda c: c.max() < 9, lambda t: t * 2 + 1, jnp.abs(lax.stop_gradient({x})))",
    ))


@whole
def scanned(d: Writer) -> str:
    x = d.float(1)
    shape = d.shape(x)
    words = f"reverse={d.chance(0.4)}, unroll={d.one((1, 1, 2))}"
    depth, n = d.one((1, 2, 3)), shape[-1]
    if d.chance(0.5):
        d.grows(shape[0] * 2)
        carry = f"jnp.zeros({shape[1:]})" if d.chance(0.5) else f"{x}[0]"
        body = d.one(("(c + t, c * 2)", "(jnp.maximum(c, t), c + t)", "(t, c)", "(c, c - t)", "(c + t, None)"))
        return f"lax.scan(lambda c, t: {body}, {carry}, {x}, {words})" + ("" if "None" not in body else "[0]")
    w = d.parameter((depth, n, n), summed=n, kept=n)
    d.grows((3 * n) ** depth)
    body = d.one(("(c @ w, None)", "(lax.rem(c @ w, 4.0), None)", "(c + c @ w, None)"))
    body = f"lambda c, w: {body}"
    return f"lax.scan({f'jax.checkpoint({body})' if d.chance(0.3) else body}, {x}, {w}, {words})[0]"


@other
def solved(d: Writer) -> str | None:
    x = d.float(2)
    *_, m, n = d.shape(x)
    k = d.one((2, 3))
    if m < k or n < k:
        return None
    square = f"(jnp.tanh({x}[..., :{k}, :{k}]) + 3 * jnp.eye({k}))"
    right = f"{x}[..., :{k}, :]"
    words = f"left_side=True, lower={d.chance(0.5)}, transpose_a={d.chance(0.5)}, unit_diagonal={d.chance(0.5)}"
    return d.one((
        f"jnp.linalg.solve({square}, {right})", f"lax.linalg.triangular_solve({square}, {right}, {words})", f"jnp.linalg.inv({square})",
        f"jnp.linalg.cholesky({square} @ jnp.swapaxes({square}, -1, -2))", f"jnp.linalg.slogdet({square})[1]", f"jnp.linalg.svdvals({square})",
        f"jnp.linalg.eigvalsh({square} + jnp.swapaxes({square}, -1, -2))", f"jnp.abs(jnp.linalg.qr({square})[1])", f"jnp.linalg.det({square})",
    ))


@other
def spectrum(d: Writer) -> str:
    x = d.float(1)
    at = d.below(len(d.shape(x)))
    return d.one((
        f"jnp.abs(jnp.fft.fft({x}, axis={at}) + 1)", f"jnp.real(jnp.fft.rfft({x}))", f"jnp.fft.irfft(jnp.fft.rfft({x}), n={d.shape(x)[-1]})",
        f"jnp.imag(jnp.fft.ifft({x} * 1j, axis={at}))", f"jnp.real(jnp.fft.fftn({x}))", f"jnp.convolve({x}.ravel(), jnp.ones(3), mode='same')",
    ))


@other
def drawn(d: Writer) -> str:
    x = d.float()
    key = f"jax.random.fold_in(jax.random.key({d.below(9)}), {d.below(9)})"
    return d.one((
        "jnp.where(jax.random.uniform({k}, {x}.shape, jnp.float32) < 0.5, {x} * 2, 0)", "{x} + jax.random.normal({k}, {x}.shape, jnp.float32).astype({x}.dtype)",
        "{x} * jax.random.randint({k}, {x}.shape, 0, 3, jnp.int32)", "{x} + jax.random.uniform(jax.random.split({k}, 2)[1], {x}.shape, jnp.float32).astype({x}.dtype)",
    )).format(k=key, x=x)


WHOLE += 5 * [reshape]  # in many forms
CLAIMED: list[Statement] = [bias, product, product, dot_general, einsum, lookup, convolution, scanned, called_with_parameters]  # most have parameters
