"""A process that is forked is the one that Python would have started: every promise of it, asked of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked

ROOT = Path(__file__).parents[1]
SELF = """
import json, os, signal, sys
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
import jax
print(json.dumps({
    "child": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "words": [sys.argv, sys.orig_argv[1:], sys.path, __name__, __file__ if "__file__" in globals() else None],
    "folder": os.getcwd(), "variables": sorted(os.environ.items()), "read": sys.stdin.read(),
    "jax": [len(jax.devices()), jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision],
    "streams": [(each.encoding, each.errors, each.line_buffering, each.write_through) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "open": sorted(n for n in map(int, os.listdir("/proc/self/fd")) if n < 64),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
}))
"""
BASE = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "JSHARD_"))} | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",  # where compilers for absent chips are installed, another backend would open files
}
OPTIONS = {"JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "true", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}


@pytest.fixture(autouse=True)
def _forks(monkeypatch):
    monkeypatch.delenv("JSHARD_TESTS_FRESH", raising=False)


def both(words: list[str], **how):
    """What a forked process and a new one print to stdout and stderr, and how they end."""
    done = []
    for start in (forked.Popen, forked.REAL):
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": BASE, **how}
        with start([sys.executable, *words], text=True, **how) as process:
            done.append((*process.communicate("typed"), process.returncode))
    return done


@pytest.mark.quick("session of -c")
@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["-c", SELF], {"start_new_session": True}),
        (["-m", "tests.told"], {"process_group": 0}),
        (["-P", "tests/told.py"], {"env": {**BASE, **OPTIONS}}),
        (["tests/told.py"], {"env": {**BASE, "PYTHONUNBUFFERED": "1"}}),
    ],
    ids=["session of -c", "group of -m", "variables of -P", "unbuffered script"],
)
def test_forked_process_finds_what_a_new_one_does(words, how, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "told.py").write_text(SELF)
    (one, said, status), (other, also, ended) = both([*words, "word"], stdin=subprocess.PIPE, cwd=tmp_path, **how)
    assert (status, ended) == (0, 0), said + also
    one, other = json.loads(one), json.loads(other)
    assert one["child"] == os.getpid()
    assert one == other


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit",
        "raise SystemExit(300)",
        "raise SystemExit('why')",
        "1/0",
        "def f():\n    raise KeyboardInterrupt\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, threading, time; atexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); print('main', end=' ')",
        "import sys; sys.stdout = None; sys.exit(3)",
        "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.exit(5)'])",
        "import os; os.execvp('sh', ['sh', '-c', 'exit 6'])",
        "import sys, warnings\nprint(sys.warnoptions)\nwarnings.warn('loud')",
    ],
)
def test_forked_process_ends_as_a_new_one_does(program):
    one, other = both([*(["-W", "error"] if "warn" in program else []), "-c", program])
    assert one == other


def test_what_a_fork_of_any_rank_compiles_is_kept_and_is_one_program_under_all_names(tmp_path):
    program = (
        "import jax\nfrom jax._src import distributed\ndistributed.global_state.process_id = 1\n"
        "jax.jit(jax.named_scope('NAME')(lambda x: x * 3.25))(2.0)"
    )
    kept = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    for name in ("first", "second"):
        subprocess.run([sys.executable, "-c", program.replace("NAME", name)], check=True, env=kept)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("jit__lambda")]) == 1


def test_forked_process_hears_signals_and_hands_descriptors_on():
    reading, writing = os.pipe()
    program = f"import os, time; os.write({writing}, b'here'); time.sleep(60)"
    process = forked.Popen([sys.executable, "-c", program], pass_fds=[writing], process_group=0)
    os.close(writing)
    assert (os.read(reading, 4), os.getpgid(process.pid)) == (b"here", process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    assert (process.wait(10), os.read(reading, 1)) == (-signal.SIGKILL, b"")
    os.close(reading)


OWN = "import os; print(os.getppid(), 'forked.py' in open('/proc/self/cmdline').read().split(chr(0))[1])"
STARTS = f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {OWN!r}])"


@pytest.mark.parametrize("fresh", [False, True])
def test_forked_process_forks_what_it_starts_itself_and_a_fresh_one_does_not(fresh, monkeypatch):
    monkeypatch.setattr(forked, "fresh", fresh)
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True)
    pid, parent, is_forked = done.stdout.split()
    assert (pid == parent, is_forked) == (True, str(not fresh))


def test_what_a_fork_can_not_be_is_started():
    for words in (["-W", "ignore", "-c", "pass"], ["-I", "-c", "pass"], ["-m", "pip"], ["-X", "dev", "x.py"]):
        assert forked.program([sys.executable, *words], os.environ) is None
    words = [sys.executable, "-c", "pass"]
    assert forked.program(words, os.environ) is not None
    for name in ("PYTHONHASHSEED", "PYTHONWARNINGS", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "LC_ALL", "TZ"):
        assert forked.program(words, {**os.environ, name: "1"}) is None
