"""Rules about what a run needs before its simulators start, of this machine or that takes long to check; see
`config.rules`. Imports no torch, except to look for layers that adapters are to be put around by name."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import Rule, fact, replay_of
from embodyrl.config.schema import Config, Device, PlacementBackend
from embodyrl.placement.cuda import has_nvidia_gpu, why_no_cuda
from embodyrl.registry import PYAV, SupportedModel
from embodyrl.runner.rundir import why_not

BLIND_REWARDS = ("dense", "success", "difference")
"""Rewards that surely read no images."""
LEAST_OF_WORKER = 10 * 2**20
"""Memory that a simulator process shares with no other, at least [bytes]; those that simulate have far more."""
LEAST_OF_ENV = 3 * 2**10
"""Memory of an env, at least [bytes]: measured for Gymnasium's CartPole, whose state is four numbers."""
LEAST_OF_CHUNK = 64
"""Memory of a chunk in a rollout, at least [bytes]: of eight columns with a number for each."""
LEAST_OF_WEIGHT = 8
"""Memory of a weight that learns, at least [bytes]: itself and its gradient."""
IMAGE_BUFFERS = 2
"""Buffers of each image between simulators and policy."""
FILES_OF_WORKER, FILES_OF_RUN = 7, 50
"""Open files of the main process for each simulator process, and for the rest of a run."""


def run_dir_can_be_made(config: Config) -> Iterator[ConfigIssue]:
    """Check that the run directory can be made, and holds nothing."""
    path = Path("runs") / config.run.name if config.run.dir is None else Path(config.run.dir)
    if config.run.dir is None and path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return  # the run gets a folder of its own in it
    if (reason := why_not(path)) is not None:
        yield ConfigIssue("run.dir" if config.run.dir is not None else "run.name", f"run.dir: {reason[0]}", reason[1])


def cuda_is_there(config: Config) -> Iterator[ConfigIssue]:
    """Check that torch will find the GPU that is asked for."""
    if "torch" in sys.modules:
        return  # it is asked itself, when the engine is built
    if config.engine.device is Device.cuda and (reason := why_no_cuda()) is not None:
        yield ConfigIssue("engine.device", f"engine.device is cuda, but torch cannot use CUDA here: {reason}")


def videos_can_be_written(config: Config) -> Iterator[ConfigIssue]:
    """Check that the package is there that writes videos of evaluations, if there are to be any."""
    if config.tracking.video.episodes and not PYAV.is_met():
        yield ConfigIssue(
            "tracking.video.episodes",
            f"tracking.video.episodes = {config.tracking.video.episodes}, but videos are written with package "
            f"{PYAV.module!r}, which is not installed",
            f"run: {PYAV.install}, or set tracking.video.episodes to 0",
        )


def processes_are_allowed(config: Config) -> Iterator[ConfigIssue]:
    """Check that the system allows so many simulator processes."""
    workers = config.env.workers
    if not isinstance(workers, int):
        return  # no more than cores
    limits = {
        "processes (ulimit -u)": _limit(resource.RLIMIT_NPROC) if os.geteuid() else None,
        "processes (kernel.pid_max)": _number(Path("/proc/sys/kernel/pid_max")),
        "processes (pids.max of the control group)": _control_group(),
    }
    files = _limit(resource.RLIMIT_NOFILE)
    if files is not None:
        limits[f"simulator processes, for each has {FILES_OF_WORKER} open files (ulimit -n {files})"] = (
            files - FILES_OF_RUN
        ) // FILES_OF_WORKER
    what, most = min(((what, most) for what, most in limits.items() if most is not None), key=lambda each: each[1])
    if workers > most:
        yield ConfigIssue(
            "env.workers",
            f"env.workers = {workers}, but this machine allows {max(0, most)} {what}",
            "set env.workers to auto, one for each core; each simulates several envs",
        )


def envs_fit_into_memory(config: Config) -> Iterator[ConfigIssue]:
    """Check that the envs fit into main memory by what they need at the very least; `embodyrl plan` counts the rest."""
    env = config.env
    height, width = env.image_size if len(env.image_size) == 2 else (0, 0)
    images = IMAGE_BUFFERS * len(env.cameras) * height * width * 3
    workers = env.workers if isinstance(env.workers, int) else 1
    needed = env.num_envs * (LEAST_OF_ENV + images) + workers * LEAST_OF_WORKER
    there = psutil.virtual_memory().total
    if needed > there:
        most = (there - workers * LEAST_OF_WORKER) // (LEAST_OF_ENV + images)
        yield ConfigIssue(
            "env.num_envs" if most > 0 else "env.workers",
            f"env.num_envs = {env.num_envs} in env.workers = {env.workers} processes need {needed / 1e9:.0f} GB of "
            f"main memory or more, and this machine has {there / 1e9:.0f} GB",
            f"set env.num_envs far below {most}; embodyrl plan --start measures a simulator process"
            if most > 0
            else "set env.workers to auto",
        )


