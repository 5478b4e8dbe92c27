"""Processes are started, read and ended together. The programs here use no JAX."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jshard.launch import supervisor
from jshard.launch.supervisor import Supervisor, fault_of

ROOT = Path(__file__).parent.parent.parent
RANK = "import os, signal, sys, time; rank = int(os.environ['JAX_PROCESS_ID'])\n"


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`launch(program, "-n", "2")` starts `jshard launch` with this program."""

    def start(program: str, *words: str) -> subprocess.Popen[str]:
        script = tmp_path / "program.py"
        script.write_text(RANK + program)
        command = [sys.executable, "-m", "jshard", "launch", *words, str(script), "word", "--option", "3"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", "HERE": str(tmp_path)}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    return start


def finished(started: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    try:
        out, err = started.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGABRT)  # it says where each of its threads stands
        pytest.fail("it did not end:\n" + "\n".join(started.communicate(timeout=10)))
    return started.returncode, sorted(out.splitlines()), err.splitlines()


def wait_for(paths: list[Path]) -> list[int]:
    """The process ids that are written there, once they are."""
    deadline = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_launch_puts_the_rank_before_each_line_hands_words_on_and_tells_who_never_joined(launch, tmp_path):
    program = "print(rank, sys.argv[1:], os.environ['JAX_NUM_PROCESSES']); print('to stderr', file=sys.stderr)"
    status, out, err = finished(launch(program, "-n", "2"))
    assert (status, sorted(err[:2])) == (0, ["[0] to stderr", "[1] to stderr"])
    assert err[2:] == [
        f"no process of {tmp_path}/program.py has called jshard.init(), so that each works alone; call it before JAX does "
        "anything"
    ]
    assert out == [f"[{rank}] {rank} ['word', '--option', '3'] 2" for rank in (0, 1)]


def test_launch_ends_as_the_first_that_failed_and_stops_the_others(launch):
    program = "rank == 1 and (print('why', file=sys.stderr), time.sleep(0.3), sys.exit(7)); time.sleep(60)"
    began = time.monotonic()
    status, _, err = finished(launch(program, "-n", "3"))
    said = "rank 1 ended with status 7 before its first step; all were stopped; its last lines begin with [1]"
    assert (status, err) == (7, ["[1] why", said])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGKILL, "if nobody killed it, memory may have run out: type dmesg"),
        (signal.SIGTERM, "its last lines begin with [0]"),
    ],
)
def test_launch_names_the_signal_and_the_step_that_it_came_in(launch, number, end):
    program = """
from jshard.launch.heartbeat import Pulse
pulse = Pulse()
pulse.stands("all_reduce of loss")
for step in range(1, 10):
    pulse.at("step", step)
    if rank == 0 and step == 7:
        os.kill(os.getpid(), NUMBER)
time.sleep(60)
"""
    started = launch(program.replace("NUMBER", str(int(number))), "-n", "2")  # which has no time for a beat
    status, _, err = finished(started)
    said = f"rank 0 was ended by {number.name} in step 7, and the others waited for it in all_reduce of loss; all were stopped; "
    assert (status, err) == (128 + number, [said + end])


def test_launch_leaves_out_what_the_others_say_of_the_fault(launch):
    program = """
own = f"{os.environ['HERE']}/pid"
if rank == 0:
    open(own, "w").write(str(os.getpid()))
    sys.exit(3)
while not (os.path.exists(own) and open(own).read()) or os.path.exists(f"/proc/{open(own).read()}"):
    time.sleep(0.001)
print("the other is gone", file=sys.stderr)
sys.exit(4)
"""
    status, _, err = finished(launch(program, "-n", "2"))
    assert (status, len(err)) == (3, 1)


def test_launch_starts_all_again_as_often_as_asked(launch):
    program = "attempt = os.environ.get('JSHARD_RESTART', '0'); print('attempt', attempt); sys.exit(9 if attempt < '2' else 0)"
    status, out, err = finished(launch(program, "-n", "1", "--restarts", "3"))
    assert (status, out) == (0, [f"[0] attempt {attempt}" for attempt in range(3)])
    assert err[1::2] == ["starting all again: restart 1 of 3", "starting all again: restart 2 of 3"]


NO_MORE = "not started again: the same fault would follow; mend it first"


def test_launch_does_not_repeat_a_mistake(launch):
    status, out, err = finished(launch("print('once'); sys.exit(2)", "-n", "1", "--restarts", "3"))
    assert (status, out, err[1:]) == (2, ["[0] once"], [NO_MORE])


