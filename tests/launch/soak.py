"""Four processes that are disturbed again and again, and lose to the last bit what they would have lost in peace.

python -m tests.launch.soak --minutes 30 --seed 7        make soak

Every minute one of them is killed, stopped, sent SIGTERM, or raises; `--restarts` starts all again. Which, and when, the
seed decides. Memory and open files are counted once a second, and have to stay where they were.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent.parent
YAML = "tests/launch/soak.yaml"
SETTLED = 4  # steps of an attempt behind which a fault may come
KINDS = {
    "kill": signal.SIGKILL,
    "kill rank 0": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "raise": None,
}
WAITED = r"\d+, and the others waited for it in all_reduce of \w+ over \w+ \(tests/launch/soak.yaml:\d+\); all were stopped; "
SENTENCES = {
    "kill": f"^rank {{rank}} was ended by SIGKILL in step {WAITED}",
    "kill rank 0": f"^rank 0 was ended by SIGKILL in step {WAITED}",
    "stop": "rank {rank} has not answered for ",
    "term": "received SIGTERM, or the notice of one, in step ",
    "raise": f"^rank {{rank}} ended with status 1 in step {WAITED}",
}
WITHIN = 240.0  # seconds that a restart may take, on a machine as slow as any
LAUNCHER_GROWS = 8  # MiB at most, from its first count on
RANK_GROWS = 48  # MiB at most, above the most that a rank held before the first fault


@dataclasses.dataclass
class Soaked:
    """What was seen."""

    steps: int
    fewest: int
    faults: list[str] = dataclasses.field(default_factory=list)
    untold: list[str] = dataclasses.field(default_factory=list)  # faults whose sentence did not come
    undisturbed: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    launcher: list[float] = dataclasses.field(default_factory=list)  # MiB, once a second
    files: list[int] = dataclasses.field(default_factory=list)  # that the launcher has open, once a second
    peaks: list[dict[int, float]] = dataclasses.field(default_factory=list)  # MiB by rank, between two faults each
    restarts: list[float] = dataclasses.field(default_factory=list)  # seconds from a fault to the next step
    left: list[int] = dataclasses.field(default_factory=list)  # processes that outlived a fault
    folders: list[str] = dataclasses.field(default_factory=list)  # of checkpoints, at the end
    processor: float = 0.0  # seconds of all processes
    wall: float = 0.0

    def check(self) -> None:
        """An AssertionError that says which promise is broken."""
        assert len(self.faults) >= self.fewest, self.faults
        assert not self.untold, self.untold
        assert len(self.undisturbed) == self.steps
        assert self.losses == self.undisturbed, _difference(self.losses, self.undisturbed)
        assert not self.left, f"processes {self.left} outlived a fault"
        grown = max(self.launcher) - self.launcher[0]
        assert grown <= LAUNCHER_GROWS, f"the launcher grew by {grown:.1f} MiB"
        assert max(self.files) <= self.files[0] + 2, f"the launcher opened {max(self.files) - self.files[0]} files more"
        first, most = max(self.peaks[0].values()), max(max(each.values()) for each in self.peaks)
        assert most - first <= RANK_GROWS, f"a rank held {most:.0f} MiB, and {first:.0f} before the first fault"
        assert len(self.folders) <= 3 and all(name.isdecimal() for name in self.folders), self.folders

    def __str__(self) -> str:
        same = "bitwise those" if self.losses == self.undisturbed else "NOT those"
        peaks = " ".join(f"{max(each.values()):.0f}" for each in self.peaks)
        waits = " ".join(f"{each:.0f}" for each in self.restarts)
        return (
            f"{len(self.faults)} faults in {self.wall / 60:.1f} minutes; {self.steps} losses, {same} of an undisturbed run\n"
            f"launcher {self.launcher[0]:.1f} MiB at first, {self.launcher[-1]:.1f} at the end, {max(self.launcher):.1f} at "
            f"most; {self.files[0]} files open at first, {max(self.files)} at most\n"
            f"MiB that a rank held at most, between two faults each: {peaks}\n"
            f"seconds from a fault to the next step: {waits}\n"
            f"processor time {self.processor:.0f} s; processes left over {len(self.left)}; checkpoints {self.folders}"
        )


def _difference(losses: Sequence[float], others: Sequence[float]) -> str:
    at = next(
        (n for n, (a, b) in enumerate(zip(losses, others, strict=False)) if a != b), min(len(losses), len(others))
    )
    return f"{len(losses)} and {len(others)} losses, which differ from step {at + 1} on"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a soak is done. `alone` takes the undisturbed loss from one process, which costs less and is bitwise the same."""

    minutes: float
    seed: int = 0
    every: float = 60.0  # seconds between two faults, more or less
    ranks: int = 4
    pause: float = 0.5  # seconds between two steps
    fewest: int = 2  # faults, however slow the machine is
    words: tuple[str, ...] = ()  # changes to the configuration
    alone: bool = False


