"""Chooses another option of a config group in a file, and adjusts dependent settings."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.compose import components, nearest_option
from embodyrl.config.edit import EditError, choose, leave_out, set_value
from embodyrl.config.fields import settings_of
from embodyrl.config.files import (
    PlainLoader,
    Source,
    find_config,
    find_source,
    list_options,
    read_document,
)
from embodyrl.config.issues import LEAVE_OUT, ConfigError, ConfigIssue, KeyPath, key_path
from embodyrl.config.load import load_config
from embodyrl.config.plugins import read_saved
from embodyrl.config.rules import ConfigUse, Rule
from embodyrl.config.schema import LEFT_OPEN, EnvConfig, RewardConfig
from embodyrl.errors import RemediedError
from embodyrl.files import write_whole
from embodyrl.hub import SCHEME
from embodyrl.registry import SupportedModel

CRLF = "\r\n"
ROUNDS = 20
"""Most rounds of changes that make others necessary."""
OF_TASKS = ("tasks", "task_descriptions", "cameras", "image_size")
"""Settings of `env` that name what only one simulator has, besides those that hold for some tasks only."""
OF_SOME_TASKS = ("success_return", "kwargs", "environment_state")
"""Options of simulators that hold for some tasks only."""
OF_WEIGHTS = ("checkpoint", "adapter", "tokenizer", "statistics", "unnorm_key", "vlm", "pretrained")
"""Options of models that name files of one model."""


REWARD: KeyPath = ("algorithm", "reward")


class SwapError(RemediedError):
    """Raised when a file cannot be changed."""

    exit_code = 2


@dataclass
class Swapped:
    """A changed config file, not yet written."""

    path: Path
    before: str
    after: str
    faults: tuple[ConfigIssue, ...] = ()
    """What is left for the user to decide."""
    left_out: list[KeyPath] = field(default_factory=list)
    """Settings of the former choice that the file has no longer."""

    def write(self) -> None:
        """Write the file, with the line ends and the rights that it has.

        Raises:
            SwapError: it was changed meanwhile, or cannot be written.
        """
        place = self.path.resolve()  # not in place of a link
        try:
            with place.open(encoding="utf-8", newline="") as file:
                now = file.read()
            if now.replace(CRLF, "\n") != self.before:
                raise SwapError(f"{self.path} was changed meanwhile", "check it, and swap again")
            mode = place.stat().st_mode
            write_whole(place, self.after.replace("\n", CRLF) if CRLF in now else self.after)
            place.chmod(mode)
        except OSError as error:
            raise SwapError(f"{self.path} cannot be written: {error.strerror}", "check its permissions") from None

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        old, new = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        lines = difflib.unified_diff(old, new, str(self.path), f"{self.path} (swapped)", n=2)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def swap(
    source: str, choices: Mapping[str, str], *, use: ConfigUse = ConfigUse.run, also: Sequence[Rule] = ()
) -> Swapped:
    """Change a file so that it chooses other options of config groups, and follow up on what these need.

    Args:
        source: a YAML file of the user's own.
        choices: option by group, as `{"algorithm": "grpo"}`.
        use: purpose for which the result is checked; nothing is downloaded.
        also: rules besides those of `use`.

    Raises:
        SwapError: it is no such file, there is no such option, or the file's layout does not allow the change.
        ConfigError: the file cannot be read.
    """
    found = find_source(source)
    if isinstance(found, ConfigIssue):
        raise ConfigError([found])
    _refuse(found, choices)
    document = read_document(found.path, found.label)
    if not document.readable:
        raise ConfigError(document.faults)
    before = found.path.read_text(encoding="utf-8")
    swapped = Swapped(Path(source), before, before)
    with tempfile.TemporaryDirectory() as folder:
        draft = _Draft(found, swapped, Path(folder) / found.path.name, tuple(choices), use, also)
        swapped.faults = draft.faults()
        if any(not fault.path and fault.location is not None for fault in swapped.faults):
            raise ConfigError(swapped.faults)  # what is wrong is the file itself
        try:
            draft.begin(choices)
        except EditError as error:
            entries = ", ".join(f"`- {group}: {option}`" for group, option in choices.items())
            raise SwapError(
                f"{source} is written in a way that cannot be changed by itself: {error}", entries
            ) from None
        draft.follow_up()
    return swapped


def use_of_run(text: str) -> ConfigUse:
    """Return the use by which a file is checked as a run checks it, where that downloads nothing."""
    try:
        settings = yaml.load(text, PlainLoader)
    except yaml.YAMLError:
        settings = None  # which loading it reports
    return ConfigUse.check if SCHEME in str(settings) else ConfigUse.run


def _refuse(found: Source, choices: Mapping[str, str]) -> None:
    """Raise SwapError for files that are not the user's own, and for unknown options."""
    if found.is_builtin or read_saved(found.path) is not None:
        what = "comes with embodyrl" if found.is_builtin else "is the record of a run"
        name = found.label if found.is_builtin else str(found.path)
        raise SwapError(
            f"{name} {what}", f"make a file of your own first: embodyrl run {name} --print-config > my.yaml"
        )
    for group, option in choices.items():
        options = list_options(group, found.folders)
        if not options or "/" in group:
            raise SwapError(f"there is no config group {group!r}", "swap env=..., model=... or algorithm=...")
        if find_config(found.folders, f"{group}/{option}") is None:
            raise SwapError(f"config group {group!r} has no option {option!r}", nearest_option(option, options))


