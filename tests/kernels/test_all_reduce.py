"""all_reduce by every algorithm against the sum done by NumPy: one contract, which the plain-XLA function keeps too."""

from __future__ import annotations

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.inspect.ledger.ledger import read

# mesh, mesh axes, shape, dtype: every group, every dtype, shapes that fill no tile
WHOLE = P()
CASES = [
    ({"t": 2}, ("t",), (5, 7), "float32"),
    ({"t": 3}, ("t",), (130, 3), "int32"),
    ({"t": 4}, ("t",), (), "float32"),
    ({"t": 4}, ("t",), (257, 130), "bfloat16"),
    ({"t": 8}, ("t",), (40,), "int8"),
    ({"t": 8}, ("t",), (0, 3), "float32"),
    ({"d": 2, "t": 3}, ("t",), (3, 1, 129), "bfloat16"),
    ({"d": 2, "t": 4}, ("t", "d"), (5, 7), "float32"),
]
TORUS = [
    ({"d": 2, "t": 3}, ("d", "t"), (130, 3), "int32"),
    ({"d": 4, "t": 2}, ("d", "t"), (5, 7), "float32"),
    ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), (40,), "bfloat16"),
]
PRODUCT = [
    (mesh, axes, shape, dtype)
    for mesh, axes in [({"t": n}, ("t",)) for n in (2, 3, 4, 8)] + [({"d": 2, "t": 4}, ("d",))]
    for shape in ((), (5, 7), (130, 3), (8, 128), (300, 130))
    for dtype in ("float32", "bfloat16", "int32", "int8")
]


def named(case) -> str:
    mesh, axes, shape, dtype = case
    return "-".join(["x".join(map(str, mesh.values())), "+".join(axes), "x".join(map(str, shape)) or "scalar", dtype])


def placed(x, mesh, axes=("t",)):
    return jax.device_put(x, jax.NamedSharding(mesh, P(axes)))


def product(turn):
    """The whole product by `make kernel-product`; else a fifth of it, another one for each algorithm."""
    cases = PRODUCT if os.environ.get("JSHARD_KERNEL_PRODUCT") else PRODUCT[turn::5]
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=named(case), marks=pytest.mark.slow) for case in cases]
    )


