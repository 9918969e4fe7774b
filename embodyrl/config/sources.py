"""Where config files are: the user's own, the built-in groups, the built-in experiments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from embodyrl.config.issues import ConfigIssue, Location
from embodyrl.errors import near_match

DEFAULT_EXPERIMENT = "metaworld_reach"
"""What `embodyrl run` does without a file."""


def builtin_folder() -> Path:
    """The folder of built-in config groups: inside the installed package, else at the top of the repository."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def list_experiments() -> list[str]:
    """Names of the built-in experiments, as `embodyrl run` takes them: `experiment/metaworld_reach`."""
    return sorted(f"experiment/{path.stem}" for path in (builtin_folder() / "experiment").glob("*.yaml"))


def list_options(group: str, folders: tuple[Path, ...] | None = None) -> list[str]:
    """The choices of a config group, as a defaults list names them: `metaworld/reach` of `env`."""
    found: set[str] = set()
    if ".." in Path(group).parts:  # nobody's groups are outside, and a walk through a whole disk takes minutes
        return []
    for folder in folders or (builtin_folder(),):
        base = folder / group
        found.update(path.relative_to(base).with_suffix("").as_posix() for path in base.rglob("*.yaml"))
    return sorted(found)


def list_groups(folders: tuple[Path, ...]) -> list[str]:
    """The config groups of each folder (not nested ones: a user's folder may hold anything)."""
    found = {path.parent.name for folder in folders for path in folder.glob("*/*.yaml")}
    nested = {path.parent.parent.name for path in builtin_folder().glob("*/*/*.yaml")}
    return sorted((found | nested) - {"experiment"})


def find_config(folders: tuple[Path, ...], name: str) -> Path | None:
    """The file of `group/option`, in the first folder that has it."""
    paths = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)  # is_file() raises for names of 300 letters


@dataclass(frozen=True)
class Source:
    """A config file, and what it may refer to."""

    path: Path
    """The file."""
    label: str
    """What the header calls it."""
    plugin_dir: Path
    """Folder in which `plugins:` are looked up besides the installed packages."""
    is_builtin: bool = False
    """Whether the file came with embodyrl."""

    @property
    def file(self) -> str:
        """How messages call the file."""
        return readable_path(self.path) if self.is_builtin else self.label

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where config groups are looked up, first match wins."""
        return (self.path.parent, builtin_folder())

    def has_group(self, name: str) -> bool:
        """Whether `name` is a config group, as `env` and `env/gym` are."""
        return any(os.path.isdir(folder / name) for folder in self.folders) and bool(list_options(name, self.folders))


def find_source(source: str | Path | None, plugin_dir: Path | None = None) -> Source | ConfigIssue:
    """The config that `source` means: a file, else a built-in experiment; None is the default experiment."""
    if source is not None and os.path.isfile(source):
        path = Path(source).absolute()
        return Source(path, str(source), plugin_dir or path.parent)
    name = DEFAULT_EXPERIMENT if source is None else str(source).removeprefix("experiment/").removesuffix(".yaml")
    path = builtin_folder() / "experiment" / f"{name}.yaml"
    if os.path.isfile(path) and "/" not in name:
        return Source(path, f"experiment/{name}", plugin_dir or Path.cwd(), is_builtin=True)
    assert source is not None, f"the built-in configs are missing: {path}"
    return _missing(Path(source))


def _missing(path: Path) -> ConfigIssue:
    """The fault for a file that is not there."""
    where = Location(str(path))
    experiments = list_experiments()
    if os.path.isdir(path):
        inside = sorted(child.name for child in path.glob("*.yaml"))
        remedy = f"name the file in it, as in {path / inside[0]}" if inside else "name a YAML file"
        return ConfigIssue((), "is a folder, not a config file", remedy, where)
    near = near_match(path.name, sorted(child.name for child in path.parent.glob("*.y*ml")))
    if near:
        return ConfigIssue((), "no such file", f"did you mean {str(path.with_name(near))!r}?", where)
    name = str(path).removesuffix(".yaml")
    near = near_option(name, experiments)
    hint = f"did you mean {near!r}?" if near else f"built-in experiments: {', '.join(experiments)}"
    return ConfigIssue((), "no such file", hint, where)


def near_option(name: str, options: list[str]) -> str | None:
    """Return the option `group/option` that was probably meant: near to it as a whole, else in its last part."""
    by_last = {option.rpartition("/")[2]: option for option in options}
    return near_match(name, options) or by_last.get(near_match(name.rpartition("/")[2], by_last) or "")


def readable_path(path: Path) -> str:
    """The path relative to the working directory where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
