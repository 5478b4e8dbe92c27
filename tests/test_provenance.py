"""Every collective of a training step, and the key of the configuration that it names; what a user's own scopes can't do."""

from __future__ import annotations

import inspect
import types
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard.inspect.compiled import collectives_in
from jshard.inspect.plan import explain
from jshard.kernels import all_reduce
from jshard.programs.provenance import (
    Cause,
    StackFrames,
    cause,
    causes,
    op_name,
    operation,
    own_line,
    scope,
    source_of,
    taken,
)
from jshard.signals.active_config import load, unload
from jshard.signals.keys import blamed

D, T = "data", "tensor"
AR, AG, RS, A2A = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    unload()


def configured(keys: str, more: str = "") -> dict[int, str]:
    """Loads a signal "only" with one key a line; the key that stands on each line."""
    head = f"jshard:\n  mesh: {{data: 2, tensor: 4}}\n{more}only:\n"
    text = head + "".join(f"  {line}\n" for line in keys.splitlines())
    with open("one.yaml", "w") as file:
        file.write(text)
    load("one.yaml")
    found, outer = {}, ["", ""]
    for number, line in enumerate(text.splitlines(), 1):
        name = line.split(":")[0]
        depth = (len(name) - len(name.strip())) // 2
        outer[depth:] = [name.strip()]
        found[number] = ".".join(outer).removeprefix("only.")
    return found


def step(layer, optimizer, x):
    def loss(layer, x):
        return jnp.square(layer(x)).sum()

    gradients, of_x = nnx.grad(loss, argnums=(0, 1))(layer, x)
    optimizer.update(layer, gradients)
    return of_x


def named(keys: str, rank: int = 3) -> set[tuple[str, str, str, str]]:
    """Of the collectives of a step that a signal asked for: phase, collective, mesh axes, and the key on the line named."""
    lines = configured(keys, OTHER if "other" in keys else "")
    with jshard.signal("only"):
        layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))
    ledger = explain(step, layer, jshard.Optimizer(layer, optax.sgd(0.1)), jnp.ones((8,) * rank))
    return {
        (line.phase, line.collective, line.axis, lines[line.place.line])
        for line in ledger
        if line.signal.startswith("only")
    }


# -- one key a line: the line named is that of the key --

