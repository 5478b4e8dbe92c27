"""The example notebook is run cell by cell in IPython; what jshard returns is shown as a table or a page, as text without HTML,
and a mistake is one sentence."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jshard.errors import JShardError
from jshard.inspect.ledger import Ledger
from jshard.printing.table import Rows, Shown, as_text
from jshard.signals.active_config import unload
from jshard.signals.config import load_configuration

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture
def shell(monkeypatch):
    """IPython, as a notebook's kernel has it."""
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="no IPython here; type: pip install ipython")
    monkeypatch.chdir(EXAMPLES)
    shell = shells.InteractiveShell.instance(colors="nocolor")
    yield shell
    shells.InteractiveShell.clear_instance()
    unload()


def text_of(markup: str) -> list[str]:
    """The words of each cell and sentence."""
    return [html.unescape(word) for word in re.findall(r"<(?:td|p)[^>]*>([^<]*)</", markup)]


@pytest.mark.seconds
def test_notebook_runs_and_shows_what_each_cell_returns(shell, capsys):
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    *runs, mistaken = cells
    shown = {}
    for source in runs:
        done = shell.run_cell(source)
        assert done.success, source
        if done.result is not None:
            shown[type(done.result).__name__] = shell.display_formatter.format(done.result)[0]
    assert list(shown) == ["Configuration", "Ledger", "Verification", "Report", "Difference"]
    for name in ("Configuration", "Ledger", "Verification", "Difference"):
        words = text_of(shown[name]["text/html"])
        assert " ".join(" ".join(words).split()) == " ".join(shown[name]["text/plain"].split())
    assert "configs/mlp.yaml:7" in shown["Ledger"]["text/plain"] and "EQUAL" in shown["Verification"]["text/plain"]
    assert len(shown["Report"]["text/plain"]) < 200 and "\n" not in shown["Report"]["text/plain"]
    capsys.readouterr()

    assert isinstance(shell.run_cell(mistaken).error_in_exec, JShardError)
    assert capsys.readouterr().out.strip() == ('JShardError: signal "layer3" is not in <dict>; did you mean "layer2"?')


def test_notebook_is_kept_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


class Frames(HTMLParser):
    def handle_starttag(self, tag, attrs):
        self.tag, self.attributes = tag, dict(attrs)


def test_report_and_timeline_are_framed_apart_from_the_notebook():
    from jshard.inspect.report.html_report import Report
    from jshard.inspect.timeline import Timeline

    page = "<!doctype html><p title='x'>\"quoted\" & <script>1</script></p>"
    drawn = Timeline("run", (), (), (), (), 1.0, ())
    for shown, inside in ((Report(None, page), page), (drawn, drawn.html())):  # pyright: ignore[reportArgumentType]
        frame = Frames()
        frame.feed(shown._repr_html_())
        assert (frame.tag, frame.attributes["srcdoc"], frame.attributes["sandbox"]) == (
            "iframe",
            inside,
            "allow-scripts",
        )
    assert repr(drawn) == str(drawn) == "run: no marked step, 0 operations on 0 devices"


@dataclasses.dataclass(frozen=True, repr=False)
class Hostile(Shown):
    def blocks(self):
        yield "<script>alert(1)</script>"
        yield Rows([("<b>", "&")], (1,))


def test_shown_is_escaped_in_a_notebook_and_plain_in_a_terminal():
    assert str(Hostile()) == repr(Hostile()) == "<script>alert(1)</script>\n<b>  &"
    markup = Hostile()._repr_html_()
    assert "<script" not in markup and "<b>" not in markup
    assert text_of(markup) == ["<script>alert(1)</script>", "<b>", "&"]
    assert re.findall("text-align: (left|right)", markup) == ["left", "right"]


def test_configuration_prints_as_check_says_it():
    loaded = load_configuration({"jshard": {"mesh": {"data": 2}, "budget": "1KiB"}, "a": {"row": "data"}, "b": {}})
    assert repr(loaded).splitlines() == [
        "<dict>  mesh {data: 2} of 2 devices, explicit",
        "<dict>  at most 1,024 B on each device",
        "<dict>  a: rows over data",
        "<dict>  b: replicated",
    ]


def test_empty_ledger_prints_its_total():
    assert repr(Ledger(())) == "total: no collectives"
    assert as_text([Rows([("a", "1"), ("bb", "20")], (1,)), "", "a sentence"]) == "a    1\nbb  20\n\na sentence"


def test_error_of_several_faults_is_a_line_each_in_ipython():
    joined = JShardError.of([JShardError("one", hint="do"), JShardError("two", hint="don't")])
    assert joined._render_traceback_() == ["JShardError: one; do", "JShardError: two; don't"]
