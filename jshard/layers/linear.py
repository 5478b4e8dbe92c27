"""`jshard.Linear`: `flax.nnx.Linear` whose parameters are born where a signal says and whose product runs as it says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import JShardError
from jshard.layers.body import Arithmetic
from jshard.layers.sharded_matmul import multiply
from jshard.layers.strategy import Strategy, check_parameters, strategy_of
from jshard.layouts.creation import create
from jshard.layouts.redistribution import as_array
from jshard.signals.scope import active, active_path, resolve

_kernel_init = nnx.initializers.lecun_normal()
_bias_init = nnx.initializers.zeros_init()


class Linear(nnx.Linear):
    """`nnx.Linear(in_features, out_features, ...)` with the same arguments and, from the same seed, the same numbers.

    It remembers the signal it was built under; a signal that is active at the call wins. With no configuration loaded,
    or outside every signal, it is `nnx.Linear`.

        with jshard.signal("layer1"):
            self.up = jshard.Linear(784, 1024, rngs=rngs)
    """

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool = True, param_dtype: Any = jnp.float32,
        kernel_init: Any = _kernel_init, bias_init: Any = _bias_init, rngs: nnx.Rngs, **arguments: Any,
    ):  # fmt: skip
        signal = active()
        if signal is not None:
            strategy = strategy_of(signal)
            check_parameters(strategy, signal, in_features, out_features, use_bias=use_bias)
            param_dtype = signal.dtype.param or param_dtype
            kernel_init, bias_init = _Born(kernel_init, strategy, "kernel"), _Born(bias_init, strategy, "bias")
        super().__init__(
            in_features, out_features, use_bias=use_bias, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, rngs=rngs, **arguments,
        )  # fmt: skip
        self.signal_path: tuple[str, ...] = active_path()

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`inputs[..., in_features]` to `[..., out_features]`, lying as the signal says."""
        signal, scope = resolve(self.signal_path)
        if signal is None:
            return super().__call__(inputs) if out_sharding is None else super().__call__(inputs, out_sharding)
        if out_sharding is not None:
            raise JShardError(
                f"{signal} says where the output lies, and so does out_sharding=", mend="remove out_sharding="
            )
        if jnp.shape(inputs)[-1:] != (self.in_features,) and not jax.sharding.get_abstract_mesh().manual_axes:
            raise JShardError(
                f"{signal} has a Linear of {self.in_features} inputs, called with an array of shape {jnp.shape(inputs)}",
                mend=f"give it arrays whose last axis is {self.in_features}",
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
            return multiply(
                as_array(inputs, said=str(signal)), self.kernel[...], bias, signal, arithmetic, features=features
            )


class _Born:
    """An initializer whose array comes into being split over the mesh."""

    def __init__(self, initializer: Any, strategy: Strategy, parameter: str):
        self.initializer, self.strategy, self.parameter = initializer, strategy, parameter

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        layout = self.strategy.kernel() if self.parameter == "kernel" else self.strategy.bias()
        return create(self.initializer, key, shape, dtype, layout)
