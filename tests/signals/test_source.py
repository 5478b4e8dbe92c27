"""YAML means what people expect, and every value knows where it was written."""

from __future__ import annotations

import math

import pytest

from jshard.errors import JShardError, Location
from jshard.signals.faults import Faults, listed, shown
from jshard.signals.nodes import Node, read_mapping, scalar
from jshard.signals.source import read_text, read_word


def read(text: str) -> Node:
    faults = Faults()
    node = read_text(text.encode(), "f", faults)
    faults.stop()
    assert node is not None
    return node


def at(node: Node, *path: str | int) -> Node:
    for key in path:
        node = node.value[key]
    return node


@pytest.mark.parametrize(
    "word, value",
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("+1.5e+3", 1500.0), (".5", 0.5), ("2.", 2.0), ("-0.0", -0.0), ("1_000", 1000),
        ("017", 17), ("0o17", 15), ("0x1F", 31), ("-3", -3), ("+3", 3), ("0", 0),
        (".inf", math.inf), ("-.inf", -math.inf),
        ("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False), ("FALSE", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("No", "No"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("n", "n"),
        ("12:30", "12:30"), ("1:2:3", "1:2:3"), ("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"),
        ("1e", "1e"), ("e5", "e5"),
        ("_1", "_1"), ("1__0", "1__0"), ("0b11", "0b11"), ("64MiB", "64MiB"), ("inf", "inf"), ("nan", "nan"),
        ("=", "="),
        ("9" * 40, int("9" * 40)), ("9" * 41, "9" * 41), ("\u0661", "\u0661"),
    ],
)  # fmt: skip
def test_scalar_means_what_people_expect(word: str, value: object):
    assert scalar(word) == value and type(scalar(word)) is type(value)


def test_scalar_in_quotes_is_text():
    assert read("""{a: "1", b: '1e-4', c: "true", d: 'null', e: ""}""").plain() == {
        "a": "1", "b": "1e-4", "c": "true", "d": "null", "e": "",
    }  # fmt: skip
    assert read("a: |\n  12\nb: >-\n  true\n").plain() == {"a": "12\n", "b": "true"}


def test_source_keeps_lines_of_keys_and_values():
    node = read("layer1:\n  row: data\n  column:\n    - tensor\n    - pipe\nlayer2: {row: data}\n")
    assert node.keys["layer2"] == Location("f", 6, 1)
    assert at(node, "layer1").keys["column"] == Location("f", 3, 3)
    assert at(node, "layer1", "column", 1).place == Location("f", 5, 7)
    assert at(node, "layer2", "row").place == Location("f", 6, 15)


def test_names_that_yaml_calls_booleans_stay_names():
    assert read("x: {1a: {b: 2}}").plain() == {"x": {"1a": {"b": 2}}}
    assert read("no: {on: off}\nyes: [y, n]\n").plain() == {"no": {"on": "off"}, "yes": ["y", "n"]}


def test_anchors_work_and_keep_their_places():
    node = read("a: &a {row: 1, column: 2}\nb: {x: *a}\nd: *a\n")
    assert node.plain()["b"] == {"x": {"row": 1, "column": 2}}
    assert at(node, "b", "x").keys["row"].line == 1 and at(node, "b").keys["x"].line == 2
    assert node.keys["d"].line == 3 and at(node, "d", "row").place.line == 1
    assert at(node, "d").value is at(node, "a").value
    assert read("a: {'<<': 3}\n").plain() == {"a": {"<<": 3}}


def test_anchor_again_means_the_latest():
    assert read("a: &x 1\nb: *x\nc: &x 2\nd: *x\n").plain() == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_collections_know_how_many_values_they_hold_and_how_deep():
    node = read("a: []\nb: [1, [2, {c: 3}]]\n")
    assert [(each.size, each.depth) for each in (at(node, "a"), at(node, "b"), node)] == [(1, 1), (6, 4), (8, 5)]


def test_lists_nest_as_deep_as_is_said():
    assert read("a: " + "[" * 48 + "]" * 48).depth == 49
    with pytest.raises(JShardError, match="^f:1 nests deeper than 50 levels; write it flatter$"):
        read("a: " + "[" * 49 + "]" * 49)


def test_source_sees_a_byte_order_mark_and_any_line_end():
    faults = Faults()
    node = read_text(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "f", faults)
    assert not faults and node is not None and node.plain() == {"a": 1, "b": 2} and node.keys["b"].line == 2


def test_aliases_are_counted_when_written_out():
    node = read("a: &a [x, x]\nb: [*a, *a]\n")
    assert node.size == 1 + 3 + (1 + 3 + 3) and node.depth == 4


def test_word_of_the_command_line_has_no_line():
    faults = Faults()
    node = read_word("[1e-3, no]", "the command line", faults)
    assert node is not None and node.plain() == [1e-3, "no"] and at(node, 0).place == Location("the command line")
    empty = read_word("", "the command line", faults)
    assert empty is not None and empty.value is None and not faults


def test_mapping_of_python_reads_numbers_of_any_kind():
    numpy = pytest.importorskip("numpy")
    faults = Faults()
    node = read_mapping({"a": numpy.int64(3), "b": numpy.float32(0.5), "c": (1, [True])}, "<dict>", faults)
    assert node is not None and not faults
    assert node.plain() == {"a": 3, "b": 0.5, "c": [1, [True]]} and type(node.plain()["a"]) is int


def test_faults_come_in_the_order_of_files_and_lines():
    faults = Faults()
    faults.opens("b")
    faults.opens("a")
    for place in (Location("a", 1), Location("b", 9), Location("elsewhere"), Location("b", 2, 7), Location("b", 2, 3)):
        faults.add((), place, f"is {place.column}", "do not")
    with pytest.raises(JShardError) as told:
        faults.stop()
    assert told.value.faults == tuple(
        f"{fault}; do not" for fault in ("b:2 is 3", "b:2 is 7", "b:9 is None", "a:1 is None", "elsewhere is None")
    )


def test_faults_of_no_line_come_first_and_those_of_no_column_before_the_line():
    faults = Faults()
    for place in (Location("f", 1, 1), Location("f", 1), Location("f")):
        faults.add((), place, f"is {place.column}", "do not")
    with pytest.raises(JShardError) as told:
        faults.stop()
    assert told.value.faults == ("f is None; do not", "f:1 is None; do not", "f:1 is 1; do not")


def test_numbers_are_shown_as_long_as_they_can_be_read():
    assert shown(10**30 - 1) == "9" * 30 and shown(1 - 10**30) == "-" + "9" * 30
    assert shown(10**30) == shown(10**31) == shown(-(10**30)) == "a number of more than 30 digits"


def test_words_are_listed_up_to_sixteen():
    assert (listed(["a"]), listed("ab"), listed("abc", "and")) == ("a", "a or b", "a, b and c")
    assert listed("abcdefghijklmnop") == "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o or p"
    assert listed("abcdefghijklmnopq") == "a, b, c, d, e, f, g, h, i, j, k, l, m, n or one of 3 more"


def test_fault_of_a_shared_piece_is_told_once():
    faults = Faults()
    for name in ("a", "b"):
        faults.add((name,), Location("f", 3, 5), "says too much", "say less")
        faults.add((name,), Location("f", 4, 5), f"says {name}", "say less")
    with pytest.raises(JShardError) as told:
        faults.stop()
    assert told.value.faults == (
        'signal "a" (f:3) says too much; say less', 'signal "a" (f:4) says a; say less',
        'signal "b" (f:4) says b; say less',
    )  # fmt: skip
