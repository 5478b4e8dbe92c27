"""Tables of pipeline schedules: those with a name, and what a person makes of one, held against a machine that runs it."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from jshard.errors import JShardError
from jshard.schedules import KINDS, generate, load, read

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 3), (4, 8), (4, 16), (8, 8)]
CHUNKS = (1, 2, 3)


class Machine:
    """Stages that know nothing but what they hold: they run a table, and find out whether it does all that it should."""

    def __init__(self, rows: list[list[list[tuple[str, int, int]]]]):
        ops = [op for row in rows for tick in row for op in tick]
        self.rows, self.stages = rows, len(rows)
        self.microbatches, self.chunks = (1 + max((op[number] for op in ops), default=-1) for number in (1, 2))
        self.separate = any(op[0] == "W" for op in ops)
        everywhere = range(self.stages)
        self.inputs, self.gradients, self.kept, self.half = ([set() for _ in everywhere] for _ in range(4))
        for microbatch in range(self.microbatches):
            self.gradients[-1].add((microbatch, self.chunks - 1))  # made of its own output
        self.done: Counter[tuple[str, int, int, int]] = Counter()

    def run(self) -> bool:
        for tick in range(max(map(len, self.rows))):
            sent = []
            for slot in "FBW":
                for stage, row in enumerate(self.rows):
                    for op in row[tick] if tick < len(row) else ():
                        if op[0] == slot:
                            if slot == "F" and (stage, op[2]) == (0, 0):  # read from the batch, now
                                self.inputs[0].add(op[1:3])
                            what = op[1:3]
                            if not getattr(self, slot)(stage, what, sent):
                                return False
                            self.done[slot, stage, *what] += 1
            for where, stage, what in sent:
                where[stage].add(what)
        return len(self.done) == self.whole() and {*self.done.values()} == {1}

    def whole(self) -> int:
        return (3 if self.separate else 2) * self.stages * self.microbatches * self.chunks

    def F(self, stage, what, sent) -> bool:
        if what not in self.inputs[stage]:
            return False
        self.inputs[stage].remove(what)
        self.kept[stage].add(what)
        to, chunk = (stage + 1, what[1]) if stage + 1 < self.stages else (0, what[1] + 1)
        sent += [(self.inputs, to, (what[0], chunk))] if chunk < self.chunks else []
        return True

    def B(self, stage, what, sent) -> bool:
        if what not in self.gradients[stage] or what not in self.kept[stage]:
            return False
        self.gradients[stage].remove(what)
        if self.separate:
            self.half[stage].add(what)
        else:
            self.kept[stage].remove(what)
        to, chunk = (stage - 1, what[1]) if stage else (self.stages - 1, what[1] - 1)
        sent += [(self.gradients, to, (what[0], chunk))] if chunk >= 0 else []
        return True

    def W(self, stage, what, sent) -> bool:
        if what not in self.half[stage]:
            return False
        self.half[stage].remove(what)
        self.kept[stage].remove(what)
        return True


def runs(text: str) -> bool:
    """Whether a table can be read, and does all that it should."""
    rows = [line.split("#")[0].split() for line in text.split("\n")]
    ops = [[[] if word == "." else re.split(r"(?=[FBW])", word)[1:] or [word] for word in row] for row in rows if row]
    word = r"[FBW]\d{1,6}([.]\d{1,3})?"
    known = all(re.fullmatch(word, op, re.ASCII) for row in ops for tick in row for op in tick)
    if not known or not all(
        "".join(op[0] for op in tick) in ("", *"FBW", "FB", "FW", "BW", "FBW") for row in ops for tick in row
    ):
        return False
    if not all(
        "".join(tick) == word
        for row, words in zip(ops, filter(None, rows), strict=True)
        for tick, word in zip(row, words, strict=True)
        if word != "."
    ):
        return False
    numbers = [[[numbered(op) for op in tick] for tick in row] for row in ops]
    return bool(numbers) and Machine(numbers).run()


def numbered(op: str) -> tuple[str, int, int]:
    microbatch, chunk = f"{op[1:]}.0".split(".")[:2]
    return op[0], int(microbatch), int(chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_schedules_with_a_name_run_and_read_as_they_are_written(kind, stages, microbatches):
    for chunks in CHUNKS:
        made = generate(kind, stages, microbatches, chunks)
        assert runs(made.text())
        again = read(made.text(), kind)
        assert again == made
        assert (again.stages, again.microbatches, again.virtual_stages) == (stages, microbatches, stages * chunks)
        assert again.splits_weights == (kind == "zero_bubble")


def edited(text: str, draw: random.Random) -> str:
    """One edit, as a person makes it: a word, a letter, a row."""
    lines = [line for line in text.split("\n") if line.split("#")[0].strip()]
    if not lines:
        return text
    at = draw.randrange(len(lines))
    words = lines[at].split()
    where = draw.randrange(len(words))
    match draw.randrange(12):
        case 0:
            other = draw.randrange(len(words))
            words[where], words[other] = words[other], words[where]
        case 1:
            del words[where]
        case 2:
            words.insert(where, draw.choice([".", ".", words[draw.randrange(len(words))]]))
        case 3:
            words[where] = "."
        case 4:  # another letter, or none
            place = draw.randrange(len(words[where]))
            words[where] = words[where][:place] + draw.choice(["", *"FBW0123.fX-"]) + words[where][place + 1 :]
        case 5:  # one more letter
            place = draw.randrange(len(words[where]) + 1)
            words[where] = words[where][:place] + draw.choice("FBW0123.f #@@") + words[where][place:]
        case 6:  # an operation goes to another tick, which may have none of its kind
            ops = re.findall(r"[FBW][\d.@]+", words[where])
            if ops:
                op, to = draw.choice(ops), draw.randrange(len(words))
                words[where] = words[where].replace(op, "", 1) or "."
                words[to] = "".join(
                    sorted([op, *re.findall(r"[FBW][\d.@]+", words[to])], key=lambda each: "FBW".index(each[0]))
                )
        case 7:
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(["", "# a remark", "   "]))
            return "\n".join(lines)
        case 8:
            del lines[at]
            return "\n".join(lines)
        case 9:
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
            return "\n".join(lines)
        case 10:  # all of it later
            return "\n".join(f". {line}" for line in lines)
        case _:  # a tick of its own for what stands in two slots, on every stage
            rows = [line.split() for line in lines]
            tick = draw.randrange(max(map(len, rows)))
            for row in rows:
                if tick < len(row):
                    ops = re.findall(r"[FBW][\d.@]+", row[tick])
                    row[tick : tick + 1] = ["".join(ops[:1]) or ".", "".join(ops[1:]) or "."]
            lines = [" ".join(row) for row in rows]
            return "\n".join(lines)
    lines[at] = " ".join(words)
    return "\n".join(lines)


SENTENCE = re.compile(
    r'(?:"(?P<word>[^"]+)"|the table|stage (?P<stage>\d+)) \(mine\.txt:(?P<line>\d+):(?P<column>\d+)\) [^;\n]+; [^;\n]+'
)


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(10))
def test_schedules_10_000_random_edits_are_accepted_rightly_or_refused_in_a_sentence(seed):
    draw = random.Random(seed)
    accepted = Counter()
    for number in range(1000):
        made = generate(draw.choice([*KINDS]), draw.choice([1, 2, 3]), draw.choice([2, 3, 4]), draw.choice([1, 1, 2]))
        text = made.text()
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            text = edited(text, draw)
        right = runs(text)
        try:
            read(text, "mine.txt")
        except JShardError as error:
            assert not right, (number, text, str(error))
            found = SENTENCE.fullmatch(str(error))
            assert found, str(error)
            behind = text.split("\n")[int(found["line"]) - 1][int(found["column"]) - 1 :]
            if found["word"]:
                assert behind.startswith(found["word"]), (text, str(error))
        else:
            assert right, (number, text)
            accepted[text] += 1
    assert 100 < len(accepted) < 900


FAULTS = {
    "": "the table (mine.txt:1:1) has no row; write one for each stage, as F0 F1 B0 B1",
    "F0 B0W0@2": '"B0W0@2" (mine.txt:1:4) is no tick; write F3, B3 or W3 for microbatch 3, F3.1 for its chunk 1, F4B3 for both, or . to wait',
    "F0 B0x": '"B0x" (mine.txt:1:4) is no tick; write F3, B3 or W3 for microbatch 3, F3.1 for its chunk 1, F4B3 for both, or . to wait',
    "F0F1 B0": '"F1" (mine.txt:1:3) is the second F in tick 0 of stage 0; put it in another tick',
    "# mine\nF0 B0F1": '"F1" (mine.txt:2:6) follows a B, but a tick runs F, then B, then W; write it before the B',
    "F0 B0 F0": '"F0" (mine.txt:1:7) runs a second time on stage 0, after tick 0; remove one of them',
    "F0 .  B0\n.  F0": "stage 1 (mine.txt:2:6) has no B0, of 1 microbatch and 1 chunk; write it in tick 1 or later",
    "F0 B0\n.  F0B0": '"B0" (mine.txt:1:4) runs in tick 1 of stage 0, but needs B0 of stage 1, which runs in tick 1; move it to tick 2 or later',
    "F0 . B0\nF0 B0": '"F0" (mine.txt:2:1) runs in tick 0 of stage 1, but needs F0 of stage 0, which runs in tick 0; move it to tick 1 or later',
    "F0B0 W0 F1 W1B1": '"B1" (mine.txt:1:14) follows a W, but a tick runs F, then B, then W; write it before the W',
    "W0 F0B0": '"W0" (mine.txt:1:1) runs in tick 0 of stage 0, but needs B0 of its own stage, which runs in tick 1; move it to tick 1 or later',
}


@pytest.mark.parametrize(("text", "says"), FAULTS.items())
def test_schedules_each_fault_is_a_sentence(text, says):
    with pytest.raises(JShardError) as told:
        read(text, "mine.txt")
    assert str(told.value) == says


def test_schedules_a_file_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(JShardError) as told:
        load(tmp_path)
    assert (
        str(told.value)
        == f"the table {tmp_path} can't be read: is a directory; name a file with a row for each stage, as F0 F1 B0 B1"
    )
