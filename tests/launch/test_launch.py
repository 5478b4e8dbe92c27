"""`jshard launch` with real processes and JAX between them: the same loss, one sentence for each fault, and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jshard.hardware.host import free_port

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "tests/launch/program.py"


def start(*words: str, before: Sequence[str] = (), launched: bool = True, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [*before, sys.executable, "-m", "jshard", *(["launch"] if launched else []), *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def finished(started: subprocess.Popen[str], timeout: float = 120) -> tuple[int, list[str], list[str]]:
    out, err = started.communicate(timeout=timeout)
    return started.returncode, out.splitlines(), err.splitlines()


def on_a_host_named_by_its_address() -> list[str]:
    """Words before a command that make the name of this host lead to its address in the network, where that can be had."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return []
        name = trial.getsockname()[0]
    words = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
    return (
        words
        if shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
        else []
    )


GLOO = "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
TORN = "[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 33 peer ranks.  peer ranks. "
REST = "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 33"


def test_launch_leaves_out_what_gloo_says_though_its_threads_speak_at_once():
    said = ["one", GLOO, "", "7", GLOO + GLOO, TORN + REST, "", TORN, REST, "two", "[Gloo] Rank one"]
    status, out, _ = finished(start("-n", "1", "-m", "tests.launch.echo", *said))
    assert (status, out) == (0, [f"[0] {line}" for line in ("one", "", "7", "two", "[Gloo] Rank one")])


@pytest.mark.slow
def test_train_loses_bitwise_the_same_alone_and_in_2_and_in_4_processes(tmp_path):
    words = ["train", "tests/launch/soak.yaml", "jshard.mesh.tensor=4", "steps=20"]  # four summands have an order
    (tmp_path / "hurry").touch()
    soaked = {"SOAK_HERE": str(tmp_path)}
    started = {way: start("-n", way, *words, f"output={tmp_path}/{way}", **soaked) for way in ("2", "4")}
    started["alone"] = start(*words, f"output={tmp_path}/alone", launched=False, **soaked)
    losses = {}
    for way, each in started.items():
        status, out, err = finished(each, timeout=240)
        assert status == 0, err
        if way != "alone":
            assert [line for line in out if not line.startswith("[0] ")] == []  # the first alone speaks, and writes
        assert out[-1].removeprefix("[0] ").startswith("test accuracy ")
        lines = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        losses[way] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["alone"]) == 20
    assert losses["alone"] == losses["4"] == losses["2"]


@pytest.mark.slow
def test_a_model_by_claims_loses_bitwise_the_same_alone_and_in_4_processes(tmp_path):
    train = {
        "model": "tests.support.plain:Dense",
        "data": "tests.support.plain:data",
        "batch": 16,
        "steps": 6,
        "log": {"every": 1},
    }
    rest = {"row": "data", "match": ["**"]}
    (tmp_path / "claims.yaml").write_text(json.dumps({"jshard": {"mesh": {"data": 8}, "train": train}, "rest": rest}))
    losses = []
    for count, launched in (("4", True), ("8", False)):
        words = ["-n", count] if launched else []
        words += ["train", f"{tmp_path}/claims.yaml", f"output={tmp_path}/{count}"]
        status, _, err = finished(start(*words, launched=launched), timeout=240)
        assert status == 0, err
        lines = [json.loads(line) for line in (tmp_path / count / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.slow
def test_launch_shows_all_ranks_when_one_has_stopped_and_all_listened_on_loopback_alone():
    status, out, err = finished(
        start("-n", "4", PROGRAM, "stop", "2", before=on_a_host_named_by_its_address(), JSHARD_STEP_TIMEOUT="8")
    )
    assert status == 1
    assert err[-1].startswith("rank 2 was at fault, as rank ")
    rows = [line.split()[1:] for line in err[-7:-2]]
    assert rows[0] == [
        "rank",
        "host",
        "process",
        "alive",
        "phase",
        "step",
        "done",
        "stands",
        "in",
        "(inferred)",
    ]
    assert [row[3] for row in rows[1:]] == ["yes", "yes", "no", "yes"]
    assert [row[-1] == "<--" for row in rows[1:]] == [False, False, True, False]
    assert "rank 2 has not answered for " in err[-2]
    listens = [line.split("listens at ")[1].split() for line in out]
    assert len(listens) == 4 and all(listens)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {address for each in listens for address in each} <= loopback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "fault", "rank", "status", "sentence"),
    [
        (
            2,
            "kill",
            0,
            137,
            "rank 0 was ended by SIGKILL in step 5; all were stopped; if nobody killed it, memory may have run out",
        ),
        (2, "exit", 1, 3, "rank 1 ended with status 3 in step 5; all were stopped; its last lines begin with [1]"),
        (2, "raise", 1, 1, "rank 1 ended with status 1 in step 5; all were stopped; its last lines begin with [1]"),
        (2, "stop", 0, 1, "rank 0 was at fault, as rank "),
        (4, "sleep", 2, 1, "rank 2 "),
    ],
)
def test_launch_names_the_rank_at_fault(count, fault, rank, status, sentence):
    began = time.monotonic()
    ended, _, err = finished(start("-n", str(count), PROGRAM, fault, str(rank), JSHARD_STEP_TIMEOUT="4"))
    assert (ended, err[-1].startswith(sentence)) == (status, True), err
    assert time.monotonic() - began < 60
    if fault == "raise":
        assert err[-2] == "[1] RuntimeError: the model is broken"
    if fault == "sleep":
        assert any(line.endswith("<--") and line.split()[1] == "2" for line in err)
        assert any("rank 2 keeps the others waiting for " in line and "it was in step 5 (data)" in line for line in err)


