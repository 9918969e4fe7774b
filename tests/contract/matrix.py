"""The contract matrix, backend x check, as a Markdown table.

pytest tests/contract --junitxml=contract.xml
python tests/contract/matrix.py contract.xml
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from xml.etree import ElementTree

MARKS = {"failure": "FAIL", "error": "FAIL", "skipped": "-"}


def outcomes(path: str) -> Iterator[tuple[str, str, str]]:
    """(check, backend, mark) for every test in pytest's JUnit file, whose names are test[backend-promise]."""
    for case in ElementTree.parse(path).iter("testcase"):
        check, _, backend = case.get("name", "").removesuffix("]").partition("[")
        if check == "test_it_keeps":
            backend, _, check = backend.rpartition("-")
        mark = next((MARKS[child.tag] for child in case if child.tag in MARKS), "ok")
        yield check.removeprefix("test_").replace("_", " "), backend, mark


def table(path: str) -> str:
    """The whole matrix; `-`: does not apply, or is not installed here."""
    cells = {(check, backend): mark for check, backend, mark in outcomes(path)}
    checks, backends = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    rows = [["check", *backends], ["---"] * (len(backends) + 1)]
    rows += [[check, *(cells.get((check, backend), "") for backend in backends)] for check in checks]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(sys.argv[1]))
