"""What people read and may copy: commands and settings in pages, help texts, docstrings, messages and comments."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from embodyrl.config.fields import settings_of
from embodyrl.config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "scripts"))
import docs_reference  # noqa: E402

PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]
PROGRAMS = sorted(path for folder in ("embodyrl", "examples") for path in (REPOSITORY / folder).rglob("*.py"))
CONFIGS = sorted(path for folder in ("configs", "examples") for path in (REPOSITORY / folder).rglob("*.yaml"))
OF_OTHERS = ("docs/comparison.md", "embodyrl/migrate/")
"""Where settings of other programs are named."""

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.S | re.M)
STARTS = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .* -m )?embodyrl (?=-|[a-z]+\b)")
"""Start of a line that is a command."""
PIECE = r"[^\s`\"',;)\]]+"
VALUE = rf"'[^']*'|\[[^]]*\]|\{{[^}}]*\}}|{PIECE}(?:,(?![\w.]+=){PIECE})*"
KEY = rf"(?:{'|'.join(settings_of(Config))})(?:\.[a-z_0-9]+)+|env|model|algorithm"
SETTING = re.compile(rf"(?<![\w./=-])({KEY})=({VALUE})")
"""A setting with its value: `key=value`."""
OPEN = re.compile(r"\.\.\.|<x>|<Tab>|(?:^|\s)\[|(?:^|[\s=/\[])[A-Z][A-Z_]*(?:$|[\s=/\].])")
"""A place to fill in: ..., [OPTION], DIR, what a program puts into its message."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Text:
    """A text, or a part of one that is set as code."""

    place: str
    """File and line."""
    text: str
    is_code: bool
    """Whether it is all code, and not prose with code in it."""


@cache
def blocks(*languages: str) -> list[Block]:
    """The blocks of the pages in these languages."""
    found = []
    for name, path in zip(NAMES, PAGES, strict=True):
        text = path.read_text()
        for match in FENCE.finditer(text):
            if match[2] in languages:
                code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
                found.append(Block(name, text.count("\n", 0, match.start()) + 1, match[2], code))
    return found


@cache
def texts() -> list[Text]:
    """All that is read: blocks and prose of pages, strings and comments of programs, comments of configs."""
    found = [Text(str(block), block.code, True) for block in blocks("", "sh", "bash", "console", "text")]
    for block in blocks("python"):
        found += of_program(block.page, block.code, block.line)
    for name, path in zip(NAMES, PAGES, strict=True):
        prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
        found.append(Text(name, prose, False))
    for path in PROGRAMS:
        found += of_program(str(path.relative_to(REPOSITORY)), path.read_text())
    for path in CONFIGS:
        name = str(path.relative_to(REPOSITORY))
        found += of_comments(name, path.read_text())
    return [each for each in found if not each.place.startswith(OF_OTHERS)]


def of_program(name: str, code: str, first: int = 0) -> Iterator[Text]:
    """Yield strings and comments of Python code; what is put into a string is a place to fill in."""
    inside: set[ast.AST] = set()
    for node in ast.walk(ast.parse(code)):
        text = None
        if isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<x>" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            text = node.value
        if text:
            yield Text(f"{name}:{first + node.lineno}", text, False)  # type: ignore[attr-defined]
    yield from of_comments(name, code, first)


def of_comments(name: str, code: str, first: int = 0) -> Iterator[Text]:
    """Yield the comments of YAML or Python, lines that follow one another as one."""
    for match in re.finditer(r"(?:^[ \t]*#.*\n)+|[ \t]#[ \t].*\n", code, re.M):
        text = re.sub(r"^[ \t]*# ?", "", match[0], flags=re.M)
        yield Text(f"{name}:{first + code.count(chr(10), 0, match.start()) + 1}", text, False)


@dataclass(frozen=True)
class Command:
    """A command of embodyrl."""

    place: str
    words: tuple[str, ...]
    is_whole: bool
    """Whether it can be copied: it stands alone, and nothing is to be filled in."""
    is_refused: bool = False
    """Whether it is shown with the settings that it refuses."""

    def __str__(self) -> str:
        return f"{self.place}: embodyrl {' '.join(self.words)}"


def commands() -> list[Command]:
    """Every command that is shown: on lines of their own, and in backticks."""
    found = []
    for text in texts():
        lines = re.sub(r"\\\n\s*", " ", text.text).splitlines()
        alone = [line for line in map(str.strip, lines) if STARTS.match(line)]
        inline = (
            [] if text.is_code else [" ".join(span.split()) for span in re.findall(r"`(embodyrl [^`]+)`", text.text)]
        )
        given = [command(text.place, line, alone=True) for line in alone if text.is_code or "`" not in line]
        is_refused = text.is_code and "\ncommand line: " in text.text
        given = [replace(each, is_refused=is_refused) for each in given]
        found += [each for each in given if text.is_code or each.words[0] in docs_reference.commands()]
        found += [command(text.place, line, alone=False) for line in inline if STARTS.match(line)]
    return list(dict.fromkeys(found))


def command(place: str, line: str, *, alone: bool) -> Command:
    """Return the command of a line, without what a shell or a reader takes from it."""
    line = re.split(r" {3,}\(", STARTS.sub("", line))[0]
    words = shlex.split(line, comments=True) if alone and line.count("'") % 2 == 0 else line.split()
    words = words[: words.index(">")] if ">" in words else words
    return Command(place, tuple(words), alone and not OPEN.search(" ".join(words)))


def settings() -> list[tuple[str, tuple[str, ...]]]:
    """All settings that are shown with values, as places and overrides; those that follow one another together."""
    found = []
    for text in texts():
        end = -1
        for match in SETTING.finditer(text.text):
            word = f"{match[1]}={re.sub(r'(?<![.])[.:]$', '', match[2])}"
            if end >= 0 and not text.text[end : match.start()].strip(" \n\\"):
                found[-1] = (text.place, (*found[-1][1], word))
            else:
                found.append((text.place, (word,)))
            end = match.end()
    return list(dict.fromkeys(found))
