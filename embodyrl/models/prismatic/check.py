"""Checks of a config of OpenVLA or OpenVLA-OFT against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim, state_dim
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.checkpoint import CheckpointFiles, head_file
from embodyrl.models.prismatic.config import PrismaticConfig
from embodyrl.models.saved import open_shard, shard_files
from embodyrl.models.vla.checkpoint import choose_key
from embodyrl.models.vla.config import check_robot, check_without_checkpoint


def check(config: Config, num_images: int, heads: tuple[str, ...] = ()) -> Iterator[ConfigIssue]:
    """Yield issues that concern both OpenVLA and OpenVLA-OFT.

    Args:
        config: the whole config.
        num_images: images per observation.
        heads: parts that the checkpoint must have in separate files.
    """
    model, cameras = config.model, config.env.cameras
    assert isinstance(model, PrismaticConfig)
    if len(cameras) != num_images:
        yield ConfigIssue(
            "env.cameras",
            f"env.cameras names {len(cameras)} camera(s), but model {model.name!r} takes {num_images} image(s)",
            f"name {num_images} camera(s) of the simulator",
        )
    if model.adapter is not None and not Path(model.adapter).is_dir():
        yield ConfigIssue(
            "model.adapter", f"model.adapter = {model.adapter!r} is no folder", "name the folder of a LoRA adapter"
        )
    if model.checkpoint is None:
        yield from check_without_checkpoint(model, "adapter", "unnorm_key")
    if model.checkpoint is not None and Path(model.checkpoint).is_dir():
        yield from _check_folder(config, model, Path(model.checkpoint), heads)


def _check_folder(
    config: Config, model: PrismaticConfig, folder: Path, heads: tuple[str, ...]
) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(folder)
        for path in shard_files(folder):
            open_shard(path, "np")
        for head in heads:
            head_file(folder, head)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    try:
        chosen = files.statistics[choose_key(files.statistics, model.unnorm_key)]
    except PolicyError as error:
        yield error.issue("model.unnorm_key")
        return
    sizes = {"actions": ("action", action_dim(config), "its matching controller")}
    if getattr(model, "use_proprio", False):
        sizes["states"] = ("proprio", state_dim(config), "other states with env.proprio")
    for what, (name, there, instead) in sizes.items():
        numbers = chosen.get(name, {}).get("q01")
        if isinstance(numbers, list):
            settings = ("model.unnorm_key",)
            yield from check_robot(what, len(numbers), math.inf, there, settings=settings, instead=instead)
