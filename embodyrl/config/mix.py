"""Several simulators in a run: the section `env` with `mix`, how its entries become whole sections, and its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodyrl.config.build import plain_value
from embodyrl.config.compose import Settings, nearest_option
from embodyrl.config.fields import defaults_below
from embodyrl.config.files import Origin, find_config, list_options, read_document, readable_path
from embodyrl.config.infos import SimulatorInfo, repeated_for, simulator_info
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath, dotted
from embodyrl.config.rules import RULES, SIMULATOR_RULES, rule
from embodyrl.config.schema import Config, EnvConfig, EnvSource, Schedule, setting
from embodyrl.config.values import show

MIX = "mix"
"""`env.name` of several simulators, and the setting that lists them."""
PROCESSES = (
    *("num_envs", "workers", "numa", "start_method", "startup_timeout_s", "step_timeout_s"),
    *("on_worker_death", "max_restarts", "offload"),
)
"""Settings of `env` that are those of the run, whatever the file of a source says."""
SHARED = ("cameras", "image_size", "frames", "max_episode_steps", "start_states", "perturb")
"""Settings of `env` that hold for every source if they are written there."""
FREQUENCY = "control steps per second"
LAYOUT = ("cameras", "image_size", "frames")
"""Settings that all sources must have in common."""
AS_IN = "[{env: libero/spatial, share: 0.7}, {env: libero_pro/spatial_swap, share: 0.3}]"


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """A simulator of a mix."""

    share: float = setting(above=0.0)
    """Weight of the simulator; weights are divided by their sum."""
    env: str | None = setting(None)
    """Its settings, by a name of a defaults list, as in `libero/spatial`."""
    name: str | None = setting(None)
    """Its name in metrics and in front of its tasks. null: `env`."""
    simulator: EnvConfig = setting()
    """Settings that differ from those of `env`, as in `{tasks: [faucet-open-v3]}`."""

    @property
    def title(self) -> str:
        """Its name in metrics and in front of its tasks."""
        return self.name or self.env or self.simulator.name


@dataclass(frozen=True, kw_only=True)
class MixConfig(EnvConfig):
    """Several simulators with the same observations and actions. Every episode is played in one of them."""

    mix: list[MixEntry] = setting()
    """The simulators, as in `[{env: libero/spatial, share: 0.7}, {env: libero_pro/spatial_swap, share: 0.3}]`."""

    @property
    def sources(self) -> tuple[EnvSource, ...]:
        """The simulators, with the number of envs and the processes of the run."""
        total = sum(each.share for each in self.mix)
        common: dict[str, Any] = {name: getattr(self, name) for name in PROCESSES}
        return tuple(
            EnvSource(name=each.title, share=each.share / total, env=replace(each.simulator, **common))
            for each in self.mix
        )


# ---- from the files to whole sections


def expand_mix(settings: Settings, folders: tuple[Path, ...]) -> list[ConfigIssue]:
    """Complete the entries of `env.mix` with the files that they name and with what `env` says for all of them, and
    `env` with what follows from its entries; returns what is wrong with that. What an entry itself says wins, and over
    it what the command line says for all of them. An entry of a saved config is complete and reads no file."""
    env, path = settings.get(("env",)), ("env", MIX)
    if not isinstance(env, dict) or MIX not in env:
        return []
    place = settings.origins[path]
    if (fault := _not_listed(env[MIX], path, place)) is not None:
        settings.take(("env",))
        return [fault]
    if env.setdefault("name", MIX) != MIX:
        settings.take(path)  # the rest is checked as a config with one simulator
        message = f"env.mix lists simulators, and env.name = {show(env['name'])} is another one"
        return [ConfigIssue((path,), message, "leave out `env: ...` in the defaults list, or env.mix", place.key)]
    settings.origins.setdefault(("env", "name"), place)
    written = [name for name in SHARED if name in env]
    issues: list[ConfigIssue] = []
    for index, entry in enumerate(env[MIX]):
        if isinstance(entry, dict) and isinstance(entry.get("simulator", {}), dict):
            issues += _complete((*path, index), entry, settings, written, folders)
    for name, value in _derived(env).items():
        if name not in env:
            settings.put(("env", name), value, place)
    return issues


def _not_listed(mix: Any, path: KeyPath, place: Origin) -> ConfigIssue | None:
    """Return what is wrong with something that is no list of sections."""
    if mix is None or mix == []:
        return ConfigIssue((path,), "env.mix is empty", f"name simulators, as in {AS_IN}", place.value)
    if not isinstance(mix, list):
        message = f"env.mix = {show(mix)} is no list of simulators"
        return ConfigIssue((path,), message, f"write all of them, as in {AS_IN}", place.value)
    for index, entry in enumerate(mix):
        if not isinstance(entry, dict):
            hint = f"write {{env: {entry}, share: 1}}" if isinstance(entry, str) else f"write sections, as in {AS_IN}"
            where = (*path, index)
            return ConfigIssue((where,), f"{dotted(where)} = {show(entry)} is no section", hint, place.value)
    return None


def _complete(
    path: KeyPath, entry: dict[str, Any], settings: Settings, written: list[str], folders: tuple[Path, ...]
) -> Iterator[ConfigIssue]:
    """Complete an entry."""
    own, here, whole = entry.get("simulator", {}), (*path, "simulator"), Settings()
    place = settings.origins.get((*path, "env"), settings.origins[path])
    is_saved = "name" in own
    if not is_saved:
        option = entry.get("env")
        if not isinstance(option, str):
            message = f"{dotted(path)} names no simulator"
            yield ConfigIssue((path,), message, "add `env: ...`, as in a defaults list", place.value)
            return
        file = find_config(folders, f"env/{option}")
        if file is None:
            message, options = f"config group 'env' has no option {option!r}", list_options("env", folders)
            yield ConfigIssue(((*path, "env"),), message, nearest_option(option, options), place.value)
            return
        document = read_document(file, readable_path(file))
        yield from document.faults
        if "defaults" in document.data or MIX in document.data:
            message = f"{document.label} has a list of its own, which no entry of {dotted(path[:-1])} can have"
            yield ConfigIssue(((*path, "env"),), message, "name a file with the settings of one simulator", place.value)
            return
        whole.merge(document)
        for name in PROCESSES:
            whole.data.pop(name, None)
        for name in written:
            whole.merge_value((name,), settings, ("env", name))
    for name in own:
        if name in PROCESSES and not is_saved:
            message, value = f"{dotted((*here, name))} belongs to all simulators of the mix", show(own[name])
            yield ConfigIssue(((*here, name),), message, f"write env.{name} = {value}", settings.origins[here].value)
        whole.merge_value((name,), settings, (*here, name))
    for name in written:
        if settings.origins["env", name].value.file == COMMAND_LINE:
            whole.merge_value((name,), settings, ("env", name))
    entry["simulator"] = whole.data
    settings.origins |= {here: place} | {(*here, *below): origin for below, origin in whole.origins.items()}


def _derived(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of `env` that follow from its entries, as far as these are sound."""
    entries = [each for each in env[MIX] if isinstance(each, dict) and isinstance(each.get("simulator"), dict)]
    whole = [defaults_below(EnvConfig, each["simulator"]) for each in entries]
    states = [each["start_states"] for each in whole if isinstance(each.get("start_states"), int)]
    found: dict[str, Any] = {"tasks": _tasks(entries), "start_states": max(states, default=1)}
    longest = {each["max_episode_steps"] for each in whole}
    if len(longest) == 1:
        found["max_episode_steps"] = longest.pop()
    return found | ({name: whole[0][name] for name in LAYOUT} if whole else {})


