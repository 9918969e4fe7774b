"""What the README and docs/ show is true: links lead somewhere, configs are legal, commands and settings exist, Python
compiles and imports what there is, and the generated reference holds every setting."""

from __future__ import annotations

import ast
import importlib
import itertools
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shown
import yaml
from shown import NAMES, OPEN, REPOSITORY, Block, Command, blocks

import embodyrl
from embodyrl.cli.arguments import split_arguments
from embodyrl.cli.collect import not_needed
from embodyrl.config import ConfigError, ConfigUse, LoadedConfig, list_experiments, load_config, to_plain
from embodyrl.config.fields import all_paths, defaults_below, find_setting, settings_of
from embodyrl.config.files import builtin_folder
from embodyrl.config.issues import MissingDependency
from embodyrl.config.renames import OPTIONS, SETTINGS
from embodyrl.config.schema import Config
from embodyrl.evaluation.protocols import find as find_protocol
from embodyrl.sweeps.axes import split_words

sys.path.append(str(REPOSITORY / "scripts"))
import docs_reference


def reference(page: str) -> str:
    """Return a page of the reference, made where no other test has registered components of its own."""
    code = f"import docs_reference; print(docs_reference.{page}_page())"
    made = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY / "scripts",
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return made.stdout


CLASSIFIER = ("algorithm", "reward", "path")


@cache
def load(source: str | None, overrides: tuple[str, ...] = (), use: ConfigUse = ConfigUse.elsewhere) -> LoadedConfig:
    """Load a config; what an earlier command leaves, as demonstrations and weights, need not be there."""
    return load_config(source, overrides, use=use, not_needed=[*not_needed(None), CLASSIFIER])


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
    return {setting for name in list_experiments() for setting in settings_in(name)}


@cache
def settings_in(experiment: str | None) -> set[str]:
    data = to_plain(load(experiment).config)
    return {".".join(map(str, path)) for path in all_paths(Config, data)}


def exists(path: tuple[str, ...], data: Any, known: set[str]) -> bool:
    return ".".join(path) in known or find_setting(Config, defaults_below(Config, data), path)[0] is not None


