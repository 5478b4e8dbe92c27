"""The strategies of a Linear and what each must show, as one table; meshes to show it on; the dense answer.

Letters stand for mesh axes: `d` data, `t` tensor, `p` pipe. Layouts have a word for each axis of an array, `-` for a
whole one: `kernel="d t"`. Collectives have the mesh axes they run over, one word for each array: `all_reduce/t`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard
from jshard.inspect.compiled import collectives_in, wire_bytes
from jshard.inspect.plan import explain
from jshard.programs.jaxprs import equations
from jshard.programs.provenance import said
from jshard.signals.active_config import unload
from jshard.signals.scope import outside

BATCH, LENGTH, INPUTS, OUTPUTS = 8, 8, 16, 24
AXES = {"d": "data", "t": "tensor", "p": "pipe"}
BF16 = {"compute": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a signal says, where the arrays then lie, and every collective of forward and backward (gradients of the
    parameters and of the input)."""

    name: str
    keys: dict[str, Any] = dataclasses.field(hash=False)
    x: str
    kernel: str
    bias: str
    y: str
    forward: str = ""
    backward: str = ""
    letters: tuple[tuple[str, str], ...] = tuple(AXES.items())

    @property
    def rank(self) -> int:
        return len(self.x.split())

    @property
    def uses(self) -> frozenset[str]:
        said = " ".join(word.split("/")[-1] for word in f"{self.forward} {self.backward}".split())
        return frozenset(f"{self.x}{self.kernel}{self.bias}{self.y}{said}") & frozenset(AXES)

    def spec(self, array: str) -> jax.P:
        """The layout of "x", "kernel", "bias" or "y"."""
        names = dict(self.letters)
        words = getattr(self, array).split()
        return jax.P(*(None if word == "-" else tuple(names[letter] for letter in word) for word in words))

    def expected(self, phase: str, mesh: jax.sharding.Mesh) -> collections.Counter[tuple[str, int]]:
        """How many arrays each kind of collective carries over groups of each size."""
        names = dict(self.letters)
        return collections.Counter(
            (kind, math.prod(mesh.shape[names[letter]] for letter in over))
            for kind, over in (word.split("/") for word in getattr(self, phase).split())
        )

    def configuration(self, mesh: str, axis_types: str = "explicit") -> dict[str, Any]:
        names = dict(self.letters)
        other = {"other": {"row": [names["d"], names["t"]]}} if "backward" in self.keys else {}
        return {
            "jshard": {"mesh": MESHES[mesh], "axis_types": axis_types},
            "layer": {key: _renamed(value, names) for key, value in self.keys.items()},
            **other,
        }

    def __str__(self) -> str:
        return self.name


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Letters as names of mesh axes: "dt" is [data, tensor]."""
    if isinstance(value, dict):
        return {key: _renamed(each, names) for key, each in value.items()}
    if not isinstance(value, str) or not set(value) <= set(names):
        return value
    return names[value] if len(value) == 1 else [names[letter] for letter in value]


# fmt: off
CASES = [
    Case("replicated", {}, x="- -", kernel="- -", bias="-", y="- -"),
    # gradients of parameters are summed over the rows
    Case("row", {"row": "d"}, x="d -", kernel="- -", bias="-", y="d -", backward="all_reduce/d all_reduce/d"),
    Case("row over two", {"row": "dt"}, x="dt -", kernel="- -", bias="-", y="dt -",
         backward="all_reduce/dt all_reduce/dt"),
    # each device has some columns of w: the gradient of x is the sum of all devices' parts
    Case("column", {"column": "t"}, x="- -", kernel="- t", bias="t", y="- t", backward="all_reduce/t"),
    Case("column over two", {"column": "dt"}, x="- -", kernel="- dt", bias="dt", y="- dt", backward="all_reduce/dt"),
    # everybody does the same with what was gathered, so that its gradient is only a slice
    Case("column gather", {"column": "t", "output": "gather"}, x="- -", kernel="- t", bias="t", y="- -",
         forward="all_gather/t", backward="all_reduce/t"),
    Case("column gather over two", {"column": "dt", "output": "gather"}, x="- -", kernel="- dt", bias="dt", y="- -",
         forward="all_gather/t all_gather/d", backward="all_reduce/dt"),
    # partial sums of y are summed; what follows is the same on all devices, and so are its gradients
    Case("reduction", {"reduction": "t"}, x="- t", kernel="t -", bias="-", y="- -", forward="all_reduce/t"),
    Case("reduction over two", {"reduction": "dt"}, x="- dt", kernel="dt -", bias="-", y="- -",
         forward="all_reduce/dt"),
    # the bias is added to rows that differ: its gradient is summed; the cotangent of y is gathered
    Case("reduction scatter", {"reduction": "t", "output": "scatter"}, x="- t", kernel="t -", bias="-", y="t -",
         forward="reduce_scatter/t", backward="all_gather/t all_reduce/t"),
    Case("reduction scatter over two", {"reduction": "dt", "output": "scatter"},
         x="- dt", kernel="dt -", bias="-", y="dt -",
         forward="reduce_scatter/d reduce_scatter/t", backward="all_gather/t all_gather/d all_reduce/dt"),
    # combinations
    Case("row column", {"row": "d", "column": "t"}, x="d -", kernel="- t", bias="t", y="d t",
         backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("row column gather", {"row": "d", "column": "t", "output": "gather"}, x="d -", kernel="- t", bias="t", y="d -",
         forward="all_gather/t", backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("row reduction", {"row": "d", "reduction": "t"}, x="d t", kernel="t -", bias="-", y="d -",
         forward="all_reduce/t", backward="all_reduce/d all_reduce/d"),
    Case("row reduction scatter", {"row": "d", "reduction": "t", "output": "scatter"},
         x="d t", kernel="t -", bias="-", y="dt -",
         forward="reduce_scatter/t", backward="all_gather/t all_reduce/d all_reduce/dt"),
    Case("column reduction", {"column": "d", "reduction": "t"}, x="- t", kernel="t d", bias="d", y="- d",
         forward="all_reduce/t", backward="all_reduce/d"),
    Case("row column reduction", {"row": "d", "column": "t", "reduction": "p"},
         x="d p", kernel="p t", bias="t", y="d t",
         forward="all_reduce/p", backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("row column over two", {"row": "d", "column": "tp"}, x="d -", kernel="- tp", bias="tp", y="d tp",
         backward="all_reduce/d all_reduce/d all_reduce/tp"),
    # activations rest split by sequence: gathered for columns, scattered from reductions
    Case("sequence", {"sequence": "t"}, x="- t -", kernel="- -", bias="-", y="- t -",
         backward="all_reduce/t all_reduce/t"),
    Case("sequence column", {"column": "t", "sequence": "t"}, x="- t -", kernel="- t", bias="t", y="- - t",
         forward="all_gather/t", backward="reduce_scatter/t"),
    Case("sequence reduction", {"reduction": "t", "sequence": "t"}, x="- - t", kernel="t -", bias="-", y="- t -",
         forward="reduce_scatter/t", backward="all_gather/t all_reduce/t"),
    Case("sequence column, two axes", {"column": "t", "sequence": "t"}, x="t -", kernel="- t", bias="t", y="- t",
         forward="all_gather/t", backward="reduce_scatter/t"),
    Case("sequence reduction, two axes", {"reduction": "t", "sequence": "t"}, x="- t", kernel="t -", bias="-", y="t -",
         forward="reduce_scatter/t", backward="all_gather/t all_reduce/t"),
    Case("row sequence column", {"row": "d", "column": "t", "sequence": "t"},
         x="d t -", kernel="- t", bias="t", y="d - t",
         forward="all_gather/t", backward="reduce_scatter/t all_reduce/d all_reduce/d"),
    Case("row sequence reduction", {"row": "d", "reduction": "t", "sequence": "t"},
         x="d - t", kernel="t -", bias="-", y="d t -",
         forward="reduce_scatter/t", backward="all_gather/t all_reduce/d all_reduce/dt"),
    Case("row sequence column, two axes", {"row": "d", "column": "t", "sequence": "t"},
         x="dt -", kernel="- t", bias="t", y="d t",
         forward="all_gather/t", backward="reduce_scatter/t all_reduce/d all_reduce/d"),
    # parameters rest split: gathered for use, w again for the gradient of x; their gradients scattered where devices saw different rows
    Case("store", {"row": "d", "store": "d"}, x="d -", kernel="d -", bias="d", y="d -",
         forward="all_gather/d all_gather/d", backward="all_gather/d reduce_scatter/d reduce_scatter/d"),
    Case("store keep", {"row": "d", "store": {"parameters": "d", "keep": True}}, x="d -", kernel="d -", bias="d", y="d -",
         forward="all_gather/d all_gather/d", backward="reduce_scatter/d reduce_scatter/d"),
    Case("store without rows", {"store": "d"}, x="- -", kernel="d -", bias="d", y="- -",
         forward="all_gather/d all_gather/d", backward="all_gather/d"),
    Case("store over two", {"row": "dt", "store": "dt"}, x="dt -", kernel="dt -", bias="dt", y="dt -",
         forward="all_gather/d all_gather/t all_gather/d all_gather/t",
         backward="all_gather/d all_gather/t reduce_scatter/d reduce_scatter/t reduce_scatter/d reduce_scatter/t"),
    Case("store over one of two", {"row": "dt", "store": "d"}, x="dt -", kernel="d -", bias="d", y="dt -",
         forward="all_gather/d all_gather/d",
         backward="all_gather/d reduce_scatter/d reduce_scatter/d all_reduce/t all_reduce/t"),  # of the parts that rest here
    Case("store column", {"row": "d", "column": "t", "store": "d"}, x="d -", kernel="d t", bias="td", y="d t",
         forward="all_gather/d all_gather/d", backward="all_gather/d reduce_scatter/d reduce_scatter/d all_reduce/t"),
    Case("store reduction", {"row": "d", "reduction": "t", "store": "d"}, x="d t", kernel="t d", bias="d", y="d -",
         forward="all_gather/d all_gather/d all_reduce/t", backward="all_gather/d reduce_scatter/d reduce_scatter/d"),
    Case("store optimizer", {"row": "d", "store": {"optimizer": "d"}}, x="d -", kernel="- -", bias="-", y="d -",
         backward="all_reduce/d all_reduce/d"),
    # the cotangent goes to more rows, w is gathered; the gradient of x comes back
    Case("backward other", {"row": "d", "column": "t", "backward": "other"}, x="d -", kernel="- t", bias="t", y="d t",
         backward="all_to_all/t all_gather/t all_reduce/dt all_reduce/dt all_gather/t"),
    # dtypes: parameters and x are float32 at rest unless said
    Case("compute bfloat16", {"row": "d", "column": "t", "dtype": BF16}, x="d -", kernel="- t", bias="t", y="d t",
         backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("reduce float32", {"row": "d", "column": "t", "dtype": BF16 | {"reduce": "float32"}},
         x="d -", kernel="- t", bias="t", y="d t", backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("reduction reduce float32", {"row": "d", "reduction": "t", "dtype": BF16 | {"reduce": "float32"}},
         x="d t", kernel="t -", bias="-", y="d -", forward="all_reduce/t", backward="all_reduce/d all_reduce/d"),
    Case("store reduce float32", {"row": "d", "store": "d", "dtype": BF16 | {"reduce": "float32"}},
         x="d -", kernel="d -", bias="d", y="d -",
         forward="all_gather/d all_gather/d", backward="all_gather/d reduce_scatter/d reduce_scatter/d"),
    # what devices did alike with what they gathered has one gradient: a slice of it, and no sum
    Case("store without rows reduce float32", {"store": "d", "dtype": BF16 | {"reduce": "float32"}},
         x="- -", kernel="d -", bias="d", y="- -", forward="all_gather/d all_gather/d", backward="all_gather/d"),
    Case("store beyond rows reduce float32", {"row": "d", "store": "dt", "dtype": BF16 | {"reduce": "float32"}},
         x="d -", kernel="dt -", bias="dt", y="d -",
         forward="all_gather/d all_gather/t all_gather/d all_gather/t",
         backward="all_gather/d all_gather/t reduce_scatter/d reduce_scatter/d"),
    Case("sequence reduce float32", {"column": "t", "sequence": "t", "dtype": BF16 | {"reduce": "float32"}},
         x="- t -", kernel="- t", bias="t", y="- - t", forward="all_gather/t", backward="reduce_scatter/t"),
    Case("param bfloat16", {"row": "d", "reduction": "t", "dtype": {"param": "bfloat16"}},
         x="d t", kernel="t -", bias="-", y="d -", forward="all_reduce/t", backward="all_reduce/d all_reduce/d"),
    # what forward gathered is not kept, but gathered again
    Case("remat column", {"row": "d", "column": "t", "remat": True}, x="d -", kernel="- t", bias="t", y="d t",
         backward="all_reduce/d all_reduce/d all_reduce/t"),
    Case("remat sequence column", {"row": "d", "column": "t", "sequence": "t", "remat": True},
         x="d t -", kernel="- t", bias="t", y="d - t",
         forward="all_gather/t", backward="all_gather/t reduce_scatter/t all_reduce/d all_reduce/d"),
    Case("remat store", {"row": "d", "store": "d", "remat": True}, x="d -", kernel="d -", bias="d", y="d -",
         forward="all_gather/d all_gather/d", backward="all_gather/d reduce_scatter/d reduce_scatter/d"),
]
# fmt: on

MESHES = {
    "8": {"data": 8},
    "1x1": {"data": 1, "tensor": 1},
    "2x4": {"data": 2, "tensor": 4},
    "4x2": {"data": 4, "tensor": 2},
    "2x2x2": {"data": 2, "tensor": 2, "pipe": 2},
}
BY_NAME = {case.name: case for case in CASES}
SOME = (
    "replicated", "row column", "column gather", "row reduction", "reduction scatter", "sequence column",
    "row sequence reduction", "store", "store column", "backward other", "remat sequence column",
)  # fmt: skip


def on(mesh: str, names: Any = None) -> list[Case]:
    """The cases that a mesh has the axes for. Where there is only one mesh axis, tensor is another name for it."""
    cases = CASES if names is None else [BY_NAME[name] for name in names]
    if len(MESHES[mesh]) == 1:
        one = tuple((letter, "data") for letter in AXES)
        return [dataclasses.replace(case, letters=one) for case in cases if len(case.uses) <= 1]
    here = {letter for letter, name in AXES.items() if name in MESHES[mesh]}
    return [case for case in cases if case.uses <= here]


# -- the dense answer, exact: small integers, whose sums are exact in float32, and in bfloat16 up to 256 --


def integers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer of -2 to 2 that compiles nothing, other numbers for kernel and bias."""
    return jnp.asarray(((np.arange(math.prod(shape)) * 7 // 4 + len(shape)) % 5 - 2).reshape(shape).astype(dtype))


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def shapes(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of x and of y."""
    before = (BATCH, LENGTH)[: rank - 1]
    return (*before, INPUTS), (*before, OUTPUTS)


def forward_and_gradients(layer: Any, x: jax.Array, cotangent: jax.Array, run: Any = operator.call) -> Any:
    """`run(layer, x)`, and the gradients of the parameters and of the input."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    y, pull = jax.vjp(lambda parameters, x: run(nnx.merge(graph, parameters, rest), x), parameters, x)
    return y, *pull(cotangent)


def layer_of(case: Case, **arguments: Any) -> jshard.Linear:
    with outside():
        rngs = nnx.Rngs(0)
    with jshard.signal("layer"):
        return jshard.Linear(INPUTS, OUTPUTS, kernel_init=integers, bias_init=integers, rngs=rngs, **arguments)


@functools.cache
def dense(rank: int, compute: str | None = None, param: str = "float32") -> Any:
    """(y, gradients of kernel and bias, gradient of x) of nnx.Linear on one device."""
    layer = nnx.Linear(
        INPUTS, OUTPUTS, kernel_init=integers, bias_init=integers, dtype=compute, param_dtype=param, rngs=nnx.Rngs(0)
    )  # fmt: skip
    graph, state = nnx.split(layer)
    x_shape, y_shape = shapes(rank)
    run = jax.jit(lambda state, x, y: forward_and_gradients(nnx.merge(graph, state), x, y))
    return run(state, numbers(x_shape), cast(numbers(y_shape, 1), compute))


def cast(cotangent: np.ndarray, compute: str | None) -> np.ndarray:
    return cotangent.astype(jnp.dtype(compute or jnp.float32))


def dense_of(case: Case) -> Any:
    dtype = case.keys.get("dtype", {})
    return dense(case.rank, dtype.get("compute"), dtype.get("param", "float32"))


def placed(array: Any, spec: jax.P) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(jshard.mesh(), spec))


def operands(case: Case) -> tuple[jax.Array, jax.Array]:
    """x and the cotangent of y, where the layer wants them."""
    x_shape, y_shape = shapes(case.rank)
    cotangent = cast(numbers(y_shape, 1), case.keys.get("dtype", {}).get("compute"))
    return placed(numbers(x_shape), case.spec("x")), placed(cotangent, case.spec("y"))


@contextlib.contextmanager
def loaded(configuration: Any) -> Iterator[jax.sharding.Mesh]:
    jshard.load(configuration)
    try:
        yield jshard.mesh()
    finally:
        unload()


# -- what a program is held against --


def assert_equal(actual: Any, expected: Any) -> None:
    """Bitwise, and the same dtype."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def assert_lies(array: jax.Array, spec: jax.P) -> None:
    """By its sharding, and by what is on the devices."""
    sharding = jax.NamedSharding(jshard.mesh(), spec)
    assert array.sharding.is_equivalent_to(sharding, array.ndim), (array.sharding, spec)
    assert array.sharding.device_set == sharding.device_set
    assert {shard.data.shape for shard in array.addressable_shards} == {sharding.shard_shape(array.shape)}


def collectives_got(compiled: Any) -> collections.Counter[tuple[str, int]]:
    """How many arrays each kind of collective carries over groups of each size; XLA may join several in one."""
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for got in collectives_in(compiled):
        assert got.count_known
        found[got.collective, got.group] += got.count * len(got.payloads)
    return found


def collectives_asked(ledger: Any) -> collections.Counter[tuple[str, int]]:
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for line in ledger:
        found[line.collective, line.group] += line.count
    return found


def keys_of_collectives(jaxpr: Any) -> list[tuple[str, str | None]]:
    """Each collective of a program, in order, with the key of YAML that asks for it."""
    names = "psum all_gather reduce_scatter all_to_all ppermute".split()
    return [
        (name, said(eqn.source_info.name_stack.stack, "key"))
        for eqn in equations(jaxpr)
        if (name := eqn.primitive.name.removesuffix("_invariant")) in names
    ]


def as_carried(ledger: Any) -> int:
    """The ledger's bytes, as XLA for CPU carries them: bfloat16 as float32."""
    return sum(line.total * (2 if line.dtype == "bfloat16" else 1) for line in ledger)


def assert_priced(f: Any, args: tuple[Any, ...], compiled: Any) -> Any:
    """The ledger of `f(*args)`, whose bytes are those of the compiled program. XLA for CPU may join what remat gathers
    again with what was gathered before, as it does to any recomputation (jax 0.10.2)."""
    ledger = explain(f, *args)
    again = [line for line in ledger if "remat" in line.via]
    assert wire_bytes(compiled) in (as_carried(ledger), as_carried(ledger) - as_carried(again))
    return ledger


def assert_collectives(case: Case, mesh: jax.sharding.Mesh, ledger: Any, compiled: Any) -> None:
    """What is asked and what XLA got are what the table says."""
    if mesh.size == 1:
        assert ledger.total == wire_bytes(compiled) == 0
        return
    forward, backward = case.expected("forward", mesh), case.expected("backward", mesh)
    assert collectives_asked(ledger.only(phase="forward")) == forward
    assert collectives_asked(ledger.only(phase="backward")) == backward
    again = collectives_asked([line for line in ledger if "remat" in line.via])
    assert collectives_got(compiled) in (forward + backward, forward + backward - again)


def assert_results(case: Case, results: Any) -> None:
    """(y, gradients of parameters, gradient of x) are the dense ones bitwise, and lie as the table says."""
    y, of_parameters, of_x = results
    dense_y, dense_parameters, dense_x = dense_of(case)
    for array, name, expected in ((y, "y", dense_y), (of_x, "x", dense_x)):
        assert_equal(array, expected)
        assert_lies(array, case.spec(name))
    for name in ("kernel", "bias"):
        assert_equal(of_parameters[name][...], dense_parameters[name][...])
        assert_lies(of_parameters[name][...], case.spec(name))


def compilations(f: Any) -> int:
    """How many programs XLA compiles while `f` runs."""
    seen: list[str] = []

    def listener(name: str, _: float, **__: Any) -> None:
        seen.extend([name] if name.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.block_until_ready(f())
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return len(seen)


def alike(got, want):
    """A value and its gradients are those wanted, each as exactly as its largest number allows."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for (path, one), (_, other) in zip(nnx.to_flat_state(got[1]), nnx.to_flat_state(want[1]), strict=True):
        far = np.abs(other[...]).max()
        np.testing.assert_allclose(one[...], other[...], rtol=1e-4, atol=1e-5 * far, err_msg=str(path))