def parametrize(cases, *quick):
    """Of `cases` those numbered `quick` run by default, the others with the slow tests."""
    marked = [
        pytest.param(case, id=named(case), marks=() if k in quick else pytest.mark.slow) for k, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("case", marked)


def parts(sizes, axes, shape, dtype):
    """Integers, a different part for each device of the group: every sum of them is exact, in int8 modulo 256."""
    group = math.prod(sizes[name] for name in axes)
    big = 97 if dtype == "int8" else 13
    numbers = np.arange(group * math.prod(shape)).reshape(group, *shape) * 7 % big - big // 2
    return numbers.astype(np.int64)


class Contract:
    """What every algorithm of all_reduce must do."""

    algorithm = "xla"

    @pytest.fixture(autouse=True)
    def run_interpreted(self, interpreted):
        pass

    def summed(self, x, axes):
        return kernels.all_reduce(x, axes, algorithm=self.algorithm)

    def check_value(self, mesh, case):
        sizes, axes, shape, dtype = case
        numbers = parts(sizes, axes, shape, dtype)
        here = mesh(**sizes)
        x = placed(numbers.astype(jnp.dtype(dtype)), here, axes)

        def body(x):
            y = self.summed(x[0], axes)
            # every device of the group shows its own bits; the type says that they are the same
            return y, lax.pcast(y, axes, to="varying")[None], x

        specs = (P(), P(axes), P(axes))
        run = jax.jit(jax.shard_map(body, mesh=here, in_specs=P(axes), out_specs=specs))
        y, every, unchanged = run(x)
        expected = numbers.sum(0).astype(jnp.dtype(dtype))
        assert y.dtype == jnp.dtype(dtype) and y.shape == shape
        np.testing.assert_array_equal(y, expected)
        for each in np.asarray(every):
            np.testing.assert_array_equal(each, expected)
        np.testing.assert_array_equal(unchanged, x)


class Kernel(Contract):
    """What only a kernel can be asked."""

    def test_gradient_is_that_of_psum_inside_and_outside(self, mesh):
        sizes, axes = self.gradient_mesh
        shape = (5, 7)
        here = mesh(**sizes)
        x = placed(parts(sizes, axes, shape, "float32").astype(np.float32), here, axes)
        weight = jnp.arange(35.0).reshape(shape)

        def loss(x, summed):
            return (summed(jnp.square(x[0])) * weight).sum()

        def outside(summed):
            return jax.grad(
                lambda x: jax.shard_map(lambda x: loss(x, summed), mesh=here, in_specs=P(axes), out_specs=P())(x)
            )

        def inside(summed):
            return jax.shard_map(jax.grad(lambda x: loss(x, summed)), mesh=here, in_specs=P(axes), out_specs=P(axes))

        for door in (outside, inside):
            ours = jax.jit(door(lambda x: self.summed(x, axes)))(x)
            theirs = jax.jit(door(lambda x: lax.psum(x, axes)))(x)
            np.testing.assert_array_equal(ours, theirs)

    def test_bits_are_the_same_on_all_devices_where_order_matters(self, mesh):
        sizes, axes = self.gradient_mesh
        group = math.prod(sizes[name] for name in axes)
        here = mesh(**sizes)
        x = placed(np.random.default_rng(0).standard_normal((group, 9, 130), np.float32), here, axes)

        def body(x):
            return lax.pcast(self.summed(x[0], axes), axes, to="varying")[None]

        every = np.asarray(jax.jit(jax.shard_map(body, mesh=here, in_specs=P(axes), out_specs=P(axes)))(x))
        for each in every:
            np.testing.assert_array_equal(each, every[0])
        np.testing.assert_allclose(every[0], np.asarray(x, np.float64).sum(0), atol=1e-5)

    def test_bfloat16_is_summed_in_float32_and_rounded_once(self, mesh):
        sizes, axes = self.gradient_mesh
        group = math.prod(sizes[name] for name in axes)
        x = np.ones((group, 16), np.float32)
        x[0] = 256  # one more at a time is lost in bfloat16; seven more at once are not
        here = mesh(**sizes)
        x = placed(x.astype(jnp.bfloat16), here, axes)
        run = jax.shard_map(lambda x: self.summed(x[0], axes), mesh=here, in_specs=P(axes), out_specs=P())
        expected = np.asarray(x, np.float32).sum(0).astype(jnp.bfloat16)
        assert expected[0] != jnp.bfloat16(256)
        np.testing.assert_array_equal(jax.jit(run)(x), expected)


class TestXla(Contract):
    @parametrize(CASES, *range(8))
    def test_sum_is_exact_and_the_same_everywhere(self, mesh, case):
        self.check_value(mesh, case)


class TestOneShot(Kernel):
    algorithm = "one_shot"
    gradient_mesh = {"d": 2, "t": 4}, ("t",)

    @parametrize(CASES, 2, 3, 7)
    def test_sum_is_exact_and_the_same_everywhere(self, mesh, case):
        self.check_value(mesh, case)

    @product(0)
    def test_sum_is_exact_over_the_product(self, mesh, case):
        self.check_value(mesh, case)


class TestRing(Kernel):
    algorithm = "ring"
    gradient_mesh = {"d": 2, "t": 4}, ("t",)

    @parametrize(CASES, 0, 1, 4, 6)
    def test_sum_is_exact_and_the_same_everywhere(self, mesh, case):
        self.check_value(mesh, case)

    @product(1)
    def test_sum_is_exact_over_the_product(self, mesh, case):
        self.check_value(mesh, case)


@pytest.mark.seconds
class TestTorus(Kernel):
    algorithm = "torus"
    gradient_mesh = {"d": 2, "t": 2}, ("d", "t")

    @parametrize(TORUS, 0)
    def test_sum_is_exact_and_the_same_everywhere(self, mesh, case):
        self.check_value(mesh, case)


class TestPermute(Contract):
    algorithm = "permute"
    gradient_mesh = {"d": 2, "t": 4}, ("d", "t")
    test_gradient_is_that_of_psum_inside_and_outside = Kernel.test_gradient_is_that_of_psum_inside_and_outside
    test_bits_are_the_same_on_all_devices_where_order_matters = (
        Kernel.test_bits_are_the_same_on_all_devices_where_order_matters
    )

    @parametrize(CASES, 1, 2, 4, 6, 7)
    def test_sum_is_exact_and_the_same_everywhere(self, mesh, case):
        self.check_value(mesh, case)


# -- where a kernel stands in a program --

X = np.arange(8 * 35, dtype=np.float32).reshape(8, 5, 7) % 5


def on_line(mesh, body, out_specs=WHOLE, **sizes):
    """The program, and what puts its argument in place."""
    here = mesh(**(sizes or {"t": 4}))
    run = jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=out_specs))
    return run, lambda x: placed(x, here)