@pytest.mark.slow
def test_launch_heeds_no_clock_on_the_wall():
    status, out, err = finished(start("-n", "4", PROGRAM, "clock", "2", JSHARD_STEP_TIMEOUT="60"))
    assert (status, err) == (0, [])
    assert sum(line.endswith("total 6.0") for line in out) == 4


@pytest.mark.slow
def test_launch_goes_on_after_a_full_disk_from_the_checkpoint_before_and_ends_at_nan(tmp_path):
    words = ["train", "tests/launch/soak.yaml", "steps=400", "checkpoint=4", f"output={tmp_path}/run"]
    started = start("-n", "2", "--restarts", "2", *words, SOAK_HERE=str(tmp_path), SOAK_PAUSE="0.05")
    out = []
    assert started.stdout is not None
    for word, file in (("saved step 8:", "full.1"), ("resumed from step ", ""), ("saved step ", "nan.1")):
        while word not in (line := started.stdout.readline()):
            assert line, started.communicate()
            out.append(line)
        if file:
            (tmp_path / file).touch()
    last = line
    status, rest, err = finished(started)
    last = [line for line in [last, *rest] if "saved step " in line][-1].split("saved step ")[1].partition(":")[0]
    assert len(err) == 6, err
    full, says, again, nan, end, no_more = err
    assert no_more == "not started again: the same fault would follow; mend it first"
    assert re.fullmatch(
        rf'\[1\] jshard.train.checkpoint \(the command line\) saves to "{tmp_path}/run/checkpoints", which can\'t save step \d+: '
        rf"file too large, and the last checkpoint is that of step \d+; make it writable, then type: jshard resume {tmp_path}/run --trust",
        full,
    )
    assert says.startswith("rank 1 ended with status 1 in step ")
    assert again == "starting all again: restart 1 of 2"
    assert re.fullmatch(
        rf"\[\d\] the loss of step \d+ is NaN, and so are inputs of its batch that rank 1 read; the last good checkpoint is that of "
        rf"step {last} \({tmp_path}/run/checkpoints/{last}\); fix what tests.launch.soaked:data returns, then type: "
        rf"jshard resume {tmp_path}/run --trust",
        nan,
    )
    assert (status, end) == (2, f"all were stopped: the reason is above, by rank {nan[1]}")


