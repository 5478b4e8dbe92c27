"""`jshard.plan` and `jshard plan` on pretended devices, which need no extra, and what goes wrong in the other process."""

from __future__ import annotations

import collections
import json
import os
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from jshard.cli import main
from jshard.errors import JShardError
from jshard.inspect.compiled.collective import Large
from jshard.inspect.plan import aot as deviceless
from jshard.inspect.plan import cache, plan
from jshard.inspect.plan.aot import Compiled, Exported
from jshard.inspect.plan.estimate import memory_of
from jshard.inspect.plan.topology import Topology
from jshard.printing.units import size
from jshard.signals.active_config import configuration, unload

YAML = """jshard:
  mesh: {data: 2, tensor: 4}
up: {row: data, column: tensor}
down: {row: data, reduction: tensor}
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """A cache and a folder of its own, and nothing loaded afterwards."""
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.yaml").write_text(YAML)
    yield
    unload()


def loss(model, x):
    return jnp.square(model(x)).mean()


def model():
    return jshard.MLP(8, 16, 8, use_bias=False, rngs=nnx.Rngs(0))


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROWS = {
    "mlp.yaml:4 down forward all_reduce over tensor asked 1 192 B got 1 192 B not hidden",
    "- - forward all_reduce over data asked 1 4 B got 1 4 B not hidden",
    "mlp.yaml:4 down backward all_reduce over data asked 1 128 B got 1 128 B not hidden",
    "mlp.yaml:3 up backward all_reduce over tensor asked 1 192 B got 1 192 B not hidden",
    "mlp.yaml:3 up backward all_reduce over data asked 1 128 B got 1 128 B not hidden",
    "mlp.yaml:3 up backward all_gather over data asked 1 128 B got 1 128 B not hidden",  # x lies whole, and so its gradient
}  # which of them XLA merges is another matter on another version


def test_plan_is_a_page_and_a_document_and_is_looked_up_the_second_time(monkeypatch):
    jshard.load("mlp.yaml")
    made = plan(loss, model(), X, topology="cpu:8")
    sections = str(made).split("\n\n")
    assert len(sections) == 4
    assert re.fullmatch(
        r"cpu:8 \(8 devices, pretended\), mesh data 2 x tensor 4, compiled by jax [\d.]+, jaxlib [\d.]+ in [\d.]+ s",
        sections[0],
    )
    *rows, total = sections[1].splitlines()
    assert {re.sub(r" (\d merged|\().*", "", re.sub(" +", " ", row)) for row in rows} == ROWS
    assert re.fullmatch(
        r"wire: 772 B per device asked in 6 collectives, 772 B run \(as many\) in \d instructions, 0 B of it hidden and 772 B not",
        total,
    )
    assert sections[2].endswith(f"memory: needs {size(made.memory.total)} per device")
    assert sections[3] == "time: no estimate for cpu:8, there are no figures for it"
    document = json.loads(made.to_json())
    assert (document["schema"], document["wire"]["asked"], document["wire"]["got"]) == ("jshard.plan/1", 772, 772)
    wire = collections.Counter()
    for row in document["wire"]["rows"]:
        assert row["wire_asked"] == row["wire_got"]
        wire[row["signal"]] += row["wire_got"]
    assert wire == {"down": 320, "-": 4, "up": 448}
    assert sum(document["memory"]["parts"].values()) == document["memory"]["total"] == made.memory.total

    monkeypatch.setattr(deviceless, "compile_absent", None)  # nothing is compiled any more

    moved_down_the_file = types.FunctionType(loss.__code__.replace(co_firstlineno=500), globals(), "loss")

    def called_from_elsewhere():
        return plan(moved_down_the_file, model(), X, topology="cpu:8")

    again = called_from_elsewhere()
    assert again.cached and str(again.comparison) == str(made.comparison)
    assert ", cached (it took " in str(again)


@pytest.mark.seconds
def test_a_partitioned_program_is_looked_up_the_second_time_in_one_process():
    """Its number in this process is in the names of its scopes."""
    jshard.load({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "match": ["**"]}})
    of = lambda: plan(
        jshard.shard(lambda model, x: model(x).sum()), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X, topology="cpu:8"
    )
    assert (of().cached, of().cached) == (False, True)


def test_plan_takes_arrays_where_they_lie_and_keeps_what_is_donated(mesh):
    """Without a configuration: on a mesh as large as that of the arguments, of the function's own making."""
    grid = mesh(data=8)
    x = jax.device_put(jnp.ones((16, 4)), jax.NamedSharding(grid, jax.P("data")))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    made = plan(double, x, topology="cpu:8", backward=False)
    assert dict(made.mesh) == {"data": 8}
    assert made.memory.parts == {
        "arguments": 32, "results that take no argument's place": 0, "temporaries": 0, "program": 0,
    }  # fmt: skip


