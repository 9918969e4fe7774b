"""Change single expressions of the package and see whether the tests of their room notice.

    python scripts/mutants.py [--count 100] [--seed 1] [--rooms engine runner ..] [--out mutants.jsonl]

Works on the commit that is checked out, in a copy of it: the checkout stays as it is. Each changed place is a line of
the output: where, what it was, what it became, whether a test failed, which one, after how long. Places are drawn with
the seed, the same for the same sources, so that two versions of the tests can be compared: `--tests COMMIT` takes the
tests of another commit, of which it runs those files that are not the same here, and `--only FILE` the places that a
file of such lines says survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "algorithms": ["algorithms"],
    "config": ["config", "settings"],
    "engine": ["engine"],
    "envs": ["envs", "contract"],
    "models": ["models", "parity"],
    "placement": ["placement", "faults"],
    "rollout": ["rollout"],
    "runner": ["runner"],
}
"""Rooms of the package, and the folders of tests that are about each."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATIONS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
LONGEST_S = 900.0
"""After which a run of tests counts as one that fails: the change made something wait [s]."""


@dataclass(frozen=True)
class Mutant:
    """A change of an expression.

    Attributes:
        path: of the module, below the repository's top.
        line: of the expression, which is in one line.
        begin: column where it begins.
        end: column where it ends.
        before: its text.
        after: the text in its place.
    """

    path: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    @property
    def room(self) -> str:
        """Of the package."""
        return self.path.split("/")[1]

    def applied(self, source: str) -> str:
        """Return the module's text with the change."""
        lines = source.splitlines(keepends=True)
        encoded = lines[self.line - 1].encode()
        found = encoded[self.begin : self.end].decode()
        if found != self.before:
            raise ValueError(f"{self.path}:{self.line} has {found!r}, not {self.before!r}")
        lines[self.line - 1] = (encoded[: self.begin] + self.after.encode() + encoded[self.end :]).decode()
        return "".join(lines)


def changed(node: ast.AST) -> str | None:
    """Return what an expression becomes; None if it stays."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        return f"(({left}) {COMPARISONS[type(node.ops[0])]} ({right}))"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS and not isinstance(node.left, ast.JoinedStr):
        return f"(({ast.unparse(node.left)}) {OPERATIONS[type(node.op)]} ({ast.unparse(node.right)}))"
    if isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        return f"({operator.join(f'({ast.unparse(each)})' for each in node.values)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return repr(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return repr(node.value + 1)
    return None


def places(path: Path) -> Iterator[Mutant]:
    """Yield what can be changed in the functions of a module."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                text = changed(node)
                if text is not None and isinstance(node, ast.expr) and node.lineno == node.end_lineno:
                    line = path.read_text().splitlines()[node.lineno - 1].encode()
                    begin, end = node.col_offset, node.end_col_offset or 0
                    before = line[begin:end].decode()
                    yield Mutant(path.relative_to(ROOT).as_posix(), node.lineno, begin, end, before, text)


