"""Python processes that tests start, forked from one that has imported JAX, Flax and the like: more than a second less each.

`subprocess.Popen`, in a test and in what it starts, asks a server for a process: a child of whoever asked, with the id, group,
descriptors, environment and end of one that Python starts. What the server has imported stays hidden until the program imports
it, and only then JAX reads its variables. What a fork can't be (options of Python but `-W error`, variables that the C library or
an import reads, `-m pytest`) is started as ever, and so is all that a test with the fixture `fresh` starts, or a run with
JSHARD_TESTS_FRESH=1. What forks share, and new processes do not: the seed of hashes. None is taken apart when it ends.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

# What is imported beforehand. A group shows itself with those before it.
GROUPS = (
    ("yaml",),
    ("numpy.random",),
    ("sklearn.datasets",),
    ("jax", "jax.numpy", "jax.experimental.pallas"),
    ("flax.nnx", "optax"),
    ("orbax.checkpoint.experimental.v1",),
)
MODULES = ("jshard", "examples", "benchmarks", "tests", "doctest")  # that `python -m` may name
# Variables that Python, the C library or an import reads: with others than the server has had, a process is a new one.
READ_AT_ONCE = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "FLAX_", "LC_", "LANG", "TZ")
UNFLUSHED: list[Any] = []  # streams of a program that ended in another: `exec` drops their text
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
REAL = subprocess.Popen


class Channel:
    """One end of a socket that takes JSON and descriptors."""

    def __init__(self, end: socket.socket):
        self.end = end

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        content = json.dumps(message).encode()
        content = len(content).to_bytes(8, "big") + content
        self.end.sendall(content[socket.send_fds(self.end, [content], descriptors) :])

    def receive(self) -> tuple[Any, list[int]]:
        """The next message, None when nobody is there any more."""
        content, descriptors = b"", []
        while len(content) < 8 or len(content) < 8 + int.from_bytes(content[:8], "big"):
            part, more, *_ = socket.recv_fds(self.end, 1 << 20, 64)
            if not part:
                return None, []
            content, descriptors = content + part, descriptors + more
        return json.loads(content[8:]), descriptors


class Server:
    """What a process that starts others knows of its server."""

    def __init__(self, end: socket.socket, variables: Mapping[str, str]):
        self.channel, self.variables, self.lock = Channel(end), variables, threading.Lock()

    def start(self, message: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self.lock:
            prctl = ctypes.CDLL(None).prctl
            prctl(SUBREAPER, 1, 0, 0, 0)  # what the server forks twice becomes a child of this process
            try:
                self.channel.send({**message, "parent": os.getpid()}, descriptors)
                pid, _ = self.channel.receive()
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)
            assert pid is not None, "the server that processes are forked from has ended"
            return pid


server: Server | None = None  # of this process
fresh = False  # nothing is forked


class Popen(REAL):
    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        variables = dict(os.environ if env is None else env)
        program = None
        if (
            not fresh and not isinstance(args, (str, bytes, os.PathLike)) and executable is None and preexec_fn is None and close_fds
            and not shell and restore_signals and (gid, gids, uid, umask) == (None, None, None, -1)
            and os.path.isdir(cwd or ".") and "JSHARD_TESTS_FRESH" not in variables
        ):  # fmt: skip
            program = _program([os.fspath(word) for word in args], variables)
        if program is None:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        message = {
            "words": [os.fspath(word) for word in args],
            "variables": variables,
            "folder": os.path.abspath(cwd or "."),
            "session": start_new_session,
            "group": process_group,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        self.pid = _server().start(message, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _program(words: Sequence[str], variables: Mapping[str, str]) -> tuple[str, str, list[str], bool] | None:
    """`("-m" | "-c" | "", what, its words, whether its folder is left out)`; None where a fork is no such process."""
    match _without_warnings(words):
        case [sys.executable, "-I", "-S", script, *rest] if script.endswith("parent_death.py"):
            program = "", script, rest, True
        case [sys.executable, "-P", "-m", module, *rest] if module.partition(".")[0] in MODULES:
            program = "-m", module, rest, True
        case [sys.executable, "-m", module, *rest] if module.partition(".")[0] in MODULES:
            program = "-m", module, rest, False
        case [sys.executable, "-c", program, *rest]:
            program = "-c", program, rest, False
        case [sys.executable, "-P", script, *rest] if not script.startswith("-"):
            program = "", script, rest, True
        case [sys.executable, script, *rest] if not script.startswith("-"):
            program = "", script, rest, False
        case _:
            return None
    had = _server().variables
    names = {name for name in {*variables, *had} if name.startswith(READ_AT_ONCE)}
    names -= {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}
    return program if all(variables.get(name) == had.get(name) for name in names) else None


def _without_warnings(words: Sequence[str]) -> Sequence[str]:
    return [words[0], *words[3:]] if words[1:3] == ["-W", "error"] else words


def _server() -> Server:
    """The server of this process, which is started at the first question."""
    global server
    if server is None:
        ours, theirs = socket.socketpair()
        left_out = ("JAX_", "XLA_", "PYTHONPATH")  # each process has its own
        variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        process = REAL(
            [sys.executable, __file__, str(theirs.fileno())],
            env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        server = Server(ours, variables)
        atexit.register(lambda: (ours.close(), process.wait()))
    return server


class Hidden:
    """Modules that are there already, one group a call of `load`; `sys.meta_path` asks it before any other."""

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, types.ModuleType], dict[str, str]]] = []

    def load(self, names: Sequence[str]) -> None:
        variables, modules = dict(os.environ), {*sys.modules}
        for name in names:
            importlib.import_module(name)
        new = {name: sys.modules[name] for name in [*sys.modules] if name not in modules}
        new = {name: module for name, module in new.items() if name.partition(".")[0] not in sys.stdlib_module_names}
        self.groups.append((new, {name: os.environ[name] for name in {*os.environ} - {*variables}}))

    def hide(self) -> None:
        for modules, variables in self.groups:
            for name in modules:
                sys.modules.pop(name, None)
            for name in variables:
                os.environ.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        asked = next((group for group in self.groups if name in group[0]), None)
        if asked is None:
            return None
        before = self.groups[: self.groups.index(asked) + 1]
        shown = [group for group in before if group is asked or "sklearn" not in group[0]]  # which nothing else needs
        self.groups = [group for group in self.groups if group not in shown]
        for modules, variables in shown:
            sys.modules.update(modules)
            for variable, value in variables.items():
                os.environ.setdefault(variable, value)
            if "jax" in modules:
                _read_variables_of_jax(modules["jax"].config)
                compiled_before.as_tests_do()
                with contextlib.suppress(ModuleNotFoundError):  # which it looks for when it is imported
                    modules["jax._src.xla_bridge"].jax_plugins = importlib.import_module("jax_plugins")
            if "numpy" in modules:
                modules["numpy.random"].seed()
        self.module = sys.modules.pop(name)  # by its own spec, found here, it would be executed again
        self.spec = self.module.__spec__
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec


def _read_variables_of_jax(config: Any) -> None:
    """As JAX does when it is imported; the server has had none of them."""
    for name, (kind, *_) in config.meta.items():
        if (text := os.environ.get(name.upper())) is not None:
            known = {int: int, float: float, bool: lambda text: text.lower() in ("y", "yes", "t", "true", "on", "1")}
            config.update(name, known.get(kind, str)(text))


def serve(hidden: Hidden, end: socket.socket, variables: Mapping[str, str]) -> None:
    """Forks for each message, until nobody can send one."""
    channel = Channel(end)
    while True:
        message, descriptors = channel.receive()
        if message is None:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                _finish(_become, hidden, variables, message, descriptors, writing)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(between, 0)
        pid = os.read(reading, 20)
        os.read(reading, 1)  # nothing, once it has a group of its own: it can be killed
        channel.send(int(pid))
        for descriptor in (reading, *descriptors):
            os.close(descriptor)


def _become(
    hidden: Hidden, variables: Mapping[str, str], message: dict[str, Any], descriptors: list[int], writing: int
) -> None:
    """This fork is now the process that the message asks for."""
    while os.getppid() != message["parent"]:
        time.sleep(0.0005)
    if message["session"]:
        os.setsid()
    if message["group"] >= 0:
        os.setpgid(0, message["group"])
    os.close(writing)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    os.closerange(3, 512)
    _begin_again(hidden, variables)
    for descriptor, number in zip(high, message["descriptors"], strict=True):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(512, 512 + 64)
    for number, handler in DISPOSITIONS.items():
        signal.signal(number, handler)
    QUIET.__exit__(None, None, None)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["variables"])
    _open_streams()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _run(message["words"])


def _begin_again(hidden: Hidden, variables: Mapping[str, str]) -> None:
    """What this process starts is forked too: from a fork that knows as little as this one does now."""
    global server
    ours, theirs = socket.socketpair()
    if not os.fork():
        channel = os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1024)
        serve(hidden, socket.socket(fileno=channel), variables)
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1000)
    ours.close()
    theirs.close()
    server = Server(socket.socket(fileno=high), variables)


def _open_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        old = getattr(sys, f"__{name}__")
        raw = open(number, f"{mode}b", 0 if unbuffered and mode == "w" else -1, closefd=False)
        lines = not unbuffered and (name == "stderr" or raw.isatty())
        text = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered)
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _run(words: Sequence[str]) -> None:
    program = _program(words, os.environ)
    assert program is not None, words
    kind, what, rest, apart = program
    sys.orig_argv = list(words)
    if _without_warnings(words) is not words:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    own = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.realpath(what)))
    sys.path[:] = [
        *([] if apart else [first]),
        *own,
        *(path for path in BASE if path not in own),
    ]  # site takes none twice
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.argv = [kind or what, *rest]
    if kind == "-m":
        runpy._run_module_as_main(what)
    elif kind == "-c":
        if sys.version_info >= (3, 13):  # which shows the lines of such a program too
            lines = [f"{line}\n" for line in what.splitlines()]
            linecache.cache["<string>"] = len(what), None, lines, "<string>"
        exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        main.__file__ = os.path.abspath(what)
        with io.open_code(what) as file:
            code = compile(file.read(), what, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _finish(program: Callable[..., None], *args: Any) -> NoReturn:
    """Run it, and end as Python does."""
    status: Any = 0
    try:
        program(*args)
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        status = 1
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            status = status or 120
            with contextlib.suppress(OSError):
                os.write(2, f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n".encode())
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


def _exec(real: Callable[[str, Sequence[str]], NoReturn]) -> Callable[[str, Sequence[str]], NoReturn]:
    """Continue this process as the program that it ends in, without the text that it has not flushed."""

    def become(path: str, words: Sequence[str]) -> NoReturn:
        if path == words[0] and _program(words, os.environ) is not None:
            UNFLUSHED.extend((sys.__stdout__, sys.__stderr__))  # a stream that nobody refers to is flushed
            _open_streams()
            _finish(_run, words)
        real(path, words)

    return become


if __name__ == "__main__":
    BASE, VARIABLES, HIDDEN = sys.path[1:], dict(os.environ), Hidden()
    for group in GROUPS:
        HIDDEN.load(group)
    HIDDEN.hide()
    import compiled_before  # its variables are those of each process

    del sys.modules["compiled_before"]
    QUIET = warnings.catch_warnings()
    QUIET.__enter__()
    warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of a fork; it has not started here
    # It ends when who asks it does.
    DISPOSITIONS = {
        each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    subprocess.Popen, os.execv, os.execvp = Popen, _exec(os.execv), _exec(os.execvp)
    gc.collect()
    gc.freeze()
    serve(HIDDEN, socket.socket(fileno=int(sys.argv[1])), VARIABLES)
