"""Capturing: what JAX's profiler saw of an experiment's steps, of a script's own loop, and of a run that goes on."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.config import compilation_cache_include_metadata_in_key

import jshard
from jshard.cli import main
from jshard.errors import JShardError
from jshard.inspect.timeline import timeline
from jshard.inspect.timeline.capture import captures
from jshard.signals import active_config as current
from jshard.training.experiments.trace import LOOK, TraceRequest, settle, trace
from tests.support.xplanes import write

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/watching.md").read_text()
pytestmark = pytest.mark.usefixtures("named", "in_the_root")


@pytest.fixture(scope="module")
def named():
    """The profiler sees names and lines of each program."""
    with compilation_cache_include_metadata_in_key(True):
        yield


@pytest.fixture(scope="module")
def captured(named, tmp_path_factory):
    """Two steps of XOR on four devices: the run's folder, what was printed, and the ledger."""
    whole = tmp_path_factory.mktemp("trace") / "xor"
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        patch.setattr("builtins.print", lambda *words, **how: said.append(" ".join(map(str, words))))
        assert main(["trace", "configs/xor.yaml", "--trust", "--steps", "2", "-o", str(whole)]) == 0
        from jshard.training.experiments.experiment import Experiment

        built = Experiment.build(current.load("configs/xor.yaml"), current.mesh())
        ledger = built.explain()
    current.unload()
    return whole, said, ledger


@pytest.mark.seconds
def test_trace_says_what_it_captured_and_what_to_type_next(captured):
    whole, said, _ = captured
    count = len(timeline(whole).bars)
    assert said[-2:] == [
        f"captured steps 2 to 3: {count:,} operations on 4 devices, in {whole}/trace",
        f"to see them, type: jshard timeline {whole} -o timeline.html",
    ]


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # JAX's own
def test_trace_events_are_all_that_jax_reads_of_the_same_capture(captured):
    (capture,) = captures(captured[0])
    profile = jax.profiler.ProfileData.from_file(str(capture.file()))
    stats = [(event, dict(event.stats)) for plane in profile.planes for line in plane.lines for event in line.events]
    expected = collections.Counter(
        (said["hlo_op"], said["device_ordinal"], round(event.duration_ns)) for event, said in stats if "hlo_op" in said
    )
    read = capture.read.events
    assert collections.Counter((event.op, event.device, round(event.duration)) for event in read) == expected
    assert capture.read.jax == jax.__version__


def test_trace_steps_run_alike_on_every_device(captured):
    drawn = timeline(captured[0])
    runs = collections.defaultdict(list)
    for bar in drawn.bars:
        runs[bar.lane, bar.step].append(bar.op)
    assert set(runs) == {(device, step) for device in range(4) for step in (2, 3)}
    assert len({tuple(sorted(ops)) for ops in runs.values()}) == 1
    assert {window.step for window in drawn.steps} == {2, 3}


def test_trace_collectives_are_those_of_the_ledger_with_its_signals_and_lines(captured):
    whole, _, ledger = captured
    seen = collections.Counter(
        (bar.operation.collective, bar.operation.signal, bar.line)
        for bar in timeline(whole).bars
        if bar.operation.kind == "collective"
    )
    asked = collections.Counter()
    for line in ledger.lines:
        asked[line.collective, line.signal, line.line] += 4 * 2 * line.count  # devices, steps
    assert seen == asked
    assert seen


def test_trace_names_signal_and_line_of_what_computes(captured):
    drawn = timeline(captured[0])
    dots = {(bar.operation.signal, bar.operation.phase, bar.line) for bar in drawn.bars if bar.op.startswith("dot")}
    assert {("layer1", "forward", "configs/xor.yaml:13"), ("layer2", "backward", "configs/xor.yaml:14")} <= dots
    assert drawn.title == "configs/xor.yaml"
    assert drawn.notes == ()


