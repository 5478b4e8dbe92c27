"""What ran, told once: lines of JSON for each process, stderr as JSHARD_LOG asks, and one reader of all processes' lines."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.layouts.layout import Layout
from jshard.runs import events
from jshard.signals import active_config as current
from jshard.signals.config import load_configuration
from jshard.signals.effective_config import lines
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.train import train
from jshard.training.log_reader import Logs, read
from jshard.training.settings import Settings
from jshard.training.telemetry import log as writing
from jshard.training.telemetry.log import Log
from jshard.training.telemetry.metrics import Record
from jshard.training.telemetry.process_status import standings
from jshard.training.telemetry.progress import Bar, silent

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/watching.md").read_text()
pytestmark = pytest.mark.usefixtures("in_the_root")


@pytest.fixture
def heard():
    """What is told while a test runs."""
    told: list[tuple[str, dict]] = []
    stop = events.listen(lambda what, fields: told.append((what, dict(fields))))
    yield told
    stop()


# -- a run --


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Training XOR, which is logged."""
    before, found = Path.cwd(), tmp_path_factory.mktemp("run")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    try:
        words = ["steps=20", "log={every: 1, ran: true}", "evaluation=10", f"output={found}"]
        experiment = Experiment.build(current.load("configs/xor.yaml", words), current.mesh())
        train(experiment, Bar(20, silent()))
        (found / "ledger.json").write_text(experiment.explain().to_json())
    finally:
        sys.path.remove(str(ROOT))
        os.chdir(before)
        current.unload()
    return found


def test_log_begins_with_the_facts_of_the_run(run):
    (begin,) = read(run).ranks[0].of("begin")
    assert (begin["schema"], begin["rank"], begin["of"], begin["pid"]) == ("jshard.log/1", 0, 1, os.getpid())
    assert (begin["mesh"], begin["source"], begin["steps"], begin["batch"]) == (
        {"tensor": 4},
        "configs/xor.yaml",
        20,
        4,
    )
    assert begin["versions"]["jax"] == jax.__version__
    assert len(begin["digest"]) == 16


def test_log_has_each_collective_of_the_step_as_explain_lists_it(run):
    listed = json.loads((run / "ledger.json").read_text())
    every = read(run).ranks[0].of("program", "collective")
    assert {line["program"] for line in every} == {"the training step", "the evaluation"}
    found = [line for line in every if line["program"] == "the training step"]
    assert [line["what"] for line in found] == ["program"] + ["collective"] * len(listed["lines"])
    assert (found[0]["collectives"], found[0]["wire"]) == (listed["total"]["count"], listed["total"]["wire"])
    for line, entry in zip(found[1:], listed["lines"], strict=True):
        assert {key: line[key] for key in entry if key != "schedule"} == {
            k: v for k, v in entry.items() if k != "schedule"
        }
    assert found[1]["place"] == "configs/xor.yaml:14"


def test_log_has_a_line_for_each_step_with_the_loss_that_metrics_have(run):
    steps = read(run).ranks[0].of("step")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert [line["loss"] for line in steps] == [round(line["loss"], 6) for line in metrics if "loss" in line]
    assert all(line["seconds"] >= line["called"] > 0 and line["rss"] > 10**6 for line in steps)
    assert all(line["examples_per_second"] > 0 for line in steps[1:])


def test_log_tells_how_the_run_went_on_and_ended(run):
    last = [line for line in read(run).lines if line["what"] in ("compiled", "evaluated", "ended")]
    assert [(line["what"], line["step"]) for line in last] == [
        ("compiled", 1), ("evaluated", 10), ("evaluated", 20), ("ended", 20),
    ]  # fmt: skip
    assert last[-1]["how"] == "finished"


