"""What the README and docs/ show is true: links lead somewhere, configs are legal, commands and settings exist, Python
compiles and imports what there is, and the generated reference holds every setting."""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodyrl.cli.collect import not_needed
from embodyrl.config import ConfigUse, LoadedConfig, list_experiments, load_config, to_plain
from embodyrl.config.fields import all_paths, defaults_below, find_setting
from embodyrl.config.schema import Config
from embodyrl.evaluation.protocols import find as find_protocol

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]

sys.path.append(str(REPOSITORY / "scripts"))
import docs_reference  # noqa: E402


def reference(page: str) -> str:
    """Return a page of the reference, made where no other test has registered components of its own."""
    code = f"import docs_reference; print(docs_reference.{page}_page())"
    made = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY / "scripts",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return made.stdout


def load(source: str | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a config; what an earlier command leaves, as demonstrations and weights, need not be there."""
    return load_config(source, overrides, use=ConfigUse.elsewhere, not_needed=not_needed(None))


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for name, path in zip(NAMES, PAGES, strict=True):
        text = path.read_text()
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.S | re.M):
            if match[2] in languages:
                code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
                found.append(Block(name, text.count("\n", 0, match.start()) + 1, match[2], code))
    return found


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.S | re.M))


def anchors(path: Path) -> set[str]:
    """The places in a page to which links can lead, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code((REPOSITORY / name).read_text())):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        path = (
            REPOSITORY / posixpath.normpath(posixpath.join(posixpath.dirname(name), file))
            if file
            else REPOSITORY / name
        )
        if name == "docs/index.md" and file in docs_reference.PAGES:
            continue
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{name} links to {target}; there are {sorted(anchors(path))}"


def test_every_page_is_in_the_site_and_every_image_is_shown() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    pages = {str(path.relative_to(REPOSITORY / "docs")) for path in (REPOSITORY / "docs").rglob("*.md")}
    assert listed == pages | set(docs_reference.PAGES)


MY = REPOSITORY / "README.md"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's my.yaml, for commands that name one."""
    folder = tmp_path_factory.mktemp("reader")
    [mine] = [block.code for block in blocks("yaml") if block.page == "README.md"]
    (folder / "my.yaml").write_text(mine)
    return folder


def groups_of(data: Any) -> set[str]:
    """The groups that a config's `defaults` choose."""
    entries = data.get("defaults", []) if isinstance(data, dict) else []
    return {key for entry in entries if isinstance(entry, dict) for key in entry}


CONFIGS = [(block, yaml.safe_load(block.code)) for block in blocks("yaml")]
OWN = [
    (block, data)
    for block, data in CONFIGS
    if not re.match(r"# [\w/]+\.yaml$", block.code, re.M) and "plugins" not in data and "aspects" not in data
]
"""Without protocols, those of plug-ins and of files that the page names, which `tests/cli/test_examples.py` reads."""
WHOLE = [
    block
    for block, data in OWN
    if groups_of(data) >= {"env", "model", "algorithm"} and "my" not in block.code.replace("my-", "")
]
"""Configs that need no file of the reader's own."""


def test_protocols_can_be_read_and_their_settings_exist(tmp_path: Path, known: set[str]) -> None:
    protocols = [block for block, data in CONFIGS if "aspects" in data]
    assert protocols
    for block in protocols:
        path = tmp_path / "protocol.yaml"
        path.write_text(block.code)
        read = find_protocol(str(path), yaml.safe_load(block.code)["simulator"])
        settings = read.settings_of("libero_10/0", read.aspects[2].models[0], sees_images=True)
        assert settings and set(settings) <= known, str(block)


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_a_whole_config_is_legal(block: Block, workplace: Path) -> None:
    path = workplace / f"{Path(block.page).stem}-{block.line}.yaml"
    path.write_text(block.code)
    load(str(path))


def leaves(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*path, str(key)))
    else:
        yield path


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every setting of the schema, with the options of all components that shipped experiments choose."""
    found: set[str] = set()
    for name in list_experiments():
        data = to_plain(load(name).config)
        found |= {".".join(map(str, path)) for path in all_paths(Config, data)}
    return found


def exists(path: tuple[str, ...], data: Any, known: set[str]) -> bool:
    return ".".join(path) in known or find_setting(Config, defaults_below(Config, data), path)[0] is not None


def test_the_settings_of_a_part_of_a_config_exist(known: set[str]) -> None:
    for block, data in OWN:
        for path in leaves({key: value for key, value in data.items() if key != "defaults"}):
            assert exists(path, data, known), f"{block}: there is no setting {'.'.join(path)}"


STARTS = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .* -m )?embodyrl (?=[a-z-])")


def commands() -> list[tuple[Block, list[str]]]:
    """Every `embodyrl ...` that a page shows in a block of its own, as arguments."""
    found = []
    for block in blocks("", "sh", "bash", "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            if STARTS.match(line):
                words = shlex.split(STARTS.sub("", line), comments=True)
                found.append((block, words[: words.index(">")] if ">" in words else words))
    return found


SHOWN = [(block, words) for block, words in commands() if words[0] in docs_reference.commands()]
HAVE_CONFIG = {"run", "validate", "plan", "graph", "doctor", "collect"}


def test_every_command_is_one() -> None:
    chart = re.compile(r"run ──|^0\.")
    odd = [(str(block), words) for block, words in commands() if words[0] not in docs_reference.commands()]
    assert not [each for each in odd if not chart.search(" ".join(each[1]))], "no such commands"


@pytest.mark.parametrize(("block", "words"), SHOWN, ids=lambda each: str(each) if isinstance(each, Block) else "")
def test_a_command_has_its_options_and_settings(
    block: Block, words: list[str], workplace: Path, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *rest = words
    if "──" in rest:  # a chart
        return
    command = docs_reference.commands()[name]
    parameters = command.make_context(name, list(rest)).params  # raises what the command line prints
    given = [word for value in parameters.values() if isinstance(value, list) for word in value]
    settings = [word for word in given if re.match(r"[\w.]+=", word)]
    if name not in HAVE_CONFIG or "NAME" in " ".join(rest):
        for setting in settings:
            path = setting.partition("=")[0]
            assert exists(tuple(path.split(".")), {}, known), f"{block}: there is no setting {path}"
        return
    monkeypatch.chdir(workplace)
    source = next((word for word in given[:1] if word not in settings), None)
    load(source, [word for word in given if word != source])


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles_and_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(block.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "embodyrl":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block}: {node.module} has no {alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "embodyrl":
            assert hasattr(importlib.import_module("embodyrl"), node.attr), f"{block}: embodyrl has no {node.attr}"


def test_the_reference_has_every_setting_with_its_documentation(known: set[str]) -> None:
    page = reference("settings")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", page, re.M))
    sections = set(re.findall(r"^## `([\w.]+)`", page, re.M)) | set(re.findall(r"^`([\w.]+)`: \S", page, re.M))
    missing = sorted(path for path in known if path not in rows and path not in sections)
    assert len(rows) > 150 and not missing
    assert all(rows.values()), "a setting without a word about it"


def test_the_reference_of_commands_and_components_is_that_of_the_program() -> None:
    commands = reference("commands")
    assert all(f"## `embodyrl {name}`" in commands for name in ("run", "resume", "eval", "validate", "plan"))
    assert "--print-config" in commands and "\x1b" not in commands
    assert "| `libero` | LIBERO" in reference("components")
