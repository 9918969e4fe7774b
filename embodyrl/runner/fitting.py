"""Whether this machine can carry a run, and the settings with which it does, found before its simulators start."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from embodyrl.config import LoadedConfig
from embodyrl.config.build import with_values
from embodyrl.config.schema import Config, Device, ParallelBackend
from embodyrl.errors import UserError
from embodyrl.placement.cuda import why_no_cuda
from embodyrl.placement.ranks import RankInfo
from embodyrl.planning.choices import BACKEND, CHECKPOINTING, candidates, is_large
from embodyrl.runner.rundir import SOURCES, read_config

if TYPE_CHECKING:
    from embodyrl.planning.planner import Limits

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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A config for this machine."""

    loaded: LoadedConfig
    """With values for the settings that share out memory."""
    lines: Sequence[str] = ()
    """What was chosen, and a warning if the run may not fit."""


def fit(loaded: LoadedConfig, place: RankInfo, run_dir: Path) -> Fitted:
    """Choose the settings that share out memory, and compare what a large model needs with that of this rank's GPU;
    nothing is started.

    Args:
        loaded: of the run.
        place: of this rank, whose GPU has been chosen.
        run_dir: of the run, where its config is.

    Raises:
        UserError: weights and optimiser alone do not fit; names settings with which the run would.
    """
    if not is_large(loaded.config.model):  # planning would take longer than loading
        return Fitted(loaded=loaded.choosing(next(candidates(loaded.config, place.size, place.local_size))))

    from embodyrl.planning.planner import Limits

    limits = Limits(cuda=False, gpu=None, host=float(psutil.virtual_memory().total), ranks_here=place.local_size)
    if loaded.config.engine.device is not Device.cpu and why_no_cuda() is None:
        import torch

        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            limits = dataclasses.replace(limits, cuda=True, gpu=float(memory), host=None)
    return fit_into(loaded, place, limits, lambda more: read_config(run_dir, more, SOURCES, trust=True).config)


def choices_of(loaded: LoadedConfig) -> list[Any]:
    """Return the choices of the first rank for the others, as JSON."""
    engine = loaded.config.engine
    return [engine.parallel.backend, engine.gradient_checkpointing]


def follow_choices(loaded: LoadedConfig, choices: Sequence[Any]) -> LoadedConfig:
    """Return the config with the choices that the first rank has sent, see `choices_of`: all must have the same."""
    backend, checkpointing = choices
    return loaded.choosing({BACKEND: ParallelBackend(backend), CHECKPOINTING: checkpointing})


def fit_into(loaded: LoadedConfig, place: RankInfo, limits: Limits, load: Callable[[Sequence[str]], Config]) -> Fitted:
    """Fit a run into memory; see `fit`.

    Args:
        loaded: of the run.
        place: of this rank.
        limits: memory of this machine.
        load: loads the config with further overrides.
    """
    from embodyrl.planning.planner import Adviser, Planner

    def on_all_ranks(config: Config) -> Config:
        """Return the config with the number of ranks, which torchrun may have decided."""
        return cast(Config, with_values(config, {("engine", "parallel", "world_size"): place.size}))

    planner = Planner(limits, 1, None)
    values, choices = planner.choose(on_all_ranks(loaded.config))
    config = on_all_ranks(with_values(loaded.config, values))
    fitted = Fitted(loaded=loaded.choosing(values), lines=[f"  {'chosen':<11}{choice}" for choice in choices])
    if not limits.cuda:
        return fitted
    phases, memory = planner.needs(config)["gpu"].values(), limits.gpu
    total = max(need.total for need in phases)
    if memory is None or total <= memory:
        return fitted
    certain = max(sum(size for name, size in need.parts.items() if name not in ESTIMATED) for need in phases)
    if certain <= memory:
        warning = (
            f"note: this run may need more memory than its GPU has: about {total / GB:.3g} of {memory / GB:.3g} GB "
            "(embodyrl plan shows the parts and settings that save some)"
        )
        return dataclasses.replace(fitted, lines=[*fitted.lines, warning])
    advice = Adviser(planner, lambda more: on_all_ranks(load(more))).advise(config)
    remedy = " or ".join(" ".join(settings) for settings in advice) or "a smaller model, or more GPUs"
    raise UserError(
        f"the GPU is too small for this run: weights and optimiser alone need {certain / GB:.3g} GB, and it has "
        f"{memory / GB:.3g} GB: try {remedy}"
    )