@pytest.mark.parametrize(("code", "attempts"), [("ENOSPC", 1), ("EDQUOT", 1), ("EIO", 3)])
def test_launch_does_not_start_again_on_a_full_disk_and_says_why(launch, code, attempts):
    program = """
import errno
from jshard.errors import refused
from jshard.launch.initialize import fail, pulse
pulse().at("step", 3)
try:
    with refused("the run can't save", hint="make room"):
        raise OSError(errno.CODE, os.strerror(errno.CODE))
except ValueError as error:
    fail(error)
"""
    status, _, err = finished(launch(program.replace("CODE", code), "-n", "1", "--restarts", "2"))
    why = f"[0] the run can't save: {os.strerror(getattr(errno, code)).lower()}; make room"
    assert err.count(why) == attempts
    if attempts == 1:
        assert (status, err) == (2, [why, "all were stopped: the reason is above, by rank 0", NO_MORE])
    else:
        assert (status, NO_MORE in err) == (1, False)


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_launch_that_is_stopped_stops_all_and_their_children(launch, tmp_path, number, status, said):
    program = """
import subprocess
child = subprocess.Popen(["sleep", "300"])
open(f"{os.environ['HERE']}/{rank}", "w").write(str(os.getpid()))
open(f"{os.environ['HERE']}/child{rank}", "w").write(str(child.pid))
time.sleep(300)
"""
    started = launch(program, "-n", "2")
    pids = wait_for([tmp_path / name for name in ("0", "1", "child0", "child1")])
    started.send_signal(number)
    assert finished(started) == (status, [], [said])
    assert gone(pids)


def test_launch_kills_what_does_not_hear(launch, tmp_path):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{os.environ['HERE']}/{rank}", "w").write(str(os.getpid()))
time.sleep(300)
"""
    started = launch(program, "-n", "2", "--grace", "0.5")
    pids = wait_for([tmp_path / "0", tmp_path / "1"])
    started.terminate()
    assert finished(started)[0] == 143
    assert gone(pids)


def test_launch_lets_all_save_when_one_is_preempted(launch):
    program = "time.sleep(0.2 if rank == 1 else 1.0); print('saved', rank); sys.exit(143)"
    status, out, err = finished(launch(program, "-n", "2"))
    assert (status, out) == (143, ["[0] saved 0", "[1] saved 1"])
    assert err == ["all were stopped: rank 1 received SIGTERM, or the notice of one, before its first step"]


def test_launch_draws_one_bar_on_a_terminal_and_ends_by_ctrl_c(tmp_path):
    (tmp_path / "program.py").write_text(
        RANK
        + """
from jshard.launch.heartbeat import Pulse
pulse = Pulse()
pulse.of = 9
for step in range(1, 10):
    pulse.at("step", step)
    pulse.done, pulse.says = step, f"loss {step}"
    pulse.tell()
    time.sleep(0.05)
