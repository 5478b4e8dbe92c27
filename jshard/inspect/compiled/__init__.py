"""The collectives of a compiled program, read from its text."""

from __future__ import annotations

from jshard.inspect.compiled.collective import CompiledCollective as CompiledCollective
from jshard.inspect.compiled.schedule import collectives_in as collectives_in
from jshard.inspect.compiled.schedule import wire_bytes as wire_bytes