def test_mesh_that_does_not_fit_the_topology_is_one_sentence(mesh):
    jshard.load("mlp.yaml")
    assert _said(lambda: plan(loss, model(), X, topology="cpu:16")) == (
        "jshard.mesh (mlp.yaml:2) has 8 devices, and cpu:16 has 16; use --topology cpu:8, or make its sizes multiply to 16"
    )
    jshard.load({"jshard": {"mesh": {"data": -1, "tensor": 3}}})
    assert _said(lambda: plan(loss, X, X, topology="cpu:16")) == (
        "jshard.mesh (<dict>) fixes 3 devices, and cpu:16 has 16; make its sizes multiply to 16"
    )
    unload()
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh(data=4, tensor=2), jax.P("data")))
    assert _said(lambda: plan(jnp.sum, x, topology="h100:16")) == (
        "an argument is on a mesh of 8 devices, {data: 4, tensor: 2}, and h100:16 has 16; "
        "use topology=h100:8, or make the sizes of the mesh multiply to 16"
    )


def _said(doing) -> str:
    with pytest.raises(JShardError) as error:
        doing()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "missing", "sentence"),
    [
        (
            "v5e:4x4",
            "libtpu",
            'planning for v5e:4x4 needs libtpu, which is not installed; type: pip install "jshard[tpu]"',
        ),
        (
            "h100:8",
            "jax_plugins",
            'planning for h100:8 needs JAX\'s CUDA plugin, which is not installed; type: pip install "jshard[plan]"',
        ),
        (
            "cpu:8",
            "flatbuffers",
            "planning for cpu:8 needs flatbuffers, which is not installed; type: pip install flatbuffers",
        ),
    ],
)
def test_compiler_that_is_not_installed_is_one_sentence(monkeypatch, name, missing, sentence):
    there = deviceless._there
    monkeypatch.setattr(deviceless, "_there", lambda module: not module.startswith(missing) and there(module))
    assert _said(lambda: plan(jnp.sum, X, topology=name)) == sentence


# -- the other process --

NOTHING = Exported(b"", "{}", b"")


def compiler(monkeypatch, tmp_path, script: str):
    """Another script in the compiler's place."""
    (tmp_path / "aot_worker.py").write_text(script)
    monkeypatch.setattr(deviceless, "__file__", str(tmp_path / "aot.py"))
    monkeypatch.setattr(deviceless, "check_installed", lambda topology: None)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "import os, sys; print('noise\\nLLVM ERROR: Cannot select: intrinsic', file=sys.stderr, flush=True); os.abort()",
            "the compiler for h100:8 aborted (SIGABRT): LLVM ERROR: Cannot select: intrinsic; "
            "plan a smaller part of the program to find what it can't take",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the compiler for h100:8 aborted (SIGSEGV); plan a smaller part of the program to find what it can't take",
        ),
        (
            "raise RuntimeError('INTERNAL: it would not')",
            "the compiler for h100:8 refused the program: RuntimeError: INTERNAL: it would not; "
            "plan a smaller part of the program to find what it can't take",
        ),
        (
            "import time; time.sleep(60)",
            "compiling for h100:8 took longer than 1 s; plan a smaller program, or give it longer: limit=2",
        ),
    ],
)
def test_compiler_that_fails_is_one_sentence(monkeypatch, tmp_path, script, sentence):
    compiler(monkeypatch, tmp_path, script)
    assert _said(lambda: deviceless.compile_absent(NOTHING, Topology.of("h100:8"), limit=1)) == sentence


