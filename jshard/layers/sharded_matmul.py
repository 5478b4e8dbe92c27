"""The product `x @ w + b` under a strategy, global or in a shard_map; its gradient under another."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jshard.errors import JShardError
from jshard.layers.body import Arithmetic, Body
from jshard.layers.strategy import Strategy, check_kernels, check_sizes, inside_shard_map, strategy_of
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import check_in_use
from jshard.layouts.redistribution import move, plan_moves, redistribute
from jshard.programs.provenance import scope
from jshard.signals.active_config import configuration
from jshard.signals.device_sets import check_reach, is_elsewhere
from jshard.signals.signal import Signal


@dataclasses.dataclass(frozen=True)
class Product:
    """A product: global arrays are redistributed, and the body runs in a shard_map. Inside the
    user's shard_map, where arrays are a device's shards, the body runs directly."""

    body: Body
    inside_shard_map: bool
    back: Product | None = None  # the product of the backward pass, under another signal
    back_scope: str = ""
    label: str = dataclasses.field(default="a layer", compare=False)  # the signal, for the log of transfers

    @property
    def strategy(self) -> Strategy:
        return self.body.strategy

    @property
    def is_two_programs(self) -> bool:
        """True if the backward runs on other devices: a program can't run on both."""
        return self.back is not None and self.back.strategy.mesh != self.strategy.mesh

    def __call__(self, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        return self.forward(x, w, b) if self.back is None else _with_back(self, x, w, b)

    def forward(self, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        if self.inside_shard_map:
            return self.body(x, w, b)
        s, rank = self.strategy, jnp.ndim(x)
        specs = (s.x(rank).spec, s.kernel().spec, None if b is None else s.bias().spec)
        placed = self.placed(x, w, b, self)
        return jax.shard_map(self.body, mesh=s.mesh, in_specs=specs, out_specs=s.y(rank).spec)(*placed)

    def placed(self, x: jax.Array, w: jax.Array, b: Any, source: Product) -> tuple[Any, Any, Any]:
        """Redistribute the operands to this product's layouts; shards have the layouts of the product `source`."""
        rank, here, there = jnp.ndim(x), self.strategy, source.strategy
        return (
            self.bring(x, there.x(rank), here.x(rank)),
            self.bring(w, there.kernel(), here.kernel()),
            None if b is None else self.bring(b, there.bias(), here.bias()),
        )

    def bring(self, x: jax.Array, source: Layout, target: Layout) -> Any:
        if self.inside_shard_map:
            return move(x, plan_moves(source.axes, target.axes))
        return redistribute(x, target, source=source if source.mesh == target.mesh else None, label=self.label)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_back(product: Product, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    if product.is_two_programs:
        return layer(dataclasses.replace(product, back=None), *product.placed(x, w, b, product))
    return product.forward(x, w, b)


def _with_back_bwd(product: Product, kept: tuple[Any, ...], y_cotangent: jax.Array) -> tuple[Any, ...]:
    """Differentiate under the other signal: operands and cotangent are moved to its layouts,
    gradients are moved back. Gradients computed on other devices stay there."""
    back = product.back
    assert back is not None
    rank = jnp.ndim(kept[0])

    def there(*operands: Any) -> tuple[Any, ...]:
        with scope(key="backward"):
            return back.placed(*operands, source=product)

    def forward(*operands: Any) -> jax.Array:
        with scope(signal=product.back_scope):
            return layer(back, *operands) if product.is_two_programs else back.forward(*operands)

    with scope(key="backward"):
        y_cotangent = back.bring(y_cotangent, product.strategy.y(rank), back.strategy.y(rank))
    if not product.is_two_programs:
        return jax.vjp(lambda *operands: forward(*there(*operands)), *kept)[1](y_cotangent)
    if any(isinstance(each, Tracer) for each in (*kept, y_cotangent)):
        present = configuration()
        assert present is not None
        raise _elsewhere(product, present.lookup((product.back_scope,)))
    return jax.vjp(forward, *there(*kept))[1](y_cotangent)


_with_back.defvjp(lambda product, *operands: (_with_back(product, *operands), operands), _with_back_bwd)


@functools.partial(jax.jit, static_argnums=0)
def layer(product: Product, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    return product(x, w, b)


def multiply(
    x: jax.Array, w: jax.Array, b: jax.Array | None, signal: Signal, arithmetic: Arithmetic,
    *, strategy: Strategy | None = None, features: tuple[int, int] | None = None,
) -> jax.Array:  # fmt: skip
    """Compute `x @ w + b` under `signal`. `features` are the global sizes (K, N), needed if arrays are shards."""
    asked = strategy_of(signal) if strategy is None else strategy
    if signal.store_prefetch:
        raise JShardError(
            f"{signal} says store.prefetch ({signal.at('store.prefetch')}) for a layer that does not know which is the next",
            hint="build the layers with jshard.stack, claim them by match, and run the model by jshard.shard",
        )
    check_kernels(signal, asked.mesh, lambda op: _hindrance(op, asked, arithmetic))
    inside = inside_shard_map((*asked.batch, *asked.column, *asked.reduction, *asked.store), str(signal))
    if not inside:
        check_in_use(asked.mesh)
        check_sizes(asked, signal, jnp.shape(x), *jnp.shape(w))
        check_reach(x, asked.mesh, signal)
        if signal.backward is None and is_elsewhere(x, asked.mesh):
            x = redistribute(x, asked.x(jnp.ndim(x)), label=str(signal))
    elif features is not None:
        x = _local_input(asked, signal, x, w, features)
    product = Product(Body(asked, arithmetic), inside, label=str(signal))
    product = product if signal.backward is None else _with_backward(product, signal, x, w)
    return product(x, w, b) if inside or product.is_two_programs else layer(product, x, w, b)


def _hindrance(op: str, strategy: Strategy, arithmetic: Arithmetic) -> str | None:
    """Return why a product can't use its signal's kernel; None if it can."""
    if "matmul" not in op:
        return None
    if not arithmetic.is_plain:
        return "knows no precision= and no dot_general= of its own"
    if op == "all_gather_matmul" and strategy.gathered and strategy.reduce_dtype is not None:
        return "does not sum gradients in another dtype, as dtype: {reduce: ...} asks"
    if op == "all_gather_matmul" and strategy.gathered and strategy.scattered:
        return "does not scatter its result, as this signal does"
    return None


def _with_backward(product: Product, signal: Signal, x: jax.Array, w: jax.Array) -> Product:
    present = configuration()
    assert present is not None and signal.backward is not None
    other = present.lookup((signal.backward,))
    strategy = dataclasses.replace(strategy_of(other), keep=True)  # its forward is part of the backward pass
    if strategy.mesh != product.strategy.mesh and product.inside_shard_map:
        raise _elsewhere(product, other)
    if not product.inside_shard_map:
        check_sizes(strategy, other, jnp.shape(x), *jnp.shape(w))
    back = Product(Body(strategy, product.body.arithmetic), product.inside_shard_map, label=str(other))
    return dataclasses.replace(product, back=back, back_scope=other.name)


def _elsewhere(product: Product, other: Signal) -> JShardError:
    return JShardError(
        f"{other} has its own devices for a backward, which one compiled program can't reach",
        hint=f'call jax.grad outside jax.jit, or give signal "{other.name}" mesh axes instead of workers',
    )


def _local_input(
    strategy: Strategy, signal: Signal, x: jax.Array, w: jax.Array, features: tuple[int, int]
) -> jax.Array:
    """Redistribute x for the body: inside a shard_map the sizes tell the sharding of its last axis."""
    expected = strategy.kernel().shard_shape(features, label=str(signal))
    if w.shape != expected:
        raise JShardError(
            f"{signal} finds a kernel of {w.shape} on each device where {expected} is expected",
            hint="build the model under the configuration that it is called under",
        )
    rank, inputs = x.ndim, features[0]
    wanted = strategy.x(rank)
    for names in dict.fromkeys((strategy.reduction, (), strategy.column)):
        present = wanted.with_axis(rank - 1, names) if not set(names) & set(sum(wanted.axes[:-1], ())) else None
        if present is not None and x.shape[-1] * present.ways(rank - 1) == inputs:
            return move(x, plan_moves(present.axes, wanted.axes))
    sizes = dict.fromkeys([f"{inputs // wanted.ways(rank - 1)}", f"{inputs}"])
    raise JShardError(
        f"{signal} is called with {x.shape[-1]} of {inputs} inputs on each device, which no mesh axis of it explains",
        hint=f"give it {' or '.join(sizes)}",
    )