def drawn(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw the same number of places in each room."""
    chosen = []
    for number, room in enumerate(sorted(TESTS)):
        share = count // len(TESTS) + (number < count % len(TESTS))
        every = {each: None for path in sorted((ROOT / "embodyrl" / room).rglob("*.py")) for each in places(path)}
        picked = random.Random(f"{seed} {room}").sample(list(every), share)
        chosen += picked if room in rooms else []
    return chosen


def tests_of(room: str, copy: Path, commit: str | None) -> list[str]:
    """Return the folders of a room's tests; of another commit, the files of tests that are not the same here."""
    folders = [f"tests/{name}" for name in TESTS[room] if (copy / "tests" / name).is_dir()]
    if commit is None:
        return folders
    asked = ["git", "diff", "--name-only", "--diff-filter=MD", commit, "HEAD", "--", *folders]
    names = subprocess.run(asked, cwd=copy, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if Path(name).match("test_*.py")]


def pytest_of(tests: list[str], copy: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests on the copy's package, also in the programs that tests start."""
    # Without the strictness about markers: the tests of another commit may have other ones.
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=-rfE --import-mode=importlib", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *words, *tests]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=LONGEST_S)


def words_for(room: str, copy: Path, commit: str | None, words: list[str]) -> list[str]:
    """Return the tests of a room as words for pytest, with those that leave out what fails without any change, which
    would count as a fault found; none if there are no tests."""
    tests = tests_of(room, copy, commit)
    if not tests:
        return []
    try:
        done = pytest_of(tests, copy, words)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the tests of {room} take longer than {LONGEST_S:g} s without any change") from None
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests of {room} cannot be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failing:
        print(f"{room}: left out, since they fail without any change: {', '.join(failing)}", flush=True)
    # A name without a test is a file that cannot be imported.
    return [
        *(f"--deselect={name}" for name in failing if "::" in name),
        *(each for each in tests if each not in failing),
    ]


def tried(mutant: Mutant, copy: Path, tests: list[str], words: list[str]) -> dict[str, object]:
    """Run tests with the change, up to the first one that fails."""
    if not tests:
        return {"killed": False, "by": "", "seconds": 0.0}
    path = copy / mutant.path
    source, began = path.read_text(), time.monotonic()
    try:
        path.write_text(mutant.applied(source))
        done = pytest_of(tests, copy, ["-x", *words])
        killed, said = done.returncode != 0, re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        by = said[1] if said else f"exit code {done.returncode}" if killed else ""
    except subprocess.TimeoutExpired:
        killed, by = True, "the limit of time"
    finally:
        path.write_text(source)
    return {"killed": killed, "by": by, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Read the command line, draw, try and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="changes, the same number in each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", default=sorted(TESTS), choices=sorted(TESTS))
    parser.add_argument("--tests", metavar="COMMIT", help="take the tests of this commit")
    parser.add_argument("--only", type=Path, metavar="FILE", help="only what this file says survived")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="lines are added to it")
    parser.add_argument("words", nargs="*", help="further words for pytest, after --")
    asked = parser.parse_args()
    if asked.only is not None and not asked.only.is_file():
        parser.error(f"--only: there is no file {asked.only}")
    known = ["git", "rev-parse", "--quiet", "--verify", f"{asked.tests}^{{commit}}"]
    if asked.tests is not None and subprocess.run(known, cwd=ROOT, capture_output=True).returncode:
        parser.error(f"--tests: this checkout has no commit {asked.tests}")
    chosen = drawn(asked.rooms, asked.count, asked.seed)
    if asked.only is not None:
        rows = [json.loads(line) for line in asked.only.read_text().splitlines()]
        names = {(row["path"], row["line"], row["begin"], row["end"]) for row in rows if not row["killed"]}
        chosen = [each for each in chosen if (each.path, each.line, each.begin, each.end) in names]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        if asked.tests is not None:
            subprocess.run(["git", "rm", "-rq", "tests"], cwd=copy, check=True)
            subprocess.run(["git", "checkout", asked.tests, "--", "tests"], cwd=copy, check=True)
        rooms = sorted({each.room for each in chosen})
        tests = {room: words_for(room, copy, asked.tests, asked.words) for room in rooms}
        count = 0
        for number, mutant in enumerate(chosen, start=1):
            found = tried(mutant, copy, tests[mutant.room], asked.words)
            count += bool(found["killed"])
            with asked.out.open("a") as out:
                out.write(json.dumps({**asdict(mutant), **found}) + "\n")
            fate = f"killed by {found['by']}" if found["killed"] else "SURVIVED"
            print(
                f"{number}/{len(chosen)}  {mutant.path}:{mutant.line}  {mutant.before} -> {mutant.after}  {fate}",
                flush=True,
            )
    print(f"{count} of {len(chosen)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
