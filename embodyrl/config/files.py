"""Finds config files and reads them with the line and column of every key and value."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.issues import ConfigIssue, KeyPath, Location, dotted
from embodyrl.config.values import DEEPEST, LARGEST_TEXT, MOST_VALUES, check_interpolations
from embodyrl.errors import near_match

_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_PREFIX + name for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_ODD_NUMBER = re.compile(r"^[-+]?0[0-9_]+$|:")

_SYNTAX = (
    # the YAML parser's words, what they mean, the remedy, whether to report the start of the construct
    ("'\\t'", "a tab where YAML wants spaces", "indent with spaces", False),
    ("mapping values are not allowed", "a colon where none can be", "check the indentation, or quote the value", False),
    ("could not find expected ':'", "a key without a colon", "write `key: value`", True),
    ("expected ',' or ']'", "a list that is not closed", "close it with ]", True),
    ("expected ',' or '}'", "a mapping that is not closed", "close it with }", True),
    ("found unexpected end of stream", "a quoted text that is not closed", "close it with the same quote", True),
    ("expected <block end>", "this line does not fit the indentation above", "align it with its neighbours", False),
    ("found undefined alias", "an alias (*name) without its anchor (&name)", "define the anchor first", False),
    ("another document", "a second YAML document", "keep one document per file (remove the ---)", False),
)


class Unreadable(Enum):
    """Type of the stand-in for a value that could not be read and has been reported."""

    value_ = None


UNREADABLE = Unreadable.value_


@dataclass(frozen=True)
class Origin:
    """Locations of a setting's key and value."""

    key: Location
    value: Location


@dataclass
class Document:
    """One file's plain data."""

    label: str
    """Name of the file in messages."""
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    faults: list[ConfigIssue] = field(default_factory=list)
    """YAML faults of the file."""
    readable: bool = True
    """False if the faults leave no data."""


def read_document(path: Path, label: str, *, any_interpolation: bool = False) -> Document:
    """Read a YAML file with `PlainLoader`. Faults of its contents are recorded, not raised.

    Args:
        path: the file.
        label: its name in messages.
        any_interpolation: leave `${...}` as it is written, whatever it is; nobody resolves it.
    """
    document = Document(label)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_TEXT + 1)
        if len(text) > LARGEST_TEXT:
            _too_large(document, f"is longer than {LARGEST_TEXT} characters")
            return document
        loader = _BoundedLoader(text)
        root = loader.get_single_node()
        _Walker(document, loader, any_interpolation).walk_root(root)
    except OSError as error:
        _unreadable(document, Location(label), f"the file cannot be read: {error.strerror}", "check its permissions")
    except UnicodeDecodeError as error:
        _unreadable(document, Location(label), f"the file is not UTF-8 text (byte {error.start})", "save it as UTF-8")
    except yaml.reader.ReaderError as error:
        message = f"the file contains the character U+{error.character:04X}, which YAML forbids"
        _unreadable(document, Location(label), message, "remove it")
    except yaml.MarkedYAMLError as error:
        _unreadable(document, *_syntax_error(error, label))
    except _TooManyError:
        _too_large(document, f"holds more than {MOST_VALUES} values")
    except RecursionError:
        _unreadable(document, Location(label), "the file is nested too deeply", "flatten it")
    return document


class _TooManyError(Exception):
    """Raised by the loader for a file with more values than any config has."""


class PlainLoader(yaml.SafeLoader):
    """Reads numbers and dates as OmegaConf does: `1e-5` is a number, as in YAML 1.2, and a date is text."""


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != _PREFIX + "timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver(
    _PREFIX + "float", re.compile(r"^[-+]?\d+(?:_\d+)*(?:\.[\d_]*)?[eE][-+]?\d+$", re.ASCII), list("-+0123456789")
)


