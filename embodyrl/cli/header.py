"""What the first screen says, within two seconds and before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from embodyrl.config import LoadedConfig
from embodyrl.config.plugins import KEY_PLACE, can_sign, code_of_its_own, where_from
from embodyrl.config.rules import fact
from embodyrl.config.schema import Config, Device, ModelConfig, Precision
from embodyrl.models.saved import other_options
from embodyrl.placement.plan import describe_binding, inventory, plan_env_workers, policy_gpu
from embodyrl.placement.ranks import own_share, place_here
from embodyrl.registry import SupportedModel
from embodyrl.version import __version__

SHOWN_TASKS = 3
"""More tasks are counted, not named."""


def header(loaded: LoadedConfig, run_dir: Path) -> str:
    """The lines before the first iteration."""
    config = loaded.config
    rows = [
        ("config", f"OK  {loaded.values} values, 0 faults   seed {config.seed}   (--print-config shows them)"),
        ("machine", machine(config)),
        ("placement", placement(config)),
        ("model", model(config)),
        ("simulator", simulator(config)),
        *(("", f"note: {note}") for note in loaded.notes),
        ("algorithm", algorithm(config)),
        ("output", f"{run_dir}/  (metrics.jsonl, checkpoints/, report.html, ...)"),
    ]
    if code := code_of_its_own(config):
        rows.insert(-1, ("plug-ins", ", ".join(f"{name} ({where_from(name)})" for name in code)))
        if not can_sign():
            rows.insert(-1, ("", f"no key can be kept in {KEY_PLACE}, so resume and eval will need --trust"))
    if changed := other_options(config.model):
        rows.insert(4, ("", f"the checkpoint was saved with other options: {', '.join(changed)}"))
    title = f"embodyrl {__version__}   run {config.run.name}   ({loaded.source})"
    return loaded.hide("\n".join([title, *(f"  {name:<11}{text}" for name, text in rows)]))


def machine(config: Config) -> str:
    """Cores that this process may use, memory, and where and in what the policy will compute."""
    device = config.engine.device
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    gpu = has_nvidia_gpu()
    precision = computes_in(config, on_gpu=gpu and device is not Device.cpu)
    if device is Device.auto:
        place = (
            f"policy on CUDA, {precision} (auto)" if gpu else f"policy on the CPU, {precision} (auto: no NVIDIA GPU)"
        )
    else:
        place = f"policy on {device.value}, {precision}"
    return f"{cores} usable cores, {memory:.0f} GiB, {'NVIDIA GPU' if gpu else 'no GPU'} -> {place}"


def computes_in(config: Config, *, on_gpu: bool) -> str:
    """What forward passes compute in; as `engine.precision.choose_precision`, which has looked at the policy."""
    wanted = config.engine.precision
    if wanted is not Precision.auto:
        return wanted.value
    large = on_gpu and fact(SupportedModel, config.model.name, "blocks")
    return "bfloat16" if large or _held_in(config.model) == "bfloat16" else "float32"


def _held_in(options: ModelConfig) -> str | None:
    """Type of the weights, where the model leaves the choice."""
    return getattr(options, "dtype", None)


def placement(config: Config) -> str:
    """How many ranks and simulator processes there will be, and what becomes of NUMA."""
    here, place = inventory(), place_here(config)
    near = policy_gpu(config.engine.device, here)
    workers = plan_env_workers(own_share(config.env, place, here), here, near)
    processes = "1 simulator process" if len(workers) == 1 else f"{len(workers)} simulator processes"
    ranks = "" if place.size == 1 else f"{place.size} ranks, each with {config.env.num_envs // place.size} slots in "
    return f"{ranks}{processes}; {describe_binding(config.env.numa, here, workers, near)}"


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU (torch is not asked: importing it takes seconds)."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())


def model(config: Config) -> str:
    """Name and origin of the policy, and what its weights are held in."""
    origin = "random weights" if config.model.checkpoint is None else f"weights from {config.model.checkpoint}"
    held = _held_in(config.model)
    return f"{config.model.name}, {origin}" + (f" held in {held}" if held else "")


def simulator(config: Config) -> str:
    """Tasks, pictures and slots."""
    env = config.env
    more = f" and {len(env.tasks) - SHOWN_TASKS} other tasks" if len(env.tasks) > SHOWN_TASKS else ""
    pictures = f"   cameras {', '.join(env.cameras)} ({env.image_size[0]}x{env.image_size[1]})" if env.cameras else ""
    return (
        f"{env.name} {', '.join(env.tasks[:SHOWN_TASKS])}{more}{pictures}   {env.num_envs} slots, "
        f"episodes of {env.max_episode_steps} steps"
    )


def algorithm(config: Config) -> str:
    """What an iteration consists of."""
    settings, rollout = config.algorithm, config.rollout
    if config.data.path is not None:
        data = config.data
        return (
            f"{settings.name}   {config.run.iterations} iterations of {data.steps} x {data.batch_size} chunks of "
            f"{rollout.chunk_size} action(s) from {data.path}"
        )
    columns = config.env.num_envs * rollout.episodes_per_slot
    decisions = rollout.chunks * columns
    return (
        f"{settings.name} ({settings.advantage.name}, {settings.loss.name})   {config.run.iterations} iterations of "
        f"{rollout.chunks} x {columns} decisions of {rollout.chunk_size} action(s), "
        f"{settings.epochs} passes in minibatches of {decisions // settings.minibatches}"
    )
