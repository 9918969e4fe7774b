"""Writes the config that an experiment begins with, for any simulator, model and algorithm that fit each other."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from embodyrl.config.fields import settings_of
from embodyrl.config.files import PlainLoader, builtin_folder, group_settings, list_experiments
from embodyrl.config.infos import simulator_info
from embodyrl.config.issues import ConfigError, ConfigIssue, MissingDependency
from embodyrl.config.load import load_config
from embodyrl.config.rules import ConfigUse, fact
from embodyrl.config.schema import AlgorithmConfig, RewardConfig, RewardedConfig, RolloutConfig
from embodyrl.config.swap import SwapError, swap
from embodyrl.registry import ADVANTAGES, ALGORITHMS, LOSSES, SIMULATORS, Registry, SupportedModel

GROUPS = ("env", "model", "algorithm")
SECTIONS = ("run", "env", "eval", "model", "rollout", "data", "algorithm", "engine")
"""Sections of a file, in their order."""
OF_METHOD = ("data", "algorithm", "engine")
"""Sections in which models and simulators only replace values of settings that are there."""
NO_START = ("runs/", "eval_every: 0\n")
"""Texts of shipped experiments that are no start by themselves: they need what another run left, or never evaluate."""
CRITIC_TARGETS = 10.0
"""Size of discounted returns that `algorithm.reward_scale` aims at."""
LONG_EPISODE, FEW_EPISODES = 1000, 20
"""Episodes of so many steps make evaluations long, and are played this often in each."""
MANY = 100
"""Iterations from which a run is evaluated 20 times and saved 10 times; shorter ones 5 times."""
LIBRARY = Path(__file__).parent / "starts"
START_FILE = "start.yaml"
"""In the folder of a method or of a family of methods."""


class StartError(ValueError):
    """Raised for a model and a simulator that do not fit each other."""


@dataclass(frozen=True)
class Start:
    """A config that is not yet written."""

    text: str
    experiment: str | None
    """The shipped experiment with the same choices, whose text it is; None: it was put together."""
    faults: Sequence[ConfigIssue]
    """What does not fit, found without the files and packages of a run."""


def start(choices: Mapping[str, str]) -> Start:
    """Return a config with these options of `GROUPS`: that of the shipped experiment which has them, if that is a start
    by itself; else what the algorithm's family, the model and the simulator begin with.

    Raises:
        StartError: the model cannot see what the simulator shows.
    """
    return _start(*(choices[group] for group in GROUPS))


@cache
def _start(env: str, model: str, algorithm: str) -> Start:
    choices = dict(zip(GROUPS, (env, model, algorithm), strict=True))
    name = next((each.name for each in experiments() if each.choices == choices and each.is_start), None)
    text = _together(choices) if name is None else experiment_text(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "my.yaml"
        file.write_text(text)
        try:
            fitted = swap(str(file), {}, use=ConfigUse.elsewhere)
        except SwapError as error:
            return Start(text, name, [ConfigIssue((), str(error))])
        file.write_text(fitted.after)
        return Start(fitted.after, name, fitted.faults or _faults_of_actions(file, env))


def _faults_of_actions(file: Path, env: str) -> Sequence[ConfigIssue]:
    """Return what does not suit the simulator's actions, which some simulators tell only where they are installed."""
    if not simulator_info(group_settings("env", env)["name"], installed=True).says("discrete"):
        return ()
    try:
        load_config(file, use=ConfigUse.check)
    except ConfigError as error:
        return [each for each in error.faults if not isinstance(each, MissingDependency)]
    return ()


# ---- shipped experiments


@dataclass(frozen=True)
class Experiment:
    """A shipped experiment, what it chooses, and whether it is a start by itself."""

    name: str
    choices: Mapping[str, str]
    is_start: bool


@cache
def experiments() -> list[Experiment]:
    """Read the shipped experiments."""
    found = []
    for each in list_experiments():
        name = each.partition("/")[2]
        text = experiment_text(name)
        entries = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
        choices = {group: option for entry in entries for group, option in entry.items() if group in GROUPS}
        if len(choices) == len(GROUPS):
            found.append(Experiment(name, choices, not any(word in text for word in NO_START)))
    return found


def experiment_text(name: str) -> str:
    """Return the text of a shipped experiment."""
    return (builtin_folder() / "experiment" / f"{name}.yaml").read_text()


# ---- a start that is put together


