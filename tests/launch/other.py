"""A loss that is another in process 1: what no reading of the YAML finds."""

from __future__ import annotations

import os

from jshard.layers import cross_entropy


def loss(outputs, targets):
    return cross_entropy(outputs, targets) * (2 if os.environ["JAX_PROCESS_ID"] == "1" else 1)
