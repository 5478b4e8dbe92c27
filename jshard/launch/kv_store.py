"""Notes of all processes in the key-value store of JAX's coordination service, as JSON."""

from __future__ import annotations

import json
from typing import Any

from jax._src import distributed  # JAX has no public name for the client of its service


def _client() -> Any:
    return distributed.global_state.client


def write(key: str, value: object) -> None:
    """Write a value, replacing an earlier value."""
    _client().key_value_set(f"jshard/{key}", json.dumps(value), allow_overwrite=True)


def claim(key: str, value: object) -> bool:
    """Write a value if there is none; return whether this process was the first."""
    try:
        _client().key_value_set(f"jshard/{key}", json.dumps(value), allow_overwrite=False)
        return True
    except Exception as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise


def read_ranks(folder: str) -> dict[int, Any]:
    """Return all values under `folder`, by the rank at the end of each key."""
    found = _client().key_value_dir_get(f"jshard/{folder}/")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}


def read(key: str, seconds: float | None = None) -> Any:
    """Return a value, waiting up to `seconds` for it, or None."""
    try:
        if seconds is None:
            return json.loads(_client().key_value_try_get(f"jshard/{key}"))
        return json.loads(_client().blocking_key_value_get(f"jshard/{key}", max(1, int(seconds * 1000))))
    except Exception as error:
        if ("NOT_FOUND" if seconds is None else "DEADLINE_EXCEEDED") in str(error):
            return None
        raise
