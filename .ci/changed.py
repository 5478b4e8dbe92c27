"""Print the test files for what changed since origin/main (or since the last commit where there is no origin), nearest first.

A reader starts at a test and opens a file that one of its words names: the file's own name, or what the file defines. From
there the reader goes on in the same way, and gives up half of the time. The more likely the reader opens a file, the nearer
is the test to it. Nothing here knows where modules and tests lie.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from pathlib import Path

STEPS, GOES_ON = 4, 0.5
MOST = 8  # test files for one changed file
DEFINED = re.compile(r"^(?:def|class)\s+(\w+)|^(\w+)(?::[^=\n]+)?\s*=", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_][\w-]*+(?!\.(?!py\b|md\b|yaml\b)\w)")  # not the first word of `word.attribute`
IN_CODE = re.compile(r"""^\s*(?:from|import) .*|[./"'][\w-]+|[\w-]+\.(?:py|md|yaml)\b""", re.MULTILINE)  # no prose
once = functools.cache  # there is one checkout in a process


class Checkout:
    """The files that git knows or would take."""

    def __init__(self, root: Path):
        self.root = root
        found = self.git("ls-files", "--cached", "--others", "--exclude-standard")
        self.paths = sorted(path for path in set(found) if (root / path).is_file())
        self.tests = [path for path in self.paths if re.fullmatch(r"(.*/)?test_\w+\.py", path)]
        self.by_word: dict[str, set[str]] = {}  # files by their own names, and by the names that they define
        for path in self.paths:
            defined = DEFINED.findall(self._text(path)) if path.endswith(".py") and path not in self.tests else []
            for word in {_name(path), *(function or constant for function, constant in defined)}:
                self.by_word.setdefault(word, set()).add(path)

    def git(self, *arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=self.root)
        return done.stdout.split("\n")[:-1] if done.returncode == 0 else []

    def changed(self) -> list[str]:
        since = (self.git("merge-base", "origin/main", "HEAD") or ["HEAD"])[0]
        return self.git("diff", "--name-only", since) + self.git("ls-files", "--others", "--exclude-standard")

    def tests_of(self, path: str) -> list[tuple[float, str]]:
        """Return the tests nearest to a file, and how near, as a part of the nearest."""
        near = sorted(((self._reader_of(test)[path], test) for test in self.tests), reverse=True)[:MOST]
        return [(share / near[0][0], test) for share, test in near if share]

    @once
    def _reader_of(self, test: str) -> Counter[str]:
        """Return how likely a reader who starts at a test opens each file."""
        here, passed = Counter({test: 1.0}), Counter({test: 1.0})
        for _ in range(STEPS):
            onward: Counter[str] = Counter()
            for path, likely in here.items():
                named = self._named(path)
                for other, times in named.items():
                    onward[other] += likely * GOES_ON * times / named.total()
            passed.update(onward)
            here = onward
        return passed

    @once
    def _named(self, path: str) -> Counter[str]:
        """Return how many times a file names each other file; a word that several files define counts as a part for each."""
        named: Counter[str] = Counter()
        text = self._text(path)
        words, of_facade = Counter(WORD.findall(text)), set(re.findall(r"\bjshard\.(\w+)", text))
        files_named = {word for line in IN_CODE.findall(text) for word in WORD.findall(line)}
        for word, times in words.items():
            # A definition counts where its file is named too, as in an import, or where the façade has it.
            files = [file for file in self.by_word.get(word, ()) if word in of_facade or _name(file) in files_named]
            named.update(dict.fromkeys(files, times / max(len(files), 1)))
        if path in self.tests:
            subject, share = _name(path).removeprefix("test_"), named.total() / 4 + 1
            for name in (subject, subject.split("_")[0]):
                named.update(dict.fromkeys(self.by_word.get(name, ()), share))
        del named[path]
        return named

    @once
    def _text(self, path: str) -> str:
        return (self.root / path).read_text(errors="ignore") if path.endswith((".py", ".md", ".yaml")) else ""


@once
def _name(path: str) -> str:
    """Return the name of a module, and of a file without its suffix."""
    where = Path(path)
    return where.parent.name if where.stem == "__init__" else where.stem


def main() -> None:
    checkout = Checkout(Path(__file__).parents[1])
    near: Counter[str] = Counter({test: 2.0 for test in checkout.tests if test.endswith("test_floors.py")})
    for path in checkout.changed():
        near |= Counter({test: share for share, test in checkout.tests_of(path)})
    print(*(test for test, _ in near.most_common()))


if __name__ == "__main__":
    main()
