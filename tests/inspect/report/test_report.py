"""The page of `jshard report`: what it tells is what the ledger tells, whatever is in it is text, and in a browser it works:
no errors, sorted and folded by the keyboard, light and dark, on a phone."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jshard.cli.experiment import sketched
from jshard.cli.target import Target
from jshard.errors import JShardError, Location
from jshard.inspect.ledger import Ledger, Line
from jshard.inspect.ledger.entries import joined
from jshard.inspect.report import report
from jshard.inspect.report.facts import Facts, Laid
from jshard.inspect.report.html_report import page
from jshard.inspect.report.mesh_picture import ACROSS, MOST_DEVICES, Picture, Strip, strips
from jshard.inspect.report.source import costs
from jshard.kernels import all_reduce
from jshard.layouts.mesh import absent_mesh
from jshard.printing.markup import data, element
from jshard.printing.pages.words import PALETTE, amount, size
from jshard.programs.provenance import Cause
from jshard.signals.active_config import unload
from tests.support.browser import Window

YAML = """\
# </code></script><script>document.title = "broken"</script> & "all" that
jshard:
  mesh: {data: 2, tensor: 4}
  train: {model: report_model:Model, data: report_model:data, batch: 16, optimizer: adam}

_rows: {row: data}
layers/up: {extends: _rows, column: tensor}
layers/down:
  extends: _rows
  reduction: tensor
layers: {}
head: {extends: _rows, store: data}
objective: {row: data}
"""
MODEL = """\
import jax
import numpy as np
from flax import nnx

import jshard


class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layers"):
            self.layers = nnx.List([jshard.MLP(16, 32, 16, rngs=rngs) for _ in range(3)])
        with jshard.signal("head"):
            self.head = jshard.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        with jshard.signal("head"):
            return self.head(x)


def data():
    x, y = np.zeros((32, 16), np.float32), np.zeros(32, np.int32)
    return {"train": (x, y), "test": (x, y)}
