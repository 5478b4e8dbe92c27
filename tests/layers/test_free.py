"""The abstraction is free: each layer and strategy compiles to the text of the shard_map one would write by hand."""

from __future__ import annotations

import functools
import hashlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jshard
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

P = jax.P
bf16, f32 = jnp.bfloat16, jnp.float32


# -- by hand: one device's program of each strategy --


def gather(x, *names, axis=0, to="varying"):
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=axis, tiled=True, to=to)
    return x


def scatter(y, *names, axis=0):
    for name in names:
        y = lax.psum_scatter(y, name, scatter_dimension=axis, tiled=True)
    return y


def differs(x, *names):
    return lax.pcast(x, names, to="varying")


def plus(y, b):
    """`y + b`, where b differs as y does before it gets y's rank: its gradient is summed as it lies, by every JAX."""
    missing = jax.typeof(y).mat.varying - jax.typeof(b).mat.varying
    return y + differs(b, *sorted(missing)) if missing else y + b


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def stored(w, scattered, sliced):
    """Gathered in bfloat16; its gradient in float32, scattered where devices used it on other rows, else this device's part."""
    for name in sliced:
        w = gather(w.astype(bf16), name, to="invarying")
    return gather(w.astype(bf16), *scattered)


def stored_backward(scattered, sliced, _, g):
    g = scatter(g.astype(f32), *scattered)
    for name in sliced:
        g = part(g, name, 0)
    return (g,)


stored.defvjp(lambda w, *names: (stored(w, *names), None), stored_backward)


def part(x, name, axis):
    size = x.shape[axis] // lax.axis_size(name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * size, size, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sequence(x, name):
    return gather(x.astype(bf16), name, axis=1)


sequence.defvjp(lambda x, name: (sequence(x, name), None), lambda name, _, g: (scatter(g.astype(f32), name, axis=1),))


def plain(x, w, b):
    return plus(x @ w, b)


def row_reduce_float32(x, w, b):
    w, b = differs(w, "data"), differs(b, "data")
    return plus(differs(x, "tensor").astype(bf16) @ w.astype(bf16), b.astype(bf16))


def reduction_reduce_float32(x, w, b):
    w, b = differs(w, "data").astype(bf16), differs(b, "data").astype(bf16)
    y = lax.psum(jnp.matmul(x.astype(bf16), w, preferred_element_type=f32), "tensor")
    return plus(y.astype(bf16), b)


def with_stored(x, w, b, *names):
    return x.astype(bf16) @ stored(w, *names) + stored(b, *names)