Tree: TypeAlias = "dict[str, Line]"


@dataclass
class Line:
    """A setting as it is written: what follows its name, with a comment, and the settings below it."""

    rest: str = ""
    below: Tree = field(default_factory=dict)

    @property
    def value(self) -> Any:
        """The setting's value."""
        return yaml.load(self.rest, PlainLoader)


def family_of(algorithm: str) -> str:
    """Return the family of an option of the group `algorithm` (`AlgorithmConfig.family`), or `whole` if its parts need
    whole episodes."""
    settings = group_settings("algorithm", algorithm)
    entry = ALGORITHMS.entry(settings["name"])
    family: str = (entry.load_options() or AlgorithmConfig)(name=entry.name).family
    parts: list[tuple[Registry[Any], Any]] = [(ADVANTAGES, settings.get("advantage")), (LOSSES, settings.get("loss"))]
    names = [(registry, part["name"] if isinstance(part, dict) else part) for registry, part in parts if part]
    return "whole" if any(fact(registry, name, "whole") for registry, name in names) else family


def kind_of(model: str) -> str:
    """Return the kind of an option of the group `model`: `states`, `images` or `pretrained`."""
    entry = SupportedModel.entry(group_settings("model", model)["name"])
    if entry.published is not None:
        return "pretrained"
    return "images" if entry.images else "states"


def _together(choices: Mapping[str, str]) -> str:
    """Return the text of a config for any choices."""
    env = group_settings("env", choices["env"])
    family, kind = family_of(choices["algorithm"]), kind_of(choices["model"])
    tree: Tree = {}
    for name in (f"{family}.{kind}", choices["algorithm"], f"{choices['algorithm']}.{kind}"):
        _merge(tree, library("methods").get(name))
    of_model = Line()
    for name in (choices["model"], f"{choices['model']}.{family}"):
        _merge(of_model.below, library("models").get(name))
    _merge(tree, of_model, only_there=OF_METHOD)
    _leave_out_foreign(tree, choices["algorithm"])
    _show_it_all(tree, env, choices)
    _scale_rewards(tree, env, family, choices["algorithm"])
    _count(tree, env)
    listed = "".join(f"  - {group}: {option}\n" for group, option in choices.items())
    ordered = {section: tree[section] for section in SECTIONS if section in tree}
    return f"defaults:\n{listed}  - _self_\nseed: 1\n{_written(ordered)}"


def _leave_out_foreign(tree: Tree, algorithm: str) -> None:
    """Leave out settings of a family that this method does not have."""
    entry = ALGORITHMS.entry(group_settings("algorithm", algorithm)["name"])
    own = settings_of(entry.load_options() or AlgorithmConfig)
    section = tree.get("algorithm", Line())
    section.below = {name: line for name, line in section.below.items() if name in own}


@cache
def library(name: str) -> Mapping[str, Line]:
    """Read a file of `starts/`, or of the methods those in their folders and in their families': settings by what they
    are for."""
    if name != "methods":
        return _read(LIBRARY / f"{name}.yaml")
    found: Tree = {}
    for entry in ALGORITHMS.entries():
        for kind in (entry.load_options() or AlgorithmConfig).__mro__:
            file = Path(str(sys.modules[kind.__module__].__dict__.get("__file__"))).with_name(START_FILE)
            if file.is_file():
                found |= _read(file)
    return found


@cache
def _read(file: Path) -> Tree:
    root: Tree = {}
    levels: list[Tree] = [root]
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        key, _, rest = line.strip().partition(":")
        levels[depth + 1 :] = [levels[depth].setdefault(key, Line(rest.strip())).below]
    return root


def _merge(tree: Tree, line: Line | None, only_there: Sequence[str] = ()) -> None:
    """Add the settings below a line; in some sections only those that are there already."""
    for key, each in line.below.items() if line else ():
        if key in tree or key not in only_there:
            _put(tree, key, each, adds=key not in only_there)


def _put(tree: Tree, key: str, line: Line, *, adds: bool) -> None:
    mine = tree.setdefault(key, Line())
    mine.rest = line.rest or mine.rest
    for name, each in line.below.items():
        if adds or name in mine.below:
            _put(mine.below, name, each, adds=adds)


def _set(tree: Tree, path: str, rest: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, Line()).below
    tree[key] = Line(rest)