OTHER = "other:\n  row: [data, tensor]\n"
DTYPE = "dtype:\n  compute: bfloat16\n  reduce: float32"
F, B, U = "forward", "backward", "update"
# x comes in whole, so that its gradient is gathered over what splits it
X_ROW, X_SEQUENCE = (B, AG, D, "row"), (B, AG, T, "sequence")
GATHERED = {(F, AG, T, "sequence"), (B, RS, T, "sequence"), X_SEQUENCE}
STORED = {(F, AG, D, "store"), (B, AG, D, "store"), (B, RS, D, "store"), X_ROW}
SHARDED = {(F, AG, D, "shard"), (B, RS, D, "shard"), (B, AG, D, "shard")}
KEYS: dict[str, tuple[str, set[tuple[str, str, str, str]]]] = {
    "row": ("row: data", {(B, AR, D, "row"), X_ROW}),
    "column": ("column: tensor", {(B, AR, T, "column")}),
    "reduction": ("reduction: tensor", {(F, AR, T, "reduction"), (B, AG, T, "reduction")}),
    "row and column": ("column: tensor\nrow: data", {(B, AR, D, "row"), (B, AR, T, "column"), X_ROW}),
    "sequence": ("sequence: tensor", {(B, AR, T, "sequence"), X_SEQUENCE}),
    "sequence of columns": ("column: tensor\nsequence: tensor", GATHERED),
    "sequence of a reduction": (
        "reduction: tensor\nsequence: tensor",
        {(F, RS, T, "sequence"), (B, AG, T, "sequence"), (B, AR, T, "sequence"), (B, AG, T, "reduction")},
    ),
    "sequence before row": ("sequence: tensor\nrow: data", {(B, AR, "data, tensor", "row"), X_ROW, X_SEQUENCE}),
    "store": ("row: data\nstore: data", STORED),
    "store alone": ("store: data", {(F, AG, D, "store"), (B, AG, D, "store")}),
    "store of a sequence": (
        "sequence: data\nstore: data",
        {(F, AG, D, "store"), (B, AG, D, "store"), (B, RS, D, "store"), (B, AG, D, "sequence")},
    ),
    "store of the optimizer": (
        "row: data\nstore:\n  optimizer: data",
        {(B, AR, D, "row"), X_ROW, (U, AG, D, "store.optimizer")},
    ),
    "output: gather": ("column: tensor\noutput: gather", {(F, AG, T, "output"), (B, AR, T, "column")}),
    "output: scatter": (
        "reduction: tensor\noutput: scatter",
        {(F, RS, T, "output"), (B, AG, T, "output"), (B, AR, T, "reduction"), (B, AG, T, "reduction")},
    ),
    "output: sum": (
        "reduction: tensor\nsequence: tensor\noutput: sum",
        {(F, AR, T, "output"), (B, AG, T, "reduction")},
    ),
    "shard of rows": ("shard:\n  axis: 0\n  mesh: data", SHARDED),
    "shard of columns": ("shard:\n  axis: 1\n  mesh: tensor", {(B, AR, T, "shard")}),
    "backward": (
        "row: data\ncolumn: tensor\nbackward: other",
        {(B, A2A, T, "backward"), (B, AG, T, "backward"), (B, AR, "data, tensor", "other.row"), (B, AG, D, "backward")},
    ),
    "dtype.reduce": (f"row: data\ncolumn: tensor\n{DTYPE}", {(B, AR, D, "row"), (B, AR, T, "column"), X_ROW}),
    "dtype.reduce of what is stored": (f"row: data\nstore: data\n{DTYPE}", STORED),
    "dtype.reduce of a sequence": (f"column: tensor\nsequence: tensor\n{DTYPE}", GATHERED),
    "remat": ("column: tensor\nsequence: tensor\nremat: true", {*GATHERED, (B, AG, T, "remat")}),
    "store, kept": (
        "row: data\nstore:\n  keep: true\n  parameters: data",
        {(F, AG, D, "store"), (B, RS, D, "store"), X_ROW},
    ),
    "remat of what is stored": (
        "row: data\nstore: data\nremat: true",
        {*STORED - {(B, AG, D, "store")}, (B, AG, D, "remat")},
    ),
    "kernel": (
        "column: tensor\nkernel:\n  all_reduce: in_order\nreduction: data\nsequence: data",
        {(F, RS, D, "sequence"), (B, AG, D, "sequence"), (B, A2A, T, "column"), (B, AR, D, "sequence"), (B, AG, D, "reduction")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_collective_names_the_line_of_the_key_that_asks(name):
    keys, expected = KEYS[name]
    assert named(keys) == expected


@pytest.mark.parametrize("name", ["row and column", "sequence of a reduction", "store of the optimizer"])
def test_compiled_collective_carries_the_cause_of_the_line_that_asked(name):
    lines = configured(KEYS[name][0])
    with jshard.signal("only"):
        layer = jshard.Linear(8, 16, rngs=nnx.Rngs(0))
    graph, state = nnx.split((layer, jshard.Optimizer(layer, optax.sgd(0.1))))

    def whole(state, x):
        layer, optimizer = nnx.merge(graph, state)
        return step(layer, optimizer, x), nnx.split((layer, optimizer))[1]

    compiled = jax.jit(whole).lower(state, jnp.ones((8, 8, 8))).compile()
    found = set()
    for got in collectives_in(compiled):
        mesh_axes = got.mesh_axes({D: 2, T: 4})
        for each in (blamed(each, mesh_axes) for each in got.causes):
            found.add((each.phase, got.collective, ", ".join(mesh_axes), lines[each.place.line]))
    assert found == named(KEYS[name][0])


@pytest.mark.parametrize("column", ["", "\ncolumn: tensor"])
def test_sum_under_a_signal_is_asked_by_the_key_that_splits_what_is_summed(column):
    """Two keys may name one mesh axis: a sum is over the devices that hold other rows."""
    lines = configured(f"store: data\nrow: data{column}")

    def summed(x):
        with jshard.signal("only"):
            return jshard.sum(x, 0)

    (line,) = explain(summed, jnp.ones((8, 8)), backward=False).lines
    assert (line.collective, line.axis, lines[line.place.line]) == (AR, D, "row")


def test_cotangent_of_a_tensor_is_moved_by_the_key_backward():
    lines = configured("column: tensor\nbackward: other", OTHER)

    def placed(x):
        with jshard.signal("only"):
            return jnp.sin(jshard.signal.tensor(x))

    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(jshard.mesh(), P()))
    ledger = explain(lambda x: placed(x).sum(), x)
    told = {(line.phase, line.signal, lines[line.place.line]) for line in ledger if line.via == "redistribute"}
    assert told == {(B, "only", "backward")}


# -- a user's own scopes --

FAKES = ("redistribute", "signal:only", "phase:update", "key:store", "chosen:row", "transpose", "rematted_computation",
         "checkpoint", "jshard", "jshard[]", "jshard[only]", "jshard[signal]", "jshard[phase=never]", "jshard[word=only]", "store")  # fmt: skip


@pytest.mark.parametrize("fake", FAKES)
def test_scope_of_the_users_neither_fakes_nor_silences_a_cause(fake):
    """The first collective stands under no signal, the second under one that does not name its axis, the third is asked for."""
    configured("row: data")

    def body(x):
        first = all_reduce(x, "tensor")
        with jshard.signal("only"):
            return first + all_reduce(x * 2, "tensor"), all_reduce(x * 3, "data")

    def told(x):
        mapped = jax.shard_map(body, mesh=jshard.mesh(), in_specs=P(D, T), out_specs=(P(D), P(None, T)))
        return [(line.cause, line.via) for line in explain(mapped, x, backward=False)]

    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(jshard.mesh(), P(D, T)))
    plain = told(x)
    with jax.named_scope(fake):
        assert told(x) == plain
    assert [via for _, via in plain] == ["no signal asked", "no signal asked", ""]
    stack = f"jit(f)/{fake}/jshard[signal=only]/{fake}/psum"
    assert cause(stack) == cause("jit(f)/jshard[signal=only]/psum") == Cause(("only",))


def test_name_may_hold_what_name_stacks_and_hlo_are_written_with():
    name = 'a (b):c[d]=e,f%"g"'

    def f(x):
        with scope(signal=f"{name}/inner", key="row"):
            return lax.psum(x, D)

    mesh = jax.make_mesh((8,), (D,))
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(D), out_specs=P()))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P(D)))
    (got,) = collectives_in(mapped.lower(x).compile())
    (line,) = explain(mapped, x, backward=False)
    assert got.causes == (Cause((name, "inner"), key="row"),)
    assert line.cause.path == (name, "inner")