class _BoundedLoader(PlainLoader):
    """Stops early in files with too many nodes, such as those whose aliases double at every level."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > 2 * MOST_VALUES:  # with their keys
            raise _TooManyError
        return super().compose_node(parent, index)


def _too_large(document: Document, why: str) -> None:
    _unreadable(document, Location(document.label), f"the file {why}", "leave out what is no setting")


def _unreadable(document: Document, location: Location, message: str, remedy: str) -> None:
    document.data, document.origins, document.readable = {}, {}, False
    document.faults.append(ConfigIssue((), message, remedy, location))


def _at(mark: yaml.Mark, label: str) -> Location:
    return Location(label, mark.line + 1, mark.column + 1)


def _syntax_error(error: yaml.MarkedYAMLError, label: str) -> tuple[Location, str, str]:
    """Return location, message and remedy of a YAML syntax error."""
    problem = error.problem or error.context or "cannot be read as YAML"
    mark = error.problem_mark or error.context_mark
    for said, message, remedy, at_start in _SYNTAX:
        if said in problem:
            if at_start and error.context_mark is not None:
                mark = error.context_mark
            return (_at(mark, label) if mark else Location(label), f"YAML syntax: {message}", remedy)
    return (_at(mark, label) if mark else Location(label), f"YAML syntax: {problem}", "fix the line")


class _Walker:
    """Turns a tree of YAML nodes into plain data."""

    def __init__(self, document: Document, loader: PlainLoader, any_interpolation: bool) -> None:
        self.document = document
        self.any_interpolation = any_interpolation
        self.loader = loader
        self.open_nodes: list[int] = []
        self.count = 0

    def walk_root(self, root: yaml.Node | None) -> None:
        """Fill the document from the file's top node."""
        label = self.document.label
        if root is None:
            remedy = "`embodyrl run --print-config` shows a whole config"
            _unreadable(self.document, Location(label), "the file is empty", remedy)
        elif not isinstance(root, yaml.MappingNode):
            what = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            where = _at(root.start_mark, label)
            _unreadable(self.document, where, f"the file holds {what}, not settings", "write `key: value` lines")
        else:
            self.document.data = self.mapping(root, ())

    def fault(self, node: yaml.Node, path: KeyPath, message: str, remedy: str) -> None:
        """Record a fault at the node's location."""
        self.document.faults.append(ConfigIssue((path,), message, remedy, _at(node.start_mark, self.document.label)))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the plain data of any node."""
        self.count += 1
        if self.count > MOST_VALUES:
            raise _TooManyError
        if id(node) in self.open_nodes:
            self.fault(node, path, f"{dotted(path)} contains itself", "write the values out, without aliases")
            return UNREADABLE
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace(_PREFIX, "!!")
            self.fault(node, path, f"{dotted(path)} has the tag {tag}", "remove it: a config holds only plain values")
            return UNREADABLE
        if len(path) > DEEPEST:
            self.fault(node, path[:1], f"{dotted(path[:1])} is nested more than {DEEPEST} deep", "flatten it")
            return UNREADABLE
        self.open_nodes.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self.sequence(node, path)
            assert isinstance(node, yaml.ScalarNode)
            return self.scalar(node, path)
        finally:
            self.open_nodes.pop()

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        """Return a number, text, true, false or null."""
        try:
            value = self.loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            kind = node.tag.removeprefix(_PREFIX)
            self.fault(node, path, f"{dotted(path)}: {node.value!r} is not of type {kind}", f"remove the tag !!{kind}")
            return UNREADABLE
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and node.style is None and _ODD_NUMBER.search(node.value):
            message = f"{dotted(path)}: YAML reads {node.value} as {value}"
            self.fault(node, path, message, f"write {value} if that is meant")
        is_checked = isinstance(value, str) and not self.any_interpolation
        problem = check_interpolations(value) if is_checked else None
        if problem is not None:
            self.fault(node, path, f"{dotted(path)} {problem.message}", problem.hint)
            return UNREADABLE
        return value

    def sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        """Return a list, with the origins of its entries recorded."""
        items = []
        for index, child in enumerate(node.value):
            place = _at(child.start_mark, self.document.label)
            self.document.origins[*path, index] = Origin(place, place)
            items.append(self.value(child, (*path, index)))
        return items

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """Return a mapping. The last value of a repeated key counts, as in YAML."""
        self.find_duplicates(node, path)
        if _merged_size(node, {}) > MOST_VALUES:
            raise _TooManyError
        self.loader.flatten_mapping(node)  # `<<: *anchor`
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, path)
            if key is not None:
                label = self.document.label
                here = (*path, key)
                self.document.origins[here] = Origin(_at(key_node.start_mark, label), _at(value_node.start_mark, label))
                data[key] = self.value(value_node, here)
        return data

    def key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """Return the text of a key, or None after recording a fault."""
        if isinstance(node, yaml.ScalarNode) and node.tag == _PREFIX + "str":
            return str(node.value)
        what = f"the key {node.value!r}" if isinstance(node, yaml.ScalarNode) else "a key"
        inside = f" in {dotted(path)}" if path else ""
        self.fault(node, path, f"{what}{inside} is not text", "put it in quotes if it is meant so")
        return None

    def find_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Record keys that occur twice."""
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                here = (*path, key_node.value)
                message = f"duplicate key {dotted(here)!r} (first on line {seen[key_node.value]})"
                self.fault(key_node, here, message, "remove one of them")
            seen.setdefault(key_node.value, key_node.start_mark.line + 1)