def rollout_fits_into_memory(config: Config) -> Iterator[ConfigIssue]:
    """Check that a rollout fits into main memory by what its chunks need at the very least, without images."""
    rollout, envs = config.rollout, config.env.num_envs
    if not config.algorithm.needs(config).rollouts:
        return
    of_chunk = envs * rollout.episodes_per_slot * LEAST_OF_CHUNK
    needed, there = rollout.num_chunks * of_chunk, psutil.virtual_memory().total
    if needed > there and not any(envs_fit_into_memory(config)):
        yield ConfigIssue(
            ("rollout.num_chunks", "env.num_envs"),
            f"rollout.num_chunks = {rollout.num_chunks} of env.num_envs = {envs} need {needed / 1e9:.0f} GB of main "
            f"memory or more, and this machine has {there / 1e9:.0f} GB",
            f"set rollout.num_chunks far below {max(2, there // of_chunk)}",
        )


def _sections(path: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Yield a section of a config and those below it, by their full names."""
    yield path, section
    for each in dataclasses.fields(section):
        if dataclasses.is_dataclass(below := getattr(section, each.name)):
            yield from _sections(f"{path}.{each.name}", below)


def networks_fit_into_memory(config: Config) -> Iterator[ConfigIssue]:
    """Check that networks of given widths fit into main memory, where the policy is in it."""
    if config.engine.device is Device.cuda or (config.engine.device is Device.auto and has_nvidia_gpu()):
        return
    there = psutil.virtual_memory().total
    for section, settings in (*_sections("model", config.model), *_sections("algorithm", config.algorithm)):
        where, widths = f"{section}.hidden_sizes", list(getattr(settings, "hidden_sizes", ()))
        count = getattr(settings, "count", 1)
        weights = count * sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths))
        if (needed := LEAST_OF_WEIGHT * weights) > there:
            yield ConfigIssue(
                where,
                f"{where} = {widths} are {weights:.1e} weights, which need {needed / 1e9:.0f} GB of main memory "
                f"or more, and this machine has {there / 1e9:.0f} GB",
                "choose narrower layers",
            )


def adapters_find_layers(config: Config) -> Iterator[ConfigIssue]:
    """Check that adapters are given layers of the model, which is built without weights for that."""
    lora = config.engine.lora
    if not (lora.rank and lora.targets) or fact(SupportedModel, config.model.name, "blocks") is False:
        return
    from embodyrl.engine.lora import choose_layers
    from embodyrl.models.errors import PolicyError
    from embodyrl.planning.planner import assumed_spec
    from embodyrl.planning.weightless import build_weightless

    try:
        policy, _ = build_weightless(config.model, assumed_spec(config), chunk_size=config.rollout.chunk_size)
    except Exception:  # of any kind, by code of its own, which says why when it is built with its weights
        return
    try:
        choose_layers(policy, lora.targets)
    except PolicyError as error:
        yield ConfigIssue("engine.lora.targets", error.message, error.remedy)


def images_are_looked_at(config: Config) -> Iterator[ConfigIssue]:
    """Check that no images are rendered for a model that reads none, unless a reward or a stage may read them."""
    reward, changes, name = config.algorithm.parts().get("reward"), config.pipeline, config.model.name
    if fact(SupportedModel, name, "images") is not False or replay_of(config) is not None:
        return  # of replays another rule says more
    is_own = changes.function is not None or changes.insert or changes.replace
    if config.env.cameras and not is_own and (reward is None or reward.name in BLIND_REWARDS):
        yield ConfigIssue(
            "env.cameras",
            f"env.cameras = {config.env.cameras}, but model {name!r} reads states alone, and nothing else reads images",
            "set env.cameras to [] (videos do without), or choose a model that reads them, as cnn",
            fix={"env.cameras": []},
        )


def _limit(kind: int) -> int | None:
    """Return a limit of this process; None if there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    """Return the number in a file of the system; None if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # `max` is no limit


def _control_group() -> int | None:
    """Return the least number of processes that this process's control groups allow; None if they do not limit it."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "pids"):
            place = Path("/sys/fs/cgroup", names, path.lstrip("/"))
            limits += [_number(folder / "pids.max") for folder in (place, *place.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


_OF_THIS_MACHINE: tuple[Rule, ...] = (
    cuda_is_there,
    videos_can_be_written,
    processes_are_allowed,
    envs_fit_into_memory,
    rollout_fits_into_memory,
    networks_fit_into_memory,
)


def start_rules(config: Config) -> Iterator[ConfigIssue]:
    """Check what a run that starts now needs, of this machine among others."""
    yield from run_dir_can_be_made(config)
    yield from images_are_looked_at(config)
    yield from adapters_find_layers(config)
    if config.placement.backend is not PlacementBackend.ray:  # which runs on others
        for rule in _OF_THIS_MACHINE:
            yield from rule(config)
