"""Lines of a rename file: what they take, and what is wrong with them."""

from __future__ import annotations

import pytest

from jshard.errors import JShardError
from jshard.training.checkpoints.tensors import Renaming

LINES = r"""
# a comment

embed\.weight:            embed/embedding          # a word
layers\.(\d+)\.q\.weight: layers/\1/q/kernel | permute 1 0
layers\.(\d+)\.(norm|ln)\.weight: norms/\2/scale[\1]
h\.(\d+)\.(up|gate).w:    layers/\1/wi[:, 0:4] | permute 1 0
qkv:                      q/kernel | slice 0 0:4 | reshape 2 2 -1
qkv:                      k/kernel | slice 0 4:
experts\.(\d+)\.(\d+):    moe/w[\1, \2]
.*\.ids:                  -
"""


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str = LINES) -> Renaming:
        (tmp_path / "r.txt").write_text(text)
        from pathlib import Path

        return Renaming.read(Path("r.txt"))

    return read


@pytest.mark.parametrize(
    "name, targets",
    [
        ("embed.weight", ["embed/embedding"]),
        ("layers.11.q.weight", ["layers/11/q/kernel"]),
        ("layers.3.ln.weight", ["norms/ln/scale[3]"]),
        ("h.2.up.w", ["layers/2/wi[:, :4]"]),
        ("qkv", ["q/kernel", "k/kernel"]),
        ("experts.1.2", ["moe/w[1, 2]"]),
        ("a.ids", ["-"]),
        ("embedXweight", []),
        ("embed.weight.more", []),
    ],
)
def test_lines_take_the_names_that_they_match_whole(lines, name, targets):
    renaming = lines()
    assert [str(line.target_of(name)) for line in renaming.lines_of(name)] == targets


def test_line_sees_a_tensor_as_it_says(lines):
    q, k = lines().lines_of("qkv")
    assert (q.view((6, 8)).shape, k.view((6, 8)).shape) == ((2, 2, 8), (2, 8))
    assert (q.place.line, k.place.line) == (8, 9)


def test_line_behind_one_that_takes_all_is_found(lines):
    renaming = lines("a.*: x\nab: y\nc: z\nnever: w")
    assert [
        (str(line.place), name, str(taker.place)) for line, name, taker in renaming.shadowed(["ab", "ac", "c"])
    ] == [("r.txt:2", "ab", "r.txt:1")]


def test_all_faults_of_a_rename_file_are_told_at_once(lines):
    with pytest.raises(JShardError) as told:
        lines(
            "nothing here\n(a: b\na: \\1\n(a): b\\2\nx: y | permut 1 0\nx: y | reshape -1 -1\nx: y | slice 0\nx: y[1, a]\n"
            "x: y | permute\nx: y | slice 0 4:2:1\nx: y | split 2\nx: y | slice 0 -5:\nfine: y[:, 2:]"
        )
    step = "which is none; write"
    assert str(told.value).splitlines() == [
        'r.txt:1 has "nothing here", which is no line of a rename file; write regex: path',
        r'r.txt:2 begins with "(a", which is no regular expression: missing ), unterminated subpattern at position 0; write letters as they are and \. for a dot',
        r'r.txt:3 names \1, and "a" has 0 groups; write (...) for each',
        r'r.txt:4 names \2, and "(a)" has 1 groups; write (...) for each',
        'r.txt:5 has the step "permut 1 0", which is none; did you mean "permute"?',
        f'r.txt:6 has the step "reshape -1 -1", {step} reshape 32 -1',
        f'r.txt:7 has the step "slice 0", {step} slice 0 0:512',
        'r.txt:8 names "y[1, a]", whose region is none; write layers/0/kernel, or stack/kernel[0] or qkv[:, 0:512]',
        f'r.txt:9 has the step "permute", {step} permute 1 0',
        f'r.txt:10 has the step "slice 0 4:2:1", {step} slice 0 0:512',
        f'r.txt:11 has the step "split 2", {step} split 0 128',
        f'r.txt:12 has the step "slice 0 -5:", {step} slice 0 0:512',
    ]


def test_rename_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(JShardError) as told:
        Renaming.read(tmp_path / "no.txt")
    assert (
        str(told.value)
        == f"{tmp_path / 'no.txt'} can't be read: no such file or directory; name a file of lines `regex: path`"
    )