def merged(base: Any, part: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(part, dict):
        return part
    return base | {key: merged(base.get(key), value) for key, value in part.items()}


def refused_part(block: Block, data: Any, workplace: Path, known: set[str]) -> str | None:
    """What is wrong with a part of a config: there is no such setting, or no shipped experiment takes its values."""
    settings = {key: value for key, value in data.items() if key != "defaults"}
    missing = [".".join(path) for path in leaves(settings) if not exists(path, data, known)]
    if missing:
        return f"there is no setting {missing[0]}"
    paths = {".".join(path) for path in leaves(settings)}
    said = []
    for name in sorted(list_experiments(), key=lambda name: -len(paths & settings_in(name))):
        base = yaml.safe_load((builtin_folder() / f"{name}.yaml").read_text())
        path = workplace / f"{Path(block.page).stem}-{block.line}-{Path(name).name}.yaml"
        path.write_text(yaml.safe_dump(merged(base, settings)))
        said.append(refusal(lambda path=path: load(str(path), (), ConfigUse.show)))
        if said[-1] is None:
            return None
    return said[0]


def test_the_parts_of_configs_are_legal(workplace: Path, known: set[str]) -> None:
    said = {str(block): refused_part(block, data, workplace, known) for block, data in OWN if block not in WHOLE}
    wrong = [f"{block}: {text}" for block, text in said.items() if text is not None]
    assert len(said) > 10 and not wrong, "\n".join(wrong)


HAVE_CONFIG = {"run", "validate", "check", "plan", "graph", "doctor", "collect"}
CHART = re.compile(r"──|^0\.")


def refusal(call: Callable[[], object]) -> str | None:
    """What the program says to a wrong use; None if it says nothing, or only that something is not on this machine."""
    try:
        call()
    except ConfigError as error:
        faults = [str(fault) for fault in error.faults if not isinstance(fault, MissingDependency)]
        return "; ".join(faults) or None
    except Exception as error:  # of whatever reads arguments
        return str(getattr(error, "message", error))
    return None


@cache
def options_of_components() -> set[str]:
    """Options of all registered components, as settings."""
    return {
        f"{where}.{name}"
        for where in docs_reference.OF_COMPONENTS
        for entry in docs_reference.registry_at(where).entries()
        for name in settings_of(docs_reference.options_at(where, entry.name))
    }


def homes(keys: list[str]) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """Configs in which settings may be legal, with what else they need: the default, the shipped experiments that have
    them, every choice of the component that may have one for an option, and experiments with a map that takes any
    key."""
    yield None, ()
    yield from ((name, ()) for name in list_experiments() if settings_in(name).issuperset(keys))
    parents = {key.rpartition(".")[0] for key in keys}
    for where in parents & docs_reference.OF_COMPONENTS.keys():
        yield from ((None, (f"{where}.name={entry.name}",)) for entry in docs_reference.registry_at(where).entries())
    yield from ((name, ()) for name in list_experiments() if settings_in(name) >= parents)


def refused_settings(words: tuple[str, ...]) -> str | None:
    """What is wrong with settings that stand alone: no shipped experiment takes them."""
    places = homes([word.partition("=")[0] for word in words])
    said = (refusal(lambda home=home, more=more: load(home, (*more, *words), ConfigUse.show)) for home, more in places)
    first = next(said)
    return None if first is None or None in said else first


def together(found: Iterable[tuple[str, ...]]) -> dict[str | None, list[dict[str, str]]]:
    """Settings that an experiment may take at once, by experiment, to save time: maps of keys to overrides."""
    rounds: dict[str | None, list[dict[str, str]]] = {}
    for words in found:
        given = {word.partition("=")[0]: word for word in words}
        if any(key in docs_reference.OF_COMPONENTS or key.endswith(".name") for key in given):
            continue  # they choose which options there are
        home = next((name for name in (None, *list_experiments()) if settings_in(name) >= given.keys()), None)
        of_home = rounds.setdefault(home, [])
        free = next((each for each in of_home if not each.keys() & given.keys()), None)
        if free is None:
            of_home.append(given)
        else:
            free.update(given)
    return rounds


def taken(home: str | None, words: tuple[str, ...]) -> set[str]:
    """Those of some settings that an experiment takes, which is asked about all of them, then about halves."""
    if refusal(lambda: load(home, words, ConfigUse.show)) is None:
        return set(words)
    middle = len(words) // 2
    return taken(home, words[:middle]) | taken(home, words[middle:]) if middle else set()


def one_by_one(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every combination of settings with several values."""
    plain, axes = split_words(words)
    for values in itertools.product(*(axis.values for axis in axes)):
        yield (*plain, *(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)))


def refused_config(words: tuple[str, ...]) -> str | None:
    """What is wrong with the config of a command and the settings that it changes: all combinations of a sweep."""
    source, overrides = split_arguments(list(words))
    if source is not None and source.endswith(".yaml") and not Path(source).is_file():
        source = "my.yaml"
    for each in one_by_one(tuple(overrides)):
        said = refusal(lambda each=each: load(source, each))
        if said is not None:
            return said
    return None


def refused_command(given: Command) -> str | None:
    """What is wrong with a command: it, its options, its config. One with places to fill in, or that is a part of a
    sentence, needs no more than options that there are."""
    name, *rest = given.words
    if name.startswith("-") or "--help" in rest or CHART.search(" ".join(given.words)):
        return None
    command = docs_reference.commands().get(name)
    if command is None:
        return f"there is no command {name}"
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in rest if re.match(r"--\w", word) and word.partition("=")[0] not in options]
    if unknown:
        return f"{name} has no option {unknown[0]}"
    parameters: dict[str, Any] = {}
    said = refusal(lambda: parameters.update(command.make_context(name, list(rest)).params))
    if said is not None:
        return said if given.is_whole else None
    words = parameters.get("words") or ()
    if not given.is_whole or name not in HAVE_CONFIG or not words:
        return None
    return refused_config(tuple(words))


def test_every_command_that_is_shown_can_be_given(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    found = shown.commands()
    wrong = [f"{each}\n    {said}" for each in found if ((said := refused_command(each)) is None) is each.is_refused]
    assert len(found) > 300 and any(each.is_refused for each in found) and not wrong, "\n".join(wrong)


def test_every_setting_that_is_shown_is_one(known: set[str]) -> None:
    """In pages, help texts, docstrings, messages and comments; with a value to be filled in, its key is one."""
    found = shown.settings()
    wrong, whole = [], dict[tuple[str, ...], str]()
    for place, words in found:
        if not OPEN.search(" ".join(words)):
            whole |= dict.fromkeys(one_by_one(words), place)
            continue
        keys = {word.partition("=")[0] for word in words} - options_of_components()
        missing = [key for key in keys if not exists(tuple(key.split(".")), {}, known)]
        wrong += [f"{place}: there is no setting {key}" for key in missing]
    legal = set[str]()
    for home, rounds in together(whole).items():
        legal |= {word for each in rounds for word in taken(home, tuple(each.values()))}
    for words, place in whole.items():
        if not legal.issuperset(words) and (said := refused_settings(words)) is not None:
            wrong.append(f"{place}: {' '.join(words)}\n    {said}")
    assert len(found) > 200 and not wrong, "\n".join(wrong)


def test_no_old_name_is_shown() -> None:
    """Except where it is said that it is one."""
    old = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, (*SETTINGS, *OPTIONS)))})\b")
    wrong = [
        f"{text.place}: {match[0]}"
        for text in shown.texts()
        for match in old.finditer(text.text)
        if "renamed" not in text.text[match.start() : match.end() + 20] and "config/renames" not in text.place
    ]
    assert not wrong, "\n".join(wrong)


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


def test_the_reference_of_python_has_all_that_the_package_offers() -> None:
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", docs_reference.api_page(), re.M)}
    assert shown >= set(embodyrl.__all__) - {"ConfigSource", "__version__", "envs", "models"}
    assert shown >= {"sweep", "resume_sweep", "compare", "verify", "Observation", "StepResult"}
