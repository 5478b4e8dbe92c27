"""What is moved outside a program is told, where somebody listens: by whom, what, from where to where, and how."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.layouts.gathering import on_host
from jshard.layouts.p2p import listed
from jshard.runs import events


@pytest.fixture
def told():
    found = []
    stop = events.listen(lambda what, fields: found.append((what, fields)))
    yield found
    stop()


def test_what_moves_is_told(mesh, told):
    grid, line = mesh(data=2, tensor=4), mesh(a=4)
    rows, columns = NamedSharding(grid, P("data")), NamedSharding(grid, P(None, "tensor"))
    some = NamedSharding(line, P("a"))
    host, every = np.ones((8, 16), np.float32), list(range(8))
    on_rows, on_columns = "[data, whole] on {data: 2, tensor: 4}", "[whole, tensor] on {data: 2, tensor: 4}"
    on_line = "[a, whole] on {a: 4}, devices 0 to 3"
    x = jshard.place(host, rows)
    y = jshard.place(x, columns)
    for label in ('signal "a" (f.yaml:1)', "it"):
        jshard.layouts.redistribute(jnp.asarray(host), rows, label=label)
        jshard.layouts.redistribute(x, columns, label=label)
    jshard.place(x, rows)  # lies so
    z = jshard.scatter(host, some)
    jshard.scatter(host, some, method="broadcast")
    jshard.place(z, rows)
    jshard.gather(z)
    jshard.gather(z, root=0)
    away = jshard.place(z, jax.memory.Space.Host)
    jshard.place(y, [5])
    del away
    on_host(x)  # all of it is here
    bits = {"shape": [8, 16], "dtype": "float32", "bytes": 512}
    moves = ["slice over tensor", "all_gather over data"]
    expected = [
        ("redistribute", "", [], "the host", None, on_rows, every),
        ("redistribute", "", moves, on_rows, every, on_columns, every),
    ]
    for label in ('signal "a" (f.yaml:1)', "it"):
        expected += [("redistribute", label, [], "device 0", [0], on_rows, every)]
        expected += [("redistribute", label, moves, on_rows, every, on_columns, every)]
    expected += [
        ("scatter", "", [], "the host of process 0", None, on_line, [0, 1, 2, 3]),
        ("broadcast", "", [], "the host of process 0", None, on_line, [0, 1, 2, 3]),
        ("move", "", [], on_line, [0, 1, 2, 3], on_rows, every),
        ("gather", "", [], on_line, [0, 1, 2, 3], "the host of every process", None),
        ("gather", "", [], on_line, [0, 1, 2, 3], "the host of process 0", None),
        ("move", "", [], on_line, [0, 1, 2, 3], "the memory of its hosts", None),
        ("move", "", [], on_columns, every, "[whole, tensor] on {data: 1, tensor: 1}, device 5", [5]),
    ]
    names = ("op_name", "by", "moves", "from", "from_devices", "to", "to_devices")
    assert told == [("moved", dict(zip(names, each, strict=True)) | bits) for each in expected]


def test_devices_are_listed_in_few_words():
    devices = jax.devices()
    assert listed(devices[2:3]) == "device 2"
    assert listed(devices[1:3]) == "devices 1 to 2"
    assert listed([devices[at] for at in (3, 1)]) == "devices 3, 1"
    assert listed({devices[at] for at in (3, 1)}) == "devices 1, 3"
    assert listed([devices[at] for at in (1, 0, 3)]) == "devices 1, 0, 3"
    many = [*devices, *devices, devices[0]]
    assert listed(many[:16]) == "devices 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(many) == "17 devices from 0 to 0 (checksum 227ba56e)"
    assert listed([*many, devices[3]]).startswith("18 devices from 0 to 3 (checksum ")