# -- several processes, of which one is killed --


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two processes; the second is late for each step, and then killed."""
    found = tmp_path_factory.mktemp("killed")
    words = ["train", "configs/xor.yaml", "data=tests.support.late_rows:data", "log=true", f"output={found}"]
    command = [sys.executable, "-m", "jshard", "launch", "-n", "2", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JSHARD_LOG": "info"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
    return found, done


@pytest.mark.slow
def test_log_survives_that_its_process_is_killed(killed):
    found, done = killed
    assert done.returncode == 137, done.stderr
    logs = read(found)
    assert sorted(logs.ranks) == [0, 1]
    steps = [line["step"] for line in logs.ranks[1].of("step")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 10
    assert not logs.ranks[1].of("ended")
    for rank in (0, 1):
        assert logs.ranks[rank].begin["rank"] == rank and logs.ranks[rank].begin["of"] == 2
        assert len(logs.ranks[rank].of("collective")) == 1
    order = [(line["step"], line["time"]) for line in logs.lines]
    assert order == sorted(order) and {line["rank"] for line in logs.lines if line["step"] == 5} == {0, 1}


@pytest.mark.slow
def test_top_says_which_process_was_late_and_fell_silent(killed):
    logs = read(killed[0])
    first, second = standings(logs, now=max(line["time"] for line in logs.lines) + 60)
    told = "; ".join(second.why)
    assert " s of each step for its data, the others 0.00 s" in told
    assert any(f"silent for {seconds} s" in second.why for seconds in (60, 61))
    assert not any(why.startswith("slow") for why in first.why)


@pytest.mark.slow
def test_jshard_log_tells_of_each_rank_behind_its_number(killed):
    told = killed[1].stderr.splitlines()
    for rank in (0, 1):
        assert any(line.startswith(f"[{rank}] info: rank {rank} of 2 begins: configs/xor.yaml, mesh") for line in told)
        assert any(line.startswith(f"[{rank}] info: the training step asks for 1 collective, ") for line in told)


# -- a loop of one's own --


class Late:
    """A loss that is there when the test says so."""

    def __init__(self, value: float):
        self.value, self.there = value, False

    def is_ready(self) -> bool:
        return self.there

    def __float__(self) -> float:
        return self.value


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rank-0000.jsonl").read_text().splitlines()]


def until_written(folder: Path, *expected: str) -> None:
    """Wait for the thread of a log, which alone takes what was heard: a second one would take lines in another order."""
    for _ in range(2000):
        if [line["what"] for line in written(folder)] == [*expected]:
            return
        time.sleep(0.01)
    assert [line["what"] for line in written(folder)] == [*expected]


def test_log_of_a_loop_of_ones_own_does_not_wait_for_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "WAITS", 0.0)
    with jshard.log(tmp_path) as log:
        late = Late(0.5)
        log.step(1, loss=late, examples=8)
        log.step(2, loss=float("nan"))
        until_written(tmp_path, "begin", "waits")
        late.there = True
        until_written(tmp_path, "begin", "waits", "step", "step")
        monkeypatch.setattr(writing, "WAITS", 60.0)
        log.step(3, loss=Late(0.1), note="mine")
    begin, waits, first, second, ended, third = written(tmp_path)
    assert (waits["step"], first["step"], first["loss"], second["loss"]) == (1, 1, 0.5, "nan")
    assert first["examples_per_second"] > 0 and first["mono"] < waits["mono"]
    assert (third["step"], third["loss"], third["done"], third["note"]) == (3, None, False, "mine")
    assert (begin["source"], ended["step"], ended["how"]) == ("no configuration", 3, "finished")


def test_log_of_a_loop_of_ones_own_lists_its_program_and_what_is_moved(tmp_path):
    jshard.load({"jshard": {"mesh": {"data": 8}}, "rows": {"row": "data"}})
    x = jshard.signal.tensor(np.ones((8, 2), np.float32), name="rows")
    with pytest.raises(RuntimeError), jshard.log(tmp_path) as log:
        log.program(jshard.signal("rows")(jshard.sum), x, name="total", backward=False)
        jshard.place(x, Layout(jshard.mesh(), None, None))
        raise RuntimeError("no\nmore")
    program, collective, moved, ended = written(tmp_path)[1:]
    assert (program["program"], program["collectives"]) == ("total", 1)
    assert (collective["collective"], collective["mesh_axes"], collective["place"]) == (
        "all_reduce",
        ["data"],
        "<dict>",
    )
    assert (moved["op_name"], moved["moves"], moved["bytes"]) == ("redistribute", ["all_gather over data"], 64)
    assert ended["how"] == "RuntimeError: no"


def test_log_goes_on_behind_a_half_line_and_else_begins_anew(tmp_path):
    (tmp_path / "rank-0000.jsonl").write_text('{"what": "begin", "wall": 1, "mono": 1}\n{"what": "st')
    (tmp_path / "rank-0001.jsonl").write_text("of an earlier run of two\n")
    with jshard.log(tmp_path, goes_on=True) as log:
        log.step(1)
    logs = Logs(tmp_path).read()
    assert [(line["what"], line["attempt"]) for line in logs.ranks[0].lines] == [
        ("begin", 1), ("begin", 2), ("ended", 2), ("step", 2),
    ]  # fmt: skip
    assert logs.ranks[0].cut == ["rank-0000.jsonl has a line that was cut off or changed; it is left out"]
    with jshard.log(tmp_path):
        pass
    assert [line["what"] for line in written(tmp_path)] == ["begin", "ended"]
    assert not (tmp_path / "rank-0001.jsonl").exists()


def test_log_that_fills_the_disk_ends_and_the_program_does_not(tmp_path, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "rank-0000.jsonl"
    path.symlink_to("/dev/full")
    with jshard.log(tmp_path) as log:
        log.step(1)
        log._drain()
        log.step(2)
    told = f"the log {path} ends here, as it can't be written to: no space left on device\n"
    assert capsys.readouterr().err == told


def test_log_in_a_folder_that_can_not_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JShardError) as told:
        jshard.log(tmp_path / "file" / "log")
    assert str(told.value) == (
        f"jshard.log writes to {tmp_path}/file/log, which can't be written to: not a directory; name another folder"
    )


# -- the page --


def test_page_names_every_event():
    listed = re.findall(r"^\| (`.*?) \|", PAGE.partition("| `what` |")[2].partition("\n\n")[0], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == set(events.WORDS) - {"config"}


def test_page_shows_python_that_runs(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(run)
    loop, reader, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(loop, {"jshard": jshard, "step": lambda *args: 0.5, **dict.fromkeys(("model", "optimizer", "x", "y"))})
    assert len(written(tmp_path / "runs/mine/log")) == 1 + 1 + 100 + 1
    exec(reader, {})
    assert capsys.readouterr().out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("said", re.findall(r"^\| `(log: .*?)` \|", PAGE, re.MULTILINE))
def test_page_shows_keys_that_load(said):
    assert load_configuration({"jshard": {"train": yaml.safe_load(said)}}).train["log"]


# -- what is moved --


def test_moved_tells_of_each_array_that_goes_elsewhere_and_of_no_other(heard, mesh):
    eight = mesh(data=2, tensor=4)
    rows, columns = Layout(eight, "data", None), Layout(eight, None, "tensor")
    x = jshard.scatter(np.ones((8, 8), np.float32), rows)
    y = jshard.place(x, columns)
    assert jshard.place(y, columns) is y
    jax.jit(lambda x: jshard.place(x, columns))(x)
    jshard.gather(y)
    jshard.place({"y": y}, jax.devices()[:2])
    jshard.place(jax.random.split(jax.random.key(0), 8), Layout(eight, "data"))
    on = "{data: 2, tensor: 4}"
    assert [(told["op_name"], told["from"], told["to"], told["moves"]) for what, told in heard if what == "moved"] == [
        ("scatter", "the host of process 0", f"[data, whole] on {on}", []),
        (
            "redistribute",
            f"[data, whole] on {on}",
            f"[whole, tensor] on {on}",
            ["slice over tensor", "all_gather over data"],
        ),
        ("gather", f"[whole, tensor] on {on}", "the host of every process", []),
        ("move", f"[whole, tensor] on {on}", "[whole, tensor] on {data: 1, tensor: 2}, devices 0 to 1", []),
        ("redistribute", "device 0", f"[data] on {on}", []),
    ]
    assert events.WORDS["moved"][1](heard[1][1]) == (
        f"redistribute  float32[8, 8], 256 B, from [data, whole] on {on} to [whole, tensor] on {on} by slice over tensor, "
        "all_gather over data"
    )


def test_moved_tells_worker_sets_by_number_and_the_signal_that_asks(heard):
    jshard.load(
        {
            "jshard": {"mesh": {"workers": 4}},
            "a": {"shard": {"axis": 1, "workers": [0, 1]}, "backward": "b"},
            "b": {"shard": {"axis": 1, "workers": [2, 3]}},
        }
    )
    with jshard.signal("a"):
        layer = jshard.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    x = jshard.signal.tensor(jshard.signal.tensor(np.ones((2, 4), np.float32), name="b"), name="a")
    heard[:] = [each for each in heard if each[0] == "moved"]
    assert [(told["by"], told["from_devices"], told["to_devices"]) for _, told in heard] == [
        ('signal "b" (<dict>)', None, [2, 3]),
        ('signal "a" (<dict>)', [2, 3], [0, 1]),
    ]
    assert events.WORDS["moved"][1](heard[1][1]) == (
        'redistribute  signal "a" (<dict>)  float32[2, 4], 32 B, from [whole, workers] on {workers: 2}, devices 2 to 3 to '
        "[whole, workers] on {workers: 2}, devices 0 to 1"
    )
    heard.clear()
    jax.grad(lambda x: layer(x).sum())(x)
    forward = ('signal "a" (<dict>)', [0, 1], [0, 1])  # x is made whole
    backward = [('signal "b" (<dict>)', source, [2, 3]) for source in ([0], [0, 1], [0, 1])]  # cotangent, x and kernel
    assert [(told["by"], told["from_devices"], told["to_devices"]) for what, told in heard if what == "moved"] == [
        forward, *backward
    ]  # fmt: skip


# -- JSHARD_LOG --


def test_jshard_log_shows_what_it_asks_for(capsys):
    show = events.listener({"JSHARD_LOG": "info, collectives"})
    assert show is not None
    show("saved", {"step": 7, "folder": "runs/mine"})
    show("config", {"place": "a.yaml:1", "key": "layer1.row", "value": "data"})
    show("step", {"step": 8})
    line = {"place": None, "signal": "layer1", "phase": "forward", "collective": "all_reduce", "mesh_axes": ["data"]}
    line |= {"group": 2, "count": 3, "count_known": False, "payload": 1024, "dtype": "float32", "via": "remat"}
    show("collective", {"program": "step", **line})
    assert capsys.readouterr().err.splitlines() == [
        "info: has saved step 7 in runs/mine",
        "collectives: step: -  layer1  forward  all_reduce  over data (2)  ? x 3 x 1,024 B  float32  (remat)",
    ]


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"JAX_PROCESS_ID": "0"}, True),
        ({"JAX_PROCESS_ID": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
        ({"JAX_PROCESS_ID": "1", "JSHARD_LAUNCH_STATUS": "5"}, True),
    ],
)
def test_jshard_log_is_told_by_the_first_rank_or_by_all_behind_their_numbers(environment, speaks):
    assert (events.listener({"JSHARD_LOG": "info", **environment}) is not None) == speaks
    assert events.listener(environment) is None


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("info,colectives", '"colectives" is none of info, config, collectives; did you mean "collectives"?'),
        ("1", '"1" is none of info, config, collectives; write JSHARD_LOG=info,config,collectives, or some of them'),
    ],
)
def test_jshard_log_with_an_unknown_word_is_one_sentence(said, sentence):
    with pytest.raises(JShardError) as told:
        events.listener({"JSHARD_LOG": said})
    assert str(told.value) == f'JSHARD_LOG is "{said}", and {sentence}'


def test_jshard_log_with_an_unknown_word_ends_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "jshard", "schema"],
        capture_output=True,
        text=True,
        env={**os.environ, "JSHARD_LOG": "x"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('JSHARD_LOG is "x", and "x" is none of info, config, collectives; ')


def test_configuration_is_told_key_by_key_with_the_line_of_each(heard):
    jshard.load(
        "configs/digits.yaml",
        ["layer1.dtype.param=bfloat16", "layer1.expect.all_reduce=1", "layer2.store.optimizer=data"],
    )
    told = [(fields["place"], fields["key"], fields["value"]) for what, fields in heard if what == "config"]
    assert told[:3] == [
        ("configs/digits.yaml:4", "jshard.mesh.data", "2"),
        ("configs/digits.yaml:4", "jshard.mesh.tensor", "4"),
        ("configs/digits.yaml:6", "jshard.train.model.path", "examples.digits:Model"),
    ]
    assert told[-8:] == [
        ("configs/digits.yaml:15", "layer1.row", "data"),
        ("configs/digits.yaml:15", "layer1.column", "tensor"),
        ("the command line", "layer1.dtype.param", "bfloat16"),
        ("the command line", "layer1.expect.all_reduce", "1"),
        ("configs/digits.yaml:16", "layer2.row", "data"),
        ("configs/digits.yaml:16", "layer2.reduction", "tensor"),
        ("the command line", "layer2.store.optimizer", "data"),
        ("configs/digits.yaml:17", "objective.row", "data"),
    ]
    assert list(lines(load_configuration({"a": {}}))) == [(load_configuration({"a": {}}).signals["a"].place, "a", "{}")]


# -- the keys --


@pytest.mark.parametrize(
    ("said", "every", "folder", "board"),
    [
        ({}, 100, None, False),
        ({"log": True}, 100, "runs/x/log", False),
        ({"log": False}, 100, None, False),
        ({"log": {"every": 5}}, 5, None, False),
        ({"log": {"every": 5, "ran": True, "tensorboard": True}}, 5, "runs/x/log", True),
        ({"log": {"folder": "logs"}}, 100, "logs", False),
        ({"log": {"folder": "logs", "ran": False}}, 100, None, False),
    ],
)
def test_log_keys_say_what_is_written_where(said, every, folder, board):
    asked = Settings(load_configuration({"jshard": {"train": {"output": "runs/x", **said}}}))
    assert (asked.table("log").get("every", 100), asked.ran(), asked.tensorboard()) == (
        every,
        folder and Path(folder),
        board,
    )


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (True, "log (<dict>) has no folder to write to; write output: runs/mine beside it, or folder: in it"),
        ({"tensorboard": True}, "log.tensorboard (<dict>) has no folder to write to; write output: runs/mine"),
    ],
)
def test_log_without_a_folder_is_told(said, sentence):
    asked = Settings(load_configuration({"jshard": {"train": {"log": said}}}))
    with pytest.raises(JShardError) as told:
        print(asked.ran(), asked.tensorboard())
    assert str(told.value) == f"jshard.train.{sentence}"


# -- TensorBoard --


def board(proto: Any, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of the newest file of a folder: records of length, checksum, event, checksum."""
    found: dict[str, list[tuple[int, float]]] = {}
    read = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).read_bytes()
    while read:
        (size,) = struct.unpack("<Q", read[:8])
        event, read = proto.Event.FromString(read[12 : 12 + size]), read[16 + size :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_record_writes_figures_for_tensorboard(tmp_path, extra):
    proto = extra("tensorboardX.proto.event_pb2")
    loaded = load_configuration({"jshard": {"train": {"output": str(tmp_path), "log": {"tensorboard": True}}}})
    record = Record(str(tmp_path), loaded, tensorboard=True)
    record.write(step=10, loss=0.5, examples_per_second=100)
    record.write(step=20, loss=0.25)
    record.close()
    assert board(proto, tmp_path / "tensorboard") == {
        "loss": [(10, 0.5), (20, 0.25)],
        "examples_per_second": [(10, 100.0)],
    }
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_record_for_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    loaded = load_configuration({"jshard": {"train": {"output": str(tmp_path), "log": {"tensorboard": True}}}})
    with pytest.raises(JShardError) as told:
        Record(str(tmp_path), loaded, tensorboard=True)
    assert str(told.value) == (
        "jshard.train.log.tensorboard (<dict>) is true, and tensorboardX, which writes for it, is not installed; "
        'type: pip install "jshard[tensorboard]"'
    )


def test_log_reads_the_loss_of_an_array_and_tells_of_one_that_failed(tmp_path):
    class Failed:
        def __float__(self) -> float:
            raise RuntimeError("a device is gone\nand more")

    assert writing._loss(jnp.float32(0.5)) == {"loss": 0.5}
    assert writing._loss(Failed()) == {"loss": None, "fault": "RuntimeError: a device is gone"}
    log = Log(tmp_path, label="it", goes_on=False)
    log.close()
    log.close()
