"""A folder with a module and its configuration, in which commands are typed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jshard.signals.active_config import unload

MODULE = """
import jshard
from flax import nnx

def model():
    return jshard.MLP(8, 16, 8, use_bias=False, rngs=nnx.Rngs(0))

def loss(model, x):
    return jshard.mean(model(x) ** 2)
"""


@contextlib.contextmanager
def typed_in(folder: Path, name: str, yaml: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in `folder`, with MODULE as `name` and its configuration mlp.yaml."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{name}.py").write_text(MODULE)
    (folder / "mlp.yaml").write_text(yaml)
    yield
    sys.modules.pop(name, None)
    unload()
