"""Annotations of Flax's variables (`nnx.with_partitioning`): while a mesh is loaded, claims say where parameters lie."""

from __future__ import annotations

import dataclasses

from flax import config

from jshard.signals import active_config
from jshard.signals.active_config import load as load
from jshard.signals.config import Configuration


@dataclasses.dataclass
class _Annotations:
    """Flax's setting before a mesh was loaded; None where none is."""

    before: bool | None = None

    def follow(self, configuration: Configuration | None) -> None:
        """Have Flax create annotated variables like all others while a mesh is loaded: it would ask for a mesh whose axes have
        the names of the annotations."""
        is_loaded = configuration is not None and configuration.mesh is not None
        if is_loaded and self.before is None:
            self.before = config.flax_always_shard_variable
            config.update("flax_always_shard_variable", False)
        elif not is_loaded and self.before is not None:
            config.update("flax_always_shard_variable", self.before)
            self.before = None


active_config.listeners.append(_Annotations().follow)
active_config.tell_listeners()
