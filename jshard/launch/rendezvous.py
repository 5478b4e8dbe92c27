"""The roll call before JAX starts: all processes report to rank 0, and learn whether all are there
and equal. Rank 0 listens where JAX's service will listen afterwards. Messages are lines of JSON."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import os
import socket
import time
from collections.abc import Mapping

from jshard.errors import JShardError
from jshard.launch.cluster_env import Membership

Facts = Mapping[str, str]  # a process's facts on a topic, to be compared
LONGEST = 1 << 20  # bytes of a message
SAYS = 1.0  # seconds for a message; then the connection is closed, and our processes try again
SOON = 0.1  # seconds to wait for others after a fault: they receive it too
HINTS = {
    "installation": "install the same versions for all of them",
    "configuration": "start all of them with the same YAML and the same key=value",
}


@dataclasses.dataclass(frozen=True)
class Present:
    """A process that has answered the roll call."""

    rank: int
    processes: int
    host: str
    pid: int
    facts: Mapping[str, Facts]

    @property
    def where(self) -> str:
        return f"process {self.pid} on {self.host}"


def answer(membership: Membership, facts: Mapping[str, Facts], seconds: float) -> None:
    """Wait until all processes have reported equal facts; otherwise raise the same error in all of them."""
    me = Present(membership.rank, membership.processes, socket.gethostname(), os.getpid(), facts)
    if membership.rank == 0:
        listener = _listen(membership)
        if listener is not None:
            _call(listener, me, seconds)
            return
    _report(membership, me, seconds)


def _listen(membership: Membership) -> socket.socket | None:
    """Listen at the coordinator's address; return None if another process has the port: maybe a rank 0."""
    host, port = membership.address
    family = (
        socket.AF_INET6 if ":" in host or (not membership.is_local and socket.has_dualstack_ipv6()) else socket.AF_INET
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not membership.is_local:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host if membership.is_local else "", port))
        listener.listen(membership.processes)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise JShardError(
            f"rank 0 can't listen at {membership.coordinator}: {(error.strerror or str(error)).lower()}",
            hint="name a port above 1023 of the host that rank 0 runs on: --coordinator host:8476",
        ) from error


def _call(listener: socket.socket, me: Present, seconds: float) -> None:
    """Run the roll call of rank 0: wait for the others, compare, and send the verdict."""
    here: dict[int, Present] = {0: me}
    wires: list[socket.socket] = []
    fault: tuple[str, str] | None = None
    deadline = time.monotonic() + seconds
    while len(here) < me.processes and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if (present := _hear(connection)) is not None:
                wires.append(connection)
                if fault is None and (fault := _fault_of(present, here)) is not None:
                    deadline = min(deadline, time.monotonic() + SOON)
                here.setdefault(present.rank, present)
    missing = [rank for rank in range(me.processes) if rank not in here]
    if fault is None and missing:
        fault = _missing(missing, me.processes, seconds)
    for topic in me.facts:
        difference = mismatch(topic, {rank: each.facts.get(topic, {}) for rank, each in here.items()})
        if fault is None and difference is not None:
            fault = difference, HINTS.get(topic, "start all of them alike")
    listener.close()  # before the others continue: JAX's service needs the port
    for connection in wires:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            connection.sendall(json.dumps({"fault": fault}).encode() + b"\n")
    if fault is not None:
        raise JShardError(fault[0], hint=fault[1])


def _hear(connection: socket.socket) -> Present | None:
    """Read a process's report; close the connection of any other program, such as a port scanner."""
    connection.settimeout(SAYS)
    try:
        with connection.makefile("rb") as reader:
            return Present(**json.loads(reader.readline(LONGEST)))
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return None


def _fault_of(present: Present, here: Mapping[int, Present]) -> tuple[str, str] | None:
    first = here[0]
    if present.processes != first.processes:
        return (
            f"rank {present.rank} ({present.where}) was started as one of {present.processes} processes and rank 0 as one of "
            f"{first.processes}",
            "give all of them the same --processes",
        )
    if (other := here.get(present.rank)) is not None:
        return (
            f"rank {present.rank} was started twice: {other.where} and {present.where}",
            "give each process a --process-id of its own",
        )
    return None


def mismatch(topic: str, by_rank: Mapping[int, Facts]) -> str | None:
    """Describe the first difference between ranks, or return None. It names the lowest rank that
    differs from most ranks (from rank 0 without a majority), and the first fact: `rank 2 has
    another configuration than rank 0: jshard.train.batch is 32, and 64 at rank 0`."""
    texts = {rank: json.dumps(facts, sort_keys=True) for rank, facts in by_rank.items()}
    votes = collections.Counter(texts.values())
    lowest = min(by_rank)
    usual = max(votes, key=lambda text: (votes[text], text == texts[lowest]))
    rank = next((rank for rank in sorted(by_rank) if texts[rank] != usual), None)
    if rank is None:
        return None
    other = next(each for each in sorted(by_rank) if texts[each] == usual)
    mine, theirs = by_rank[rank], by_rank[other]
    fact = next(name for name in [*theirs, *mine] if mine.get(name) != theirs.get(name))
    has = f"is {mine[fact]}" if mine.get(fact) is not None else "is not there"
    had = theirs[fact] if theirs.get(fact) is not None else "not there"
    return f"rank {rank} has another {topic} than rank {other}: {fact} {has}, and {had} at rank {other}"


def _missing(missing: list[int], processes: int, seconds: float) -> tuple[str, str]:
    named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return (
        f"{named} of {processes} did not start within {seconds:g} s",
        f"start it with --process-id {missing[0]}, look at its output, or wait longer with JSHARD_START_TIMEOUT=600",
    )


def _report(membership: Membership, me: Present, seconds: float) -> None:
    """Report to rank 0 and wait for the verdict, as every other rank does."""
    deadline = time.monotonic() + seconds
    line = json.dumps(dataclasses.asdict(me)).encode() + b"\n"
    verdict = None
    while verdict is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _no_answer(membership, me, seconds)
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(membership.address, timeout=left) as wire,
        ):
            wire.sendall(line)
            # rank 0 may have started later; a second rank 0 waits less for an unknown program
            wire.settimeout(min(left, 5) if me.rank == 0 else left + 5)
            with wire.makefile("rb") as reader:
                verdict = json.loads(reader.readline(LONGEST))
        if verdict is None:
            if me.rank == 0:
                raise _no_answer(membership, me, seconds)
            time.sleep(0.05)
    if verdict["fault"] is not None:
        raise AlreadyReported(verdict["fault"][0], hint=verdict["fault"][1])


def _no_answer(membership: Membership, me: Present, seconds: float) -> JShardError:
    if me.rank == 0:
        return JShardError(
            f"port {membership.address[1]}, where rank 0 has to listen, is in use by another program",
            hint=f"choose another for all of them: --coordinator {membership.address[0]}:{membership.address[1] + 1}",
        )
    return JShardError(
        f"rank 0 did not answer rank {me.rank} at {membership.coordinator} within {seconds:g} s",
        hint="start rank 0, look at its output, or name another --coordinator",
    )


class AlreadyReported(JShardError):
    """An error also reported by rank 0: on one machine it is printed once."""
