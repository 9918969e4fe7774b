"""The README's samples are what the program prints, as far as that depends on neither the machine nor the hour."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / "scripts"))
import badges  # noqa: E402
import readme_samples  # noqa: E402

TEXT = readme_samples.README.read_text()
SAMPLES = readme_samples.samples(TEXT)
AGAIN = "- run scripts/readme_samples.py"


def test_there_are_samples() -> None:
    assert SAMPLES.keys() == {"first-run", "faults", "validate"}


@pytest.mark.parametrize("name", ["faults", "validate"])
def test_a_sample_is_what_the_program_says(name: str) -> None:
    written = {"faults": readme_samples.faults, "validate": readme_samples.validated}
    assert SAMPLES[name] == written[name](TEXT), AGAIN


def test_the_first_screen_is_that_of_the_program() -> None:
    shown = SAMPLES["first-run"].splitlines()
    for line in readme_samples.first_screen():
        assert line in shown, f"{AGAIN} with the output of `embodyrl run`"


def test_the_first_run_is_summed_up_from_its_output() -> None:
    rows = [f"   {index:2}     1,024     142.16     0.00" for index in (1, 2, 80)]
    log = [
        "embodyrl",
        "evaluating  3 of 9",
        "evaluation  0.0",
        " iter   env",
        *rows[:2],
        "evaluation  1.0",
        rows[2],
        "done in 3 s",
    ]
    expected = [
        "embodyrl",
        "evaluation  0.0",
        " iter   env",
        rows[0],
        "  ...",
        "evaluation  1.0",
        rows[2],
        "done in 3 s",
    ]
    assert readme_samples.first_run("\n".join(log)) == "\n".join(expected) + "\n"


def test_the_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)|<img [^>]*src=\"([^\"]+)\"", TEXT)
    paths = [REPOSITORY / (markdown or html) for markdown, html in pictures]
    assert paths and all(path.is_file() for path in paths)
    assert all(path.stat().st_size < 1_500_000 for path in paths)


def test_the_badges_say_what_the_package_says() -> None:
    files = {path.name: path.read_text() for path in badges.FOLDER.iterdir()}
    assert files == badges.badges(), "- run scripts/badges.py"
    assert all(f"](docs/images/badges/{name})" in TEXT for name in files)


def test_it_is_short_and_says_at_once_what_has_not_been_run() -> None:
    assert len(TEXT.split()) <= 1500
    [first] = [part for part in TEXT.split("\n\n") if "on a cluster" in part]
    assert "Nothing has been run on a GPU yet" in first
    assert "](docs/index.md)" in TEXT.partition("## ")[0]


def test_the_address_to_clone_is_filled_in_at_one_place() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    assert [path.name for path in pages if re.search(r"git clone <", path.read_text())] == ["README.md"]