# One fault of each kind, in two processes.
SHORT = Form(0.25, every=0.5, ranks=2, pause=0.1, fewest=5, words=("watchdog.step_timeout=8",), alone=True)


def soak(form: Form, say: Callable[[str], None] = print) -> Soaked:
    with tempfile.TemporaryDirectory() as folder:
        return _Soak(Path(folder), form, say).run()


class _Soak:
    def __init__(self, here: Path, form: Form, say: Callable[[str], None]):
        self.here, self.form, self.chance, self.say = here, form, random.Random(form.seed), say
        self.every, self.seconds = form.every, 60 * form.minutes
        self.steps = round(self.seconds / form.pause)
        self.listeners: list[threading.Thread] = []
        self.said: list[str] = []  # what the launcher and its processes said, but for steps
        self.step, self.restarts = 0, 0  # the last step of this attempt, 0 before its first
        self.found = Soaked(self.steps, form.fewest)

    def run(self) -> Soaked:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        (self.here / "hurry").touch()
        peaceful = self._start("peaceful", "-n", "1" if self.form.alone else str(self.form.ranks))
        assert peaceful.wait() == 0, self.said
        self.found.undisturbed = losses(self.here / "peaceful")
        (self.here / "hurry").unlink()
        self.say(f"{self.steps} steps in peace took {time.monotonic() - began:.0f} s")
        self.began = time.monotonic()
        self.step = 0
        launcher = self._start("disturbed", "-n", str(self.form.ranks), "--restarts", "1000")
        try:
            self._disturb(launcher)
        finally:
            launcher.kill()
            launcher.wait()
            for each in self.listeners:
                each.join(10)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.found.processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.found.losses = losses(self.here / "disturbed")
        self.found.folders = sorted(os.listdir(self.here / "disturbed" / "checkpoints"))
        return self.found

    def _disturb(self, launcher: subprocess.Popen[str]) -> None:
        kinds: list[str] = []
        due = self.every * self.chance.uniform(0.4, 0.6)
        pids: dict[int, int] = {}
        while True:
            self._wait(launcher, lambda: self.step > 0, "the first step")
            if not pids:
                self.began = time.monotonic()  # a slow machine takes long to start, and gets as many faults
            before = pids
            pids = {rank: int((self.here / f"pid.{rank}").read_text()) for rank in range(self.form.ranks)}
            self.found.left += [pid for pid in before.values() if alive(pid)]
            self.found.peaks.append({})
            first = self.step
            self._wait(launcher, lambda first=first: self.step >= first + SETTLED, "more steps")
            self._watch(launcher, pids, due if len(self.found.faults) < self.form.fewest else min(due, self.seconds))
            over = max(due, time.monotonic() - self.began) > self.seconds - self.every / 4
            if over and len(self.found.faults) >= self.form.fewest:
                break
            kinds = kinds or self.chance.sample(sorted(KINDS), len(KINDS))
            kind, rank = kinds.pop(), self.chance.randrange(self.form.ranks)
            self._commit(launcher, kind, 0 if kind == "kill rank 0" else rank, pids)
            behind = time.monotonic() - self.began + self.every / 3  # a slow machine gets fewer faults
            due = max(due + self.every * self.chance.uniform(0.8, 1.2), behind)
        (self.here / "hurry").touch()
        self._wait(launcher, lambda: launcher.poll() is not None, "the end", 1800)
        self.found.left += [pid for pid in pids.values() if alive(pid)]
        self.found.wall = time.monotonic() - self.began
        assert launcher.returncode == 0, self.said[-20:]

    def _watch(self, launcher: subprocess.Popen[str], pids: dict[int, int], until: float) -> None:
        """Counts memory once a second."""
        while True:
            self.found.launcher.append(mebibytes(launcher.pid))
            self.found.files.append(len(os.listdir(f"/proc/{launcher.pid}/fd")))
            peak = self.found.peaks[-1]
            for rank, pid in pids.items():
                peak[rank] = max(peak.get(rank, 0), mebibytes(pid))
            if time.monotonic() - self.began > until:
                return
            assert launcher.poll() is None, self.said[-20:]
            time.sleep(1)

    def _commit(self, launcher: subprocess.Popen[str], kind: str, rank: int, pids: dict[int, int]) -> None:
        """One fault, and what follows up to the next step."""
        began, step, restarts, lines = time.monotonic(), self.step, self.restarts, len(self.said)
        assert restarts == len(self.found.faults), f"nobody asked for the last restart: {self.said[-20:]}"
        what = f"{kind} of rank {rank} in step {step}" if kind != "kill rank 0" else f"kill of rank 0 in step {step}"
        self.say(f"{self._clock}  {what}")
        if (number := KINDS[kind]) is not None:
            os.kill(pids[rank], number)
        else:
            (self.here / f"raise.{rank}").touch()
        self._wait(launcher, lambda: self.restarts > restarts and self.step > 0, what)
        sentence = SENTENCES[kind].format(rank=rank)
        told = [line for line in self.said[lines:] if re.search(sentence, line)]
        if not told:
            self.found.untold.append(f"{what}: {self.said[lines:]}")
        resumed = [line for line in self.said[lines:] if "resumed from step" in line]
        self.found.faults.append(what)
        self.found.restarts.append(time.monotonic() - began)
        self.say(f"{self._clock}  goes on after {self.found.restarts[-1]:.1f} s, {' '.join(resumed)[:60]}")

    def _wait(self, launcher: Any, ready: Callable[[], bool], what: str, seconds: float = WITHIN) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert launcher.poll() is None or what == "the end", (what, self.said[-20:])
            assert time.monotonic() < until, f"after {what} nothing came for {seconds:.0f} s: {self.said[-20:]}"
            time.sleep(0.05)

    @property
    def _clock(self) -> str:
        passed = int(time.monotonic() - self.began)
        return f"{passed // 60:02d}:{passed % 60:02d}"

    def _start(self, name: str, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOAK_HERE": str(self.here), "JAX_PLATFORMS": "cpu"}
        environment["SOAK_PAUSE"] = str(self.form.pause)
        started = subprocess.Popen(
            [sys.executable, "-m", "jshard", "launch", *words]
            + ["train", YAML, f"steps={self.steps}", f"output={self.here / name}", *self.form.words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.listeners.append(threading.Thread(target=self._listen, args=(started,), daemon=True))
        self.listeners[-1].start()
        return started

    def _listen(self, started: subprocess.Popen[str]) -> None:
        assert started.stdout is not None
        with started.stdout as lines:
            self._hear(lines)

    def _hear(self, lines: IO[str]) -> None:
        for line in lines:
            if (step := re.match(r"\[0\] step (\d+)/", line)) is not None:
                self.step = int(step[1])
                continue
            self.said.append(line.rstrip())
            if line.startswith("starting all again"):
                self.step = 0
                self.restarts += 1


def losses(run: Path) -> list[float]:
    """Of each step, in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return [found[step] for step in sorted(found)]


def mebibytes(pid: int) -> float:
    """The memory of a process that is its own: what others share with it is counted once, there."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except FileNotFoundError:
        return 0.0
    return (int(words[1]) - int(words[2])) * resource.getpagesize() / 2**20


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.launch.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between two faults, more or less")
    chosen = parser.parse_args(words)
    found = soak(Form(chosen.minutes, chosen.seed, chosen.every), lambda text: print(text, flush=True))
    print(found)
    found.check()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
