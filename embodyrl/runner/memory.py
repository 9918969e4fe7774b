"""Running out of memory: what it looks like, and what helps."""

from __future__ import annotations

import gc
import traceback

import torch

from embodyrl.config.schema import Config, Offload
from embodyrl.errors import RunError
from embodyrl.registry import SupportedModel


class OutOfMemoryError(RunError):
    """Raised when memory of the machine or of the GPU runs out; its text says what takes less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. Torch has a class for it on GPUs alone."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def release(error: BaseException) -> None:
    """Let go of what the functions that failed still hold, so that there is memory to save with."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or what it is."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def remedies(config: Config) -> str:
    """Settings that would take less memory and are not in use yet, for people."""
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
    """Decisions or demonstrated samples that go through the model together in learning."""
    if config.engine.micro_batch_size is not None:
        return config.engine.micro_batch_size
    if config.data.path is not None:
        return config.data.batch_size
    rollout = config.rollout
    return config.env.num_envs * rollout.episodes_per_slot * rollout.chunks // config.algorithm.minibatches