@pytest.mark.slow
def test_launch_does_not_start_again_on_a_disk_that_is_really_full(tmp_path):
    mount = f"mkdir {tmp_path}/full && mount -t tmpfs -o size=256k tmpfs {tmp_path}/full && "
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True).returncode:
        pytest.skip("needs `unshare -rm` and tmpfs, to have a disk that is full")
    before = ["unshare", "-rm", "sh", "-c", mount.replace("mkdir", "mkdir -p") + 'exec "$@"', "sh"]
    words = [
        "train",
        "tests/launch/soak.yaml",
        "steps=40",
        "checkpoint={every: 2, keep: 100}",
        f"output={tmp_path}/full/run",
    ]
    (tmp_path / "hurry").touch()
    started = start("-n", "2", "--restarts", "2", *words, before=before, SOAK_HERE=str(tmp_path))
    status, _, err = finished(started, timeout=240)
    assert (status, len(err)) == (2, 3), err
    assert re.search(r"can\'t (save step \d+|be written to): no space left on device[;,] .*make room", err[0]), err
    assert re.fullmatch(r"all were stopped: the reason is above, by rank \d", err[1])
    assert err[2] == "not started again: the same fault would follow; mend it first"


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


STANDS = "permute of blocks over stage (tests/launch/staged.yaml:15)"


@pytest.mark.slow
def test_killed_stage_is_named_and_stages_go_on_bitwise_also_on_another_number_of_them(tmp_path):
    def on(stages: int, *words: str, kills: str = "", into: str) -> list[str]:
        """In one process for each stage, where one is killed; in peace in one for all of them."""
        more = ("-n", str(stages), "--restarts", "1") if kills else ("-n", "1")
        said = [f"jshard.mesh={{stage: {stages}}}", f"output={tmp_path}/{into}"]
        variables = {"STAGED": f"SIGKILL {kills}"} if kills else {}
        status, _, err = finished(start(*more, *words, *said, **variables), timeout=240)
        assert status == 0, err
        return err

    def resume(run: str) -> tuple[str, ...]:
        return "resume", f"{tmp_path}/{run}", "--trust", "--from", "4", "steps=8"

    train = ("train", "tests/launch/staged.yaml")
    assert on(2, *train, into="two") == []
    killed, again = on(2, *train, kills="5 1", into="two-killed")
    assert killed == (
        f"rank 1 was ended by SIGKILL in step 5, and the others waited for it in {STANDS}; all were stopped; if nobody killed "
        "it, memory may have run out: type dmesg"
    )
    assert again == "starting all again: restart 1 of 1"
    assert losses(tmp_path / "two-killed") == losses(tmp_path / "two") and len(losses(tmp_path / "two")) == 6
    assert on(4, *resume("two"), into="four") == []
    killed, _ = on(4, *resume("two-killed"), kills="7 2", into="four-killed")
    assert killed.startswith(
        "rank 2 was ended by SIGKILL in step 7, and the others waited for it in permute of blocks over "
    )
    assert losses(tmp_path / "four-killed") == losses(tmp_path / "four")
    assert {step: losses(tmp_path / "four")[step] for step in (5, 6)} == pytest.approx(
        {step: losses(tmp_path / "two")[step] for step in (5, 6)}, rel=1e-5
    )


@pytest.mark.slow
def test_launch_names_the_stage_that_stands_still_and_what_the_others_wait_in(tmp_path):
    words = ["train", "tests/launch/staged.yaml", f"output={tmp_path}/run", "watchdog.step_timeout=8"]
    status, _, err = finished(start("-n", "4", *words, STAGED="SIGSTOP 5 2"))
    rows = [line for line in err if re.match(r"\[\d\] \d ", line)]
    assert (status, [line.endswith("<--") for line in rows]) == (1, [False, False, True, False]), err
    assert re.search(
        rf"rank 2 has not answered for \d+ s: it was in step \d( \(\w+\))? when it last did, and the others wait for it in {re.escape(STANDS)}; ",
        "\n".join(err),
    )
    assert err[-1].startswith("rank 2 was at fault, as rank ")