@dataclass
class _Draft:
    """A file that is being changed; each change is checked as a whole config."""

    source: Source
    swapped: Swapped
    path: Path
    """Copy with the changes."""
    groups: tuple[str, ...]
    """Sections with another choice."""
    use: ConfigUse
    also: Sequence[Rule]
    tried: set[tuple[KeyPath, str]] = field(default_factory=set)
    open: KeyPath = ()
    """Setting that was left open for the user."""

    def faults(self, also: Sequence[Rule] = ()) -> tuple[ConfigIssue, ...]:
        """Return the faults of the file as changed so far, by further rules, too."""
        self.path.write_text(self.swapped.after, encoding="utf-8")
        source = Source(self.path, self.source.label, self.source.plugin_dir, draft_of=self.source.path)
        use = use_of_run(self.swapped.after) if self.use is ConfigUse.run else self.use
        try:
            load_config(source, use=use, also=also)
        except ConfigError as error:
            return error.faults
        return ()

    def written(self) -> dict[str, Any]:
        """Return the settings of the file."""
        data: dict[str, Any] = yaml.load(self.swapped.after, PlainLoader)
        return data

    def has(self, path: KeyPath) -> bool:
        """Return whether the file has a setting."""
        data: Any = self.written()
        for key in path:
            if not isinstance(data, dict) or key not in data:
                return False
            data = data[key]
        return bool(path)

    def begin(self, choices: Mapping[str, str]) -> None:
        """Choose, and leave out what belongs to the former choice as a whole."""
        for group, option in choices.items():
            kept = self.reward_to_keep(option) if group == "algorithm" else None
            self.swapped.after = choose(self.swapped.after, group, option)
            section = self.written().get(group)
            for path in _of_former(group, section if isinstance(section, dict) else {}):
                if path != REWARD or kept is None:
                    self.drop(path)
            if kept is not None:
                self.swapped.after = set_value(self.swapped.after, REWARD, kept)
            if group == "model" and self.is_published(option):
                # Small random weights, its default, are not what somebody means who names it.
                self.open = ("model", "checkpoint")
                self.swapped.after = set_value(self.swapped.after, self.open, LEFT_OPEN)

    def reward_to_keep(self, algorithm: str) -> Any:
        """Return the reward that is learned from, where another algorithm would silently learn from another one; None
        where it has its own, or the reward is that of the former algorithm."""
        written = self.written()
        entries = [each for each in written.get("defaults", []) if isinstance(each, dict)]
        former = next((str(each["algorithm"]) for each in entries if "algorithm" in each), "")
        section = written.get("algorithm")
        chosen = self.options("algorithm", former) | (section if isinstance(section, dict) else {})
        usual = RewardConfig().name
        reward = chosen.get("reward", usual)
        name = reward.get("name") if isinstance(reward, dict) else reward
        is_its_own = "reward" in self.options("algorithm", algorithm) or name in (former, usual)
        return None if is_its_own else reward

    def options(self, group: str, option: str) -> dict[str, Any]:
        """Return the settings of an option of a group; empty if there is none."""
        found = find_config(self.source.folders, f"{group}/{option}")
        return read_document(found, option).data if found else {}

    def is_published(self, model: str) -> bool:
        """Return whether an option of the group `model` is one whose weights are published."""
        name = str(self.options("model", model).get("name"))
        return name in SupportedModel and SupportedModel.entry(name).published is not None

    def drop(self, path: KeyPath) -> None:
        """Leave a setting out."""
        self.swapped.after = leave_out(self.swapped.after, path)
        self.swapped.left_out.append(path)

    def follow_up(self) -> None:
        """Change what follows until nothing else does."""
        for _ in range(ROUNDS):
            self.swapped.faults = self.faults()
            if not any([self.mend(fault) for fault in self.swapped.faults]):
                break
        if self.also:  # what they say of this machine is for the user to decide
            self.swapped.faults = self.faults(self.also)

    def mend(self, fault: ConfigIssue) -> bool:
        """Make the change that a fault asks for; returns whether there was one to make."""
        fix = {key_path(name): value for name, value in fault.fix.items()}
        is_former = fault.path[:1] and fault.path[0] in self.groups and fault.path != self.open
        if not fix and is_former and self.has(fault.path):
            fix = {fault.path: LEAVE_OUT}  # of the former choice
        return any([self.change(path, value) for path, value in fix.items()])

    def change(self, path: KeyPath, value: Any) -> bool:
        """Give a setting a value, or leave it out, unless that was tried."""
        if (path, repr(value)) in self.tried:
            return False
        self.tried.add((path, repr(value)))
        try:
            if value is LEAVE_OUT:
                if not self.has(path):
                    return False
                self.drop(path)
            else:
                self.swapped.after = set_value(self.swapped.after, path, value)
        except EditError:
            return False  # the fault stays, with its remedy
        return True


def _of_former(group: str, section: Mapping[str, Any]) -> list[KeyPath]:
    """Return the settings of a section that belong to the former choice, whatever their values."""
    is_whole = "name" in section  # else it changes some values of a group file
    if group == "env":
        shared = settings_of(EnvConfig)
        bound = {name for name, each in shared.items() if each.field.metadata.get("of_tasks")}
        gone = {*OF_TASKS, *bound, *OF_SOME_TASKS, *(("name", *(set(section) - set(shared))) if is_whole else ())}
        return [("env", name) for name in section if name in gone]
    if is_whole:
        return [(group,)]
    if group == "model":
        return [("model", name) for name in section if name in OF_WEIGHTS]
    named = (path for path in components() if path[0] == group and len(path) == 2 and path[1] in section)
    return [path for path in named if not isinstance(section[str(path[1])], dict) or "name" in section[str(path[1])]]
