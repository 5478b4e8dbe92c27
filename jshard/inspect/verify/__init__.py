"""Whether a sharded program equals the same program on one device, array by array."""

from __future__ import annotations

from jshard.inspect.verify.equality import verify as verify
from jshard.inspect.verify.verification import Verification as Verification