# -- readers --


def test_causes_are_read_from_what_xla_keeps():
    up = "jshard[signal=up]"
    assert cause(f"jit(f)/jshard[signal=attn]/{up}/jit(layer)/shard_map/psum") == Cause(("attn", "up"))
    assert cause(f"jit(f)/transpose(jvp({up}))/jvp({up})/psum") == Cause(("up",), B)
    again = f"jit(f)/transpose(jvp())/checkpoint/rematted_computation/{up}/jshard[key=store]/all_gather"
    assert cause(again) == Cause(("up",), B, "store", remat=True)
    assert not cause(f"jit(f)/again/rematted_computation/{up}/all_gather").remat  # a scope of the user's
    assert not cause("jit(f)/checkpoint/zeroth/psum").remat
    assert cause(f"jit(f)/vmap({up})/psum") == Cause(("up",))
    assert cause(f"{up}/jshard[reason=redistribute]/all_gather") == Cause(("up",), redistributed=True)
    assert cause(f"jshard[phase=update]/{up}/mul") == Cause(("up",), U)
    assert cause(f"{up}/jshard[key=store]/jshard[signal=in]/psum") == Cause(("up", "in"))  # a key is of its own signal
    rest, down = "jshard[claim=rest]", "jshard[claim=mlp%2Fdown]"
    assert cause(f"{rest}/while/body/{down}/psum") == Cause(("mlp", "down"))  # of claims the innermost
    assert cause(f"{rest}/{up}/{down}/psum") == Cause(("up",))  # a signal that is named, wherever it stands
    assert cause(f"{up}/jshard[key=store]/{down}/psum") == Cause(("up",))
    assert cause("") == Cause()


def test_signals_that_a_transformation_repeats_are_told_once():
    """Of one segment of the stack, or of all until there; a user may name a signal twice."""
    a, b, x = (f"jshard[signal={name}]" for name in "abx")
    for text, path in {
        f"{a}/{a}": "aa",
        f"{a}/{a}/transpose(jvp())": "aa",
        f"{a}/vmap({b})": "ab",
        f"{b}/vmap({a})": "ba",
        f"{a}/transpose(jvp({a}))": "a",
        f"{x}/jvp({a})/transpose({a})": "xa",
        f"{x}/jvp({a})/transpose({x})/{a}": "xa",
        f"{a}/{b}/transpose(jvp({a}))/{b}": "ab",
        f"{a}/{a}/{a}/{a}/vmap({a})": "aaaa",
    }.items():
        assert cause(f"{text}/psum").path == tuple(path), text


def test_what_is_computed_again_is_remat_but_for_what_is_transposed_there():
    again, up = "jshard[again=remat]", "jshard[signal=up]"
    assert all(cause(f"{again}/{outer}({up})/sin").remat for outer in ("", "jvp", "vmap"))
    assert not cause(f"{again}/transpose(jvp({up}))/sin").remat