"""
HOSTILE = "\"><img src=x onerror='alert(1)'></script><!-- ${1} \u202e\x00\ud800"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The report of a training step, and where it lies."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "stack.yaml").write_text(YAML)
    (folder / "report_model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        with sketched(Target("stack.yaml", ())) as experiment:
            made = report(experiment)
    unload()
    return made, made.save(folder / "report.html")


@pytest.fixture
def ledger(told):
    return told[0].facts.ledger


def numbers(page: str, name: str) -> list[int]:
    """The numbers that a page gives under one name."""
    return [int(n) for n in re.findall(rf'<data value="(\d+)"[^>]* data-total="{name}"', page)]


# -- what it tells --


def test_report_totals_are_those_of_the_ledger(told, ledger):
    text = told[0].html
    assert ledger.total > 0
    assert numbers(text, "wire") == [ledger.total, ledger.total]
    assert numbers(text, "count") == [ledger.count, ledger.count]
    assert sum(numbers(text, "margin")) == ledger.total
    assert sum(map(int, re.findall(r'<tr data-order[^>]* data-total="(\d+)"', text))) == ledger.total
    assert sum(map(int, re.findall(r'<tr data-order[^>]* data-count="(\d+)"', text))) == ledger.count


def test_report_merges_lines_that_differ_in_nothing_but_their_count(ledger):
    shown = joined(ledger)
    assert len(shown) < len(ledger.lines)
    assert (sum(line.total for line in shown), sum(line.count for line in shown)) == (ledger.total, ledger.count)


def test_report_memory_is_that_of_the_ledger(told, ledger):
    facts = told[0].facts
    assert [sum(device.values()) for device in facts.memory] == [ledger.held] * 8
    at_rest = {place and place.line: cost.rest for place, cost in costs(facts).items() if cost.rest}
    assert at_rest == {rest.place and rest.place.line: rest.total for rest in ledger.memory}
    assert numbers(told[0].html, "rest") == [ledger.held]


def test_report_prices_the_line_that_asked(told, ledger):
    found = {place.line: cost for place, cost in costs(told[0].facts).items() if place is not None}
    assert {line: cost.total for line, cost in found.items() if cost.count} == {
        int(line.rpartition(":")[2]): total for line, total in ledger.by("line").items()
    }
    assert 'id="y0-10"' in told[0].html and 'href="#y0-10"' in told[0].html


def test_report_lists_every_kind_of_array_with_its_layout(told):
    facts = told[0].facts
    kernel = next(array for array in facts.arrays if array.path == ("layers", "0", "up", "kernel"))
    assert (kernel.shape, kernel.axes, kernel.signal) == ((16, 32), ((), ("tensor",)), "layers/up")
    assert (str(kernel.place), kernel.local, kernel.bytes_each) == ("stack.yaml:7", (16, 8), 512)
    between = {array.path: (array.axes, array.note) for array in facts.of("activation")}
    assert between["layers", "up"] == ((("data",), ("tensor",)), "3 × ")
    assert {array.kind for array in facts.arrays} == {"parameters", "gradients", "optimizer", "batch", "activation"}


def test_report_folds_modules_that_look_alike(told):
    text = told[0].html
    assert "0 … 2" in text and "3 alike, 4 arrays each" in text


def test_report_is_one_line_when_printed(told, ledger):
    length = size(len(told[0].html.encode()))
    assert str(told[0]) == (
        f"stack.yaml: {ledger.count:,} collectives, {ledger.total:,} B on the wire per device, a page of {length}"
    )


def test_report_of_a_function_and_its_arguments(mesh):
    unload()
    grid = mesh(data=8)

    def loss(model, x):
        summed = jax.shard_map(lambda x: all_reduce(x.sum(), "data"), mesh=grid, in_specs=P("data"), out_specs=P())
        return summed(x) * model.bias.sum()

    x = jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(grid, P("data")))
    made = report(loss, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), x)
    assert made.facts.title == "test_report_of_a_function_and_its_arguments.<locals>.loss"
    assert [(a.kind, a.path) for a in made.facts.arrays] == [
        ("parameters", ("bias",)), ("parameters", ("kernel",)), ("batch", ("argument 1",)),
    ]  # fmt: skip
    assert numbers(made.html, "wire") == [made.facts.ledger.total] * 2 != [0, 0]
    assert "There is no file of a configuration to show." in made.html


def test_report_that_cannot_be_written_is_one_sentence(told, tmp_path):
    target = tmp_path / "missing" / "report.html"
    with pytest.raises(JShardError) as error:
        told[0].save(target)
    assert str(error.value) == (
        f"the report can't be written to {target}: no such file or directory; name another file by -o report.html"
    )


def test_report_command_writes_the_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "stack.yaml").write_text(YAML)
    (tmp_path / "report_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from jshard.cli import main

    try:
        assert main(["report", "stack.yaml", "-o", "page.html", "batch=32"]) == 0
    finally:
        unload()
    assert capsys.readouterr().out.endswith(": page.html\n")
    assert "batch 32" in (tmp_path / "page.html").read_text()


# -- where it lies --


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}, {"a": 2, "b": 2, "c": 2}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_tiles_are_those_that_jax_gives_each_device(mesh, sizes, seed):
    grid = mesh(**sizes)
    draw = np.random.default_rng(seed)
    entries: list = [[], [], []]
    for name in draw.permutation(list(sizes)):
        if (axis := int(draw.integers(4))) < 3:
            entries[axis].append(str(name))
    sharding = jax.NamedSharding(grid, P(*(tuple(each) or None for each in entries)))
    shape = (8, 16, 24)
    array = laid(shape=shape, axes=tuple(map(tuple, entries)), mesh=grid)
    where = sharding.devices_indices_map(shape)
    for device, tile in zip(grid.devices.flat, array.tiles(grid), strict=True):
        assert tile is not None
        held = [slice(part * step, (part + 1) * step) for part, step in zip(tile, array.local, strict=True)]
        assert [(s.start or 0, s.stop or n) for s, n in zip(where[device], shape, strict=True)] == [
            (s.start, s.stop) for s in held
        ]


def test_tiles_of_a_slice_of_the_mesh_are_on_its_devices_only(mesh):
    grid = mesh(data=8)
    part = jax.sharding.Mesh(grid.devices[2:4], ("workers",))
    assert laid(shape=(4,), axes=(("workers",),), mesh=part).tiles(grid) == [None, None, (0,), (1,), *[None] * 4]


def test_picture_runs_the_last_axis_right_and_nests_split_ones_above():
    grid = absent_mesh({"a": 2, "b": 4, "c": 3})
    array = laid(shape=(8, 5, 7, 12), axes=(("a",), (), (), ("b", "c")), mesh=grid)
    drawn = Picture.of(array)
    assert (drawn.down_axes, drawn.rows, drawn.columns) == ((0, 2), 2, 12)
    assert [drawn.part(tile, array) for tile in array.tiles(grid)] == list(range(24))


@pytest.mark.parametrize(
    ("sizes", "count", "first", "last"),
    [
        ({}, 1, Strip((0,), ()), Strip((0,), ())),
        ({"data": 8}, 1, Strip((*range(8),), ()), Strip((*range(8),), ())),
        ({"data": 100}, 7, Strip((*range(16),), (("data", 0, 15),)), Strip((*range(96, 100),), (("data", 96, 99),))),
        ({"data": 2, "tensor": 4}, 2, Strip((0, 1, 2, 3), (("data", 0, 0),)), Strip((4, 5, 6, 7), (("data", 1, 1),))),
        ({"data": 4, "stage": 1, "tensor": 2}, 2, Strip((0, 2, 4, 6), (("tensor", 0, 0),)), Strip((1, 3, 5, 7), (("tensor", 1, 1),))),
        ({"a": 3, "b": 32, "c": 2}, 12, Strip((*range(0, 32, 2),), (("a", 0, 0), ("c", 0, 0), ("b", 0, 15))),
         Strip((*range(161, 192, 2),), (("a", 2, 2), ("c", 1, 1), ("b", 16, 31)))),
    ],
    ids=str,
)  # fmt: skip
def test_rows_run_along_the_longest_axis_and_have_each_device_once(sizes, count, first, last):
    rows = list(strips(sizes))
    assert (len(rows), rows[0], rows[-1]) == (count, first, last)
    assert sorted(number for row in rows for number in row.devices) == list(range(math.prod(sizes.values())))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (21_164, "20.7 KiB"),
        (10 * 2**30, "10.0 GiB"),
        (1023 * 2**20, "1023 MiB"),
    ],
)
def test_sizes_have_three_digits(number, words):
    assert size(number) == words


def test_amounts_are_exact_while_they_are_short():
    assert [amount(n) for n in (0, 452_080, 7_241_732_096)] == ["0", "452,080", "7.24 billion"]


# -- whatever is in it is text --


def laid(**changes) -> Laid:
    plain = {
        "kind": "parameters", "path": ("w",), "signal": "s", "place": None, "shape": (4, 4), "dtype": "float32", "itemsize": 4,
        "axes": ((), ()), "mesh": None,
    }  # fmt: skip
    return Laid(**{**plain, **changes})


def line(**changes) -> Line:
    plain = {
        "cause": Cause(("s",)), "collective": "all_reduce", "primitive": "psum", "mesh_axes": ("data",),
        "group": 2, "count": 1, "count_known": True, "payload": 64, "dtype": "float32", "shape": (16,),
    }  # fmt: skip
    return Line(**{**plain, **changes})


def hostile() -> Facts:
    word, grid = HOSTILE, absent_mesh({HOSTILE: 2, "tensor": 2})
    place = Location(word, 1)
    return Facts(
        title=word,
        about=(word,),
        mesh=grid,
        arrays=(laid(path=(word, word), signal=word, place=place, axes=((word,), ()), mesh=grid, note=word),),
        ledger=Ledger(
            (line(cause=Cause((word,), chosen=word, place=place, source=word), mesh_axes=(word,), branches=(word,)),)
        ),
        texts={word: (word, f"{word}: {word} # {word}")},
    )


class Reader(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def test_report_escapes_whatever_the_user_wrote():
    text = page(hostile())
    found = Reader(text)
    names = [name for name, _ in found.elements]
    assert names.count("script") == 2
    assert {"img", "iframe", "object"}.isdisjoint(names)
    handlers = {key for _, attributes in found.elements for key in attributes if key.startswith("on")}
    assert handlers == set()
    assert "\x00" not in text and text.encode()
    assert html.escape(HOSTILE[:30], quote=True) in text


def test_report_data_cannot_end_its_element():
    assert data({"a": "</script><!--&"}, "facts") == (
        '<script type="application/json" id="facts">{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}</script>'
    )


def test_elements_escape_text_and_attributes():
    assert element("b", "<", element("br"), [1, None, "&"], class_='"', hidden=True, id=None, x=1 / 3) == (
        '<b class="&quot;" hidden x="0.33">&lt;<br/>1&amp;</b>'
    )


def test_report_needs_no_network_and_allows_none(told):
    text = told[0].html
    found = Reader(text).elements
    assert not [attributes for _, attributes in found if "src" in attributes or "style" in attributes]
    assert all((attributes["href"] or "").startswith("#") for _, attributes in found if "href" in attributes)
    assert "@import" not in text and not re.search(r"url\((?!#)(?!\$)", text)
    policy = next(a["content"] or "" for _, a in found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    for kind in ("style", "script"):
        (inside,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy


def test_report_identities_are_unique(told):
    found = [attributes["id"] for _, attributes in Reader(told[0].html).elements if "id" in attributes]
    assert len(found) == len(set(found))


@pytest.mark.seconds
def test_report_of_a_deep_model_on_a_large_mesh_stays_small():
    sizes = {"data": 8, "fsdp": 8, "tensor": 32}
    grid = absent_mesh(sizes)
    assert math.prod(sizes.values()) > MOST_DEVICES
    arrays = [
        laid(kind=kind, path=(*before, "layers", str(number), f"w{weight}"), signal=f"block/w{weight}", mesh=grid,
             shape=(8192, 64 * weight + 64), axes=(("fsdp",), ("tensor",) if weight % 2 else ()))
        for kind, before in (("parameters", ()), ("optimizer", ("0", "mu")), ("optimizer", ("0", "nu")))
        for number in range(48)
        for weight in range(16)
    ]  # fmt: skip
    asked = [line(cause=Cause((f"block/w{w}",), phase), mesh_axes=(axis,), payload=64 * w)
             for phase in ("forward", "backward") for _ in range(48) for w in range(16) for axis in sizes]  # fmt: skip
    text = page(Facts("deep", (), grid, tuple(arrays), Ledger(tuple(asked)), {}))
    assert len(text.encode()) < 2_000_000
    assert f"The first {MOST_DEVICES:,} of 2,048 devices are drawn." in text
    assert numbers(text, "wire")[0] == sum(each.total for each in asked)


# -- in a browser --


@pytest.fixture
def window(browser, told):
    opened = Window(browser, told[1])
    opened.js("localStorage.clear()")
    opened.show()
    yield opened
    assert browser.get_log("browser") == []


ENTER, SPACE, RIGHT, DOWN, TAB, END = "\ue007", "\ue00d", "\ue014", "\ue015", "\ue004", "\ue010"


def test_browser_shows_the_totals_of_the_ledger(window, ledger):
    shown = window.js("[...document.querySelectorAll('[data-total=wire]')].map(e => [e.tagName, Number(e.value)])")
    assert shown == [["DATA", ledger.total]] * 2
    for group in ("signal", "axis", "phase"):
        window.press(f"[data-group={group}]", ENTER)
        sums = window.js(
            "Object.fromEntries([...document.querySelectorAll('#ledger tr.group')].map("
            "row => [row.querySelector('button').textContent, Number(row.querySelector('.c-total data').value)]))"
        )
        assert sums == ledger.by(group)
    assert window.js("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("key", [ENTER, SPACE], ids=["enter", "space"])
def test_browser_sorts_the_ledger_by_the_keyboard(window, key):
    window.press("[data-group='']", key)
    before = window.column("total")
    window.press("th.c-total button", key)
    assert window.js("document.querySelector('th.c-total').ariaSort") == "descending"
    assert window.column("total") == sorted(before, key=int, reverse=True) != before
    window.press("th.c-total button", key)
    assert window.js("document.querySelector('th.c-total').ariaSort") == "ascending"
    assert window.column("total") == sorted(before, key=int)
    window.press("th.c-total button", key)
    assert window.js("document.querySelector('th.c-total').ariaSort") == "none"
    assert window.column("total") == before
    window.press("th.c-phase button", key)
    assert [phase.split()[1] for phase in window.column("phase")] == sorted(
        (phase.split()[1] for phase in window.column("phase")), reverse=True
    )


def test_browser_folds_the_ledger_by_the_keyboard(window):
    visible = "[...document.querySelectorAll('#ledger tbody tr')].filter(row => row.offsetParent !== null).length"
    open_ = window.js(visible)
    window.press("#ledger tr.group button", ENTER)
    assert window.js("document.activeElement.getAttribute('aria-expanded')") == "false"
    assert window.js(visible) < open_
    window.browser.switch_to.active_element.send_keys(SPACE)
    assert window.js(visible) == open_
    window.press("#fold-all", ENTER)
    groups = window.js("document.querySelectorAll('#ledger tr.group').length")
    assert (window.js(visible), window.js("document.activeElement.textContent")) == (groups, "Unfold all")


def test_browser_reaches_everything_by_tab(window):
    reached = set()
    window.js("document.body.focus()")
    for _ in range(200):
        window.browser.switch_to.active_element.send_keys(TAB)
        reached |= set(
            window.js(
                "[document.activeElement.tagName + '.' + (document.activeElement.id || document.activeElement.className)]"
            )
        )
        if "A.place" in reached and "DIV.scroller" in reached:
            break
    assert {"A.skip", "BUTTON.theme", "BUTTON.pick", "DIV.mesh", "BUTTON.fold-all", "SUMMARY."} <= reached


def test_browser_shows_which_device_holds_which_tile(window, told):
    kernel = "document.querySelector('.pick:has(.name)')"
    pick = (
        "[...document.querySelectorAll('.pick')].find(b => b.closest('details').querySelector('.name').textContent === 'up'"
        " && b.querySelector('.name').textContent === 'kernel')"
    )
    window.js(f"{pick}.focus()")
    window.browser.switch_to.active_element.send_keys(SPACE)
    assert window.js(f"{pick}.getAttribute('aria-pressed')") == "true" and window.js(kernel) is not None
    assert window.js("document.querySelector('#chosen-name').textContent") == "layers.0.up.kernel"
    tiles = window.js(
        "[...document.querySelectorAll('.device')].map(d => ['x', 'y', 'width', 'height'].map("
        "k => ['.tile', '.outline'].map(c => Number(d.querySelector(c).getAttribute(k)))))"
    )
    for number, ((x, left), (y, top), (width, whole), (height, tall)) in enumerate(tiles):
        assert ((x - left) / whole, width / whole) == pytest.approx((number % 4 / 4, 1 / 4), abs=1e-3)
        assert ((y - top) / tall, height / tall) == pytest.approx((0, 1), abs=1e-3)
    window.press("#mesh", RIGHT, DOWN)
    assert window.js("document.querySelector('#said').textContent") == (
        "Device 5 (data 1, tensor 1) holds 8–15 of axis 1: 512 B. So does device 1."
    )
    assert window.js("[...document.querySelectorAll('.same')].map(d => d.dataset.device)") == ["1", "5"]


def test_browser_folds_the_tree_by_the_keyboard(window):
    window.press(".tree summary", SPACE)
    assert window.js("document.querySelector('.tree details').open") is False


def colours(window: Window) -> list[str]:
    return window.js(
        "['body', '.opening h1', '.tree', '.chip', '.cell'].map(s => { const c = getComputedStyle(document.querySelector(s));"
        " return [c.color, c.backgroundColor, c.fill].join() })"
    )


def test_browser_is_light_or_dark_as_preferred_or_chosen(window):
    light = colours(window)
    window.show(scheme="dark")
    dark = colours(window)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    window.press("#theme", ENTER)
    assert (window.js("document.documentElement.dataset.theme"), colours(window)) == ("light", light)
    window.show(scheme="light")
    window.press("#theme", SPACE)
    assert (window.js("document.querySelector('#theme-word').textContent"), colours(window)) == ("dark", dark)


CONTRAST = """(() => {
  const parse = text => { const c = text.match(/[\\d.]+/g).map(Number); return text.startsWith('color(srgb') ? c.map((v, i) => i < 3 ? v * 255 : v) : c; };
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = element => { let layers = []; for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, c) => { const a = c.length > 3 ? c[3] : 1; return under.map((u, i) => u * (1 - a) + c[i] * a); }, [255, 255, 255]); };
  return [...document.querySelectorAll('main *, header *')].filter(e => e.offsetParent && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => { const [a, b] = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.className || e.tagName, e.textContent.slice(0, 30)]; })
    .sort((x, y) => x[0] - y[0])[0]; })()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_text_can_be_read(window, scheme):
    window.show(scheme=scheme)
    ratio, *which = window.js(CONTRAST)
    assert ratio >= 4.5, which


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_mesh_axes_can_be_read_in_all_their_colours(browser, tmp_path, scheme):
    names = [f"axis{number}" for number in range(PALETTE)]
    grid = absent_mesh(dict.fromkeys(names, 2))
    asked = tuple(line(mesh_axes=(name,)) for name in names)
    target = tmp_path / "colours.html"
    target.write_text(
        page(Facts("colours", (), grid, (laid(mesh=grid, shape=(256, 4), axes=(tuple(names), ())),), Ledger(asked), {}))
    )
    opened = Window(browser, target)
    opened.show(scheme=scheme)
    ratio, *which = opened.js(CONTRAST)
    assert ratio >= 4.5, which


