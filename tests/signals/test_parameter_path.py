"""Which rows of parameters are those of repeated blocks, and are one row."""

import pytest

from jshard.signals.globs import repeats

CASES = {
    "numbers": ("blocks/0/up/kernel blocks/1/up/kernel", "blocks/*/up/kernel 2"),
    "a word and a number": ("block_0/up layers_9/up block_1/up", "block_*/up 2, layers_9/up 1"),
    "Linen's names": ("Dense_0/kernel Dense_1/kernel", "Dense_*/kernel 2"),
    "more than nine": (" ".join(f"layers_{n}/w" for n in range(12)), "layers_*/w 12"),
    "arguments": ("p['layers_0']['w'] p['layers_1']['w'] m.0.w m.1.w", "p['layers_*']['w'] 2, m.*.w 2"),
    "words around": ("gradient of m.0.w after gradient of m.1.w after".replace(" ", "~"), ""),
    "blocks in blocks": ("a/0/b/0/w a/0/b/1/w a/1/b/0/w a/1/b/1/w", "a/*/b/*/w 4"),
    "layers with names of their own": ("fc1/kernel fc2/kernel conv1/w conv2/w", ""),
    "nothing is below": ("layers/0 layers/1 step[0] step[1] w_0 w_1", ""),
    "one has a bias": ("Dense_0/kernel Dense_1/kernel Dense_0/bias", ""),
    "two and two": ("b/0/w b/1/w b/2/w b/3/w b/2/router b/3/router", "b/*/w 4, b/*/router 2"),
    "stacks": ("blocks[0:2]/w blocks[2:4]/w", ""),
    "siblings of other parents": ("a/0/w b/0/w", ""),
}


@pytest.mark.parametrize(("paths", "rows"), CASES.values(), ids=CASES)
def test_blocks_that_repeat_are_one_row(paths, rows):
    found = [(path, count) for _, path, count in repeats(("", path) for path in paths.split())]
    assert ", ".join(f"{path} {count}" for path, count in found) == (rows or ", ".join(f"{p} 1" for p in paths.split()))


def test_only_equal_rows_of_blocks_are_joined_and_parts_that_all_have_are_told():
    rows = [("wide" if b else "narrow", f"blocks/{b}/experts/{e}/w") for b in range(2) for e in range(3)]
    assert [*repeats(rows)] == [("narrow", "blocks/0/experts/*/w", 3), ("wide", "blocks/1/experts/*/w", 3)]
    rows = [("wrong" if n == 3 else "right", f"blocks/{n}/w") for n in range(12)]
    assert [*repeats(rows)] == [("right", "blocks/*/w", 11), ("wrong", "blocks/3/w", 1)]
