"""Checks of a config of OpenVLA or OpenVLA-OFT against its checkpoint. Reads no weights and imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodyrl.config.infos import ModelInfo
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config
from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.checkpoint import (
    PREPROCESSOR,
    CheckpointFiles,
    head_file,
    read_preprocessing,
    read_range,
    unused_parts,
)
from embodyrl.models.prismatic.config import Architecture, PrismaticConfig
from embodyrl.models.saved import open_shard, shard_files
from embodyrl.models.vla.fits import SimulatorSizes, attempt, check_robot, check_without_checkpoint
from embodyrl.models.vla.folder import choose_key
from embodyrl.models.vla.prompts import TOKENIZER, read_tokenizer
from embodyrl.registry import ALGORITHMS
from embodyrl.screen import counted


class PrismaticInfo(ModelInfo):
    """OpenVLA, and what OpenVLA-OFT shares with it."""

    def _images(self, model: Any) -> int:
        """Return the images per observation."""
        return 1

    def _heads(self, model: Any) -> tuple[str, ...]:
        """Return the parts that the options use and that a checkpoint has in separate files, by the prefixes of
        these."""
        return ()

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config that concerns both."""
        model, cameras, num_images = config.model, config.env.cameras, self._images(config.model)
        assert isinstance(model, PrismaticConfig)
        if len(cameras) != num_images:
            yield ConfigIssue(
                "env.cameras",
                f"env.cameras names {counted(len(cameras), 'camera')}, but model {model.name!r} takes "
                f"{counted(num_images, 'image')}",
                f"name {counted(num_images, 'camera')} of the simulator",
                fix={"env.cameras": cameras[:num_images]} if len(cameras) > num_images else {},
            )
        if model.adapter is not None and not Path(model.adapter).is_dir():
            yield ConfigIssue(
                "model.adapter", f"model.adapter = {model.adapter!r} is no folder", "name the folder of a LoRA adapter"
            )
        if model.checkpoint is None:
            yield from check_without_checkpoint(model, "adapter", "unnorm_key")
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from _check_folder(config, model, Path(model.checkpoint), self._heads(model))

    def notes(self, config: Config) -> Iterator[str]:
        """Yield texts about parts of the checkpoint that the options do not use."""
        model = config.model
        if model.checkpoint is not None and Path(model.checkpoint).is_dir():
            yield from map(str, unused_parts(Path(model.checkpoint), self._heads(model)))


def _check_folder(
    config: Config, model: PrismaticConfig, folder: Path, heads: tuple[str, ...]
) -> Iterator[ConfigIssue]:
    try:
        files = CheckpointFiles.read(model)
        for path in shard_files(folder):
            open_shard(path, "np")
        for head in heads:
            head_file(folder, head)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    if not _learns_tokens(config):
        yield from (error.issue("model.checkpoint") for error in unused_parts(folder, heads))
    try:
        statistics = files.statistics
        Architecture.from_config(files.config)
        read_preprocessing(files.parse(PREPROCESSOR))
        read_tokenizer(files.tokenizer, TOKENIZER)
    except PolicyError as error:
        yield error.issue("model.checkpoint")
        return
    key = yield from attempt("model.unnorm_key", lambda: choose_key(statistics, model.unnorm_key))
    if key is None:
        return
    simulator = SimulatorSizes.of_config(config)
    sizes = {"actions": ("action", simulator.action, "its matching controller")}
    if getattr(model, "use_proprio", False):
        sizes["states"] = ("proprio", simulator.proprio, "other states with env.proprio")
    bounds = str(getattr(model, "normalization", "q99"))
    for what, (name, there, instead) in sizes.items():
        try:
            numbers = read_range(statistics, key, name, bounds).low
        except PolicyError as error:
            yield error.issue("model.checkpoint")
            continue
        yield from check_robot(what, len(numbers), math.inf, there, settings=("model.unnorm_key",), instead=instead)


def _learns_tokens(config: Config) -> bool:
    """Return whether a run learns from demonstrations only, and so can teach a model what it was not trained for."""
    algorithm = config.algorithm.name
    return algorithm in ALGORITHMS and ALGORITHMS.entry(algorithm).demonstrations is True