HAND = {
    "replicated": plain,
    "row": plain,
    "row over two": plain,
    "column": plain,
    "column over two": plain,
    "column gather": lambda x, w, b: gather(plus(x @ w, b), "tensor", axis=1, to="invarying"),
    "column gather over two": lambda x, w, b: gather(plus(x @ w, b), "data", "tensor", axis=1, to="invarying"),
    "reduction": lambda x, w, b: plus(lax.psum(x @ w, "tensor"), b),
    "reduction over two": lambda x, w, b: plus(lax.psum(x @ w, ("data", "tensor")), b),
    "reduction scatter": lambda x, w, b: plus(scatter(x @ w, "tensor"), b),
    "reduction scatter over two": lambda x, w, b: plus(scatter(x @ w, "data", "tensor"), b),
    "row column": plain,
    "row column gather": lambda x, w, b: gather(plus(x @ w, b), "tensor", axis=1, to="invarying"),
    "row reduction": lambda x, w, b: plus(lax.psum(x @ w, "tensor"), b),
    "row reduction scatter": lambda x, w, b: plus(scatter(x @ w, "tensor"), b),
    "column reduction": lambda x, w, b: plus(lax.psum(x @ w, "tensor"), b),
    "row column reduction": lambda x, w, b: plus(lax.psum(x @ w, "pipe"), b),
    "row column over two": plain,
    "sequence": plain,
    "sequence column": lambda x, w, b: plus(gather(x, "tensor", axis=1) @ w, b),
    "sequence reduction": lambda x, w, b: plus(scatter(x @ w, "tensor", axis=1), b),
    "sequence column, two axes": lambda x, w, b: plus(gather(x, "tensor") @ w, b),
    "sequence reduction, two axes": lambda x, w, b: plus(scatter(x @ w, "tensor"), b),
    "row sequence column": lambda x, w, b: plus(gather(x, "tensor", axis=1) @ w, b),
    "row sequence reduction": lambda x, w, b: plus(scatter(x @ w, "tensor", axis=1), b),
    "row sequence column, two axes": lambda x, w, b: plus(gather(x, "tensor") @ w, b),
    "store": lambda x, w, b: x @ gather(w, "data") + gather(b, "data"),
    "store keep": lambda x, w, b: x @ gather(w, "data") + gather(b, "data"),
    "store without rows": lambda x, w, b: x @ gather(w, "data", to="invarying") + gather(b, "data", to="invarying"),
    "store over two": lambda x, w, b: x @ gather(w, "data", "tensor") + gather(b, "data", "tensor"),
    "store over one of two": lambda x, w, b: (
        x @ gather(differs(w, "tensor"), "data") + gather(differs(b, "tensor"), "data")
    ),
    "store column": lambda x, w, b: x @ gather(w, "data") + gather(b, "data"),
    "store reduction": lambda x, w, b: lax.psum(x @ gather(w, "data", axis=1), "tensor") + gather(b, "data"),
    "store optimizer": plain,
    "compute bfloat16": lambda x, w, b: plus(x.astype(bf16) @ w.astype(bf16), b.astype(bf16)),
    "reduce float32": row_reduce_float32,
    "reduction reduce float32": reduction_reduce_float32,
    "store reduce float32": lambda x, w, b: with_stored(x, w, b, ("data",), ()),
    "store without rows reduce float32": lambda x, w, b: with_stored(x, w, b, (), ("data",)),
    "store beyond rows reduce float32": lambda x, w, b: with_stored(x, w, b, ("data",), ("tensor",)),
    "sequence reduce float32": lambda x, w, b: plus(sequence(x, "tensor") @ w.astype(bf16), b.astype(bf16)),
    "param bfloat16": lambda x, w, b: plus(lax.psum(x @ w.astype(f32), "tensor"), b.astype(f32)),
    "remat column": jax.checkpoint(plain),
    "remat sequence column": jax.checkpoint(lambda x, w, b: plus(gather(x, "tensor", axis=1) @ w, b)),
    "remat store": jax.checkpoint(lambda x, w, b: x @ gather(w, "data") + gather(b, "data")),
}
NOT_KEPT = ("all_gather", "all_gather_invariant", "custom_vjp_call", "pvary")
AGAIN = functools.partial(jax.checkpoint, policy=lambda operation, *_, **__: operation.name not in NOT_KEPT)
for name in [name for name in HAND if name.startswith("store") and name not in ("store keep", "store optimizer")]:
    HAND[name] = AGAIN(HAND[name])  # w is not kept, but gathered again


def by_hand(case, mesh):
    """The same three results, differentiated by JAX through the shard_map."""
    specs = tuple(case.spec(name) for name in ("x", "kernel", "bias"))
    if case.name == "backward other":
        mapped = backward_elsewhere(mesh)
    else:
        mapped = jax.shard_map(HAND[case.name], mesh=mesh, in_specs=specs, out_specs=case.spec("y"))

    def run(parameters, x, cotangent):
        y, pull = jax.vjp(lambda p, x: mapped(x, p["kernel"], p["bias"]), parameters, x)
        return y, *pull(cotangent)

    return run


def backward_elsewhere(mesh):
    """Backward over more rows, w gathered."""
    specs = P("data"), P(None, "tensor"), P("tensor")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*specs, P("data", "tensor")), out_specs=specs)
    def pull(x, w, b, g):
        g = lax.all_to_all(g, "tensor", 0, 1, tiled=True)
        w, b = (gather(p, "tensor", axis=p.ndim - 1, to="invarying") for p in (w, b))
        _, pull = jax.vjp(lambda x, w, b: plus(x @ w, b), part(x, "tensor", 0), w, b)
        gx, gw, gb = pull(g)  # with gw and gb summed over data and tensor
        return gather(gx, "tensor", to="invarying"), part(gw, "tensor", 1), part(gb, "tensor", 0)

    forward = jax.shard_map(plain, mesh=mesh, in_specs=specs, out_specs=P("data", "tensor"))
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x, w, b: (forward(x, w, b), (x, w, b)), lambda kept, g: pull(*kept, g))
    return f


# -- the texts --

