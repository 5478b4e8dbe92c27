"""`jshard schedule`: what it prints and writes, and each of its mistakes as a sentence."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from jshard.cli import main
from jshard.schedules import generate, load
from jshard.schedules.drawing import grid

MINE = "# mine\nF0 F1 .  B0 B1\n.  F0B0 F1B1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/mine.txt").write_text(MINE)


def typed(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["schedule", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_schedule_draws_two_side_by_side(capsys):
    status, out, err = typed(capsys, "gpipe", "1f1b", "--stages", "2", "--microbatches", "3")
    assert (status, err) == (0, "")
    assert (
        out
        == """\
gpipe: 2 stages, 3 microbatches, 8 ticks
         0   1   2   3   4   5   6   7
stage 0  F0  F1  F2  .   .   B0  B1  B2
stage 1  .   F0  F1  F2  B0  B1  B2  .

1f1b: 2 stages, 3 microbatches, 5 ticks
         0   1     2     3     4
stage 0  F0  F1    F2B0  B1    B2
stage 1  .   F0B0  F1B1  F2B2  .

                                gpipe    1f1b
ticks                           8        5
idle in lock-step               25.0 %   25.0 %
microbatches kept, by stage     3 3      3 1
gradients kept, by stage        1 1      1 1
sends, by stage                 3 3      3 3
sends with no work beside them  100.0 %  33.3 %
"""
    )


def test_schedule_takes_a_table_of_mine_and_writes_one_to_edit(capsys):
    assert typed(capsys, "tables/mine.txt", "--stages", "2")[1].startswith(
        "tables/mine.txt: 2 stages, 2 microbatches, 5 ticks\n"
    )
    words = "interleaved", "--stages", "2", "--microbatches", "4", "-o", "tables/other.txt"
    assert typed(capsys, *words)[1].endswith("\nwrote tables/other.txt\n")
    assert load("tables/other.txt").rows == generate("interleaved", 2, 4).rows


def test_schedule_times_change_what_waits(capsys):
    out = typed(capsys, "zero_bubble", "--stages", "4", "--microbatches", "16", "--times", "F=1,B=1,W=2")[1]
    assert re.findall(r"idle.* ([\d.]+) %", out) == ["8.6"]


def test_schedule_picture_shows_every_operation(capsys):
    words = "1f1b", "tables/mine.txt", "--stages", "2", "--microbatches", "2", "-o", "both.svg"
    assert typed(capsys, *words)[1].endswith("\nwrote both.svg\n")
    drawn = ElementTree.parse("both.svg").getroot()
    told = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(told) == 2 * 8  # two tables of eight operations
    assert told[0] == "F0 of stage 0: 0 to 1"
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text") if element.get("font-weight")]
    assert titles[0] == "1f1b: 33.3 % idle"


def test_schedule_a_table_wider_than_the_window_is_drawn_in_parts():
    lines = grid(generate("1f1b", 2, 6), 40)
    assert max(map(len, lines)) <= 40
    assert [line for line in lines if line.startswith("stage 1")] == [
        "stage 1  .   F0B0  F1B1  F2B2  F3B3",
        "stage 1  F4B4  F5B5  .",
    ]


MISTAKES = {
    "": "jshard schedule: the following arguments are required: SCHEDULE; type: jshard schedule --help",
    "gpip --stages 4": '"gpip" is no schedule and no file; did you mean "gpipe"?',
    "tables/no.txt": '"tables/no.txt" is no schedule and no file; name a file, or one of gpipe, 1f1b, interleaved, zero_bubble',
    "gpipe --stages 8": "jshard schedule gpipe needs --microbatches; type: jshard schedule gpipe --stages 8 --microbatches 16",
    "gpipe --stages 0 --microbatches 2": "--stages is 0; write 1 or more",
    "gpipe --stages four": "jshard schedule: argument --stages: invalid int value: 'four'; type: jshard schedule --help",
    "tables/mine.txt --microbatches 3": "tables/mine.txt has 2 microbatches, and not 3; remove --microbatches, or write 2",
    "tables/mine.txt --times F=0": '--times "F=0" is no list of times above 0; write --times F=1,B=1.2,W=0.8',
    "tables/mine.txt -o mine.png": "-o mine.png has an unknown ending; name a file with .svg or .txt",
    "tables/mine.txt -o no/mine.svg": "the schedule can't be written to no/mine.svg: no such file or directory; name another file by -o",
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.items())
def test_schedule_each_mistake_is_a_sentence(capsys, words, says):
    status, _, err = typed(capsys, *words.split())
    assert (status, err) == (2, f"{says}\n")
