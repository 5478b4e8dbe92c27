"""The compiling process: it compiles an exported program for absent devices and writes the result. It
runs by path, so nothing of jshard is imported. It reads `job.json` and `program.bin` in the folder of
its argument and writes `program.hlo` and `result.json` there. An error ends it with a line on stderr."""

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
    """Return the devices of a topology, in JAX's order."""
    if platform == "cpu":
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=platform, topology_name=name, **target).devices


def compiled(folder: Path) -> Any:
    """Compile the program of `folder` for the devices of its job."""
    job = json.loads((folder / "job.json").read_text())
    devices = np.array(absent_devices(job["platform"], job["name"], job["target"]))
    exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_on(devices, lies))
        for aval, lies in zip(exported.in_avals, exported._in_named_shardings, strict=True)
    ]
    return jax.jit(exported.call, donate_argnums=job["donated"]).lower(*arguments).compile()


def _on(devices: Any, lies: Any) -> NamedSharding:
    """Return the sharding of an argument, moved from its abstract mesh to these devices."""
    mesh = Mesh(devices.reshape(lies.mesh.axis_sizes), lies.mesh.axis_names, axis_types=lies.mesh.axis_types)
    return NamedSharding(mesh, lies.spec)


MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compile the job in `folder`."""
    program = compiled(folder)
    (folder / "program.hlo").write_text(program.as_text())
    memory = program.memory_analysis()
    sizes = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY}
    result = {"memory": {**sizes, "peak": int(memory.peak_memory_in_bytes)}}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