def _tasks(entries: list[dict[str, Any]]) -> list[str]:
    tasks = [
        f"{each.get('name') or each.get('env') or each['simulator'].get('name')}/{task}"
        for each in entries
        for task in each["simulator"].get("tasks") or ()
    ]
    return list(dict.fromkeys(tasks))


# ---- rules


@rule
def mix_is_told_apart(config: Config) -> Iterator[ConfigIssue]:
    """Check that there are simulators with different names, and that the tasks are theirs."""
    env = config.env
    if not isinstance(env, MixConfig):
        return
    titles = [each.title for each in env.mix]
    for index, title in enumerate(titles):
        if title in titles[:index]:
            message = f"env.mix has two simulators named {title!r}, so that metrics could not tell them apart"
            yield ConfigIssue(f"env.mix.{index}", message, "give one of them another `name`")
    tasks = [source.task(task) for source in env.sources for task in source.env.tasks]
    if tasks and env.tasks != list(dict.fromkeys(tasks)):  # none: the simulators themselves could not be read
        message = f"env.tasks = {show(env.tasks)} are not the tasks of env.mix"
        yield ConfigIssue(
            "env.tasks", message, "leave it out, and choose tasks in env.mix, in `simulator: {tasks: ...}`"
        )
    if env.task_descriptions:
        message = "env.task_descriptions belong to a simulator of env.mix"
        yield ConfigIssue(
            "env.task_descriptions", message, "write them there, in `simulator: {task_descriptions: ...}`"
        )
    if len(env.mix) > 1 and config.rollout.schedule is Schedule.ready_batch:
        message = "rollout.schedule = ready_batch waits for the envs of one simulator, and env.mix has several"
        yield ConfigIssue(("rollout.schedule", "env.mix"), message, "set rollout.schedule to lockstep or pipeline")