def _merged_size(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the entries that a mapping has once `<<: *anchor` is expanded, without expanding it: each may double the
    size."""
    if id(node) not in known:
        known[id(node)] = 0  # ends recursion: a node that leads back to it adds nothing
        size = len(node.value)
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == _PREFIX + "merge":
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                size += sum(_merged_size(each, known) for each in merged if isinstance(each, yaml.MappingNode))
        known[id(node)] = size
    return known[id(node)]


EXPERIMENTS = "experiment"
"""Folder of the shipped configs that are whole jobs."""
DEFAULT_EXPERIMENT = "metaworld_reach"
"""Experiment of `embodyrl run` without a config."""


def builtin_folder() -> Path:
    """Return the folder of built-in config groups: in the installed package, else at the top of the repository."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def list_experiments() -> list[str]:
    """Return the names of the built-in experiments, as in `experiment/metaworld_reach`."""
    return sorted(f"{EXPERIMENTS}/{path.stem}" for path in (builtin_folder() / EXPERIMENTS).glob("*.yaml"))


def list_options(group: str, folders: tuple[Path, ...] | None = None) -> list[str]:
    """Return the options of a config group by the names of a defaults list: `metaworld/reach` of `env`."""
    found: set[str] = set()
    if ".." in Path(group).parts:  # groups are inside the folders, and a walk through a whole disk takes minutes
        return []
    for folder in folders or (builtin_folder(),):
        base = folder / group
        found.update(path.relative_to(base).with_suffix("").as_posix() for path in base.rglob("*.yaml"))
    return sorted(found)


def group_settings(group: str, option: str) -> dict[str, Any]:
    """Return the settings in the file of a shipped option."""
    data: dict[str, Any] = yaml.load((builtin_folder() / group / f"{option}.yaml").read_text(), PlainLoader)
    return data


def usual_option(group: str) -> str | None:
    """Return the option of a config group that the default experiment has, or None."""
    text = (builtin_folder() / EXPERIMENTS / f"{DEFAULT_EXPERIMENT}.yaml").read_text()
    entries = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
    return next((entry[group] for entry in entries if group in entry), None)


def list_groups(folders: tuple[Path, ...]) -> list[str]:
    """Return the config groups of all folders. Nested ones are only searched among the built-in groups, since a user's
    folder may hold anything."""
    found = {path.parent.name for folder in folders for path in folder.glob("*/*.yaml")}
    nested = {path.parent.parent.name for path in builtin_folder().glob("*/*/*.yaml")}
    return sorted((found | nested) - {EXPERIMENTS})


def find_config(folders: tuple[Path, ...], name: str) -> Path | None:
    """Return the file of `group/option` in the first folder that has it, or None."""
    paths = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)  # is_file() raises for names of 300 letters


