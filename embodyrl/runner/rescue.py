"""Running out of memory: recognising it, saving the run before it ends, and settings that need less."""

from __future__ import annotations

import gc
import traceback
from typing import TYPE_CHECKING

import torch

from embodyrl.config.schema import Config, Offload
from embodyrl.errors import RunError
from embodyrl.registry import SupportedModel

if TYPE_CHECKING:
    from embodyrl.runner.runner import Runner


class OutOfMemoryError(RunError):
    """Raised when memory of the machine or of the GPU runs out; its text names settings that need less."""


def iterate_or_rescue(runner: Runner) -> dict[str, float]:
    """Run one iteration; returns its metrics.

    Raises:
        OutOfMemoryError: memory ran out. The iterations before are saved, if that was possible.
    """
    try:
        return runner.iterate()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        release(error)
        reason = reason_of(error)
    fate = _rescue(runner)  # outside of the handler, which would hold on to what the iteration used
    raise OutOfMemoryError(
        f"memory ran out in iteration {runner.progress.iteration + 1}: {reason}. {fate}. Less memory is needed with "
        f"{remedies(runner.config)}: embodyrl resume {runner.run_dir} KEY=VALUE"
    )


def _rescue(runner: Runner) -> str:
    """Save outside of the usual turn, without the episodes in progress; returns the outcome for people. The last
    iteration may have made some of its optimiser steps, which does no harm."""
    if runner.is_saved:
        return "The iteration before it is saved"
    if runner.ranks.size > 1:
        return "What was learned since the last checkpoint is lost, because the other ranks cannot be asked for it"
    runner.collector.give_up_episodes()
    try:
        runner.save_without_copy()
    except (RunError, RuntimeError, MemoryError) as error:
        return f"What was learned since the last checkpoint is lost, because saving failed as well ({error})"
    return "What was learned before it is saved"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out. Torch has a class for it only on GPUs."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def release(error: BaseException) -> None:
    """Free the locals of the functions that failed, so that there is memory to save with."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def remedies(config: Config) -> str:
    """Return the settings that need less memory and are not in use yet, for people."""
    engine, helps = config.engine, []
    if (size := _samples_at_once(config)) > 1:
        helps.append(f"engine.micro_batch_size={size // 2}")
    if not engine.gradient_checkpointing and SupportedModel.entry(config.model.name).blocks is not False:
        helps.append("engine.gradient_checkpointing=true")
    if engine.offload is not Offload.all:
        helps.append("engine.offload=all")
    if not config.env.offload:
        helps.append("env.offload=true")
    if config.run.save_async:
        helps.append("run.save_async=false")
    return ", ".join(helps)


def _samples_at_once(config: Config) -> int:
    """Return the number of chunks or demonstrated samples that go through the model together in learning."""
    if config.engine.micro_batch_size is not None:
        return config.engine.micro_batch_size
    if config.data.path is not None:
        return config.data.batch_size
    rollout = config.rollout
    return config.env.num_envs * rollout.episodes_per_slot * rollout.num_chunks // config.algorithm.minibatches
