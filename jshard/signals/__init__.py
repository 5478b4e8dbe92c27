"""Signals: named places in a program, and the YAML of their layouts. The names here need no JAX."""

from jshard.signals.config import Configuration as Configuration
from jshard.signals.config import MeshPlan as MeshPlan
from jshard.signals.config import load_configuration as load_configuration
from jshard.signals.schema import json_schema as json_schema
from jshard.signals.signal import DTypes as DTypes
from jshard.signals.signal import Shard as Shard
from jshard.signals.signal import Signal as Signal
