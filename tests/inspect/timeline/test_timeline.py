"""The timeline: every event of a capture is a bar of the page, in the lane of its device, with what
it is and who asked for it; captures of devices that are not here are written by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.inspect.timeline import timeline
from jshard.inspect.timeline.capture import captures
from jshard.inspect.timeline.event import Event
from jshard.inspect.timeline.lanes import Window as Step
from jshard.inspect.timeline.lanes import by_signal, lane, rows, sums, union
from jshard.inspect.timeline.page import Timeline, page, span
from jshard.inspect.timeline.programs import Operation
from jshard.programs.provenance import Cause
from tests.support.browser import Window
from tests.support.xplanes import Instruction, Op, plane, programs, write

PROGRAM = programs(
    jit_train={
        1: [
            Instruction("dot.1", "dot", "jit(train)/jvp(jshard[signal=up])/dot_general"),
            Instruction("psum.2", "all-reduce", "jit(train)/jvp(jshard[signal=down])/psum_invariant"),
            Instruction("start.3", "all-reduce-start", "jit(train)/transpose(jvp(jshard[signal=up]))/psum"),
            Instruction("done.3", "all-reduce-done", "jit(train)/transpose(jvp(jshard[signal=up]))/psum"),
            Instruction(
                "both.4",
                "all-reduce",
                "jit(train)/(transpose(jvp(jshard[signal=up]))/psum:transpose(jvp(jshard[signal=down]))/psum)",
            ),
            Instruction("fusion.5", "fusion", "jit(train)/jshard[signal=net]/jshard[signal=up]/add", (2,)),
            Instruction("fusion.6", "fusion", "jit(train)/jshard[phase=update]/mul", (3,)),
            Instruction("while.7", "while", "jit(train)/while"),
        ],
        2: [Instruction("inner.8", "reduce-scatter")],
        3: [Instruction("inner.9", "multiply")],
    }
)


def cpu(*ops: Op, thread: str = "tf_XLAExecute/1", steps: dict[int, int] | None = None, **said: str) -> bytes:
    """The host's plane: operations on one thread, and the loop's steps, each with the run that it starts."""
    loop = []
    for place, (step, run) in enumerate((steps or {}).items()):
        loop.append(Op("step", 10 * place, 9, {"step_num": step}))
        loop.append(Op("Execute", 10 * place + 1, 5, {"run_id": run}))
    return plane("/host:CPU", {"python": loop, thread: ops}, **said)


def ran(name: str, start: float, duration: float, device: int = 0, run: int = -1) -> Op:
    stats = {"hlo_op": name, "hlo_module": "jit_train", "program_id": 1, "run_id": run, "device_ordinal": device}
    return Op(name, start, duration, stats)


def four(folder, **more):
    """Two devices, two steps of two operations each, which overlap on device 1."""
    ops = [
        ran("dot.1", 100, 100), ran("psum.2", 220, 180), ran("dot.1", 100, 200, 1), ran("psum.2", 250, 150, 1),
        ran("dot.1", 500, 100, 0, -2), ran("psum.2", 600, 100, 0, -2), ran("dot.1", 520, 60, 1, -2), ran("psum.2", 590, 110, 1, -2),
    ]  # fmt: skip
    return write(folder, PROGRAM, cpu(*ops, steps={7: -1, 8: -2}, **more))


def bars_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="events">(.*?)</script>', text, re.S)[1])


# -- what is read --


def test_timeline_bars_are_the_events_with_their_device_step_signal_and_kind(tmp_path):
    drawn = timeline(four(tmp_path))
    told = [
        (bar.lane, bar.row, bar.step, bar.op, bar.operation.kind, bar.operation.signal, bar.start, bar.duration)
        for bar in drawn.bars
    ]
    assert told == [
        (0, 0, 7, "dot.1", "compute", "up", 0, 100),
        (0, 0, 7, "psum.2", "collective", "down", 120, 180),
        (0, 0, 8, "dot.1", "compute", "up", 400, 100),
        (0, 0, 8, "psum.2", "collective", "down", 500, 100),
        (1, 0, 7, "dot.1", "compute", "up", 0, 200),
        (1, 1, 7, "psum.2", "collective", "down", 150, 150),
        (1, 0, 8, "dot.1", "compute", "up", 420, 60),
        (1, 0, 8, "psum.2", "collective", "down", 490, 110),
    ]
    assert [lane.name for lane in drawn.lanes] == ["device 0", "device 1"]
    assert [(step.step, step.start, step.end) for step in drawn.steps] == [(7, 0, 300), (8, 400, 600)]
    assert drawn.notes == ("jshard did not make this capture, so lines of the configuration are not known.",)


def test_timeline_lane_sums_count_what_overlaps_once(tmp_path):
    first, second = timeline(four(tmp_path)).lanes
    assert (first.compute, first.collectives, first.both, first.idle) == (200, 280, 0, 120)
    assert (second.compute, second.collectives, second.both, second.idle) == (260, 260, 50, 130)


@pytest.mark.parametrize(
    ("name", "kind", "collective", "signal", "phase"),
    [
        ("dot.1", "compute", "", "up", "forward"),
        ("start.3", "collective", "all_reduce", "up", "backward"),
        ("done.3", "collective", "all_reduce", "up", "backward"),
        ("both.4", "collective", "all_reduce", "up + down", "backward"),
        ("fusion.5", "collective", "reduce_scatter", "net/up", "forward"),
        ("fusion.6", "compute", "", "-", "update"),
        ("while.7", "around", "", "-", "forward"),
        ("unknown.9", "compute", "", "-", "forward"),
    ],
)
def test_timeline_operation_is_what_the_compiled_program_says(tmp_path, name, kind, collective, signal, phase):
    (bar,) = timeline(write(tmp_path, PROGRAM, cpu(ran(name, 0, 5)))).bars
    assert (bar.operation.kind, bar.operation.collective, bar.operation.signal, bar.operation.phase) == (
        kind,
        collective,
        signal,
        phase,
    )


def test_timeline_program_out_of_a_cache_is_known_by_its_name_and_its_instructions(tmp_path):
    """The number that JAX gives it there may be another's, and other functions may have its name."""

    def program(signal, *names):
        return {1: [Instruction(name, "dot", f"jit(train)/jshard[signal={signal}]/dot_general") for name in names]}

    other = program("other", "dot.1", "dot.2", "dot.3")
    whole = programs(
        *(("jit_train", program(*each)) for each in (("one", "dot.1"), ("two", "dot.1", "dot.2"), ("three", "dot.1"))),
        jit_other=other,
    )
    ops = [ran("dot.1", 0, 5), ran("dot.2", 5, 5), ran("dot.3", 10, 5), ran("dot.1", 20, 5, run=-2)]
    drawn = timeline(write(tmp_path, whole, cpu(*ops)))
    # of the second run nothing tells which of the three it was
    assert [bar.operation.signal for bar in drawn.bars] == ["two", "two", "-", "-"]
    # a number that may be right is, but not against what was seen
    numbered = [dataclasses.replace(op, stats={**op.stats, "program_id": 2}) for op in ops]
    drawn = timeline(write(tmp_path / "numbered", whole, cpu(*numbered)))
    assert [bar.operation.signal for bar in drawn.bars] == ["two", "two", "-", "one"]


