"""The benchmark of a training step runs, and all its variants train alike; that of a plan prints two times."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from benchmarks import (
    decoder,
    fsdp,
    generate,
    loader,
    log,
    lowered,
    models,
    pipeline,
    plan,
    pod,
    processes,
    stages,
    step,
    strangers,
    trace,
    verify,
    watchdog,
    weights,
)
from jshard.schedules import KINDS

pytestmark = pytest.mark.usefixtures("nothing_loaded")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--devices", "8", "--optimizer", "sgd"]])
def test_quick_benchmark_of_a_step_prints_a_line_for_each_variant(capsys, arguments):
    step.main(["--quick", *arguments])
    told = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?)  +[\d.]+ ms +[\d.]+ - [\d.]+ ms +[\d.]+ +[\d,]+ us$", told, re.MULTILINE)
    assert rows == [
        "shard_map by hand", "shard_map by hand, again", "jshard by layers", "jshard.jit", "jit with NamedShardings",
        "one device", "nnx.jit, one device",
    ]  # fmt: skip
    assert "16-32-8, batch 32: all variants agree on the losses of three steps" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "plan"),
    [(["--plan", "tensor + fsdp"], "tensor + fsdp {'data': 2, 'tensor': 2}"), (["--here"], "one device {'data': 1, 'tensor': 1}")],
    ids=["pretended", "here"],
)  # fmt: skip
def test_quick_benchmark_of_a_decoder_prints_a_line_for_each_variant(words, plan, capsys):
    decoder.main(["--quick", *words])
    told = capsys.readouterr().out
    ratio = r" +[\d.]+ ms +[\d.]+ \([\d.]+ - [\d.]+\)"
    rows = re.findall(rf"^(\S.*?) {ratio}{ratio} +[\d.]+ s +[\d.]+ s$", told, re.MULTILINE)
    assert rows == ["plain Flax", "plain, again", "jshard"]
    assert f"{plan}: all variants agree on the losses" in told


def test_benchmark_of_a_decoder_here_needs_an_accelerator():
    with pytest.raises(SystemExit, match="no accelerator is here; leave out --here, or add --quick"):
        decoder.main(["--here"])


def test_benchmark_refuses_variants_that_do_not_agree():
    steps = {step.HAND: iter([3.0, 2.0, 1.0]).__next__, "other": iter([3.0, 2.0, 1.1]).__next__}
    with pytest.raises(AssertionError, match="other: the losses of three steps"):
        step.agree(steps)
    with pytest.raises(AssertionError, match="the losses do not fall"):
        step.agree({step.HAND: lambda: 1.0})


@pytest.mark.slow
def test_quick_benchmark_of_generation_says_that_a_token_costs_the_same_but_for_attention(capsys):
    generate.main(["--quick", "--prompts", "64", "250", "--rows", "2", "--tokens", "3"])
    head, *lines, fit = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["prompt", "prefill", "a"]
    found = [re.findall(r"([\d,]+) FLOP", line) for line in lines]
    products = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 64  # numbers in the kernels that a token meets
    attention = [4 * 2 * 32 * room for room in (128, 256)]  # two products over the cache in each of two layers
    assert found == [[f"{2 * products:,}", f"{each:,}"] for each in attention]
    (short, of_short), (long, of_long) = (
        [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) B", line)] for line in lines
    )
    assert long == pytest.approx(short, rel=0.01)  # XLA adds a softmax's sum of a row in as many parts as are in it
    assert of_long == pytest.approx(2 * of_short, rel=0.01)
    cache = 2 * 2 * 2 * 256 * 32 * 4  # keys and values of two layers and two rows
    assert of_long < 8 * cache  # as the tests compile; 4 as users do
    ms = r"[+-]?[\d.]+ ms"
    assert re.fullmatch(rf"all but attention: {ms}, and for each 1,000 tokens of the prompt {ms} \(.* to .*\)", fit)


@pytest.mark.slow
def test_quick_benchmark_of_a_plan_prints_what_the_compiler_and_the_cache_take(capsys):
    plan.main(["--quick", "--topology", "cpu:8", "--tensor", "4"])
    of = r"90,432 parameters, 2 layers, cpu:8 \(8 devices, pretended\), needs [\d.]+ KiB per device; planned"
    took = r"in [\d.]+ s, [\d.]+ s of processor time"
    first, again = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"{of} by its compiler {took}", first)
    assert re.fullmatch(f"{of} from the cache {took}", again)


@pytest.mark.slow
def test_quick_benchmark_of_fsdp_prints_a_line_for_each_way(capsys):
    fsdp.main(["--quick", "--topology", "cpu:8"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list(fsdp.WAYS)


def test_a_layer_of_a_pod_adds_what_its_gradients_need_and_what_rests_and_no_gathered_weight(capsys, extra, kept_plans):
    """Each kernel that was kept as it was gathered would be 8 MiB more. Some MiB at the peak are in VMEM, or are not, as the
    compiler likes: half a MiB a layer between these depths."""
    extra("v5e:2x4")
    fsdp.main(["--quick", "--pod", "48,96"])
    first, _, _, last = capsys.readouterr().out.splitlines()
    kept, at_rest = map(float, re.findall(r"([\d.]+) MiB", first))
    (more,) = map(float, re.findall(r"([\d.]+) MiB for each more", last))
    assert (kept, at_rest) == (3.5, 6.0)
    assert abs(more - kept - at_rest) < 0.5


@pytest.mark.slow
def test_benchmark_of_a_pod_has_three_stacks_of_one_value_and_gradient():
    """They are compared on absent chips, where nothing runs."""
    jshard.load({"jshard": {"mesh": {"data": 8}, "axis_types": "auto"}})
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(16, 16)), jnp.bfloat16)
    weights = tuple(jnp.asarray(draw.normal(size=sizes) / 8, jnp.float32) for sizes in ((3, 16, 32), (3, 32, 16)))

    def step(stack, x, weights):
        found, loss = pod.step(stack, lambda loss: loss, x, weights)
        return loss, jax.tree.map(lambda new, old: new - old, found, weights)

    def by_hand(stack):
        def body(x, weights):
            found, loss = pod.step(stack, lambda loss: lax.pmean(loss, "data"), x, weights)
            return loss, jax.tree.map(lambda new, old: (new - old) / 8, found, weights)  # a mean of eight means

        split = (P(None, "data"),) * 2
        run = jax.shard_map(
            body, mesh=jshard.mesh(), in_specs=(P("data"), split), out_specs=(P(), split), check_vma=False
        )
        return jax.jit(run)(x, weights)

    loss, update = jax.jit(functools.partial(step, pod.by_partitioner))(x, weights)
    for stack in (pod.in_each_layer, pod.one_ahead):
        found, updated = by_hand(stack)
        assert float(found) == pytest.approx(float(loss), rel=1e-2)
        for ours, theirs in zip(updated, update, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-2 * float(jnp.abs(theirs).max()))


@pytest.mark.slow
def test_quick_benchmark_of_a_pipeline_keeps_as_much_for_more_microbatches_by_1f1b_and_more_by_gpipe(capsys):
    pipeline.main(["--quick", "--topology", "cpu:4", "--schedules", "gpipe,1f1b", "--microbatches", "16,64"])
    gpipe, one_f_one_b = capsys.readouterr().out.split("gpipe\n")[1].split("1f1b\n")
    held = [re.findall(r"([\d.]+) MiB", each) for each in (gpipe, one_f_one_b)]
    assert float(held[0][0]) < float(held[0][1]) and held[1][0] == held[1][1]
    for each in (gpipe, one_f_one_b):
        assert re.search(r"[\d.]+ % +[\d.]+ %  sends, not hidden\n +[\d.]+ % +[\d.]+ %  with no work beside them", each)


@pytest.mark.slow
def test_quick_benchmark_of_weights_prints_a_line_of_bytes_and_memory(capsys):
    weights.main(["--processes", "2", "--mebibytes", "16"])
    ours = r"16 MiB in 2 processes, a shard is 8 MiB; jshard reads 8 MiB, holds \d+ MiB, takes [\d.]+ s"
    assert re.fullmatch(ours + r"(; library reads \d+ MiB, holds \d+ MiB, takes [\d.]+ s)?\n", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the model takes names that JAX is going to remove
def test_quick_benchmark_of_models_prints_a_line_for_each_plan(capsys, extra):
    extra("mamba3_jax")
    models.main(["mamba3", "--plans", "fsdp", "--no-wire"])
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["model", "plan", "loss", "gradients", "decode"]
    name, plan, *apart, gathers = line.split()
    assert (name, plan, gathers) == ("mamba3", "fsdp", "0")
    loss, gradients, decoded = map(float, apart)
    assert loss < 1e-5 and gradients < 1e-4 and decoded < 1e-4


FIRST = {processes.HAND: [3.0, 2.0, 1.0], "DDP": [3.0, 2.0, 1.00001]}


def test_processes_have_to_agree_on_their_losses_and_the_table_tells_ratios():
    differences = processes.agree(FIRST)
    assert differences[processes.HAND] == 0 and 0 < differences["DDP"] < 2e-5
    with pytest.raises(AssertionError, match=r"DDP has the losses .*, and shard_map by hand \["):
        processes.agree({**FIRST, "DDP": [3.0, 2.0, 1.1]})
    with pytest.raises(AssertionError, match="the losses do not fall"):
        processes.agree({processes.HAND: [1.0, 2.0, 3.0]})
    seconds = {processes.HAND: [0.002, 0.004, 0.006], "DDP": [0.001, 0.002, 0.003]}
    busy = {processes.HAND: [0.02, 0.04, 0.06], "DDP": [0.04, 0.08, 0.12]}
    told = processes.table(processes.Found(seconds, busy, differences), (processes.HAND, "DDP", "DTensor")).splitlines()
    assert told[0].split() == [*"median middle half processor / shard_map by hand / DDP losses".split()]
    assert told[1].split()[3:] == [*"4.00 ms 3.00 - 5.00 ms 40.00 ms 1.00, 1.00 2.00, 0.50 same".split()]
    assert told[2].split()[1:] == [*"2.00 ms 1.50 - 2.50 ms 80.00 ms 0.50, 2.00 1.00, 1.00 1e-05".split()]


@pytest.mark.slow
def test_quick_benchmark_over_processes_prints_a_line_for_each_variant(capsys):
    processes.main(["--quick", "--processes", "2", "--layouts", "data", "decoder", "pipeline"])
    told = capsys.readouterr().out
    names = re.findall(r"^(\S.*?)  +[\d.]+ ms +[\d.]+ - [\d.]+ ms +[\d.]+", told, re.MULTILINE)
    torch, decoders = processes.NO_TORCH not in told, ["plain Flax", "jshard"]
    assert names == [
        "shard_map by hand", "the same, again", "jshard by layers", "jshard, one shard_map", "jit with NamedShardings",
        "jshard.value_and_grad", "by hand, one sum of all", *["DDP", "DDP, loss of all rows"] * torch,
        *decoders, "jshard, sequence too", *["DTensor", "DTensor, sequence too"] * torch,
        *decoders, "jshard, kept", *["FSDP2", "FSDP2, kept"] * torch,
        stages.ONE, stages.TENSOR, *KINDS, *["torch's GPipe", "torch's 1F1B"] * torch,
    ]  # fmt: skip
    losses = re.findall(rf"^(?:{'|'.join((stages.TENSOR, *KINDS))}) .* (same|\d+e-\d+)$", told, re.MULTILINE)
    assert len(losses) == 5 and all(each == "same" or float(each) < 1e-5 for each in losses)
    assert re.search(
        r"^data parallel, 2 processes, sgd, 16-32-8, batch 32; load [\d.]+ on \d+ cores$", told, re.MULTILINE
    )


@pytest.mark.slow
def test_quick_benchmark_of_the_log_prints_each_loop_with_the_same_losses(capsys):
    log.main(["--quick"])
    told = capsys.readouterr().out
    assert re.search(r"^on the way of a step: [\d.]+ us with the log off, [\d.]+ us with it on$", told, re.MULTILINE)
    assert re.search(r"^16-32-10, batch 32: the same losses bitwise; [1-9]\d+ lines written$", told, re.MULTILINE)
    rows = re.findall(r"^(\S.*?)  +[\d.]+ ms(?: +[\d.]+ +[\d.]+ - [\d.]+){2}$", told, re.MULTILINE)
    assert rows == ["bare", "bare, again", "log off", "log on"]


@pytest.mark.slow
def test_quick_benchmark_of_the_watchdog_prints_a_ratio_for_each_size(capfd):
    assert watchdog.main(["--rounds", "2", "--block", "0.2"]) == 0
    told = capfd.readouterr().out
    assert re.search(r"a second of being watched takes -?[\d.]+ ms of processor time", told)
    ratio = r" +[\d.]+ +[\d.]+ to +[\d.]+"
    assert re.findall(rf"^\[0\] +(\d+) x \d+ +[\d.]+ ms +[\d.]+ ms{ratio}{ratio}$", told, re.MULTILINE) == [
        "128",
        "512",
    ]


def test_benchmark_of_the_loader_prints_a_line_with_and_without_reading_ahead(capsys):
    loader.main(["--make", "1", "--step", "1", "--count", "3"])
    of = r"[\d.]+ ms a step, [\d.]+x the slower of 1 and 1 ms"
    assert re.fullmatch(f"ahead 0: {of}\nahead 2: {of}\n", capsys.readouterr().out)


@pytest.mark.slow
def test_verify_tells_what_it_took_and_that_all_is_bitwise():
    assert re.fullmatch(
        r"decoder +24 of 24 arrays bitwise +[\d.]+ s +[\d.]+ s of the processor", verify.verified("decoder")
    )


@pytest.mark.filterwarnings("ignore:signal .* of the parameter bytes")
def test_strangers_equal_one_device_or_are_refused_or_differ():
    weights = iter((1.0, 1.0, 1.0, 2.0))

    def build():
        loss = lambda params, x: jnp.square(x @ params["w"]).mean()
        return loss, {"w": jnp.full((16, 10), next(weights))}, (np.ones((8, 16), np.float32),)

    stranger = strangers.Stranger("nobody", build, columns=("w",))
    layouts = {"fsdp": strangers.FSDP, "tensor": stranger.tensor(), "another model": strangers.FSDP}
    found = dict(strangers.outcomes(stranger, layouts))
    assert found["fsdp"] == "equal"
    assert found["tensor"].startswith(
        'refused: signal "columns" (<dict>) splits axis 1 of "w" (16, 10) claimed at <dict> over'
    )
    assert found["another model"].startswith("DIFFERS by ")


def test_strangers_name_their_packages(capsys):
    strangers.main(["--packages"])
    assert "equinox==" in capsys.readouterr().out
    assert {each.package for each in strangers.MODELS.values()} == {
        each.split("==")[0] for each in strangers.PACKAGES.split()
    }


def test_programs_differ_by_more_than_the_names_of_functions_and_results():
    text = 'module @jit_step { func.func public @main() -> (f32 {jax.result_info = "[0]"}) { call @one(%0) } func.func private @one }'
    renamed = text.replace("jit_step", "jit_g").replace("@one", "@one_3").replace('"[0]"', "\"[0]['w']\"")
    assert lowered.normalized(text) == lowered.normalized(renamed)
    assert lowered.normalized(text) != lowered.normalized(text.replace("%0", "%1"))
    before, after = {"wire": 2048, "FLOPs": 10, "temporaries": 1}, {"wire": 1024, "FLOPs": 10, "temporaries": 1}
    assert lowered.row(before, after) == "wire 2,048 -> 1,024   FLOPs 10 -> 10   temporaries 1 -> 1"
    assert lowered.row(before, {"error": "TypeError: no"}) == "there: lowers; here: TypeError: no"


@pytest.mark.slow
def test_lowered_step_of_the_last_commit_is_compared(capsys):
    lowered.main(["xor", "--against", "HEAD"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("of 1 programs are the same as at HEAD")


@pytest.mark.seconds
def test_benchmark_of_tracing_prints_ratios_beside_their_limits(capsys):
    trace.main(["blocks-2", "--rounds", "1"])
    _, line = capsys.readouterr().out.splitlines()
    of = r"[\d.]+"
    assert re.fullmatch(
        rf"blocks-2 +{of} s +{of} s +{of} \(1.5\) +{of} \(1\) +\d+ \({of}\) +\d+ \({of}\) +{of} \(1.15\)", line
    )


def test_model_of_experts_that_is_traced_has_87_parameters():
    assert len(jax.tree.leaves(nnx.state(trace.cases()["experts"].build(), nnx.Param))) == 87