print("all done", os.environ["JSHARD_LAUNCH_BAR"])
time.sleep(300)
"""
    )
    terminal, other = os.openpty()
    owns = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    launch = [sys.executable, "-m", "jshard", "launch", "-n", "2", str(tmp_path / "program.py")]
    started = subprocess.Popen(
        [sys.executable, "-c", owns, *launch],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"},
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    drawn = b""
    while drawn.count(b"all done 1") < 2 or b"9/9" not in drawn:
        drawn += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    try:
        while got := os.read(terminal, 65536):
            drawn += got
    except OSError:  # nobody has the terminal any more
        pass
    os.close(terminal)
    assert started.wait(30) == 130
    shown = [line.rpartition("\x1b[2K")[2] for line in drawn.decode().replace("\r", "").split("\n")]
    shown = [line for line in (re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", line) for line in shown) if line]
    assert sorted(shown[:2]) == ["[0] all done 1", "[1] all done 1"]
    assert re.fullmatch(r"step 9/9 \S+ loss 9 0:00:00", shown[2]) and shown[3:] == ["stopped"], shown


def test_launch_that_is_killed_takes_its_processes_along(launch, tmp_path):
    program = 'open(f"{os.environ[\'HERE\']}/{rank}", "w").write(str(os.getpid())); time.sleep(300)'
    started = launch(program, "-n", "2")
    pids = wait_for([tmp_path / "0", tmp_path / "1"])
    started.kill()
    started.communicate()
    assert gone(pids)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["train", "configs/digits.yaml"],
            "jshard launch does not know how many processes to start; type: jshard launch -n 4, or --coordinator host:port "
            "--processes 16 --process-id 3 on each host",
        ),
        (
            ["-n", "4"],
            "jshard launch names no program; type: jshard launch -n 4 train configs/digits.yaml, or a script",
        ),
        (["-n", "0", "train", "x"], "jshard launch can't start 0 processes; type: jshard launch -n 4"),
        (["-n", "2", "gone.py"], 'there is no file "gone.py" to launch; start in the folder of the file'),
        (
            ["-n", "2", "trian", "x"],
            '"trian" is neither a script nor a command for jshard launch; type: jshard launch -n 4 train',
        ),
        (
            ["-n", "3", "python3.12", "x.py", "--name", "two words"],
            "jshard launch adds \"python3.12\" by itself; type: jshard launch -n 3 x.py --name 'two words'",
        ),
        (
            ["--coordinator", "a:1", "train", "x"],
            "jshard launch has no --processes and no --process-id; type: jshard launch --coordinator host:port --processes "
            "16 --process-id 3",
        ),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process-id", "2", "train", "x"],
            "jshard launch says that this is process 2 of 2; number the processes from 0 to 1",
        ),
    ],
)
def test_launch_that_can_not_be_is_told(words, sentence, monkeypatch, capsys):
    from jshard.cli import main

    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == sentence + "\n"


class Told:
    """A process of which only what the supervisor hears is there."""

    def __init__(self, rank):
        self.rank, self.facts, self.status = rank, {}, None

    def send(self, number):
        pass

    def where(self):
        return "in step 5"

    def waited_in(self):
        return self.facts.get("stands_in", "")

    def how_ended(self):
        return f"ended with status {self.status}"


def test_supervisor_believes_who_names_the_fault_and_not_who_broke_off_behind_it(capsys):
    one, broken, knowing = Supervisor([], list), Told(1), Told(3)
    for event in (
        ("line", broken, "stderr", "Gloo: connection closed"),
        ("end", broken, 1),
        ("line", knowing, "stderr", "rank 2 keeps the others waiting"),
        ("status", knowing, {"culprit": 2}),
        ("end", knowing, 1),
        ("quiet", broken),
        ("quiet", knowing),
    ):
        one.events.put(event)
    first = one._follow([broken, knowing])
    assert (first, fault_of(first)) == (knowing, "rank 2 was at fault, as rank 3 reports above; all were stopped")
    assert capsys.readouterr().err == "[3] rank 2 keeps the others waiting\n"


@pytest.mark.parametrize("joined", [True, False])
def test_supervisor_tells_once_while_they_run_that_no_process_has_joined(joined, capsys, monkeypatch):
    one, alone = Supervisor(["python", "-m", "package.train", "--rate", "3"], list), Told(0)
    one.alone_at = float("inf") if joined else 0.0
    one.events.put(("status", alone, {"step": 1, **({"joined": True} if joined else {})}))
    one.events.put(("end", alone, 0))
    one.events.put(("quiet", alone))
    assert one._follow([alone]) is None
    said = "no process of -m package.train has called jshard.init(), so that each works alone; call it before JAX does anything\n"
    assert capsys.readouterr().err == ("" if joined else said)


def test_supervisor_keeps_what_a_process_said_of_the_fault_when_a_beat_comes_behind_it():
    one, knowing = Supervisor([], list), Told(0)
    for event in (
        ("status", knowing, {"step": 5, "culprit": 2, "fault": "rank 2 keeps the others waiting"}),
        ("status", knowing, {"step": 6}),
        ("end", knowing, 1),
        ("quiet", knowing),
    ):
        one.events.put(event)
    first = one._follow([knowing])
    assert first is knowing and first.facts["step"] == 6
    assert fault_of(first) == "rank 2 was at fault, as rank 0 reports above; all were stopped"


@pytest.mark.parametrize("is_gone", [True, False])
def test_supervisor_that_the_scheduler_stops_prints_no_stack_of_jax(is_gone, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "HELD", 0.0)
    one, lone = Supervisor([], list), Told(1)
    one.sees_all, one.asked = False, signal.SIGTERM
    for event in (
        ("line", lone, "stdout", "loss 2.0"),
        ("line", lone, "stderr", "E1121 07:40:01.123456   317 coordination_service_agent.cc:1] Polled an error"),
        ("line", lone, "stderr", "*** Check failure stack trace: ***"),
        ("end", lone, 1 if is_gone else -signal.SIGABRT),
        *([("status", lone, {"fault": "rank 0 is gone", "gone": True})] if is_gone else []),
        ("quiet", lone),
    ):
        one.events.put(event)
    assert one._follow([lone]) is (lone if is_gone else None)
    assert (one.lost, capsys.readouterr()) == (is_gone, ("[1] loss 2.0\n", ""))


@pytest.mark.parametrize("told_first", [True, False])
def test_supervisor_says_once_that_a_process_of_another_launcher_is_gone(told_first, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "HELD", 0.0)
    one, knowing = Supervisor([], list), Told(1)
    one.sees_all = False
    status = ("status", knowing, {"culprit": 0, "fault": "rank 0 is gone", "gone": True})
    end = ("end", knowing, 1)
    for event in (
        ("line", knowing, "stderr", "loss 2.0"),
        (
            "line",
            knowing,
            "stderr",
            "E1121 07:40:01.123456   317 coordination_service_agent.cc:1] rank 0 does not answer",
        ),
        ("line", knowing, "stderr", "rank 0 is gone"),
        *((status, end) if told_first else (end, status)),
        ("quiet", knowing),
    ):
        one.events.put(event)
    assert one._follow([knowing]) is knowing and one.lost
    assert capsys.readouterr().err == "[1] loss 2.0\n"
