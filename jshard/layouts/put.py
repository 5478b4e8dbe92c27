"""Arrays from the hosts of all processes to devices, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jshard.layouts.gathering import gather
from jshard.programs.jaxprs import Shaped


def put(array: Any, where: NamedSharding) -> jax.Array:
    """Place an array that every process has; each gives its own devices their part."""
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    if (keys := kind(array)) is not None:
        return typed(put(raw(array), where), keys)
    host = canonical(np.asarray(array))
    return jax.make_array_from_callback(host.shape, where, lambda part: host[part])


def on_host(array: object) -> np.ndarray:
    """Return the array as numpy; all processes call it where it lies on devices of several."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return gather(array)
    return np.asarray(array)


def canonical(array: np.ndarray) -> np.ndarray:
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def raw(array: jax.Array | np.ndarray) -> Any:
    """A key of random numbers as the numbers that it is made of; other arrays as they are."""
    return jax.random.key_data(array) if is_key(array) else array


def kind(array: jax.Array) -> str | None:
    """How a key of random numbers makes them; None for other arrays."""
    return str(jax.random.key_impl(array)) if is_key(array) else None


def typed(plain: jax.Array, kind: str | None) -> jax.Array:
    """The array that `raw` was made of."""
    return plain if kind is None else jax.random.wrap_key_data(plain, impl=kind)


def is_key(array: Shaped) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
