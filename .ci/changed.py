"""Print the test files for what changed since origin/main (or since the last commit where there is no origin), nearest first.

A reader starts at a test and opens one of the files that it names: by an import, through a façade's export, by its path, in
a program written for a child, or as `test_x.py` names x. From there he goes on in the same way, and gives up half of the
time. The more likely he comes by a file, the nearer is the test to it. Nothing here knows where modules and tests lie.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

STEPS, GOES_ON = 4, 0.5
MOST = 8  # test files for one changed file
IMPORT = re.compile(r"^\s*from ([\w.]+) import (?:\(([^)]*)\)|([^\n;]+))|^\s*import ([\w., ]+)", re.MULTILINE)
once = functools.cache  # there is one checkout in a process


class Checkout:
    """The files that git knows or would take."""

    def __init__(self, root: Path):
        self.root = root
        found = self.git("ls-files", "--cached", "--others", "--exclude-standard")
        self.paths = sorted(path for path in set(found) if (root / path).is_file())
        self.tests = [path for path in self.paths if re.fullmatch(r"(.*/)?test_\w+\.py", path)]
        self.modules: dict[str, str] = {}  # by dotted name
        self.by_name: dict[str, list[str]] = {}  # by the last word of the path
        for path in self.paths:
            self.by_name.setdefault(Path(path).name, []).append(path)
            if path.endswith(".py"):
                words = path.removesuffix(".py").removesuffix("/__init__").split("/")
                self.modules[".".join(words)] = path
                if words[0] == "tests":  # pytest puts a test's folder on the path
                    self.modules.setdefault(words[-1], path)

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
        """Return how likely a reader who starts at a test comes by each file."""
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
        """Return how many times a file names each other file."""
        if not path.endswith((".py", ".md", ".yaml")):
            return Counter()
        text = self._text(path)
        dotted = [*self._dotted(path)] if path.endswith(".py") else []
        found = Counter(filter(None, map(self._module_of, dotted)))
        # A word of the command line or of a table: `main(["explain"])`, import_module(f"jshard.cli.{word}").
        packages = {".".join(name.split(".")[:count]) for name in dotted for count in range(1, name.count(".") + 2)}
        packages = [package for package in packages if self.modules.get(package, "").endswith("/__init__.py")]
        for word in re.findall(r"[\"'](\w+)[\"']", text):
            found.update(filter(None, (self.modules.get(f"{package}.{word}") for package in packages)))
        for name in re.findall(r"[\w./-]*\w\.(?:py|md|yaml|json|sh|txt)\b", text):
            ends = [path for path in self.by_name.get(Path(name).name, ()) if f"/{path}".endswith(f"/{name}")]
            found.update(ends if len(ends) == 1 else ())
        if path in self.tests:
            subject, share = Path(path).stem.removeprefix("test_"), found.total() // 4 + 1
            for name in (subject, subject.split("_")[0]):
                found.update(dict.fromkeys(self.by_name.get(f"{name}.py", ()), share))
        del found[path]
        return found

    def _module_of(self, name: str) -> str | None:
        """Return the file of a dotted name: the module, or the one from which a façade hands it on."""
        words = name.split(".")
        for count in range(len(words), 0, -1):
            path = self.modules.get(".".join(words[:count]))
            if path is not None:
                handed_on = self._imported(path).get(words[count]) if words[count:] else None
                if handed_on is None or handed_on == name:
                    return path
                return self._module_of(".".join([handed_on, *words[count + 1 :]])) or path
        return None

    @once
    def _imported(self, path: str) -> dict[str, str]:
        """Return the dotted name of each name that a file, or a program in one of its strings, imports."""
        found: dict[str, str] = {}
        for module, inside, line, modules in IMPORT.findall(self._text(path)):
            for each in re.findall(r"([\w.]+)(?: as (\w+))?", re.sub("#.*", "", inside or line or modules)):
                name, other = each
                if module:
                    found[other or name] = f"{module}.{name}"
                else:
                    found[other or name.split(".")[0]] = name if other else name.split(".")[0]
        return found

    def _dotted(self, path: str) -> Iterator[str]:
        """Yield the dotted name of each import, and of each use of an imported name."""
        imported = self._imported(path)
        for words in re.findall(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*", self._text(path)):
            first, dot, rest = words.partition(".")
            if first in imported:
                yield f"{imported[first]}{dot}{rest}"
            elif first == "jshard":
                yield words

    @once
    def _text(self, path: str) -> str:
        return (self.root / path).read_text(errors="ignore")


def main() -> None:
    checkout = Checkout(Path(__file__).parents[1])
    near: Counter[str] = Counter({test: 2.0 for test in checkout.tests if test.endswith("test_floors.py")})
    for path in checkout.changed():
        near |= Counter({test: share for share, test in checkout.tests_of(path)})
    print(*(test for test, _ in near.most_common()))


if __name__ == "__main__":
    main()
