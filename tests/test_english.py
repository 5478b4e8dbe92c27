"""Counts of plain English: docstrings begin with their subject, sentences are short, pages fit their reader."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEANS = re.compile(r"\b(what|which|who|whom|whose|that|those|one|ones)\b", re.IGNORECASE)
BEGINS_IN_THE_MIDDLE = re.compile(r"(What|Of|As|The same|That|Those|Who|Whether|How|Where|For what|By what|In what)\b")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def sentences(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(text.split())) if sentence]


def first_sentences() -> Iterator[tuple[str, str]]:
    """The place and the first sentence of each docstring of the package."""
    for path in sorted((ROOT / "jshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                if doc := ast.get_docstring(node):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", sentences(doc)[0]


def prose(page: str) -> list[str]:
    """The sentences of a page. Programs and tables are none; code in a line and a link's address count as one word."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=[-#] |\|)|^ *\|.*$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", each)) for each in paragraphs]
    return [sentence for each in plain for sentence in sentences(each)]


def test_docstrings_lean_on_no_clause():
    heads = list(first_sentences())
    leaning = [f"{where}  {head}" for where, head in heads if LEANS.search(head)]
    assert len(leaning) <= 0.2 * len(heads), leaning[:20]


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert [f"{where}  {head}" for where, head in first_sentences() if BEGINS_IN_THE_MIDDLE.match(head)] == []


def test_docstrings_begin_with_a_short_sentence():
    long = [f"{where}  {head}" for where, head in first_sentences() if len(head.split()) > 25]
    assert len(long) <= 10, long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_short_sentences_and_few_lines(page):
    text = page.read_text()
    assert [sentence for sentence in prose(text) if len(sentence.split()) > 35] == []
    assert text.count("\n") <= 200


def test_pages_have_few_words():
    counted = [page for page in (ROOT / "docs").glob("*.md") if page.name != "mutants.md"]
    assert sum(len(page.read_text().split()) for page in [*counted, ROOT / "README.md"]) <= 33_000


def test_changelog_is_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.count("\n") <= 60
    assert re.findall("^### (.*)", text, re.MULTILINE) == ["Added", "Changed", "Fixed"]