@rule
def sources_are_sound(config: Config) -> Iterator[ConfigIssue]:
    """Check each simulator of a mix as if it were the only one."""
    if not isinstance(config.env, MixConfig):
        return
    for index, source in enumerate(config.env.sources):
        alone = replace(config, env=source.env, eval=replace(config.eval, perturb=None))
        for check in (each for each in RULES if each.__name__ in SIMULATOR_RULES):
            for issue in check(alone):
                yield moved(issue, index, source)


def moved(issue: ConfigIssue, index: int, source: EnvSource) -> ConfigIssue:
    """Return an issue of the source of this number with the settings where they are in the mix."""
    inside: KeyPath = ("env", MIX, index, "simulator")
    where = tuple(
        (*inside, *path[1:]) if path[:1] == ("env",) and path[1:2] and path[1] not in PROCESSES else path
        for path in issue.paths
    )
    return replace(issue, where=where, message=f"{source.name}: {issue.message}", fix={})


@rule
def sources_fit_together(config: Config) -> Iterator[ConfigIssue]:
    """Check that the simulators of a mix have the same observations and actions, as far as it is known."""
    if not isinstance(config.env, MixConfig) or not config.env.mix:
        return
    first, *others = config.env.sources
    for index, other in enumerate(others, start=1):
        before, now = known_layout(first.env), known_layout(other.env)
        for what, value in now.items():
            if None not in (value, before.get(what)) and value != before[what]:
                name = what if what in LAYOUT else "env"
                where: KeyPath = ("env", MIX, index, *(("simulator", what) if what in LAYOUT else ("env",)))
                said = f"{what} is {show(before[what])} in {first.name} and {show(value)} in {other.name}"
                message = f"{first.name} and {other.name} cannot be mixed: {said}"
                hint = f"write env.{name} for both" if what in LAYOUT else _as_often(what, value, before[what], other)
                yield ConfigIssue((where,), message, hint)


def _as_often(what: str, value: Any, wanted: Any, source: EnvSource) -> str:
    """Return what helps where two simulators differ in something else than cameras."""
    repeat = repeated_for(source.env, wanted, value) if what == FREQUENCY else None
    hint = "mix simulators whose policies fit both"
    return hint if repeat is None else f"write `simulator: {{action_repeat: {repeat}}}` for {source.name}, or {hint}"


def known_layout(env: EnvConfig) -> dict[str, Any]:
    """Return what is known before it runs of a simulator's observations and actions, by what it is called; None where
    it is not."""
    info: SimulatorInfo[EnvConfig] = simulator_info(env.name)
    state = info.environment_state(env)
    return {
        **{name: plain_value(getattr(env, name)) for name in LAYOUT if name != "image_size" or env.cameras},
        "the size of actions": info.action_dim(env),
        "whether actions are choices": info.discrete(env),
        "the size of the state": info.state_dim(env),
        "the environment's part of the state": None if state is None else list(state),
        FREQUENCY: info.control_frequency(env),
    }
