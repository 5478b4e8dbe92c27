"""`jshard top` and what it reads: the files of all processes as one, in order, whatever has become of them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jshard.cli import main
from jshard.errors import JShardError
from jshard.training import log_reader as merged
from jshard.training.log_reader import Logs, folder_of, path_of, read
from jshard.training.telemetry.process_status import standings

ROOT = Path(__file__).parents[2]


def begin(rank: int, of: int = 2, *, wall: float = 1000.0, mono: float = 0.0) -> dict[str, Any]:
    facts = {"rank": rank, "of": of, "host": f"node{rank}", "pid": 100 + rank, "steps": 30}
    return {"what": "begin", "wall": wall, "mono": mono, **facts}


def steps(
    last: int, *, pace: float = 1.0, zero: float = 1000.0, start: float = 0.0, **more: Any
) -> list[dict[str, Any]]:
    return [
        {"what": "step", "wall": zero + start + n * pace, "mono": start + n * pace, "step": n, "seconds": pace,
         "loss": 1 / n, "rss": 1 << 20, **more}
        for n in range(1, last + 1)
    ]  # fmt: skip


def ended(mono: float, how: str = "finished") -> dict[str, Any]:
    return {"what": "ended", "wall": 1000 + mono, "mono": mono, "step": 30, "how": how}


def put(folder: Path, rank: int, *lines: dict[str, Any], half: str = "") -> Path:
    path = path_of(folder / "log", rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + half)
    return path


# -- the reader --


def test_lines_of_all_ranks_are_in_the_order_of_steps_and_then_of_time(tmp_path):
    """The clock of the second host is ten seconds behind, and has not stood at zero when it began."""
    put(tmp_path, 0, begin(0), *steps(3))
    put(tmp_path, 1, begin(1, wall=990.5, mono=7000), *steps(3, zero=-6009.5, start=7000))
    found = [(line["step"], line["rank"], line["time"]) for line in read(tmp_path).lines if line["what"] == "step"]
    assert found == [(1, 1, 991.5), (1, 0, 1001.0), (2, 1, 992.5), (2, 0, 1002.0), (3, 1, 993.5), (3, 0, 1003.0)]


def test_half_and_changed_lines_are_left_out_and_told(tmp_path):
    path = put(tmp_path, 0, begin(0, 1), *steps(2), half='{"what": "step", "wa')
    logs = read(tmp_path)
    assert [line["step"] for line in logs.lines] == [0, 1, 2]
    assert logs.faults == ["the last line of rank-0000.jsonl is incomplete: its process was killed, or is writing"]
    with path.open("a") as file:  # it was being written: the rest comes
        file.write('ll": 1003, "mono": 3, "step": 3, "seconds": 1}\n\xff[1]\n{"what": 3}\n{}\nnull\n\n')
    logs.read()
    assert [line["step"] for line in logs.lines] == [0, 1, 2, 3]
    assert logs.faults == ["rank-0000.jsonl has a line that was cut off or changed; it is left out"]


def test_rank_without_a_file_is_told(tmp_path):
    put(tmp_path, 1, begin(1, 3), *steps(2))
    (tmp_path / "log" / "rank-x.jsonl").write_text("not ours")
    logs = read(tmp_path)
    assert logs.faults == ["rank 0 has no rank-0000.jsonl", "rank 2 has no rank-0002.jsonl"]
    assert [(row.rank, row.state) for row in standings(logs, 1003.0)] == [(0, "no log"), (1, "running"), (2, "no log")]


@pytest.mark.parametrize("jump", [3600.0, -86400.0])
def test_clock_that_jumps_is_told_and_put_right(tmp_path, jump):
    lines = steps(4)
    for line in lines[2:]:
        line["wall"] += jump
    put(tmp_path, 0, begin(0, 1), *lines)
    logs = read(tmp_path)
    assert [line["time"] for line in logs.lines] == [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
    assert logs.faults == [f"the clock of rank 0 jumped by {jump:+,.0f} s; its times are corrected"]
    assert standings(logs, 1005.0 + jump)[0].seen == 1.0


def test_attempts_follow_each_other_though_they_do_the_same_steps(tmp_path):
    put(tmp_path, 0, begin(0, 1), *steps(4), begin(0, 1, wall=1010, mono=10), *steps(2, start=10))
    logs = read(tmp_path)
    assert [(line["attempt"], line["step"]) for line in logs.lines if line["what"] == "step"] == [
        (1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2),
    ]  # fmt: skip
    assert standings(logs, 1012.0)[0].step == 2


def test_run_that_begins_anew_in_the_same_folder_is_read_anew(tmp_path):
    put(tmp_path, 0, begin(0, 1), *steps(9))
    logs = read(tmp_path)
    put(tmp_path, 0, begin(0, 1, wall=2000), *steps(1, zero=2000))
    assert [line["time"] for line in logs.read().lines] == [2000.0, 2001.0]


def test_long_file_is_read_at_its_begin_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(merged, "HEAD", 400)
    monkeypatch.setattr(merged, "TAIL", 1500)
    put(tmp_path, 0, begin(0, 1), *steps(500))
    logs = Logs(folder_of(tmp_path), full=False).read()
    assert (logs.ranks[0].begin["host"], logs.faults) == ("node0", [])
    found = [line["step"] for line in logs.ranks[0].of("step")]
    assert found[0] == 1 and found[-8:] == list(range(493, 501)) and len(found) < 30
    assert len(read(tmp_path).lines) == 501


# -- who is a straggler --


def why(tmp_path: Path, now: float) -> list[tuple[str, ...]]:
    return [row.why for row in standings(read(tmp_path), now)]


def test_straggler_is_told_by_the_word_why(tmp_path):
    put(tmp_path, 0, begin(0, 4), *steps(30))
    put(tmp_path, 1, begin(1, 4), *steps(14, pace=2.1))
    put(tmp_path, 2, begin(2, 4), *steps(30))
    put(tmp_path, 3, begin(3, 4), *steps(5, pace=1.0))
    assert why(tmp_path, 1030.0) == [
        (),
        ("slow: 2.1x the median step of the others",),
        (),
        ("silent for 25 s", "25 steps behind"),
    ]


def test_straggler_that_others_wait_for_is_told_though_all_do_as_many_steps(tmp_path):
    put(tmp_path, 0, begin(0), *steps(5, fed=0.001))
    put(tmp_path, 1, begin(1), *steps(5, fed=0.9))
    assert why(tmp_path, 1006.0) == [(), ("slow: waits 0.90 s of each step for its data, the others 0.00 s",)]


def test_process_that_compiles_or_has_ended_is_no_straggler(tmp_path):
    put(tmp_path, 0, begin(0, 3))
    put(tmp_path, 1, begin(1, 3), *steps(30), ended(30.0))
    put(tmp_path, 2, begin(2, 3), *steps(3), ended(3.0, "RuntimeError: no"))
    rows = standings(read(tmp_path), 1600.0)
    assert [row.state for row in rows] == ["compiling", "ended: finished", "ended: RuntimeError: no"]
    assert [row.why for row in rows] == [("30 steps behind",), (), ("ended before the others",)]


# -- the command --


def typed(capsys, *words: str) -> tuple[int, list[str], list[str]]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, [line.rstrip() for line in out.splitlines()], err.splitlines()


def finished(folder: Path) -> str:
    put(folder, 0, begin(0), *steps(30), ended(30.0))
    put(folder, 1, begin(1), *steps(30, device_memory=5 << 30), ended(30.5), half="{")
    return str(folder)


def test_top_prints_one_table_where_nobody_watches(capsys, tmp_path):
    status, out, err = typed(capsys, "top", finished(tmp_path))
    assert (status, err) == (0, [])
    told = [line.split() for line in out if line]
    assert told[1] == "rank host step steps/s loss memory on device seen state".split()
    assert told[3][:10] == ["0", "node0", "30/30", "1.0", "0.0333", "1.00", "MiB", "-", *told[3][8:10]]
    assert told[4][:9] == ["1", "node1", "30/30", "1.0", "0.0333", "1.00", "MiB", "5.00", "GiB"]
    assert out[-1] == "the last line of rank-0001.jsonl is incomplete: its process was killed, or is writing"
    assert all(line.endswith("ended: finished") for line in out if "node" in line)
    assert typed(capsys, "top", f"{tmp_path}/log", "--once")[0] == 0


def test_top_has_the_figures_of_a_run_of_tokens(capsys, tmp_path):
    put(tmp_path, 0, {**begin(0), "tokens": 2048, "likelihood": True}, *steps(30, pace=0.5, seconds_at_peak=0.2))
    put(tmp_path, 1, {**begin(1), "tokens": 2048, "likelihood": False})
    _, out, _ = typed(capsys, "top", str(tmp_path))
    told = [line.split() for line in out if line]
    assert told[1][3:9] == "steps/s loss perplexity tokens/s of peak".split()
    assert told[3][3:8] == ["2.0", "0.0333", "1.034", "4,096", "40.0%"]
    assert told[4][2:8] == ["0/30", "-", "-", "-", "-", "-"]


def test_top_prints_json(capsys, tmp_path):
    status, out, _ = typed(capsys, "top", finished(tmp_path), "--json")
    told = json.loads("\n".join(out))
    assert (status, told["schema"], told["run"], len(told["notes"])) == (0, "jshard.top/1", str(tmp_path), 1)
    first = told["ranks"][0]
    assert (first["rank"], first["host"], first["step"], first["state"], first["why"]) == (
        0,
        "node0",
        30,
        "ended: finished",
        [],
    )


def test_top_on_a_terminal_is_drawn_until_all_have_ended(tmp_path):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "jshard", "top", finished(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(words, stdout=theirs, cwd=ROOT, env=environment) as started:
        assert started.wait(60) == 0
    os.close(theirs)
    told = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "node1" in told and "rank-0001.jsonl is incomplete" in told


def test_top_of_another_folder_is_one_sentence(capsys, tmp_path):
    nowhere = f"{tmp_path}/nowhere"
    hint = "type: jshard top and the output folder of a run"
    told = f"there is no folder {nowhere}; {hint}"
    assert typed(capsys, "top", nowhere) == (2, [], [told])
    told = f"{tmp_path} holds no log of a run; train with log=true"
    assert typed(capsys, "top", str(tmp_path)) == (2, [], [told])
    assert typed(capsys, "top") == (
        2, [], ["jshard top: the following arguments are required: RUN; type: jshard top --help"],
    )  # fmt: skip


def test_top_finds_the_folder_that_the_configuration_names(tmp_path):
    put(tmp_path / "elsewhere", 0, begin(0, 1))
    (tmp_path / "configuration.yaml").write_text(f"jshard: {{train: {{log: {{folder: {tmp_path}/elsewhere/log}}}}}}\n")
    assert folder_of(tmp_path) == tmp_path / "elsewhere" / "log"
    (tmp_path / "configuration.yaml").write_text("jshard: {train: {log: true}}\n")
    with pytest.raises(JShardError):
        folder_of(tmp_path)


@pytest.mark.usefixtures("fresh")
def test_top_needs_no_jax(tmp_path):
    program = "import sys\nfrom jshard.cli import main\nmain(sys.argv[1:])\nprint({'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program, "top", finished(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
