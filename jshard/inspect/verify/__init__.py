"""The proof, array by array, that a sharded program equals the program on one device."""

from __future__ import annotations

from jshard.inspect.verify.equality import verify as verify
from jshard.inspect.verify.verification import Verification as Verification
