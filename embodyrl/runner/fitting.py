"""Whether this machine's GPU can carry a run, found before its simulators start."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from embodyrl.config.schema import Config, Device
from embodyrl.errors import UserError
from embodyrl.placement.cuda import why_no_cuda
from embodyrl.placement.ranks import RankInfo
from embodyrl.registry import SupportedModel
from embodyrl.runner.rundir import SOURCES, read_config

GB = 10**9
ESTIMATED = ("activations", "batch", "KV cache", "gradients on their way", "weights of other ranks")
"""Parts of a plan that are estimates, or that a run may have at other times; the others are needed for certain."""


def refuse_without_cuda(device: Device) -> None:
    """Check that torch will find the GPU that is asked for, without importing it.

    Raises:
        UserError: it will not; the text gives the reason and the remedy.
    """
    # Where torch is imported already, it is asked itself, when the engine is built.
    if device is Device.cuda and "torch" not in sys.modules and (reason := why_no_cuda()) is not None:
        raise UserError(f"engine.device is cuda, but torch cannot use CUDA here: {reason}")


def memory_warning(config: Config, place: RankInfo, run_dir: Path) -> str | None:
    """Compare the memory that a large model needs with that of this rank's GPU; nothing is started.

    Args:
        config: of the run.
        place: of this rank, whose GPU has been chosen.
        run_dir: of the run, where its config is.

    Returns:
        A warning if the run may not fit. None if it fits, for small models, and without CUDA.

    Raises:
        UserError: weights and optimiser alone do not fit; names settings with which the run would.
    """
    if config.engine.device is Device.cpu or why_no_cuda() is not None or not _is_large(config):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return compare_memory(config, place, memory, lambda more: read_config(run_dir, more, SOURCES, trust=True).config)


def compare_memory(
    config: Config, place: RankInfo, memory: float, load: Callable[[Sequence[str]], Config]
) -> str | None:
    """Compare the memory that a run needs with `memory`, that of each rank's GPU [bytes]; see `memory_warning`."""
    from embodyrl.planning.planner import Adviser, Limits, Planner

    def on_all_ranks(config: Config) -> Config:
        """Return the config with the number of ranks, which torchrun may have decided."""
        parallel = dataclasses.replace(config.engine.parallel, world_size=place.size)
        return dataclasses.replace(config, engine=dataclasses.replace(config.engine, parallel=parallel))

    config = on_all_ranks(config)
    planner = Planner(Limits(cuda=True, gpu=memory, host=None), 1, None)
    phases = planner.needs(config)["gpu"].values()
    total = max(need.total for need in phases)
    if total <= memory:
        return None
    certain = max(sum(size for name, size in need.parts.items() if name not in ESTIMATED) for need in phases)
    if certain <= memory:
        return (
            f"note: this run may need more memory than its GPU has: about {total / GB:.3g} of {memory / GB:.3g} GB "
            "(embodyrl plan shows the parts and settings that save some)"
        )
    advice = Adviser(planner, lambda more: on_all_ranks(load(more))).advise(config)
    remedy = " or ".join(" ".join(settings) for settings in advice) or "a smaller model, or more GPUs"
    raise UserError(
        f"the GPU is too small for this run: weights and optimiser alone need {certain / GB:.3g} GB, and it has "
        f"{memory / GB:.3g} GB: try {remedy}"
    )


def _is_large(config: Config) -> bool:
    """Return whether the model is one of billions of weights; planning takes longer than loading a small one."""
    return SupportedModel.entry(config.model.name).published is not None and config.model.checkpoint is not None
