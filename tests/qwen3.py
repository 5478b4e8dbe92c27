"""Qwen3 as google-tunix has it, unmodified and tiny. Its packages import much that a model does not need: they are left empty."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

from flax import nnx


def qwen3(extra: Any, kv_heads: int) -> Any:
    """Two layers of width 32 with eight heads; the test is skipped where google-tunix is not installed."""
    found = importlib.util.find_spec("tunix") if "tunix" not in sys.modules else None
    if found is None and "tunix" not in sys.modules:
        extra("tunix")
    if found is not None:
        root = Path((found.submodule_search_locations or [""])[0])
        for name in ("tunix", "tunix.models", "tunix.models.qwen3", "tunix.generate", "tunix.utils"):
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes names that JAX is going to remove
        from tunix.models.qwen3 import model  # pyright: ignore[reportMissingImports]

        config = model.ModelConfig(
            num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=8, head_dim=8, num_kv_heads=kv_heads,
            rope_theta=10000, norm_eps=1e-6,
        )  # fmt: skip
        return model.Qwen3(config, rngs=nnx.Rngs(0))
