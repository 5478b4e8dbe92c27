"""Sharding of Flax models by YAML files, with explicit collectives. Names are imported at first
use, so that `import jshard` and the command line start fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jshard import collectives as collectives
    from jshard import schedules as schedules
    from jshard.errors import JShardError as JShardError
    from jshard.inspect.plan import explain as explain
    from jshard.inspect.plan import plan as plan
    from jshard.inspect.report import report as report
    from jshard.inspect.verify import verify as verify
    from jshard.launch.initialize import init as init
    from jshard.launch.initialize import pulse as pulse
    from jshard.layers import MLP as MLP
    from jshard.layers import Attention as Attention
    from jshard.layers import AuxLoss as AuxLoss
    from jshard.layers import Decoder as Decoder
    from jshard.layers import GatedMLP as GatedMLP
    from jshard.layers import Layer as Layer
    from jshard.layers import Linear as Linear
    from jshard.layers import MoE as MoE
    from jshard.layers import attend as attend
    from jshard.layers import create as create
    from jshard.layers import cross_entropy as cross_entropy
    from jshard.layers import jit as jit
    from jshard.layers import matmul as matmul
    from jshard.layers import max as max
    from jshard.layers import mean as mean
    from jshard.layers import place as place
    from jshard.layers import shard as shard
    from jshard.layers import stack as stack
    from jshard.layers import sum as sum
    from jshard.layers import value_and_grad as value_and_grad
    from jshard.layouts import Layout as Layout
    from jshard.layouts import gather as gather
    from jshard.layouts import scatter as scatter
    from jshard.layouts.pretend import pretend as pretend
    from jshard.signals.active_config import load as load
    from jshard.signals.active_config import mesh as mesh
    from jshard.signals.active_config import unload as unload
    from jshard.signals.scope import signal as signal
    from jshard.training.checkpoints.weights import load_weights as load_weights
    from jshard.training.checkpoints.weights import save_weights as save_weights
    from jshard.training.diff import diff as diff
    from jshard.training.experiments.trace import trace as trace
    from jshard.training.generation import generate as generate
    from jshard.training.optimizers.optimizer import Optimizer as Optimizer
    from jshard.training.telemetry.log import log as log
    from jshard.training.trainer import batches as batches
    from jshard.training.trainer import train as train
    from jshard.version import __version__ as __version__

_ROOMS = {
    "jshard.errors": ("JShardError",),
    "jshard.inspect.plan": ("explain", "plan"),
    "jshard.inspect.report": ("report",),
    "jshard.inspect.verify": ("verify",),
    "jshard.launch.initialize": ("init", "pulse"),
    "jshard.layers": (
        *"Attention AuxLoss Decoder GatedMLP Layer Linear MLP MoE attend create cross_entropy jit matmul max mean".split(),
        *"place shard stack sum value_and_grad".split(),
    ),
    "jshard.layouts": ("Layout", "gather", "scatter"),
    "jshard.layouts.pretend": ("pretend",),
    "jshard.signals.active_config": ("load", "mesh", "unload"),
    "jshard.signals.scope": ("signal",),
    "jshard.training.diff": ("diff",),
    "jshard.training.generation": ("generate",),
    "jshard.training.telemetry.log": ("log",),
    "jshard.training.optimizers.optimizer": ("Optimizer",),
    "jshard.training.experiments.trace": ("trace",),
    "jshard.training.trainer": ("batches", "train"),
    "jshard.training.checkpoints.weights": ("load_weights", "save_weights"),
    "jshard.version": ("__version__",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = ("collectives", "schedules")
_RENAMED = {
    "move": "jshard.place",
    "redistribute": "jshard.place",
    "step": "jshard.jit",
    "weights": "jshard.load_weights",
    **{
        name: f"jshard.collectives.{name}"
        for name in "all_gather all_reduce all_to_all broadcast permute reduce_scatter send_recv".split()
    },
    **{name: f"flax.nnx.{name}" for name in ("Dropout", "Embed", "LayerNorm", "RMSNorm")},
}


def __getattr__(name: str) -> Any:
    if name in (*_SUBMODULES, "inspect", "kernels", "launch", "layers", "layouts", "signals", "training"):
        return importlib.import_module(f"jshard.{name}")
    if name not in _ROOM_OF:
        from jshard.errors import nearest

        close = nearest(name, __dir__())
        meant = _RENAMED.get(name, close and f"jshard.{close}")
        raise AttributeError(f"jshard has no {name!r}" + (f"; did you mean {meant}?" if meant else ""))
    if _ROOM_OF[name] == "jshard.layouts":  # defines the mesh of a PartitionSpec, also by JSHARD_CONFIG
        importlib.import_module("jshard.signals.active_config")
    value = getattr(importlib.import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*_ROOM_OF, *_SUBMODULES))