MESSAGES = {
    "far": "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(18.27G) exceeds available HBM (15.75G).",
    "near": """JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.25G of 15.75G hbm. Exceeded hbm capacity by 3.50G.

Total hbm usage >= 19.25G:

Largest program allocations in hbm:

  1. Size: 3.00G
     Operator: op_name="jit(f)/jshard[signal=mlp]/jshard[signal=up]/dot_general"
     Shape: f32[16,50331648]{1,0:T(8,128)}
     Unpadded size: 3.00G
     ==========================

  2. Size: 512.00M
     Shape: bf16[4096,65536]{1,0:T(8,128)(2,1)}
     ==========================
""",
}


def test_program_that_is_too_large_is_a_verdict(monkeypatch, tmp_path):
    compiler(monkeypatch, tmp_path, f"raise SystemExit({MESSAGES['near']!r})")
    compiled = deviceless.compile_absent(NOTHING, Topology.of("v5e:4x4"))
    assert (compiled.text, compiled.needed, compiled.available) == ("", int(19.25 * 2**30), int(15.75 * 2**30))
    assert compiled.largest == (
        Large(3 * 2**30, "f32[16,50331648]", "mlp/up"),
        Large(512 * 2**20, "bf16[4096,65536]", "-"),
    )
    assert Compiled.from_json(compiled.to_json()) == compiled

    compiler(monkeypatch, tmp_path, f"raise SystemExit({MESSAGES['far']!r})")
    told = plan(jnp.sum, X, topology="v5e:4x4", backward=False)
    assert told.memory.fits is False
    _, *sections = str(told).split("\n\n")
    assert sections == [
        "wire: 0 B on the wire per device asked; the program was too large to compile, so nothing is known of its run",
        "memory: does not fit: 18.3 GiB of 15.8 GiB per device (116 %), 2.52 GiB too much",
        "time: no estimate for v5e:4x4, nothing was compiled",
    ]


@pytest.mark.parametrize(
    ("topology", "peak", "needed", "fits"),
    [
        ("v5e:4x4", 14 * 2**30, 14 * 2**30 + 5, True),  # by the sum it would be 16 GiB and 5 bytes
        ("v5e:4x4", 17 * 2**30, 16 * 2**30 + 5, False),  # VMEM is in it
        ("cpu:8", 2**30, 16 * 2**30 + 5, None),  # temporaries are not in it
    ],
)
def test_memory_that_is_needed_is_the_peak_where_the_compilers_sum_is_larger(topology, peak, needed, fits):
    sizes = {"argument": 2**30, "output": 2**30, "alias": 2**30, "temp": 15 * 2**30, "generated_code": 5}
    jshard.load({"jshard": {"mesh": {"data": 8}, "budget": 15 * 2**30}})
    for peaks, expected in (({"peak": peak}, needed), ({}, 16 * 2**30 + 5)):
        compiled = Compiled("ENTRY main () -> f32[] {\n  ROOT c = f32[] constant(0)\n}", sizes | peaks, 1.0)
        found = memory_of(compiled, Topology.of(topology), (), configuration())
        assert (found.total, found.needed) == (16 * 2**30 + 5, expected)
        assert found.fits is (fits if peaks or fits is None else False)
        assert (found.over_budget() is None) == (expected < 15 * 2**30)
        assert size(expected) in found.verdict()


# -- the cache --


