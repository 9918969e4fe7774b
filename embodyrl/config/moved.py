"""Settings that have moved: what to say to who writes them at their old place, and how saved configs are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embodyrl.config.compose import Settings
from embodyrl.config.fields import component_sections, find_setting, owners_of
from embodyrl.config.issues import KeyPath, dotted

MOVED = {
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
}
"""Where a setting was -> where it is."""

ONCE_OF_ALL_FILTERS = ("algorithm.filter.metric", "algorithm.filter.accuracy_low", "algorithm.filter.accuracy_high")
"""Settings that are those of one component now, where they were, and that saved configs have whatever they chose."""


def moved_below(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, KeyPath]]:
    """The settings in `data`, at a path or below, that are elsewhere now: old path and new path."""
    for old, new in ((_key_path(old), _key_path(new)) for old, new in MOVED.items()):
        if old[: len(path)] == path and _is_in(data, old):
            yield old, new


def where_it_went(root: type, data: Any, new: KeyPath) -> str:
    """The remedy for a setting that is at `new` now, and which components have it if the one that is chosen does not.

    Args:
        root: dataclass of the whole config.
        data: the composed settings.
        new: where the setting is.
    """
    section = component_sections(root).get(new[:-1])
    if section is None or find_setting(root, data, new)[0] is not None:
        return f"moved to {dotted(new)!r}"
    return f"moved to {dotted(new)!r}, an option of {' and '.join(map(repr, owners_of(section, str(new[-1]))))}"


def convert_saved(settings: Settings, root: type) -> None:
    """Bring the settings of a run that an earlier version saved to their new places. A saved config has every setting,
    also those of components that the run did not use; these go.

    Args:
        settings: what was saved, composed.
        root: dataclass of the whole config.
    """
    places = {**MOVED, **{name: name for name in ONCE_OF_ALL_FILTERS}}
    for old, new in ((_key_path(old), _key_path(new)) for old, new in places.items()):
        if _is_in(settings.data, old) and find_setting(root, settings.data, old)[0] is None:
            value, origin = settings.take(old)
            if find_setting(root, settings.data, new)[0] is not None and not _is_in(settings.data, new):
                settings.put(new, value, origin)
    for former in (("algorithm", "norm"), ("algorithm", "srpo")):
        if settings.get(former) == {}:
            settings.take(former)


def _key_path(text: str) -> KeyPath:
    return tuple(text.split("."))


def _is_in(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