def test_a_cause_says_where_it_stands_and_what_was_chosen():
    up, stack = Cause(("up",), chosen="row, 3 B"), [types.SimpleNamespace(name="rematted_computation")]
    assert up.asked and not up.claimed and (up.signal, up.words, Cause().words) == ("up", ["chosen row"], [])
    assert [
        up.is_like(each) for each in (Cause(("up",), key="row"), Cause(("in",)), Cause(("up",), B), Cause(("z",)))
    ] == [True] + [False] * 3
    assert up.inside([]) == up == up.inside(stack) != up.inside(stack, checkpoint=True)
    chosen = types.SimpleNamespace(name="jshard[chosen=column%2C 2 B]")
    assert up.inside([chosen]).chosen == Cause().inside([chosen]).chosen == "column, 2 B"
    rest = Cause().inside([types.SimpleNamespace(name="jshard[claim=rest]")])
    assert rest.claimed and rest.path == rest.inside(stack).path == ("rest",)


def test_instruction_that_xla_made_of_several_has_the_cause_of_each():
    joined = "jit(f)/(transpose(jvp(jshard[signal=up]))/psum:transpose(jvp(jshard[signal=down]))/psum)"
    assert causes(joined) == (Cause(("up",), B), Cause(("down",), B))
    assert cause(joined) == Cause()
    assert cause(joined.replace("down", "up")) == Cause(("up",), B)
    assert causes(joined.removeprefix("jit(f)/")) == causes(joined)
    assert causes("jshard[signal=up]/jit(f)") == (Cause(("up",)),)  # a call is not joined of several


TABLES = """HloModule jit_f, num_partitions=8

FileNames
1 "/home/me/model.py"
2 "/lib/python3/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=41 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
3 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=%d}
2 {file_location_id=2 parent_frame_id=%d}
3 {file_location_id=3 parent_frame_id=%d}
4 {file_location_id=3 parent_frame_id=%d}


ENTRY %%main () -> f32[] {
"""


@pytest.mark.parametrize("parents", [(1, 2, 3, 1), (0, 1, 2, 0)], ids=["from one", "from none"])
def test_the_users_line_of_an_instruction_is_the_innermost_that_is_not_a_librarys(parents):
    frames = StackFrames(TABLES % parents)
    lines = [frames.source(f'metadata={{op_name="jit(f)/dot_general" stack_frame_id={n}}}') for n in range(5)]
    assert lines == ["", "model.py:40", "model.py:7", "model.py:7", ""]
    assert frames.source('metadata={op_name="jit(f)/add" source_file="/home/me/loss.py" source_line=3}') == "loss.py:3"
    assert frames.source("no metadata") == StackFrames("").source("stack_frame_id=3") == ""


def test_a_file_of_jshards_is_none_of_the_users_where_jax_shortens_names():
    """As it does in tests, whose programs have the same names in every checkout."""
    folder = Path(jshard.__file__).parent
    for file, source in {
        folder / "a.py": "",
        "/jshard/a.py": "",
        folder.parent / "a.py": "a.py:3",
        "/mine/jshard/a.py": "a.py:3",
    }.items():
        assert StackFrames("").source(f'metadata={{ source_file="{file}" source_line=3}}') == source, file


def test_the_users_line_of_an_equation_is_the_innermost_that_is_not_a_librarys():
    called = {"f": lax.sin}
    for frames in range(4):
        (eqn,) = jax.make_jaxpr(lambda x: called["f"](x))(1.0).eqns
        line = inspect.currentframe().f_lineno - 1
        assert source_of(eqn) == f"test_provenance.py:{line}", frames
        called["f"] = eval(compile("lambda x: f(x)", "/lib/flax/nn.py", "eval"), {"f": called["f"]})


def test_a_library_is_stepped_over_where_the_users_line_is_behind_it():
    frames = [("/lib/qwix/interception.py", 382), ("/lib/flax/nnx.py", 5), ("/home/me/model.py", 16)]
    assert own_line(frames) == "model.py:16"
    assert own_line(frames[:2]) == "interception.py:382"


def test_the_operation_behind_an_instruction_is_the_last_of_its_stack_and_several_where_joined():
    assert operation("jit(f)/transpose(jvp())/while/body/dot_general") == "dot_general"
    assert operation("jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)") == "reduce_sum+dot_general"
    assert operation("") == ""
    assert op_name('sin(x), metadata={op_name="jit(f)/sin" stack_frame_id=3}') == "jit(f)/sin" and op_name("") == ""


def test_how_often_a_branch_is_taken_is_said_directly_around_it():
    around = "jit(f)/while/body/jshard[times=1 3%2F2,turns=4]"
    assert taken(f"{around}/cond") == (Fraction(3, 2), 4)
    assert taken(f"{around}/jvp/cond") is taken("cond") is None