def test_cache_keeps_the_newest_and_makes_anew_what_is_broken(monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 2)
    compiled = Compiled("text", {"temp": 1}, 2.0)
    for name in ("a", "b", "c"):
        cache.store(name, compiled)
        path = cache.folder() / f"{name}.json.gz"
        os.utime(path, (ord(name), ord(name)))
    assert sorted(path.name for path in cache.folder().iterdir()) == ["b.json.gz", "c.json.gz"]
    assert cache.load("c") == compiled and cache.load("a") is None
    (cache.folder() / "b.json.gz").write_bytes(b"cut short")
    assert cache.load("b") is None and not (cache.folder() / "b.json.gz").exists()


def test_cache_tells_programs_jobs_and_compilers_apart(monkeypatch):
    first = cache.key(Exported(b"p", "job", b"m"))
    assert first == cache.key(Exported(b"on other lines", "job", b"m"))
    assert len({first, cache.key(Exported(b"p", "job", b"n")), cache.key(Exported(b"p", "gob", b"m"))}) == 3
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    assert cache.key(Exported(b"p", "job", b"m")) != first


# -- the command --


@pytest.mark.seconds
def test_command_plans_an_experiment(capsys, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.chdir(Path(__file__).parents[3])
    assert main(["plan", "configs/digits.yaml", "--trust", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["topology"]["name"], document["mesh"]) == ("cpu:8", {"data": 2, "tensor": 4})
    assert (
        document["wire"]["asked"] == document["wire"]["got"] == sum(row["wire_got"] for row in document["wire"]["rows"])
    )
    assert {row["place"] for row in document["wire"]["rows"]} >= {"configs/digits.yaml:15", "configs/digits.yaml:16"}
    assert {rest["signal"] for rest in document["memory"]["rest"]} >= {"layer1", "layer2"}
    assert document["memory"]["parts"]["results that take no argument's place"] < 1000  # the state takes its own place


@pytest.mark.seconds
def test_command_holds_the_budget(capsys, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.chdir(Path(__file__).parents[3])
    assert main(["plan", "configs/digits.yaml", "--trust", "jshard.budget=64KiB", "--topology", "cpu:8"]) == 1
    last = capsys.readouterr().out.split("\n\n")[2].splitlines()[-1]
    assert re.fullmatch(
        r"memory: jshard.budget \(the command line\) is 64.0 KiB, and the program needs [\d.]+ KiB on each device, [\d.]+ KiB "
        r"of it arguments; write budget: \d+, or split more of it: store: data",
        last,
    )


def test_program_that_calls_python_can_not_be_planned():
    def f(x):
        jax.debug.print("{}", x.sum())
        return x

    line = f.__code__.co_firstlineno + 1
    assert _said(lambda: plan(f, X, topology="cpu:8", backward=False)) == (
        f"test_plan.py:{line} calls Python while it runs (debug_print), so it can't be planned; "
        "take jax.debug.print and other callbacks out"
    )


def test_slices_of_workers_can_not_be_planned():
    jshard.load({"jshard": {"mesh": {"data": 8}}, "two": {"shard": {"axis": 0, "workers": [0, 1]}}})

    def f(x):
        with jshard.signal("two"):
            return jshard.matmul(x, x)

    assert _said(lambda: plan(f, X, topology="cpu:8")) == (
        'signal "two" (<dict>) names workers, which need the devices of a mesh, and the devices of this mesh are not here; '
        "name a mesh axis instead: shard: {axis: 0, mesh: data}"
    )


def test_command_without_a_mesh_is_one_sentence(tmp_path, capsys):
    (tmp_path / "bare.yaml").write_text("jshard: {train: {model: 'a:b'}}\n")
    assert main(["plan", "bare.yaml", "--topology", "cpu:8"]) == 2
    assert capsys.readouterr().err == (
        "bare.yaml describes no mesh to plan on; add `jshard: {mesh: {data: 2, tensor: 4}}` to it\n"
    )
