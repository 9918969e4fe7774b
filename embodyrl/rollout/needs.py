"""Which columns of a rollout anything reads."""

from __future__ import annotations

import inspect

from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.config.algorithm_rules import PARTS
from embodyrl.config.schema import Config
from embodyrl.registry import ALGORITHMS, STAGES

DO_WITHOUT = ("filter_groups", "shape_rewards", "update")
"""Stages that declare images, but need them only if a component names them."""


def images_are_read(config: Config) -> bool:
    """Return whether a stage, reward, filter or loss of a run reads the column `images`; the policy is not asked."""
    changes, settings = config.pipeline, config.algorithm
    if changes.function is not None or isinstance(settings.parts().get("reward"), EncodingRewardConfig):
        return True
    stages = [stage.function for stage in ALGORITHMS.load(settings.name)(config)]
    stages += [*changes.replace.values(), *(inserted.stage for inserted in changes.insert)]
    declared = [STAGES.entry(name) for name in stages if name not in DO_WITHOUT]
    if any(name.startswith("images") for entry in declared for name in (*entry.reads, *entry.changes)):
        return True
    components = (PARTS[kind].load(part.name) for kind, part in settings.parts().items() if kind != "advantage")
    return any("images" in inspect.signature(component).parameters for component in components)