def test_timeline_of_an_operation_whose_program_is_not_there_has_the_signal_that_it_says_itself(tmp_path):
    said = {"program_id": 9, "tf_op": "jit(train)/jshard[signal=up]/dot_general:", "hlo_category": "dot"}
    lines = {"XLA Ops": [Op("dot.1", 0, 5, said), Op("dot.2", 5, 5, {"program_id": 9})]}
    drawn = timeline(write(tmp_path, PROGRAM, plane("/device:TPU:0", lines)))
    assert [bar.operation.signal for bar in drawn.bars] == ["up", "-"]


def test_timeline_loop_lies_above_what_runs_in_it_and_is_not_counted_twice(tmp_path):
    ops = [ran("while.7", 0, 100), ran("dot.1", 10, 30), ran("psum.2", 50, 40), ran("dot.1", 120, 30)]
    drawn = timeline(write(tmp_path, PROGRAM, cpu(*ops)))
    assert [(bar.op, bar.row) for bar in drawn.bars] == [("while.7", 0), ("dot.1", 1), ("psum.2", 1), ("dot.1", 0)]
    assert (drawn.lanes[0].compute, drawn.lanes[0].collectives, drawn.lanes[0].idle) == (60, 40, 50)
    assert [first.op for first, _ in sums(drawn.bars)] == ["dot.1", "psum.2"]
    assert by_signal(drawn.bars) == [("up", 60, 0), ("down", 0, 40)]


