"""A loop of steps with one all-reduce each, which does `fault` in process `rank` at step 5: `program.py fault rank`."""

from __future__ import annotations

import os
import signal
import sys
import time

import jshard
from jshard.launch.joining import pulse


def commit(fault: str) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "raise":
            raise RuntimeError("the model is broken")
        case "mistake":
            raise jshard.JShardError("the model is wrong", mend="mend it")
        case "exit":
            sys.exit(3)
        case "sleep":
            pulse().at("data")
            time.sleep(600)


def main(fault: str, rank: int, steps: int = 20) -> None:
    member = jshard.init(devices=4)
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((4,), ("data",))
    x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda part: np.arange(4.0)[part])
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    pulse().of = steps
    for step in range(1, steps + 1):
        pulse().at("step", step)
        if step == 5 and (member is None or member.rank == rank):
            commit(fault)
        result = total(x)
        pulse().waits(step, result)
        result.block_until_ready()
        time.sleep(0.02)
    pulse().at("ended")
    print("total", float(result[0]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
