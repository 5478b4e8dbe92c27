"""Random kills of three processes, some of them in the middle of a save: every run loses bitwise what an undisturbed one loses.

python -m tests.launch.kills --count 100 --seed 7        make kills

A run is killed a few times, by the seed, and `--restarts` starts all again. Then its losses, its evaluations and its
checkpoints are held against those of the one run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RANKS, STEPS, A_RUN = 3, 12, 5  # kills in a run at most
WORDS = (
    "tests/launch/soak.yaml",
    "jshard.mesh={data: 3, tensor: 1}",
    "batch=6",
    f"steps={STEPS}",
    "checkpoint={every: 3, keep: 2}",
    "evaluation.every=4",
)


def launch(here: Path, name: str, restarts: int = 0) -> tuple[int, int]:
    """Train into the folder of this name; return how many kills it came through, and how many of them left a half save."""
    words = [
        "launch",
        "-n",
        str(RANKS),
        "--restarts",
        str(restarts),
        "tests/launch/killed.py",
        str(here / name),
        *WORDS,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jshard", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KILLS_HERE": str(here), "SOAK_HERE": str(here)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr.count(" was ended by SIGKILL "), done.stdout.count(", an unfinished checkpoint")


def left(run: Path) -> tuple[list[dict[str, float]], list[str]]:
    """What a run has left: the losses and the evaluations of its steps, and the names of its checkpoints."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = [{name: line[name] for name in line if name in ("step", "loss") or "test_" in name} for line in lines]
    return figures, sorted(os.listdir(run / "checkpoints"))


def plan(chance: random.Random, touches: Sequence[int], seconds: float) -> str:
    """Draw which rank is killed, and when. Half of all kills are at a file; two thirds of these are of rank 0, which writes most."""
    kind = chance.choices(("touch", "step", "second"), (5, 3, 2))[0]
    rank = chance.choices(range(RANKS), touches if kind == "touch" else (1,) * RANKS)[0]
    if kind == "touch":
        return f"{rank} touch {chance.randint(1, touches[rank])}"
    if kind == "step":
        return f"{rank} step {chance.randint(1, STEPS)} {chance.uniform(0, 0.05):.4f}"
    return f"{rank} second {chance.uniform(0, seconds):.2f}"


def kills(count: int, seed: int, say: Callable[[str], None] = print, plans: Sequence[str] = ()) -> int:
    """Kill so often, by these plans first; return how often it was. An AssertionError says what a run has lost."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        here, done, halves, number = Path(folder), 0, 0, 0
        (here / "hurry").touch()
        began = time.monotonic()
        launch(here, "undisturbed")
        seconds, undisturbed = time.monotonic() - began, left(here / "undisturbed")
        assert len(undisturbed[0]) == STEPS + STEPS // 4, undisturbed
        touches = [int((here / f"touches.{rank}").read_text()) for rank in range(RANKS)]
        say(f"seed {seed}; a run in peace took {seconds:.0f} s, and its ranks touched files {touches} times")
        while done < count:
            number += 1
            drawn = [plan(chance, touches, seconds) for _ in range(min(A_RUN, count - done))]
            drawn = [*plans, *drawn[len(plans) :]] if number == 1 else drawn
            for attempt, text in enumerate(drawn):
                (here / f"plan.{attempt}").write_text(text)
            (here / f"plan.{len(drawn)}").unlink(missing_ok=True)
            try:
                killed, half = launch(here, f"run-{number}", len(drawn))
                assert left(here / f"run-{number}") == undisturbed, (left(here / f"run-{number}"), undisturbed)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, run {number}, killed by the plans {drawn}: {error}") from error
            done, halves = done + killed, halves + half
            where = ", ".join(drawn[:killed])
            say(
                f"{done} of {count} kills, {halves} in a save, after {time.monotonic() - began:.0f} s; run {number}: {where}"
            )
    return done


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.launch.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args(words)
    seed = random.randrange(10**6) if chosen.seed is None else chosen.seed
    done = kills(chosen.count, seed, lambda text: print(text, flush=True))
    print(f"{done} kills by seed {seed}: every run lost bitwise what the undisturbed run lost")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