def test_timeline_of_a_tpu_has_operations_named_by_their_text_and_steps_of_the_runs_around_them(tmp_path):
    lines = {
        "Steps": [Op("7", 0, 900)],
        "XLA Modules": [Op("jit_train(1)", 0, 400, {"run_id": 5}), Op("jit_train(1)", 500, 400, {"run_id": 6})],
        "XLA Ops": [
            Op("%dot.1 = f32[8]{0} dot(f32[8]{0} %a, f32[8]{0} %b)", 10, 20, {"program_id": 1}),
            Op("%psum.2 = f32[8]{0} all-reduce(f32[8]{0} %c)", 510, 20, {"program_id": 1}),
        ],
        "Async XLA Ops": [Op("%start.3 = f32[8] all-reduce-start(f32[8] %d)", 520, 200, {"program_id": 1})],
    }
    host = cpu(steps={3: 5, 4: 6})
    drawn = timeline(write(tmp_path, PROGRAM, host, plane("/device:TPU:2", lines)))
    assert [(bar.op, bar.operation.kind, bar.step, bar.row) for bar in drawn.bars] == [
        ("dot.1", "compute", 3, 0),
        ("psum.2", "collective", 4, 0),
        ("start.3", "collective", 4, 1),
    ]
    assert [lane.name for lane in drawn.lanes] == ["device 2"]


def test_timeline_of_a_gpu_has_the_kernels_of_all_its_streams_and_steps_by_time(tmp_path):
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_train"}
    lines = {
        "Stream #13(Compute)": [Op("gemm_kernel", 5, 20, stats), Op("gemm_kernel", 15, 20, stats)],
        "Stream #14(MemcpyD2D)": [Op("MemcpyD2D", 7, 3)],
        "Framework Name Scope": [Op("layer", 0, 50)],
    }
    drawn = timeline(write(tmp_path, PROGRAM, cpu(steps={1: 5, 2: 6}), plane("/device:GPU:0", lines)))
    assert [(bar.op, bar.operation.signal, bar.step) for bar in drawn.bars] == [
        ("dot.1", "up", 1),
        ("MemcpyD2D", "-", 1),
        ("dot.1", "up", 2),
    ]


def test_timeline_of_a_cuda_graph_names_the_instructions_of_its_kernels(tmp_path):
    """As a capture of an H200 has them: all under the name of the graph."""
    stats = {"hlo_op": "command_buffer_1", "hlo_module": "jit_train", "program_id": 1, "cuda_graph_id": 5}
    kernels = [Op(name, 10 * place, 5, stats) for place, name in enumerate(("dot_1", "fusion_6", "memcpy32_post"))]
    lines = {"Stream #14(Compute)": kernels}
    drawn = timeline(write(tmp_path, PROGRAM, cpu(steps={1: 5}), plane("/device:GPU:0", lines)))
    assert [(bar.op, bar.operation.signal, bar.operation.phase) for bar in drawn.bars] == [
        ("dot.1", "up", "forward"),
        ("fusion.6", "-", "update"),
        ("command_buffer_1", "-", "forward"),
    ]


