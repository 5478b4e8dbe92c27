"""What `jshard.verify` takes for two blocks of a decoder, of a ViT and, where google-tunix is installed, of its Qwen3: seconds
by the clock and of the processor, with tracing and compiling, and how many arrays are bitwise, on eight pretend devices.

python -m benchmarks.verify
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

import jshard
from tests.support import two_blocks
from tests.support.other_models import MODELS, TINY, is_installed

CASES: dict[str, tuple[str, Callable[[nnx.Rngs], Any], Any, Any]] = {
    "decoder": (two_blocks.DECODER, two_blocks.Decoder, two_blocks.TEXT, two_blocks.cross_entropy),
    "ViT": (two_blocks.VIT, two_blocks.ViT, two_blocks.IMAGES, two_blocks.cross_entropy),
    "Qwen3": (two_blocks.QWEN3, lambda rngs: MODELS["qwen3"].make(TINY), two_blocks.TOKENS, two_blocks.of_qwen3),
}


def verified(name: str) -> str:
    """Prove one of them; a line of what it took."""
    text, make, batch, loss = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(text)
        jshard.load(path)
    model = make(nnx.Rngs(0))
    start, busy = time.perf_counter(), time.process_time()
    found = jshard.verify(jshard.shard(loss), model, *batch)
    clock, busy = time.perf_counter() - start, time.process_time() - busy
    bitwise = sum(each.verdict == "bitwise" for each in found.findings)
    return f"{name:10}{bitwise:4} of {len(found.findings)} arrays bitwise{clock:8.1f} s{busy:8.1f} s of the processor"


def main() -> None:
    jshard.pretend(8)
    warnings.simplefilter("ignore", DeprecationWarning)  # tunix takes names that JAX is going to remove
    for name in CASES:
        if name != "Qwen3" or is_installed("tunix"):
            print(verified(name), flush=True)


if __name__ == "__main__":
    main()
