"""What a compiled program does, read from its text."""

from __future__ import annotations

from jshard.inspect.compiled.traffic import CompiledCollective as CompiledCollective
from jshard.inspect.compiled.traffic import collectives_in as collectives_in
from jshard.inspect.compiled.traffic import wire_bytes as wire_bytes
