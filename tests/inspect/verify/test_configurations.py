"""The shipped configurations are proven in every bit, but for 5 % of their arrays at most."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import english
from jshard.cli import main
from jshard.signals.config import load_configuration

ROOT = Path(__file__).parents[3]
SMALL = ("model.width=32", "model.hidden=64", "data.length=32")  # of a language model: the same operations
LARGE = (*SMALL, "model.heads=4", "model.vocabulary=256", "data.tokens=bytes", "batch=16")
DECODER = (
    *LARGE,
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.depth=2",
    "jshard.mesh.data=2",
    "jshard.mesh.tensor=2",
)
POD = ("model.features=32", "model.hidden=64", "model.depth=2", "data.features=32", "batch=16", "jshard.mesh.data=2")
FILES = {
    **dict.fromkeys(("adopt/transformer", "cnn/data", "cnn/fsdp", "cnn/tensor", "digits", "xor"), ()),
    **dict.fromkeys(("lm/experts", "lm/ring"), (*SMALL, "model.depth=2")),
    "lm/english": (*SMALL, "model.depth=2", "jshard.mesh.data=4", "jshard.mesh.tensor=2"),
    **dict.fromkeys(("pipe-1f1b", "pipe-interleaved", "pipe-zero-bubble"), (*SMALL, "model.depth=8")),
    "pipe-balance": SMALL,
    "pipe-pod": (*LARGE, "model.depth=4", "microbatches=4", "jshard.mesh={stage: 2, data: 2, tensor: 2}"),
    "lm/pod": (*LARGE, "model.depth=2", "jshard.mesh.data=4", "jshard.mesh.tensor=2"),
    "decoder/fsdp": (*LARGE, "model.kv_heads=2", "model.depth=2", "jshard.mesh.data=4"),
    **{f"decoder/qwen3-{size}": DECODER for size in ("0.6b", "1.7b", "8b", "32b")},
    **{f"decoder/llama3.1-{size}": DECODER for size in ("8b", "70b")},
    **dict.fromkeys(("pod-fsdp", "pod-tensor"), (*POD, "jshard.mesh.tensor=4")),
    "pod-slices": (*POD, "jshard.mesh.tensor=2"),
}
TWO_PROCESSES = ("cnn/tensor", "digits", "lm/english", "xor")


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with the configurations, the examples and some English."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    english.main("runs/english")
    for path in sorted(Path("runs/english").iterdir())[12:]:
        path.unlink()


def test_every_configuration_that_trains_is_listed():
    every = {str(path.relative_to(ROOT / "configs").with_suffix("")): path for path in ROOT.glob("configs/**/*.yaml")}
    trains = {name for name, path in every.items() if {"model", "data"} <= load_configuration(path).train.keys()}
    assert trains - {"pod"} == set(FILES)  # others include it, and say how it is laid out


def bitwise(name: str, document: str) -> str:
    """Hold a verification, and return its row of the page."""
    found = json.loads(document)
    verdicts, plain = [each["verdict"] for each in found["findings"]], found["plain"]
    assert found["ok"] and verdicts.count("bitwise") >= 0.95 * len(verdicts), found["verdict"]
    assert not plain["unknown"] and len(plain["offs"]) >= 10
    count = len(plain["offs"])
    return f"| `{name}` | {verdicts.count('bitwise')} of {len(verdicts)} | {count} of {count} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_shipped_configuration_is_proven_in_every_bit(name, there, capsys):
    assert main(["verify", f"configs/{name}.yaml", "--trust", *FILES[name], "--json"]) == 0
    assert bitwise(name, capsys.readouterr().out) in (ROOT / "docs" / "prove-it.md").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_and_over_two_processes(name, there):
    words = [
        sys.executable,
        "-m",
        "jshard",
        "launch",
        "-n",
        "2",
        "verify",
        f"configs/{name}.yaml",
        "--trust",
        *FILES[name],
        "--json",
    ]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    bitwise(name, "\n".join(line.removeprefix("[0] ") for line in ran.stdout.splitlines() if line.startswith("[0] ")))