def test_timeline_of_threads_that_name_no_device_says_so(tmp_path):
    op = Op("dot.1", 0, 5, {"hlo_op": "dot.1", "hlo_module": "jit_train"})
    drawn = timeline(write(tmp_path, PROGRAM, cpu(op, thread="tf_XLAEigen/9")))
    assert [lane.name for lane in drawn.lanes] == ["thread tf_XLAEigen/9"]
    assert drawn.notes[:2] == (
        "This capture does not tell devices apart: there is a lane for each thread that computed.",
        "This capture marks no step.",
    )


# -- several processes --


def process(folder, rank, *, begin, steps, lines=(), **more):
    own = folder / "trace" / f"rank{rank}"
    ops = [ran("dot.1", begin + 1000 * place, 100, 8 + rank, run) for place, run in enumerate(steps.values())]
    write(own, PROGRAM, cpu(*ops, steps=steps))
    told = {
        "schema": "jshard.trace/2",
        "title": "mine.yaml",
        "rank": rank,
        "processes": 3,
        "devices": {str(8 + rank): rank},
        **more,
    }
    (own / "trace.json").write_text(json.dumps({**told, "kind": "cpu", "steps": list(steps), "lines": lines}))


def test_timeline_of_processes_begins_where_each_begins_the_first_step_that_all_have(tmp_path):
    process(tmp_path, 0, begin=5000, steps={3: -3, 4: -4}, lines=[["up", "forward", "", "", "", "", "mine.yaml:4"]])
    process(tmp_path, 1, begin=90_000, steps={4: -4, 5: -5})
    drawn = timeline(tmp_path)
    assert [(drawn.lanes[bar.lane].name, bar.step, bar.start, bar.line) for bar in drawn.bars] == [
        ("device 0 of rank 0", 3, 0, "mine.yaml:4"),
        ("device 0 of rank 0", 4, 1000, "mine.yaml:4"),
        ("device 1 of rank 1", 4, 1000, ""),
        ("device 1 of rank 1", 5, 2000, ""),
    ]
    assert drawn.notes == (
        "Processes have separate clocks: they are aligned where each begins step 4, so waits between processes "
        "before that are not seen.",
        "Of 3 processes, the captures of 2 are not in this folder.",
    )


def test_timeline_of_a_pipeline_names_the_stage_of_a_device(tmp_path):
    for rank in (0, 1):
        process(tmp_path, rank, begin=0, steps={3: -3}, stages={"0": 0, "1": 1})
    names = [each.name for each in timeline(tmp_path).lanes]
    assert names == ["device 0 of rank 0, stage 0", "device 1 of rank 1, stage 1"]


def test_timeline_of_processes_without_a_common_step_says_how_they_lie(tmp_path):
    process(tmp_path, 0, begin=5000, steps={3: -3})
    process(tmp_path, 1, begin=90_000, steps={4: -4})
    drawn = timeline(tmp_path)
    assert [bar.start for bar in drawn.bars] == [0, 0]
    assert drawn.notes[0] == (
        "The processes captured no step in common: each is drawn from its own first operation on."
    )


def test_timeline_line_of_an_operation_made_of_several_names_each(tmp_path):
    lines = [
        ["up", "backward", "", "", "all_reduce", "", "mine.yaml:4"],
        ["down", "backward", "", "", "all_reduce", "", "mine.yaml:7"],
    ]
    process(tmp_path, 0, begin=0, steps={1: -1}, lines=lines)
    (capture,) = captures(tmp_path)
    both = timeline(write(tmp_path / "other", PROGRAM, cpu(ran("both.4", 0, 5)))).bars[0]
    assert both.operation.signal == "up + down"
    (event,) = captures(tmp_path / "other")[0].read.events
    assert capture.line(event.operation) == "mine.yaml:4, 7"


# -- what is drawn --