@dataclass(frozen=True)
class Source:
    """A config file, and the folders it may refer to."""

    path: Path
    """The file."""
    label: str
    """Its name in the run's header."""
    plugin_dir: Path
    """Folder that is searched for `plugins:`, besides the installed packages."""
    is_builtin: bool = False
    """Whether the file came with embodyrl."""
    draft_of: Path | None = None
    """The file that this one is a changed copy of, in another folder."""

    @property
    def file(self) -> str:
        """Name of the file in messages."""
        return readable_path(self.path) if self.is_builtin else self.label

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that are searched for config groups; the first match wins."""
        own = self.path if self.draft_of is None else self.draft_of
        return (*{self.path.parent: None, own.parent: None}, builtin_folder())

    def has_group(self, name: str) -> bool:
        """Return whether `name` is a config group, as `env` and `env/gym` are."""
        return any(os.path.isdir(folder / name) for folder in self.folders) and bool(list_options(name, self.folders))


def find_source(source: str | Path | None, plugin_dir: Path | None = None) -> Source | ConfigIssue:
    """Find the config of this name: a file, else a built-in experiment. None is the default experiment."""
    if source is not None and os.path.isfile(source):
        path = Path(source).absolute()
        return Source(path, str(source), plugin_dir or path.parent)
    name = DEFAULT_EXPERIMENT if source is None else str(source).removeprefix(f"{EXPERIMENTS}/").removesuffix(".yaml")
    path = builtin_folder() / EXPERIMENTS / f"{name}.yaml"
    if os.path.isfile(path) and "/" not in name:
        return Source(path, f"{EXPERIMENTS}/{name}", plugin_dir or Path.cwd(), is_builtin=True)
    assert source is not None, f"the built-in configs are missing: {path}"
    return _missing(Path(source))


def _missing(path: Path) -> ConfigIssue:
    """Return the fault for a file that does not exist."""
    where = Location(str(path))
    if os.path.islink(path):
        target = os.readlink(path)
        what = f"is a symbolic link to {target!r}, which " + (
            "leads back to itself" if _is_loop(path) else "is missing"
        )
        return ConfigIssue((), what, "name the file itself, or make the link anew", where)
    experiments = list_experiments()
    if os.path.isdir(path):
        inside = sorted(child.name for child in path.glob("*.yaml"))
        remedy = f"name the file in it, as in {path / inside[0]}" if inside else "name a YAML file"
        return ConfigIssue((), "is a folder, not a config file", remedy, where)
    beside = {child.stem: child.name for child in sorted(path.parent.glob("*.y*ml")) if child.is_file()}
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")  # that all end alike makes nothing similar
    near = beside.get(near_match(stem, beside) or "")
    if near:
        return ConfigIssue((), "no such file", f"did you mean {str(path.with_name(near))!r}?", where)
    name = str(path).removesuffix(".yaml")
    near = near_option(name, experiments)
    hint = f"did you mean {near!r}?" if near else "`embodyrl list configs` shows the built-in experiments"
    return ConfigIssue((), "no such file", hint, where)


def _is_loop(path: Path) -> bool:
    """Return whether a symbolic link cannot be followed to its end."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def near_option(name: str, options: list[str]) -> str | None:
    """Return the nearest of the options `group/option`, compared as a whole, else by the last part; None if none is
    near."""
    by_last = {option.rpartition("/")[2]: option for option in options}
    return near_match(name, options) or by_last.get(near_match(name.rpartition("/")[2], by_last) or "")


def readable_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