@pytest.mark.quick("320", "1280")
@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_browser_page_is_as_wide_as_its_window(window, width):
    window.show(width=width)
    window.press(".pick", ENTER)
    assert window.js("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert window.js(OUTSIDE) == []


def test_browser_shows_hostile_names_as_text(browser, tmp_path):
    target = tmp_path / "hostile.html"
    target.write_text(page(hostile()), encoding="utf-8")
    opened = Window(browser, target)
    opened.press(".pick", ENTER)
    opened.press("th.c-signal button", ENTER)
    assert browser.get_log("browser") == []
    assert opened.js("document.querySelectorAll('img').length") == 0
    assert opened.js("document.querySelector('#chosen-name').textContent").startswith('"><img src=x')


def test_page_says_what_the_compiler_adds_on_auto_axes():
    unknown = "on axis_types: auto the compiler adds collectives of its own: see jshard explain"
    for compiler, says in {
        "": unknown,
        "XLA for CPU": "none added by XLA for CPU; for another chip see jshard plan",
    }.items():
        text = page(Facts("auto", (), None, (laid(),), Ledger((), is_auto=True, compiler=compiler), {}))
        assert f"total: no collectives; {says}" in html.unescape(text)


def test_browser_shows_a_program_that_asks_for_nothing(browser, tmp_path):
    target = tmp_path / "plain.html"
    target.write_text(page(Facts("plain", (), None, (laid(),), Ledger(()), {})), encoding="utf-8")
    opened = Window(browser, target)
    assert browser.get_log("browser") == []
    assert opened.js("document.querySelector('#said').textContent") == (
        "Device 0 (the only device) holds all of it: 64 B. No other device does."
    )
    assert "total: no collectives" in opened.js("document.body.textContent")


# -- of 256 devices, on a phone and on a desk --

LONG = "decoder/self_attention/output_projection"


def pod(**changes) -> Facts:
    """What a page about 256 devices tells: arrays split by either mesh axis and by both, long names."""
    grid, place = absent_mesh({"tensor": 2, "data": 128}), Location("configs/decoder_large.yaml", 2)
    split = {"by_tensor": ((), ("tensor",)), "by_data": (("data",), ()), "by_both": (("data",), ("tensor",))}
    facts = Facts(
        title="configs/decoder_large.yaml",
        about=("examples.decoder:Model", "adamw", "batch 8192"),
        mesh=grid,
        arrays=tuple(laid(path=(LONG, name), signal=LONG, place=place, shape=(8192, 4096), axes=axes, mesh=grid)
                     for name, axes in split.items()),
        ledger=Ledger((
            line(cause=Cause((LONG,), place=place, redistributed=True), collective="reduce_scatter", mesh_axes=("data",), group=128, payload=2**27),
            line(cause=Cause((LONG,), "backward", place=place), mesh_axes=("tensor",), payload=2**26),
            line(cause=Cause(phase="backward", asked=False), mesh_axes=("data", "tensor"), group=256),
        )),
        texts={place.source: ("jshard: {mesh: {tensor: 2, data: 128}}", f"{LONG}: {{row: data, reduction: tensor}}")},
    )  # fmt: skip
    return dataclasses.replace(facts, **changes)


@pytest.fixture
def large(browser, tmp_path):
    target = tmp_path / "large.html"
    target.write_text(page(pod()), encoding="utf-8")
    yield Window(browser, target)
    assert browser.get_log("browser") == []


BROKEN = """(() => { const found = [], range = document.createRange();
  for (const table of document.querySelectorAll('table')) {
    const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode())
      for (const word of node.textContent.matchAll(/[A-Za-z0-9][A-Za-z0-9-]*/g)) {
        range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.push(word[0]);
      } }
  return found; })()"""
OUTSIDE = """[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && e.offsetParent
  && !e.closest('.scroller')).map(e => e.outerHTML.slice(0, 80))"""


@pytest.mark.quick("390-light", "1280-dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_pictures_of_256_devices(large, tmp_path, width, scheme):
    """JSHARD_PICTURES=DIR keeps them, to be looked at."""
    large.show(width=width, scheme=scheme)
    folder = Path(os.environ.get("JSHARD_PICTURES", tmp_path))
    picture = large.picture(folder / f"report-{width}-{scheme}.png")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(picture[16:20]) == width
    assert large.js("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert large.js(OUTSIDE) == []
    assert large.js(BROKEN) == []
    ratio, *which = large.js(CONTRAST)
    assert ratio >= 4.5, which


@pytest.mark.quick("by both-390", "by both-1280")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    ("array", "shown", "says"),
    [
        (0, [["tensor 0", "data 0–127"], ["tensor 1", "data 0–127"]], "16 rows of devices; those that hold the same are drawn once."),
        (1, [["tensor 0–1", f"data {first}–{first + 15}"] for first in range(0, 128, 16)], "16 rows of devices; those that hold the same are drawn once."),
        (2, [[f"tensor {t}", f"data {first}–{first + 15}"] for t in (0, 1) for first in range(0, 128, 16)], ""),
    ],
    ids=["by tensor", "by data", "by both"],
)  # fmt: skip
def test_browser_mesh_of_256_can_be_read(large, width, array, shown, says):
    large.show(width=width)
    large.press(f".pick[data-array='{array}']", ENTER)
    rows = "[...document.querySelectorAll('.strip:not([hidden])')]"
    assert (
        large.js(f"{rows}.map(row => [...row.querySelectorAll('.where span')].map(word => word.textContent))") == shown
    )
    assert large.js("document.querySelector('#folded').textContent.trim()") == says
    cells, tiles = (
        large.js(
            f"{rows}.flatMap(row => [...row.querySelectorAll('{kind}')]).map(e => e.getBoundingClientRect().toJSON())"
        )
        for kind in (".cell", ".tile")
    )
    assert len(cells) == len(tiles) == ACROSS * len(shown)
    assert min(cell["width"] for cell in cells) >= 13 and min(min(tile["width"], tile["height"]) for tile in tiles) >= 3
    assert large.js("document.querySelector('.mesh').getBoundingClientRect().height") <= 640
    large.press("#mesh", END)
    last = large.js(f"Number({rows}.at(-1).querySelector('.device:last-child').dataset.device)")
    assert large.js("document.querySelector('#said').textContent").startswith(f"Device {last} (")
    large.press(f".pick[data-array='{(array + 1) % 3}']", ENTER)
    assert large.js("document.querySelectorAll('.strip:not([hidden]) .at').length") == 1


def test_browser_rows_that_are_too_many_are_counted(browser, tmp_path):
    grid = absent_mesh({"data": 512})
    target = tmp_path / "rows.html"
    target.write_text(
        page(pod(mesh=grid, arrays=(laid(mesh=grid, shape=(512,), axes=(("data",),)),))), encoding="utf-8"
    )
    opened = Window(browser, target)
    assert opened.js("document.querySelectorAll('.strip:not([hidden])').length") == 16
    assert opened.js("document.querySelector('#folded').textContent") == "16 more rows hold other parts."


def test_browser_bars_begin_at_zero(large):
    ends = large.js(
        "[...document.querySelectorAll('svg.split')].map(bar => [bar, [...bar.querySelectorAll('rect')].find(r => !r.matches('.track'))]"
        ".map(e => e.getBoundingClientRect().left))"
    )
    assert len(ends) == 6 and [bar for bar, first in ends if abs(bar - first) > 0.5] == []


def test_browser_shows_the_priced_configuration_first(window):
    ids = "[...document.querySelectorAll('main section')].map(section => section.id)"
    assert window.js(ids) == ["source", "places", "ledger-section", "memory"]
    assert window.js("[...document.querySelectorAll('nav a')].map(link => link.hash.slice(1))") == window.js(ids)