def many(count: int, title: str = "many", name: str = "dot") -> Timeline:
    """`count` events in each of two lanes, every second a collective, each 60 ns long with 40 ns between."""
    dot, psum = (Operation(opcode, (Cause(("up",)),)) for opcode in ("dot", "all-reduce"))
    bars = [
        Event(lane_, "", f"{name}.{n % 9}", "jit_train", psum if n % 2 else dot, 1 + n // (count // 2 + 1), 100.0 * n, 60.0,
            lane=lane_, line="mine.yaml:4")
        for lane_ in (0, 1) for n in range(count)
    ]  # fmt: skip
    length = 100.0 * count
    lanes = tuple(lane(f"device {n}", 0, [bar for bar in bars if bar.lane == n], length) for n in (0, 1))
    return Timeline(title, ("2 devices",), lanes, tuple(bars), (Step(1, 0, length / 2),), length, ())


def test_page_has_a_bar_for_every_event_however_short(tmp_path):
    drawn = timeline(four(tmp_path))
    told = bars_of(page(drawn))
    assert {len(told[key]) for key in ("kind", "lane", "row", "step", "start", "duration")} == {8}
    assert re.findall(r'<data value="(\d+)" data-total="events">', page(drawn)) == ["8"]
    assert "8 events were captured in the time shown, and each is a bar." in page(drawn)
    assert len(bars_of(page(many(5000)))["start"]) == 10_000


def test_page_tells_sums_and_the_longest_operations(tmp_path):
    words = re.sub(r"\|+", "|", re.sub(r"<[^>]+>", "|", page(timeline(four(tmp_path)))))
    assert "|device 0|200 ns|33.3 %|280 ns|46.7 %|–|120 ns|20.0 %|" in words
    assert "|down|–|–|540 ns|54.0 %|" in words
    assert "|psum.2|all-reduce|forward|down|–|4|180 ns|135 ns|540 ns|54.0 %|" in words


def test_span_and_rows():
    assert [span(ns) for ns in (0, 412.4, 999.6, 1234, 45_600, 9_996_000, 3e9)] == [
        "0 ns", "412 ns", "1.00 µs", "1.23 µs", "45.6 µs", "10.0 ms", "3.00 s",
    ]  # fmt: skip
    assert rows([(0, 10), (2, 4), (3, 4), (4, 12), (10, 11)]) == [0, 1, 2, 1, 0]
    assert union([(0, 10), (2, 4), (8, 12), (20, 21)]) == 13


# -- the command, and mistakes --


def typed(capsys, *words: str) -> tuple[int, str]:
    status = main(["timeline", *map(str, words)])
    out, err = capsys.readouterr()
    return status, (out + err).strip()


def test_timeline_command_writes_the_page_and_prints_events(tmp_path, capsys):
    run = four(tmp_path / "run")
    target = tmp_path / "page.html"
    assert typed(capsys, run, "-o", target) == (0, f"{run}: steps 7 to 8, 8 operations on 2 devices: {target}")
    assert len(bars_of(target.read_text())["start"]) == 8
    status, out = typed(capsys, run, "--json")
    first, *events = map(json.loads, out.splitlines())
    assert (status, first["schema"], first["events"], len(events)) == (0, "jshard.timeline/1", 8, 8)
    assert (events[0]["device"], events[0]["op"], events[0]["start"], events[0]["duration"]) == (
        "device 0",
        "dot.1",
        0,
        100,
    )


