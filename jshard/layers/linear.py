"""`jshard.Linear`, a `flax.nnx.Linear` sharded by its signal; `jshard.MLP`, two Linears; `jshard.GatedMLP`, as in Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard.errors import JShardError, kind_of
from jshard.layers.body import Arithmetic
from jshard.layers.layer import Layer, signal_at
from jshard.layers.sharded_matmul import multiply
from jshard.layers.strategy import check_parameters, strategy_of
from jshard.layouts.creation import check_shape, create
from jshard.layouts.redistribution import as_array
from jshard.signals.scope import Entry, active, outside, resolve
from jshard.signals.signal import PRODUCT

_kernel_init = nnx.initializers.lecun_normal()
_bias_init = nnx.initializers.zeros_init()


class Linear(nnx.Linear, Layer):
    """An `nnx.Linear(in_features, out_features, ...)` with equal arguments and, from equal seeds, equal numbers.

        with jshard.signal("layer1"):
            self.up = jshard.Linear(784, 1024, rngs=rngs)

    It remembers the signal it was built under; a signal active at the call takes precedence. Without a configuration, or
    outside every signal, it is `nnx.Linear`.
    """

    parameter_axes: ClassVar = {"kernel": PRODUCT["w"], "bias": PRODUCT["b"]}

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool = True, param_dtype: Any = jnp.float32,
        kernel_init: Any = _kernel_init, bias_init: Any = _bias_init, rngs: nnx.Rngs, **arguments: Any,
    ):  # fmt: skip
        Layer.__init__(self)
        if not hasattr(rngs, "params"):
            raise JShardError(f"jshard.Linear was given {kind_of(rngs)} as rngs", hint="write rngs=nnx.Rngs(0)")
        signal = active()
        if signal is not None:
            check_shape((in_features, out_features))
            check_parameters(strategy_of(signal), signal, in_features, out_features, use_bias=use_bias)
            param_dtype, layouts = signal.dtype.param or param_dtype, self.parameter_layouts()
            kernel_init = functools.partial(create, kernel_init, layout=layouts["kernel"])
            bias_init = functools.partial(create, bias_init, layout=layouts["bias"])
        with outside():
            nnx.Linear.__init__(
                self, in_features, out_features, use_bias=use_bias, param_dtype=param_dtype,
                kernel_init=kernel_init, bias_init=bias_init, rngs=rngs, **arguments,
            )  # fmt: skip

    def __call__(self, inputs: jax.Array, out_sharding: object = None) -> jax.Array:
        """Map `inputs[..., in_features]` to `[..., out_features]`, sharded by the signal."""
        signal, scope = resolve(self.signal_path)
        if signal is None:
            claim = signal_at(self.signal_path)  # of `jshard.shard`, which traces the unsharded program
            with scope:
                if claim is not None and claim.dtype.compute is not None:
                    return self._computing_in(claim.dtype.compute, inputs)
                return super().__call__(inputs) if out_sharding is None else super().__call__(inputs, out_sharding)
        if out_sharding is not None:
            raise JShardError(
                f"{signal} sets the sharding of the output, and so does out_sharding=", hint="remove out_sharding="
            )
        inputs = as_array(inputs, label=str(signal))
        if jnp.shape(inputs)[-1:] != (self.in_features,) and not jax.sharding.get_abstract_mesh().manual_axes:
            raise JShardError(
                f"{signal} has a Linear of {self.in_features} inputs, called with an array of shape {jnp.shape(inputs)}",
                hint=f"give it arrays whose last axis is {self.in_features}",
            )
        with scope:
            arithmetic = Arithmetic(
                dtype=signal.dtype.compute or self.dtype,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                dot_general=self.dot_general,
                promote_dtype=self.promote_dtype,
            )
            bias = None if self.bias is None else self.bias[...]
            features = (self.in_features, self.out_features)
            return multiply(inputs, self.kernel[...], bias, signal, arithmetic, features=features)

    def _computing_in(self, dtype: str, inputs: jax.Array) -> jax.Array:
        """Compute with a result in `dtype`. `jshard.shard` casts the operands, where it sums their gradients."""
        bias = None if self.bias is None else self.bias[...]
        x, w, b = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        y = self.dot_general(
            x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision,
            preferred_element_type=self.preferred_element_type or jnp.dtype(dtype),
        )  # fmt: skip
        with jax.numpy_rank_promotion("allow"):
            return y if b is None else y + b.astype(dtype)


class MLP(Layer):
    """A feed-forward layer `down(activation(up(x)))`.

    `up` is built and called under signal `signals[0]`, `down` under `signals[1]`, both nested in the MLP's own signal. With
    `up: {column: t}` and `down: {reduction: t}` it costs an all-reduce. Under a signal with `compile: true`, a call outside
    jit is a single program.
    """

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int, *, activation: Callable[..., Any] = nnx.relu,
        signals: tuple[str, str] = ("up", "down"), rngs: nnx.Rngs, **arguments: Any,
    ):  # fmt: skip
        super().__init__()
        self.signals = signals
        self.activation = activation
        with resolve(())[1], Entry(signals[0]):
            self.up = Linear(in_features, hidden_features, rngs=rngs, **arguments)
        with resolve(())[1], Entry(signals[1]):
            self.down = Linear(hidden_features, out_features, rngs=rngs, **arguments)

    def __call__(self, x: jax.Array) -> jax.Array:
        signal, scope = resolve(self.signal_path)
        with scope:
            if signal is not None and signal.compile:
                return one_program(*nnx.split(self), x)
            return self._run(x)

    def _run(self, x: jax.Array) -> jax.Array:
        with Entry(self.signals[0]):
            x = self.activation(self.up(x))
        with Entry(self.signals[1]):
            return self.down(x)


@functools.partial(jax.jit, static_argnums=0)
def one_program(graphdef: Any, state: tuple[Any, ...], x: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)._run(x)


class GatedMLP(nnx.Module):
    """A gated feed-forward layer `down(activation(gate(x)) * up(x))`. `column: tensor` of gate and
    up with `reduction: tensor` of down costs an all-reduce forward and another backward."""

    def __init__(
        self, width: int, hidden: int, *, activation: Callable[[jax.Array], jax.Array] = nnx.silu, use_bias: bool = False,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs,
    ):  # fmt: skip
        linear = functools.partial(nnx.Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.activation(checkpoint_name(self.gate(x), "gate"))
        return self.down(gate * checkpoint_name(self.up(x), "up"))