@pytest.mark.slow
def test_launched_verify_joins_two_processes_of_which_the_first_speaks_and_tells_where_only_one_is_wrong():
    words = ["--config", "tests/launch/verified.yaml", "--args", "float32[8,4]@data"]
    right, torn = (start("-n", "2", "verify", f"tests.launch.verified:{name}", *words) for name in ("right", "torn"))
    status, out, err = finished(right)
    assert (status, err, out[0]) == (0, [], "[0] EQUAL on {data: 4} and on one device: 2 arrays, all bitwise")
    assert all(line.startswith("[0] ") for line in out)
    status, out, err = finished(torn)
    assert (status, out[0]) == (1, "[0] NOT EQUAL: 1 of 2 arrays differs on {data: 4} and on one device")
    assert re.fullmatch(
        r"\[0\] on {data: 4} the difference begins in the part outside every signal \(torn\), forward: off by \S+ of the largest; another "
        "process has a copy that is off; this process has not",
        out[1],
    )
    assert err == ["rank 0 ended with status 1 before its first step; all were stopped; its last lines begin with [0]"]


@pytest.mark.slow
def test_launcher_tells_that_the_host_of_rank_0_is_gone():
    where = f"127.0.0.1:{free_port()}"
    first, other = (
        start("--coordinator", where, "--processes", "2", "--process-id", str(rank), PROGRAM, "none", "9", "4000")
        for rank in (0, 1)
    )
    assert first.stdout is not None and "listens at" in first.stdout.readline()
    began = time.monotonic()
    first.kill()  # and with it its process, as when its host goes
    first.communicate()
    status, _, err = finished(other)
    # By JAX's service, which ends the process in many words, or by gloo, whose error the process reads: whichever is first.
    assert (status, len(err)) == (1, 1), err
    assert re.fullmatch(
        rf"rank 0 is gone: nothing answers at {where} any more, and rank 1 was in step \d+; look at rank 0 and at its host, "
        "then start all of them again",
        err[0],
    )
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_last_word_of_a_slurm_job_is_on_the_rank_that_was_killed(rank, tmp_path):
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    command = [sys.executable, "-m", "jshard", "launch", PROGRAM, "kill", str(rank)]
    with (tmp_path / "job.log").open("w") as log:  # what all tasks say, as srun prints it
        tasks = [
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), **slurm, "SLURM_NTASKS": "2", "SLURM_PROCID": str(task)},
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
            for task in range(2)
        ]
        while all(task.poll() is None for task in tasks):
            time.sleep(0.05)
        for task in tasks:  # as srun --kill-on-bad-exit does when the first has ended
            task.terminate()
        ended = [task.wait(60) for task in tasks]
    said = [line for line in (tmp_path / "job.log").read_text().splitlines() if "listens at" not in line]
    assert ended[rank] == 137 and any(
        f"rank {rank} is gone: " in line or f"rank {rank} has not ans" in line for line in said
    ), said
    assert said[-1].startswith(f"rank {rank} was ended by SIGKILL in step 5; all were stopped; "), said
    assert not [line for line in said if "stack trace" in line or "stopped by SIGTERM" in line], said


@pytest.mark.slow
def test_processes_with_another_yaml_are_told_the_key():
    where = f"127.0.0.1:{free_port()}"
    words = ["train", "configs/digits.yaml", "steps=20"]
    started = [
        start("--coordinator", where, "--processes", "2", "--process-id", str(rank), *words, *more)
        for rank, more in enumerate([[], ["optimizer.learning_rate=0.1"]])
    ]
    (first, _, said), (second, *_) = map(finished, started)
    sentence = (
        "[0] rank 1 has another configuration than rank 0: jshard.train.optimizer.learning_rate is 0.1, and 0.002 at rank 0; "
        "start all of them with the same YAML and the same key=value"
    )
    assert (first, second, said) == (2, 2, [sentence, "all were stopped: the reason is above, by rank 0"])


@pytest.mark.slow
def test_processes_with_another_program_are_told_before_the_first_step():
    status, out, err = finished(
        start("-n", "2", "train", "configs/digits.yaml", "steps=20", "loss=tests.launch.other:loss")
    )
    assert status == 2
    (said,) = [line for line in err if "has another program" in line]
    assert said.startswith("[0] rank 1 has another program than rank 0: its fingerprint is ")
    assert said.endswith("; start all of them with the same code and data")
    assert not [line for line in out if "loss" in line]
