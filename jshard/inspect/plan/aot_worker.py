"""The other process: compiles one exported program for devices that are not there, and writes down what came out.

Run by its path, so that nothing of jshard is imported here. It reads `job.json` and `program.bin` in the folder it is
given and writes `program.hlo` and `result.json` there. What goes wrong ends it with a line on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding


def absent_devices(platform: str, name: str, target: dict[str, str]) -> Any:
    """The devices of a topology, in JAX's order."""
    if platform == "cpu":
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=platform, topology_name=name, **target).devices


def compiled(folder: Path) -> Any:
    """The program of `folder`, compiled for the devices of its job."""
    job = json.loads((folder / "job.json").read_text())
    devices = np.array(absent_devices(job["platform"], job["name"], job["target"]))
    exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_on(devices, lies))
        for aval, lies in zip(exported.in_avals, exported._in_named_shardings, strict=True)
    ]
    return jax.jit(exported.call, donate_argnums=job["donated"]).lower(*arguments).compile()


def _on(devices: Any, lies: Any) -> NamedSharding:
    """Where an argument lies on its abstract mesh, on these devices."""
    mesh = Mesh(devices.reshape(lies.mesh.axis_sizes), lies.mesh.axis_names, axis_types=lies.mesh.axis_types)
    return NamedSharding(mesh, lies.spec)


MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    program = compiled(folder)
    (folder / "program.hlo").write_text(program.as_text())
    memory = program.memory_analysis()
    sizes = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY}
    result = {"memory": {**sizes, "peak": int(memory.peak_memory_in_bytes)}}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
