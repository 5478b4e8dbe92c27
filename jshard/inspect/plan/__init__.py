"""Plans: the compiled form of a program for absent hardware."""

from __future__ import annotations

from jshard.inspect.plan.comparison import Comparison as Comparison
from jshard.inspect.plan.comparison import compare as compare
from jshard.inspect.plan.estimate import Memory as Memory
from jshard.inspect.plan.planning import explain as explain
from jshard.inspect.plan.planning import plan as plan
from jshard.inspect.plan.result import Plan as Plan
from jshard.inspect.plan.topology import Topology as Topology
