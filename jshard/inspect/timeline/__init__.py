"""`jshard timeline`: what ran, where and when, read from what JAX's profiler wrote."""

from __future__ import annotations

from jshard.inspect.timeline.page import Timeline as Timeline
from jshard.inspect.timeline.run_timeline import timeline as timeline
