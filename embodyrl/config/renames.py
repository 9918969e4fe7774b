"""Names that have changed: settings, options, registered components, metrics, columns of batches.

A row of a table is all that a renaming takes. An old name in a user's YAML or on the command line is answered with the
new one, and files that an earlier version wrote are read under the new names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embodyrl.config.fields import component_sections, find_setting, owners_of, settings_of
from embodyrl.config.issues import KeyPath, dotted, key_path

if TYPE_CHECKING:
    from embodyrl.config.compose import Settings

SETTINGS: dict[str, str] = {
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.behaviour_cap": "algorithm.loss.behaviour_cap",
    "algorithm.behaviour_excess": "algorithm.loss.behaviour_excess",
    "algorithm.drift_coef": "algorithm.loss.drift_coef",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.norm.mean_level": "algorithm.advantage.mean_level",
    "algorithm.norm.std_level": "algorithm.advantage.std_level",
    "algorithm.norm.leave_one_out": "algorithm.advantage.leave_one_out",
    "algorithm.norm.unbiased": "algorithm.advantage.unbiased",
    "algorithm.norm.eps": "algorithm.advantage.eps",
    "algorithm.srpo.encoder": "algorithm.reward.encoder",
    "algorithm.srpo.frames": "algorithm.reward.frames",
    "algorithm.srpo.dim": "algorithm.reward.dim",
    "algorithm.srpo.compat": "algorithm.reward.compat",
    "algorithm.srpo.scale": "algorithm.reward.scale",
    "algorithm.srpo.steepness": "algorithm.reward.steepness",
    "algorithm.filter.max_collections": "algorithm.max_collections",
    "env.instructions": "env.task_descriptions",
    "eval.seed": "eval.first_start_state",
    "rollout.chunks": "rollout.num_chunks",
    "engine.parallel.ranks": "engine.parallel.world_size",
    "model.relative_entries": "model.relative_action_dims",
}
"""Old -> new name of a setting. A name that changed twice has two rows."""

OPTIONS: dict[str, str] = {
    "--pictures": "--images",
}
"""Old -> new name of an option of a command."""

REGISTERED: dict[str, dict[str, str]] = {
    "stage": {"imitate": "sft_step"},
}
"""Old -> new name of a registered component, by the kind of its registry."""

METRICS: dict[str, str] = {
    "time/node/": "time/stage/",
    "train/passes": "train/epochs",
}
"""Old -> new name of a metric. A name that ends in / stands for all names that begin with it."""

COLUMNS: dict[str, str] = {
    "task": "task_index",
    "sentences": "task_descriptions",
}
"""Old -> new name of a column of a saved batch, or of a key of its header."""

ONCE_OF_ALL_FILTERS = ("algorithm.filter.metric", "algorithm.filter.accuracy_low", "algorithm.filter.accuracy_high")
"""Settings that kept their place but now belong to one filter. A saved config of an earlier version has them whatever
filter it chose."""


def newest_name(name: str, table: dict[str, str]) -> str:
    """Return the present name of `name`, also where it changed more than once. Names without a row are unchanged."""
    for _ in table:  # a bound, in case rows lead in a circle
        if name not in table:
            break
        name = table[name]
    return name


def newest_metric(name: str) -> str:
    """Return the present name of a metric of an earlier version."""
    group, slash, rest = name.rpartition("/")
    return newest_name(name, METRICS) if name in METRICS else newest_name(group + slash, METRICS) + rest


def renamed_component(kind: str, name: str) -> str:
    """Return the hint for a name that the registry of this kind does not have; "" if it was not renamed."""
    now = newest_name(name, REGISTERED.get(kind, {}))
    return "" if now == name else f"renamed to {now!r}"


def renamed_below(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, KeyPath]]:
    """Find renamed settings in `data`, at a path or below; yields their old and new paths."""
    for name in SETTINGS:
        old = key_path(name)
        if old[: len(path)] == path and _is_in(data, old):
            yield old, key_path(newest_name(name, SETTINGS))


def new_name_of(root: type, data: Any, new: KeyPath) -> str:
    """Return the hint for a renamed setting. It names the components that have it if the chosen one does not.

    Args:
        root: dataclass of the whole config.
        data: the composed settings.
        new: present path of the setting.
    """
    section = component_sections(root).get(new[:-1])
    if section is None or find_setting(root, data, new)[0] is not None:
        return f"renamed to {dotted(new)!r}"
    return f"renamed to {dotted(new)!r}, an option of {' and '.join(map(repr, owners_of(section, str(new[-1]))))}"


def convert_saved(settings: Settings, root: type) -> None:
    """Move the settings that an earlier version saved to their new names. A saved config has every setting; those of
    components that the run did not use are dropped.

    Args:
        settings: the saved config, composed; changed in place.
        root: dataclass of the whole config.
    """
    for name in (*SETTINGS, *ONCE_OF_ALL_FILTERS):
        old, new = key_path(name), key_path(newest_name(name, SETTINGS))
        if _is_in(settings.data, old) and find_setting(root, settings.data, old)[0] is None:
            value, origin = settings.take(old)
            if find_setting(root, settings.data, new)[0] is not None and not _is_in(settings.data, new):
                settings.put(new, value, origin)
            _take_if_empty(settings, old[:-1], root)


def convert_options(options: dict[str, Any], section: str, known: type) -> dict[str, Any]:
    """Return a component's saved options under their new names.

    Args:
        options: the options, without those of nested sections.
        section: their section of a config, such as `model`.
        known: dataclass of the options.
    """
    names = settings_of(known)
    newest = {name: newest_name(f"{section}.{name}", SETTINGS).removeprefix(f"{section}.") for name in options}
    return {name if name in names else newest[name]: value for name, value in options.items()}


def _take_if_empty(settings: Settings, path: KeyPath, root: type) -> None:
    """Remove a section that the schema no longer has, once it is empty."""
    if path and settings.get(path) == {} and find_setting(root, settings.data, path)[0] is None:
        settings.take(path)


def _is_in(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
