"""What `jshard.init` is given, before it joins anything."""

from __future__ import annotations

import pytest

import jshard
from jshard.errors import JShardError

HINT = "is no number of seconds; use a number above 0, as"


@pytest.mark.parametrize(
    ("given", "variables", "sentence"),
    [
        ({"start_timeout": 0}, {}, f"jshard.init(start_timeout=0) {HINT} 60"),
        ({"step_timeout": "1 h"}, {}, f"jshard.init(step_timeout='1 h') {HINT} 300"),
        ({"step_timeout": float("inf")}, {}, f"jshard.init(step_timeout=inf) {HINT} 300"),
        ({"step_timeout": [5]}, {}, f"jshard.init(step_timeout=[5]) {HINT} 300"),
        ({}, {"JSHARD_START_TIMEOUT": "soon"}, f"JSHARD_START_TIMEOUT=soon {HINT} 60"),
        ({}, {"JSHARD_STEP_TIMEOUT": "-1"}, f"JSHARD_STEP_TIMEOUT=-1 {HINT} 300"),
        ({}, {"JSHARD_STEP_TIMEOUT": "nan"}, f"JSHARD_STEP_TIMEOUT=nan {HINT} 300"),
    ],
)
def test_what_is_no_time_to_wait_is_told(monkeypatch, given, variables, sentence):
    for name, value in {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JShardError) as told:
        jshard.init(**given)
    assert str(told.value) == sentence
