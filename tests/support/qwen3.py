"""tunix's Qwen3, for tests that look at it alone."""

from __future__ import annotations

from typing import Any

from tests.support.other_models import MODELS, TINY, is_installed


def qwen3(extra: Any, kv_heads: int) -> Any:
    """Two layers of width 32 with eight heads, 4 or 2 of them for keys; the test is skipped where google-tunix is not installed."""
    if not is_installed("tunix"):
        extra("tunix")
    return MODELS["qwen3" if kv_heads == 4 else "qwen3-kv2"].make(TINY)
