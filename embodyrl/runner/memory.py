"""What happens when memory runs out: knowing it, freeing some, and naming settings that need less."""

from __future__ import annotations

import gc
import traceback

import torch

from embodyrl.config.schema import Config, Offload
from embodyrl.errors import RunError
from embodyrl.placement.launcher import RemoteError
from embodyrl.registry import SupportedModel


class OutOfMemoryError(RunError):
    """Raised when memory of the machine or of the GPU runs out; its text names settings that need less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out. Torch has a class for it only on GPUs."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    in_worker = isinstance(error, RemoteError) and error.type_name in ("MemoryError", "OutOfMemoryError")
    return on_cpu or in_worker or isinstance(error, MemoryError | torch.OutOfMemoryError)


def release(error: BaseException) -> None:
    """Free the locals of the functions that failed, so that there is memory to save with."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def less_memory(config: Config) -> str:
    """Return the settings that need less memory and are not in use yet, for people."""
    engine, helps = config.engine, []
    if (size := _samples_at_once(config)) > 1:
        helps.append(f"engine.micro_batch_size={size // 2}")
    if engine.gradient_checkpointing is not True and SupportedModel.entry(config.model.name).blocks is not False:
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
    return config.algorithm.batches(config).minibatch