def test_timeline_mistakes_are_one_sentence_each(tmp_path, capsys):
    run, empty, cut, idle = four(tmp_path / "run"), tmp_path / "empty", tmp_path / "cut", tmp_path / "idle"
    empty.mkdir()
    file = next(write(cut, PROGRAM, cpu(ran("dot.1", 0, 5))).rglob("*.pb"))
    file.write_bytes(file.read_bytes()[:-3])
    nothing = next(write(idle, PROGRAM, cpu(steps={1: 1})).rglob("*.pb"))
    for text, name in (("{", "half"), ('{"schema": "jshard.trace/9"}', "later")):
        (tmp_path / name / "rank0").mkdir(parents=True)
        (tmp_path / name / "rank0/trace.json").write_text(text)
    told = {
        (): "jshard timeline needs the folder of a run; type: jshard timeline runs/digits",
        (tmp_path / "no",): f"{tmp_path}/no is not there; capture one by: jshard trace configs/digits.yaml --trust -o {tmp_path}/no",
        (empty,): f"{empty} holds no capture; capture one by: jshard trace configs/digits.yaml --trust -o {empty}",
        (cut,): f"{file} is a damaged capture of JAX's profiler: it has a field that is cut off; capture it again by jshard trace",
        (idle,): f"{nothing} holds no operation of a device; capture steps that compute something, by jshard trace configs/digits.yaml --trust",
        (tmp_path / "half",): f"{tmp_path}/half/rank0/trace.json is cut off; capture it again by jshard trace",
        (tmp_path / "later",): f"{tmp_path}/later/rank0/trace.json has the schema jshard.trace/9, but this jshard reads jshard.trace/2; capture it again by jshard trace",
        (run, "-o", empty): f"the timeline can't be written to {empty}: is a directory; name another file by -o timeline.html",
        (run, "steps=3"): f"jshard timeline draws a finished capture, and can't change steps=3; type: jshard trace and the configuration, then jshard timeline {run}",
    }  # fmt: skip
    for words, sentence in told.items():
        assert typed(capsys, *words) == (2, sentence)


# -- in a browser --


def test_browser_draws_every_event_and_tells_each(browser, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    target = tmp_path / "page.html"
    target.write_text(page(many(300, hostile, hostile)), encoding="utf-8")
    opened = Window(browser, target)
    drawn = "Number(document.querySelector('#canvas').dataset.bars)"
    assert opened.js(drawn) == 600
    for width in (320, 1280):
        opened.show(width=width)
        assert opened.js("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
        assert opened.js(drawn) == 600
    opened.press("#view", "]", "]", "]")
    assert opened.js("document.querySelector('#said').textContent") == (
        f"{hostile}.2 · computes, forward, signal up (mine.yaml:4) · 60 ns from 200 ns on device 0, step 1, jit_train"
    )
    opened.press("#view", "+", "+")
    wait = "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));"
    count = browser.execute_script(f"return (async () => {{ {wait} return {drawn}; }})()")
    assert 600 * 0.36 - 4 <= count <= 600 * 0.36 + 8
    assert opened.js("document.querySelectorAll('img').length") == 0
    assert browser.get_log("browser") == []


LABELS = """const [button, done] = arguments, words = [], draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) { words.push(text); draw.call(this, text, ...rest); };
document.querySelector(button).click();
requestAnimationFrame(() => requestAnimationFrame(() => { CanvasRenderingContext2D.prototype.fillText = draw; done(words); }));"""


def test_browser_labels_bars_by_operation_or_by_signal(browser, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(page(timeline(four(tmp_path))), encoding="utf-8")
    opened = Window(browser, target)
    for by, there, not_there in (("signal", {"up", "down"}, {"dot.1"}), ("operation", {"dot.1", "psum.2"}, {"up"})):
        words = set(browser.execute_async_script(LABELS, f"[data-what=labels][data-by={by}]"))
        assert there <= words and not not_there & words
        assert opened.js("[...document.querySelectorAll('[data-what][aria-pressed=true]')].map(b => b.dataset.by)") == [
            "kind",
            by,
        ]


@pytest.mark.quick("390-light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_pictures_of_a_timeline(browser, tmp_path, width, scheme):
    """JSHARD_PICTURES=DIR keeps them, to be looked at."""
    target = tmp_path / "page.html"
    target.write_text(page(timeline(four(tmp_path))), encoding="utf-8")
    opened = Window(browser, target)
    opened.show(width=width, scheme=scheme)
    picture = opened.picture(Path(os.environ.get("JSHARD_PICTURES", tmp_path)) / f"timeline-{width}-{scheme}.png")
    assert int.from_bytes(picture[16:20]) == width
    assert opened.js("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
