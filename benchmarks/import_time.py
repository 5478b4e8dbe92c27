"""What `import jshard` costs over `import jax, flax`, which a program of its kind imports anyway, and what `jshard
check` costs, which imports none of them: the medians and their ratios.

python -m benchmarks.import_time [runs]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "import jax, flax.nnx, optax": "import jax, flax.nnx, optax",
    "... and jshard": "import jax, flax.nnx, optax, jshard",
    "... and every name of it": "import jax, flax.nnx, optax, jshard; [getattr(jshard, name) for name in dir(jshard)]",
    "jshard alone": "import jshard",
    "jshard check of pure YAML": "from jshard.cli import main; main(['check', 'configs/mlp.yaml'])",
}


def seconds(program: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(runs: int) -> dict[str, float]:
    """The median seconds of each program, measured in turns so that a slow minute hits all alike."""
    for program in PROGRAMS.values():
        seconds(program)
    turns = [{name: seconds(program) for name, program in PROGRAMS.items()} for _ in range(runs)]
    return {name: statistics.median(turn[name] for turn in turns) for name in PROGRAMS}


if __name__ == "__main__":
    medians = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    least = next(iter(medians.values()))
    for name, median in medians.items():
        print(f"{name:28} {median:6.3f} s   {median / least:5.2f}")
