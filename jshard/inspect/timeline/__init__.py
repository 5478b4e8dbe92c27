"""`jshard timeline`: the operations on each device over time, from a capture of JAX's profiler."""

from __future__ import annotations

from jshard.inspect.timeline.page import Timeline as Timeline
from jshard.inspect.timeline.run_timeline import timeline as timeline