METADATA = re.compile(r',? metadata=\{(?:[^{}"]|"[^"]*")*\}')
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> (.*) \{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
REFERENCE = re.compile(r"%[\w.\-]+")


def normal(text):
    """A program without what says where it comes from: names of functions, lines of source, how values are numbered,
    and the order of what does not depend on each other. A value is named by what it is computed from instead."""
    header, *lines = METADATA.sub("", text).splitlines()
    computations, names, inside = {}, {}, []
    for line in lines:
        if found := COMPUTATION.match(line):
            inside = computations[found[2]] = [(found[1] or "") + found[3]]
        elif found := INSTRUCTION.match(line):
            written = REFERENCE.sub(lambda name: names[name[0][1:]], re.sub(r"channel_id=\d+", "", found[3]))
            names[found[2]] = "%" + hashlib.sha256(written.encode()).hexdigest()[:8]
            inside.append(f"{found[1] or ''}{names[found[2]]} = {written}")
        elif line == "}":
            name, inside = next(reversed(computations)), sorted(inside)
            names[name] = "%" + hashlib.sha256("\n".join(inside).encode()).hexdigest()[:8]
            computations[name] = inside
    return "\n".join([re.sub(r"^HloModule [^,]+,", "", header), *sorted(map("\n".join, computations.values()))])


def compiled_text(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def shapes_of(case, mesh):
    """Parameters, x and cotangent as shapes that lie as the table says."""
    x_shape, y_shape = cases.shapes(case.rank)
    dtypes = case.keys.get("dtype", {})
    param, compute = dtypes.get("param", "float32"), dtypes.get("compute", "float32")

    def shape(name, sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=jax.NamedSharding(mesh, case.spec(name)))

    kernel = shape("kernel", (cases.INPUTS, cases.OUTPUTS), param)
    parameters = {"kernel": kernel, "bias": shape("bias", (cases.OUTPUTS,), param)}
    return parameters, shape("x", x_shape, "float32"), shape("y", y_shape, compute)


def through_the_layer(layer):
    graph, abstract = nnx.split(layer)

    def run(parameters, x, cotangent):
        state = jax.tree.map(lambda array: array, abstract)
        nnx.replace_by_pure_dict(state, parameters)
        y, of_parameters, of_x = cases.forward_and_gradients(nnx.merge(graph, state), x, cotangent)
        return y, nnx.to_pure_dict(of_parameters), of_x

    return run


FREE = [
    *((case, "2x4", "explicit") for case in cases.on("2x4")),
    *((case, "2x4", "auto") for case in cases.on("2x4", cases.SOME)),
    *((case, "2x2x2", "explicit") for case in cases.on("2x2x2") if "p" in case.uses),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize(("case", "mesh", "axis_types"), FREE, ids=str)
def test_linear_compiles_to_what_is_written_by_hand(case, mesh, axis_types):
    with cases.loaded(case.configuration(mesh, axis_types)) as grid:
        layer = nnx.eval_shape(lambda: cases.layer_of(case))
        args = shapes_of(case, grid)
        ours = compiled_text(through_the_layer(layer), *args)
        hand = compiled_text(by_hand(case, grid), *args)
    assert normal(ours) == normal(hand)


REFUSED = ("scatter", "remat", "backward")  # by `jshard.shard`
UNDER_SHARD = [case for case in cases.on("2x4") if not any(word in str(case) for word in REFUSED)]


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", UNDER_SHARD, ids=str)
def test_linear_compiles_to_the_same_under_shard_as_by_itself(case):
    with cases.loaded(case.configuration("2x4", "explicit")) as grid:
        alone, other = (
            nnx.eval_shape(lambda: cases.layer_of(case)) for _ in range(2)
        )  # `shard` changes what it is given
        args, layers = shapes_of(case, grid), (alone, jshard.shard(other))
        asked = [cases.collectives_asked(jshard.explain(through_the_layer(each), *args)) for each in layers]
        texts = [compiled_text(through_the_layer(each), *args) for each in layers]
    assert asked[0] == asked[1]
    assert normal(texts[0]) == normal(texts[1])


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", [case for case in UNDER_SHARD if {"dtype", "output"} & case.keys.keys()], ids=str)
def test_linear_under_shard_returns_what_it_returns_by_itself(case):
    with cases.loaded(case.configuration("2x4")):
        layer = jshard.shard(cases.layer_of(case))
        cases.assert_results(
            case, jax.jit(functools.partial(cases.forward_and_gradients, layer))(*cases.operands(case))
        )


def test_texts_that_differ_are_told_apart():
    """A collective more, another group, another order, another dtype; not another name."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((8, 8), f32, sharding=jax.NamedSharding(mesh, P("data", "tensor")))
    bodies = {
        "sum": lambda x: lax.psum(x, "tensor"),
        "named": lambda x: jax.named_scope("other")(lambda: lax.psum(x, "tensor"))(),
        "other group": lambda x: differs(lax.psum(x, "data"), "data"),
        "twice": lambda x: lax.psum(differs(lax.psum(x, "tensor"), "tensor"), "tensor"),
        "narrow": lambda x: lax.psum(x.astype(jnp.float16), "tensor").astype(f32),
        "scaled": lambda x: lax.psum(2 * x, "tensor"),
    }
    outs = {"other group": P("data", "tensor")}
    texts = {
        name: normal(compiled_text(
            jax.shard_map(body, mesh=mesh, in_specs=P("data", "tensor"), out_specs=outs.get(name, P("data"))), x
        ))
        for name, body in bodies.items()
    }  # fmt: skip
    assert texts["sum"] == texts["named"]
    assert len(set(texts.values())) == len(texts) - 1


# -- two layers, and a training step of them --

SIGNALS = {
    "tensor": {"up": {"row": "data", "column": "tensor"}, "down": {"row": "data", "reduction": "tensor"}},
    "sequence": {
        "up": {"column": "tensor", "sequence": "tensor"},
        "down": {"reduction": "tensor", "sequence": "tensor"},
    },
    "store": {name: {"row": "data", "store": "data"} for name in ("up", "down")},
}
BODIES = {
    "tensor": (plain, lambda x, w, b: plus(lax.psum(x @ w, "tensor"), b)),
    "sequence": (
        lambda x, w, b: plus(gather(x, "tensor", axis=1) @ w, b),
        lambda x, w, b: plus(scatter(x @ w, "tensor", axis=1), b),
    ),
    "store": (HAND["store"], HAND["store"]),
    "kept": (HAND["store keep"], HAND["store keep"]),
}
# of x and y, of what lies between, of the kernels and biases of up and down
SPECS = {
    "tensor": (P("data"), P("data", "tensor"), (P(None, "tensor"), P("tensor")), (P("tensor"), P())),
    "sequence": (P(None, "tensor"), P(None, None, "tensor"), (P(None, "tensor"), P("tensor")), (P("tensor"), P())),
    "store": (P("data"), P("data"), (P("data"), P("data")), (P("data"), P("data"))),
}
TX = optax.adam(1e-2)


def configuration_of(name, axis_types):
    return {"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}, **SIGNALS[name]}


def shapes_of_mlp(name, mesh):
    """Parameters and x."""
    outside, _, up, down = SPECS[name]

    def shape(sizes, spec):
        return jax.ShapeDtypeStruct(sizes, f32, sharding=jax.NamedSharding(mesh, spec))

    parameters = {
        "down": {"bias": shape((16,), down[1]), "kernel": shape((32, 16), down[0])},
        "up": {"bias": shape((32,), up[1]), "kernel": shape((16, 32), up[0])},
    }
    return parameters, shape((8, 8, 16) if name == "sequence" else (8, 16), outside)


def layers_by_hand(name, mesh):
    """One shard_map each."""
    outside, between, up, down = SPECS["store" if name == "kept" else name]
    first = jax.shard_map(BODIES[name][0], mesh=mesh, in_specs=(outside, *up), out_specs=between)
    second = jax.shard_map(BODIES[name][1], mesh=mesh, in_specs=(between, *down), out_specs=outside)
    return first, second


def mlp_by_hand(layers, parameters, x):
    up, down = parameters["up"], parameters["down"]
    return layers[1](jax.nn.relu(layers[0](x, up["kernel"], up["bias"])), down["kernel"], down["bias"])


def abstract_mlp():
    return nnx.eval_shape(lambda: jshard.MLP(16, 32, 16, rngs=nnx.Rngs(0)))


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", ["explicit", "auto", "shard"])
@pytest.mark.parametrize("name", SIGNALS)
def test_mlp_compiles_to_what_is_written_by_hand(name, how):
    """By itself on both kinds of mesh, and in one program by jshard.shard."""
    axis_types, wrap = ("explicit", jshard.shard) if how == "shard" else (how, lambda model: model)
    with cases.loaded(configuration_of(name, axis_types)) as grid:
        parameters, x = shapes_of_mlp(name, grid)
        both = functools.partial(
            mlp_by_hand, layers_by_hand("kept" if how == "shard" and name == "store" else name, grid)
        )
        both = (
            AGAIN(both) if how == "shard" and name == "store" else both
        )  # a model that is one program is one for it too

        def hand(parameters, x, cotangent):
            y, pull = jax.vjp(both, parameters, x)
            return y, *pull(cotangent)

        ours = compiled_text(through_the_layer(wrap(abstract_mlp())), parameters, x, x)
        assert normal(ours) == normal(compiled_text(hand, parameters, x, x))


def placed_like(tree, parameters, mesh):
    """Adam's state as shapes that lie as the parameters do."""
    whole = jax.NamedSharding(mesh, P())
    return optax.tree_map_params(
        TX,
        lambda leaf, parameter: parameter,
        tree,
        parameters,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
    )


def train(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda model: jshard.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return value


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SIGNALS)
def test_training_step_in_one_shard_map_compiles_to_what_is_written_by_hand(name):
    with cases.loaded(configuration_of(name, "explicit")) as grid:
        model = jshard.MLP(16, 32, 16, rngs=nnx.Rngs(0))
        optimizer = jshard.Optimizer(model, TX)
        parameters, x = shapes_of_mlp(name, grid)
        state = placed_like(jax.eval_shape(TX.init, parameters), parameters, grid)
        batch = cases.placed(jnp.zeros(x.shape), x.sharding.spec)
        ours = in_one_shard_map(train).lower(model, optimizer, batch, batch).compile().as_text()

        def step(parameters, state, count, x, y):
            def loss(parameters):
                squares = (mlp_by_hand(BODIES[name], parameters, x) - y) ** 2
                axes = tuple(sorted(jax.typeof(squares).mat.varying))
                return lax.psum(jnp.sum(squares), axes) / (squares.size * lax.axis_size(axes))

            value, gradients = jax.value_and_grad(loss)(parameters)
            updates, state = TX.update(gradients, state, parameters)
            return value, optax.apply_updates(parameters, updates), state, count + 1

        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (parameters, state))
        mapped = jax.shard_map(
            step, mesh=grid, in_specs=(*specs, P(), x.sharding.spec, x.sharding.spec), out_specs=(P(), *specs, P())
        )
        count = jax.ShapeDtypeStruct((), jnp.uint32, sharding=jax.NamedSharding(grid, P()))
        assert normal(ours) == normal(compiled_text(mapped, parameters, state, count, x, x))


@pytest.mark.quick("tensor-jax.jit-explicit")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("by", ["jax.jit", "jshard.jit"])
@pytest.mark.parametrize("name", SIGNALS)
def test_training_step_by_layers_compiles_to_what_is_written_by_hand(name, by, axis_types):
    with cases.loaded(configuration_of(name, axis_types)) as grid:
        model = jshard.MLP(16, 32, 16, rngs=nnx.Rngs(0))
        optimizer = jshard.Optimizer(model, TX)
        graph, ours_state = nnx.split((model, optimizer))
        parameters, x = shapes_of_mlp(name, grid)
        state = placed_like(jax.eval_shape(TX.init, parameters), parameters, grid)
        layers = layers_by_hand(name, grid)

        def step(model, optimizer, x, y):
            value, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return value

        def ours(ours_state, x, y):
            both = nnx.merge(graph, ours_state)
            return step(*both, x, y), nnx.state(both)

        def hand(parameters, state, count, x, y):
            value, gradients = jax.value_and_grad(lambda p: ((mlp_by_hand(layers, p, x) - y) ** 2).mean())(parameters)
            updates, state = TX.update(gradients, state, parameters)
            after = optax.apply_updates(parameters, updates), state, count + 1
            return value, *(after if by == "jax.jit" else (*after[1:], after[0]))  # jshard.jit returns parameters last

        count = jax.ShapeDtypeStruct((), jnp.uint32, sharding=jax.NamedSharding(grid, P()))
        if by == "jax.jit":
            text = compiled_text(ours, ours_state, x, x)
        else:
            batch = cases.placed(jnp.zeros(x.shape), x.sharding.spec)
            text = jshard.jit(step).lower(model, optimizer, batch, batch).compile().as_text()
        assert normal(text) == normal(compiled_text(hand, parameters, state, count, x, x))
