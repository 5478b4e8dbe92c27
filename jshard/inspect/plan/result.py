"""What a plan holds, before it is told as text or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.aot import Compiled
from jshard.inspect.plan.comparison import Comparison
from jshard.inspect.plan.estimate import Estimate
from jshard.inspect.plan.memory import Memory
from jshard.inspect.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Result:
    """What was asked, what the compiler made of it, what memory it needs and what time a model gives."""

    topology: Topology
    mesh: Mapping[str, int]
    asked: Ledger
    got: tuple[CompiledCollective, ...]
    comparison: Comparison | None  # None when the program was too large to be compiled to its end
    memory: Memory
    estimate: Estimate | None
    compilers: str  # jax 0.10.2, libtpu 0.0.42.1
    seconds: float  # that the compilation took, when it was made
    cached: bool
    compiled: Compiled

    @property
    def text_of_program(self) -> str:
        """The compiled text; "" when the program was too large."""
        return self.compiled.text
