"""The notes that all processes read and write: the key-value store of JAX's coordination service, with text for values."""

from __future__ import annotations

import json
from typing import Any

from jax._src import distributed  # JAX has no public name for the client of its service


def _client() -> Any:
    return distributed.global_state.client


def write(key: str, value: Any) -> None:
    """Replaces what was there."""
    _client().key_value_set(f"jshard/{key}", json.dumps(value), allow_overwrite=True)


def claim(key: str, value: Any) -> bool:
    """Writes where nothing is written yet; says whether this process was the first."""
    try:
        _client().key_value_set(f"jshard/{key}", json.dumps(value), allow_overwrite=False)
        return True
    except Exception as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise


def read(key: str) -> Any:
    """What is written now, or None."""
    try:
        return json.loads(_client().key_value_try_get(f"jshard/{key}"))
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def read_all(folder: str) -> dict[str, Any]:
    """All that is written under `folder`, by the last part of its key."""
    found = _client().key_value_dir_get(f"jshard/{folder}/")
    return {key.rpartition("/")[2]: json.loads(value) for key, value in found}


def wait(key: str, seconds: float) -> Any:
    """What is written, or will be within so many seconds, or None."""
    try:
        return json.loads(_client().blocking_key_value_get(f"jshard/{key}", max(1, int(seconds * 1000))))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
