"""A loop of steps with one all-reduce each, which does `fault` in process `rank` at step 5: `program.py fault rank [steps]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jshard


def commit(fault: str) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError("the model is broken")
        case "exit":
            sys.exit(3)
        case "sleep":
            jshard.pulse().at("data")
            time.sleep(600)


def jump(seconds: float) -> None:
    """The clock on the wall of this process, from now on."""
    clock = time.time
    time.time = lambda: clock() + seconds


def listening() -> set[str]:
    """The addresses at which this process can be reached."""
    own = {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1].partition(":")[0])
    return found


def main(fault: str, rank: int, steps: int = 20) -> None:
    member = jshard.init(devices=4)
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((4,), ("data",))
    x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda part: np.arange(4.0)[part])
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    jshard.pulse().of = steps
    for step in range(1, steps + 1):
        jshard.pulse().at("step", step)
        if step == 4:
            print("listens at", *sorted(listening()))
        mine = rank == (0 if member is None else member.rank)
        if step == 5 and mine:
            commit(fault)
        if step == 5 and fault == "clock":
            jump(3600 if jax.process_index() % 2 else -3600)
        result = total(x)
        jshard.pulse().waits(step, result)
        result.block_until_ready()
        time.sleep(0.02)
    jshard.pulse().at("ended")
    print("total", float(result[0]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