def test_trace_of_a_loop_of_ones_own_waits_for_what_it_started_and_gives_way_to_the_next(tmp_path):
    grow = jax.jit(lambda x: (x @ x) * 0.01)
    x = grow(jnp.ones((256, 256)))
    for first in (3, 5):
        with trace(tmp_path / "mine") as tracing:
            for number in range(first, first + 2):
                with tracing.step(number):
                    x = grow(x)
        steps = collections.Counter(event.step for event in tracing.capture.read.events)
        assert set(steps) == {first, first + 1} and len(set(steps.values())) == 1
    assert [bar.step for bar in timeline(tmp_path / "mine").bars][-1] == 6
    assert len(list((tmp_path / "mine").rglob("*.xplane.pb"))) == 1


def test_trace_loop_on_the_page_captures_its_three_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (loop,) = re.findall(r"^```python\n(with jshard.trace.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    step = jax.jit(lambda model, optimizer, x, y: model * optimizer + x * y)
    exec(loop, {"jshard": jshard, "step": step, **dict.fromkeys(("model", "optimizer", "x", "y"), jnp.ones(8))})
    assert {bar.step for bar in timeline("runs/mine").bars} == {1, 2, 3}


def test_trace_inside_another_is_one_sentence_and_the_first_goes_on(tmp_path):
    with trace(tmp_path / "a"):
        jnp.ones(3).sum()
        with pytest.raises(JShardError) as told:
            with trace(tmp_path / "b"):
                pass
    assert str(told.value) == (
        "no profile can be captured: Profile has already been started. Only one profile may be run at a time.; end the "
        "other one before"
    )
    assert timeline(tmp_path / "a").bars


def test_trace_of_nothing_and_into_no_folder_are_one_sentence_each(tmp_path):
    with pytest.raises(JShardError) as told:
        with trace(tmp_path / "idle"):
            pass
    (file,) = (tmp_path / "idle").rglob("*.xplane.pb")
    assert str(told.value) == (
        f"{file} holds no operation of a device; capture steps that compute something, by jshard trace configs/digits.yaml --trust"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(JShardError) as told:
        with trace(tmp_path / "file"):
            pass
    assert str(told.value) == (
        f"no capture can be written to {tmp_path}/file/rank0: not a directory; name another folder by -o runs/mine"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_trace_of_several_processes_has_a_capture_of_each_in_one_run(tmp_path):
    stale = tmp_path / "run/trace/rank5"
    stale.mkdir(parents=True)
    (stale / "trace.json").write_text("{}")
    ours = ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC")
    command = f"-m jshard launch -n 2 trace configs/xor.yaml --trust --steps 1 -o {tmp_path}/run"
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, timeout=200, cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ours},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = captures(tmp_path / "run")
    count = len(found[0].read.events)
    assert done.stdout.splitlines()[-2:] == [
        f"[0] captured step 2: {count} operations on 2 devices of process 0 (1 more captured their own), in {tmp_path}/run/trace",
        f"[0] to see them, type: jshard timeline {tmp_path}/run -o timeline.html",
    ]
    assert [(capture.rank, capture.processes) for capture in found] == [(0, 2), (1, 2)]
    drawn = timeline(tmp_path / "run")
    assert [lane.name for lane in drawn.lanes] == [
        "device 0 of rank 0", "device 1 of rank 0", "device 2 of rank 1", "device 3 of rank 1",
    ]  # fmt: skip
    moved = [bar for bar in drawn.bars if bar.operation.kind == "collective"]
    assert [(bar.lane, bar.operation.signal, bar.line, bar.step) for bar in moved] == [
        (device, "layer2", "configs/xor.yaml:14", 2) for device in range(4)
    ]


# -- a run that goes on --


class Run:
    """A loop in a thread, as training's, until it is told to end."""

    def __init__(self, output: Path):
        step = jax.jit(lambda x: jnp.sin(x).sum())
        self.asked = TraceRequest(lambda x: step(x).block_until_ready(), str(output), done=10)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._loop)

    def _loop(self) -> None:
        x = jnp.ones(64)
        with self.asked:
            while not self.ended.is_set():
                self.asked(x)
                time.sleep(0.002)

    def __enter__(self) -> Run:
        self.thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.ended.set()
        self.thread.join()


def until(holds: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def typed(capsys, *words: object) -> tuple[int, str]:
    status = main(["trace", *map(str, words)])
    out, err = capsys.readouterr()
    return status, (out + err).strip()


def test_trace_of_a_run_that_goes_on_captures_its_next_steps_each_time_it_is_asked(tmp_path, capsys):
    with Run(tmp_path):
        for _ in range(2):
            status, said = typed(capsys, tmp_path, "--steps", "3")
            first, last, *_ = (capture := captures(tmp_path)[0]).metadata["steps"][
                :: len(capture.metadata["steps"]) - 1
            ]
            assert (status, last - first, first > 11) == (0, 2, True)
            assert said.startswith(f"captured steps {first} to {last}: ")
    assert {bar.step for bar in timeline(tmp_path).bars} == {first, first + 1, last}
    assert sorted(each.name for each in (tmp_path / "trace").iterdir()) == ["rank0"]


def test_trace_of_a_run_that_ends_meanwhile_has_the_steps_that_there_were(tmp_path):
    (tmp_path / "trace").mkdir()
    with Run(tmp_path) as run:
        wish = {"id": "a", "steps": 10**6, "until": time.time() + 60}
        (tmp_path / "trace/wanted.json").write_text(json.dumps(wish))
        until(lambda: run.asked.begun is not None)
    assert timeline(tmp_path).bars
    assert captures(tmp_path)[0].metadata["asked"] == "a"


def test_trace_of_a_run_that_can_capture_none_says_why_and_the_run_goes_on(tmp_path, capsys):
    with Run(tmp_path) as run, trace(tmp_path / "other"):
        status, said = typed(capsys, tmp_path)
        done = run.asked.done
        until(lambda: run.asked.done > done)
    assert (status, said) == (
        2,
        f"the run in {tmp_path} made no capture: no profile can be captured: Profile has already been started. Only one "
        "profile may be run at a time.; end the other one before",
    )


def test_trace_of_a_run_leaves_a_wish_that_is_no_wish_of_its_own_alone(tmp_path):
    (tmp_path / "trace").mkdir()
    wanted = tmp_path / "trace/wanted.json"
    with Run(tmp_path) as run:
        until(lambda: run.asked.done > 20)
        for text in ("{", "[]", '{"id": "a", "steps": 3, "until": 0}'):
            wanted.write_text(text)
            time.sleep(1.5 * LOOK)
    assert run.asked.wish is None
    assert list((tmp_path / "trace").iterdir()) == [wanted]


def test_trace_of_a_run_clears_only_what_was_captured_before(tmp_path, capsys):
    for rank in (0, 1):
        own = write(tmp_path / f"trace/rank{rank}", b"")
        (own / "trace.json").write_text("{}")
    (tmp_path / "trace/notes.txt").write_text("mine")
    (tmp_path / "trace/rank2").mkdir()
    assert typed(capsys, tmp_path, "--wait", "0")[0] == 2
    assert sorted(each.name for each in (tmp_path / "trace").iterdir()) == ["notes.txt", "rank2"]


def test_trace_mistakes_are_one_sentence_each(tmp_path, capsys):
    there = f"remove it, or type: jshard trace {tmp_path}/configuration.yaml"
    goes_on = f"is for an experiment that jshard trace starts, and {tmp_path} is the folder of a run"
    told = {
        (): "jshard trace needs a configuration or the folder of a run; type: jshard trace configs/digits.yaml",
        ("configs/xor.yaml", "--steps", "0"): "jshard trace can't capture 0 steps; type: --steps 3",
        (tmp_path, "--wait", "0.2"): f"no run in {tmp_path} took a step within 0.2 s; start it, or capture another by: jshard trace {tmp_path}/configuration.yaml",
        (tmp_path, "-o", "x"): f"-o {goes_on}; {there}",
        (tmp_path, "steps=3"): f"key=value {goes_on}; {there}",
    }  # fmt: skip
    for words, sentence in told.items():
        assert typed(capsys, *words) == (2, sentence)
    assert not (tmp_path / "trace/wanted.json").exists()


def test_waiting_for_all_that_computes_leaves_out_what_was_given_away_meanwhile(monkeypatch):
    """A loop in another thread donates what is listed as alive."""
    given = jnp.arange(4.0)
    kept = jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    monkeypatch.setattr(jax, "live_arrays", lambda: [given, kept])
    settle()
    assert given.is_deleted() and not kept.is_deleted()