def _get(tree: Tree, path: str, otherwise: Any) -> Any:
    """Return a value that the file has, or what holds without it."""
    line = Line(below=tree)
    for key in path.split("."):
        if key not in line.below:
            return otherwise
        line = line.below[key]
    return line.value


def _written(tree: Tree, indent: str = "") -> str:
    lines = []
    for key, each in tree.items():
        below = _written(each.below, indent + "  ")
        if each.rest or below:
            lines.append(f"{indent}{key}: {each.rest}".rstrip() + f"\n{below}")
    return "".join(lines)


def _show_it_all(tree: Tree, env: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Give a model that reads no images the states in which everything is."""
    if kind_of(choices["model"]) != "states" or not env.get("cameras"):
        return
    options = SIMULATORS.entry(env["name"]).load_options()
    if options is None or "proprio" not in settings_of(options):
        raise StartError(
            f"{choices['model']} reads no images, and {choices['env']} shows its objects only there: choose a model "
            "that reads images, or an environment of states"
        )
    _set(tree, "env.cameras", "[]  # the model reads numbers")
    _set(tree, "env.proprio", "full  # with the poses of all objects")


def _scale_rewards(tree: Tree, env: Mapping[str, Any], family: str, algorithm: str) -> None:
    """Choose `algorithm.reward_scale` for the simulator's own rewards; leave it out where others are learned from."""
    usual = RewardConfig().name
    reward = _get(tree, "algorithm.reward", group_settings("algorithm", algorithm).get("reward", usual))
    if "algorithm" not in tree or "reward_scale" not in tree["algorithm"].below:
        return
    if reward != usual:
        del tree["algorithm"].below["reward_scale"]
        return
    for name in (env["name"], f"{env['name']}.{family}"):
        _merge(tree, library("simulators").get(name), only_there=OF_METHOD)
    limit = env["max_episode_steps"]
    if family == "on_policy" and env.get("success_return") and limit:
        steps = min(limit, 1.0 / (1.0 - _get(tree, "algorithm.gamma", RewardedConfig.gamma)))
        size = abs(env["success_return"]) / limit * steps
        _set(tree, "algorithm.reward_scale", str(float(f"{min(1.0, CRITIC_TARGETS / size):.0e}")))  # its first digit
    scale = _get(tree, "algorithm.reward_scale", RewardedConfig.reward_scale)
    if scale == RewardedConfig.reward_scale:
        del tree["algorithm"].below["reward_scale"]
    else:
        _set(tree, "algorithm.reward_scale", f"{scale}  # so that discounted returns are of order 1 to 10")


def _count(tree: Tree, env: Mapping[str, Any]) -> None:
    """Choose how many chunks, iterations, evaluations and checkpoints there are."""
    limit, envs = env["max_episode_steps"], max(env["num_envs"], _get(tree, "env.num_envs", 1))
    if envs > env["num_envs"]:
        _set(tree, "env.num_envs", str(envs))
    elif "env" in tree:
        tree["env"].below.pop("num_envs", None)
    chunk = min(_get(tree, "rollout.chunk_size", RolloutConfig.chunk_size), limit)
    if chunk != RolloutConfig.chunk_size:
        _set(tree, "rollout.chunk_size", str(chunk))
    if _get(tree, "rollout.episodes", None) == "whole":
        chunks = math.ceil(limit / chunk)
        _set(tree, "rollout.num_chunks", f"{chunks}  # {limit} steps, the longest episode")
    if "steps" in tree:
        steps = envs * chunk * _get(tree, "rollout.num_chunks", RolloutConfig.num_chunks)
        wanted = _get(tree, "steps", 0)
        iterations = max(10, round(wanted / steps))
        comment = f"  # of {steps:,} env steps"
    else:
        iterations, comment = _get(tree, "iterations", 0), ""
    _set(tree, "run.name", "my")
    _set(tree, "run.iterations", f"{iterations}{comment}")
    _set(tree, "run.eval_every", str(max(1, iterations // (20 if iterations >= MANY else 5))))
    _set(tree, "run.save_every", str(max(1, iterations // (10 if iterations >= MANY else 5))))
    if limit >= LONG_EPISODE:
        _set(tree, "eval.episodes", str(FEW_EPISODES))


def whats_wrong(choices: Mapping[str, str]) -> str | None:
    """Return why choices do not fit each other, or None."""
    try:
        faults = start(choices).faults
    except StartError as error:
        return str(error)
    return faults[0].message if faults else None