def called(program, x):
    run, place = program
    return run(place(x))


def traced(program, x):
    run, place = program
    return jax.make_jaxpr(run)(place(x))


def test_kernel_runs_under_scan_and_remat_with_gradients(mesh, interpreted):
    def model(summed):
        def loss(x):
            @jax.checkpoint
            def block(carry, _):
                return summed(lax.pcast(carry, "t", to="varying") * x) / 4, None

            carry, _ = lax.scan(block, jnp.ones((2, 5, 7)), None, length=3)
            return carry.sum()

        return lambda x: jax.value_and_grad(loss)(x)

    specs = (P(), P("t"))
    ours = called(on_line(mesh, model(lambda x: kernels.all_reduce(x, "t", algorithm="one_shot")), specs), X)
    theirs = called(on_line(mesh, model(lambda x: lax.psum(x, "t")), specs), X)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.seconds
def test_hundred_calls_back_to_back_read_nothing_stale(mesh, interpreted):
    def body(x):
        def call(i, x):
            return lax.pcast(kernels.all_reduce(x, "t", algorithm="one_shot"), "t", to="varying") - i

        return lax.fori_loop(0, 100, call, x)

    def plain(x):
        return lax.fori_loop(0, 100, lambda i, x: lax.pcast(lax.psum(x, "t"), "t", to="varying") - i, x)

    x = np.arange(10, dtype=np.int32).reshape(2, 5) - 4
    both = [called(on_line(mesh, each, P("t"), t=2), x) for each in (body, plain)]
    np.testing.assert_array_equal(*both)


@pytest.mark.quick(1)
@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_batch_of_vmap_is_summed_at_once(mesh, interpreted, algorithm):
    def body(x):
        return jax.vmap(lambda row: kernels.all_reduce(row, "t", algorithm=algorithm), in_axes=1)(x[0])

    np.testing.assert_array_equal(called(on_line(mesh, body), X[:4]), np.asarray(X[:4]).sum(0).T)
    run, place = on_line(mesh, body)
    assert str(jax.make_jaxpr(run)(place(X[:4]))).count("pallas_call") == 1


def test_second_call_compiles_nothing(mesh, interpreted):
    run, place = on_line(mesh, lambda x: kernels.all_reduce(x[0], "t", algorithm="one_shot"), t=2)
    first, second = place(X[:2]), place(X[:2] + 1)
    jax.block_until_ready(run(first))  # the interpreter compiles operations of its own while it runs
    happened = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: happened.append(name))
    try:
        jax.block_until_ready(run(second))
        assert happened == []
        jax.jit(lambda x: x * 3)(X)
        assert any("compile" in name for name in happened)
    finally:
        jax.monitoring.clear_event_listeners()


def test_equal_calls_share_one_trace(mesh, interpreted):
    def body(x):
        for _ in range(3):
            x = lax.pcast(kernels.all_reduce(x, "t", algorithm="one_shot"), "t", to="varying")
        return x

    jaxpr = traced(on_line(mesh, body, P("t")), X)
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.params.get("name") == "_kernel":
                found.append(eqn.params["jaxpr"])
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    look(jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr)
    assert len(found) == 3 and all(each is found[0] for each in found)


@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [
        ("one_shot", 3 * 8 * 128 * 4),  # one padded tile to each of three
        ("ring", 2 * 3 * 2 * 8 * 128 * 4),  # a tile for each part and direction
    ],
)
def test_ledger_has_the_algorithm_and_the_bytes(mesh, algorithm, wire):
    with kernels.interpret():
        jaxpr = traced(on_line(mesh, lambda x: kernels.all_reduce(x[0], "t", algorithm=algorithm)), X[:4])
    (line,) = read(jaxpr)
    assert (line.collective, line.mesh_axes, line.group, line.dtype) == ("all_reduce", ("t",), 4, "float32")
    assert (line.payload, line.wire, line.via) == (35 * 4, wire, f"kernel {algorithm}, as it declares")


def test_ledger_of_a_torus_has_a_line_for_each_ring(mesh):
    program = on_line(mesh, lambda x: kernels.all_reduce(x[0], ("d", "t"), algorithm="torus"), d=2, t=2)
    with kernels.interpret():
        found = [(line.collective, line.mesh_axes) for line in read(traced(program, X[:2]))]
    assert found == [("reduce_scatter", ("d",)), ("all_reduce", ("t",)), ("all_gather", ("d",))]
