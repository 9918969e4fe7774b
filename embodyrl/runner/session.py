"""A run from its first line on the screen to its last, as the command line and Python start it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from embodyrl.config import LoadedConfig
from embodyrl.config.build import differences, to_plain
from embodyrl.config.fields import all_paths, is_resumable
from embodyrl.config.infos import MOST_EPISODE_STEPS
from embodyrl.config.issues import dotted
from embodyrl.config.plugins import KEY_PLACE, can_sign, code_of_its_own, where_from
from embodyrl.config.rules import fact, replay_of
from embodyrl.config.schema import Config, Device, OnLoss, PlacementBackend, Precision, RolloutMode
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.perturb.kinds import perturbed
from embodyrl.errors import DiskFull, UserError, shell_command, without_controls
from embodyrl.models.saved import other_options, unread_note, weight_type
from embodyrl.placement.cuda import has_nvidia_gpu, set_up_cuda, why_no_cuda
from embodyrl.placement.launcher import MachineLost
from embodyrl.placement.plan import describe_binding, inventory, plan_env_workers, policy_gpu
from embodyrl.placement.ranks import RankInfo, is_follower, own_share, rank_info_here
from embodyrl.placement.run_plan import Machine, Plan, describe_run_binding, plan_run
from embodyrl.planning.choices import is_large
from embodyrl.registry import SupportedModel
from embodyrl.runner.alone import learn_alone, written_by
from embodyrl.runner.build import PROGRAM, ProgramInfo
from embodyrl.runner.checkpoint import DamageError, Found, Manifest, all_but_replay, find
from embodyrl.runner.deployment import Deployment, deployed, lending
from embodyrl.runner.fitting import choices_of, fit, refuse_without_cuda
from embodyrl.runner.opening import open_runner
from embodyrl.runner.ranks import follow, leading
from embodyrl.runner.rundir import (
    SOURCES,
    RunDir,
    RunDirLostError,
    read_config,
    restore_files,
    sources_not_needed,
    write_config,
)
from embodyrl.runner.stopping import Interrupted, ending_without_reader
from embodyrl.runner.workers import RolloutWorkers
from embodyrl.runs import LOG_FILE, REPORT_FILE, TENSORBOARD, published
from embodyrl.runs.record import RunRecord, sorted_evaluations
from embodyrl.screen import counted, say
from embodyrl.version import __version__

RESUMABLE = ("run.", "tracking.", "engine.parallel.", "placement.")
"""Sections that may change on resume, because they do not change what is learned. Single settings say so themselves
(`resumable` of `config.schema.setting`; micro-batches: except by rounding)."""
FIXED = ("run.name", "run.dir")
"""Settings of those sections that may not change."""
SHOWN_RATES = 5
"""Most evaluations whose success is in the last lines: the first one and the newest."""
SHOWN_TASKS = 3
"""More tasks are counted, not named."""


class ChangeError(UserError):
    """Raised when a run is to continue with settings that would make it another run."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run."""

    run_dir: Path
    exit_code: int = 0
    """0 if it was finished or a callback stopped it; 128 + number of the signal that stopped it."""
    spec: SimulatorSpec | None = None
    """The spec of its simulators, if this process started any."""


def start(loaded: LoadedConfig, host: ProgramInfo = PROGRAM) -> Ending:
    """Train from the start."""
    started = time.monotonic()
    place = rank_info_here(loaded.config)
    if is_follower():
        run_dir, exit_code = follow(loaded.config, place, started=started, host=host)
        return Ending(run_dir=run_dir, exit_code=exit_code)
    with held(RunDir.create(loaded.config)) as directory:
        write_config(directory.path, loaded)
        show(directory, header(loaded, directory.path), host)
        if loaded.config.algorithm.needs(loaded.config).alone:
            return _learn_alone(loaded, directory, host)
        return _train(loaded, directory, place, host, started=started, checkpoint=None)


def go_on(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    without_replay: bool = False,
    trust: bool = False,
    host: ProgramInfo = PROGRAM,
) -> Ending:
    """Continue from the last checkpoint of a run directory, or without its past decisions; `trust` runs its plug-ins
    even if they were written elsewhere."""
    started = time.monotonic()
    if is_follower():
        config = read_config(run_dir, overrides, SOURCES, trust=trust).config
        _, exit_code = follow(config, rank_info_here(config), started=started, host=host)
        return Ending(run_dir=run_dir, exit_code=exit_code)
    with held(RunDir.open(run_dir)) as directory:
        if (again := _read_alone(run_dir, overrides, trust=trust)) is not None:
            return _learn_alone_again(again, directory, host)
        found = _find_whole(run_dir, without_replay=without_replay)
        if (warning := restore_files(run_dir, found.place)) is not None:
            show(directory, warning, host)
        sources = sources_not_needed(found.place)
        loaded = read_config(run_dir, overrides, sources, trust=trust)
        # The reference policy is the one that the run began with, so its sources are needed again.
        if loaded.config.algorithm.needs(loaded.config).reference:
            loaded = read_config(run_dir, overrides, trust=trust)
        if without_replay and replay_of(loaded.config) is None:
            raise ChangeError(f"{run_dir} learns from no replay: leave out --without-replay")
        refuse_another_run(read_config(found.place, [], sources, trust=trust).config, loaded.config)
        manifest = Manifest.read(found.place)
        if manifest.iteration > loaded.config.run.iterations:
            raise ChangeError(
                f"run.iterations = {loaded.config.run.iterations}, but {run_dir} has done {manifest.iteration}: "
                "give a larger number"
            )
        if is_over(manifest, loaded.config) and RunRecord(run_dir).summary is not None:
            show(directory, f"{run_dir} is done. For more: {shell_command('resume', run_dir)} run.iterations=N", host)
            return Ending(run_dir=run_dir)
        write_config(run_dir, loaded)  # changed settings stay changed at the next resume
        show(directory, f"{header(loaded, run_dir)}\n  {'resume':<11}from {found.place}", host)
        if found.warning is not None:
            show(directory, found.warning, host)
        place = rank_info_here(loaded.config)
        return _train(loaded, directory, place, host, started=started, checkpoint=found)


def _find_whole(run_dir: Path, *, without_replay: bool) -> Found:
    """Find the checkpoint to continue from.

    Raises:
        DamageError: none is whole; says so if only their replays are damaged.
    """
    if without_replay:
        return replace(find(run_dir, all_but_replay), with_replay=False)
    try:
        return find(run_dir)
    except DamageError as error:
        try:
            place = find(run_dir, all_but_replay).place
        except DamageError:
            raise error from None
        raise DamageError(
            f"{error}, or continue from {place.name} with an empty replay, since all else of it is whole: "
            f"{shell_command('resume', run_dir)} --without-replay"
        ) from error


def _newest(run_dir: Path, before: Found | None) -> Found | None:
    """Find the checkpoint to continue from after a loss: what was saved since, or that which the run continued from."""
    try:
        return find(run_dir) if published(run_dir) else None
    except DamageError:
        if before is None or before.with_replay:
            raise
        return before


def _learn_alone(loaded: LoadedConfig, directory: RunDir, host: ProgramInfo) -> Ending:
    """Learn by a method that needs no simulators."""
    refuse_without_cuda(loaded.config.engine.device)
    learn_alone(loaded, directory, host)
    return Ending(run_dir=directory.path)


def _read_alone(run_dir: Path, overrides: Sequence[str], *, trust: bool) -> LoadedConfig | None:
    """Return the config of a run whose method learns without simulators and checkpoints; None of any other run."""
    if published(run_dir):
        return None
    loaded = read_config(run_dir, overrides, SOURCES, trust=trust)
    return loaded if loaded.config.algorithm.needs(loaded.config).alone else None


def _learn_alone_again(loaded: LoadedConfig, directory: RunDir, host: ProgramInfo) -> Ending:
    """Learn from the start, unless that is done: there are no checkpoints."""
    run_dir, result = directory.path, written_by(loaded.config, directory.path)
    if result.is_dir():
        show(directory, f"{run_dir} is done: its {result.name} is in {result}", host)
        return Ending(run_dir=run_dir)
    write_config(run_dir, loaded)
    note = f"  {'resume':<11}from the start: a {result.name} has no checkpoints"
    show(directory, f"{header(loaded, run_dir)}\n{note}", host)
    return _learn_alone(loaded, directory, host)


def _train(
    loaded: LoadedConfig,
    directory: RunDir,
    place: RankInfo,
    host: ProgramInfo,
    *,
    started: float,
    checkpoint: Found | None,
) -> Ending:
    """Train to the end, if `placement.on_loss` says so on ever fewer machines."""
    refuse_without_cuda(loaded.config.engine.device)
    set_up_cuda()
    lost: set[str] = set()
    while True:
        try:
            with deployed(loaded, place, directory.path, lost) as deployment:
                return _train_on(deployment, directory, place, host, started=started, checkpoint=checkpoint)
        except MachineLost as error:
            if loaded.config.placement.on_loss is OnLoss.fail:
                raise
            lost.add(error.machine)
            checkpoint = _newest(directory.path, checkpoint)
            where = "the start, since nothing was saved yet" if checkpoint is None else str(checkpoint.place)
            show(directory, f"warning: {error}\nnote: placement.on_loss is resume: continuing from {where}", host)


def _train_on(
    deployment: Deployment,
    directory: RunDir,
    place: RankInfo,
    host: ProgramInfo,
    *,
    started: float,
    checkpoint: Found | None,
) -> Ending:
    loaded, place = deployment.loaded, deployment.place or place
    for line in machines(deployment.plan):
        show(directory, line, host)
    if host.progress:
        say(f"  {'starting':<11}simulators and torch, a few seconds ...")
    with lending(place) as lender, leading(deployment, place, directory.path, checkpoint, lender) as ranks:
        if host.progress and is_large(loaded.config.model):
            say(f"  {'planning':<11}the memory of a large model, up to a minute ...")
        fitted = fit(loaded, place, directory.path)
        for line in fitted.lines:
            show(directory, line, host)
        if ranks is not None:
            ranks.broadcast_from_rank0(choices_of(fitted.loaded))
        with open_runner(
            fitted.loaded,
            directory,
            started=started,
            checkpoint=checkpoint,
            place=place,
            ranks=ranks,
            simulators=deployment.simulators_here,
            start_workers=lambda: RolloutWorkers(deployment, lender),
            host=host,
        ) as runner:
            # Before anything is closed: what has ended by itself can then still be told from what we end.
            with deployment.naming_losses():
                exit_code = runner.run()
            summary, spec = runner.summary(), runner.rollouts.spec
    show(directory, closing_lines(summary, directory.path), host)
    return Ending(run_dir=directory.path, exit_code=exit_code, spec=spec)


@contextmanager
def held(directory: RunDir, is_resumable: Callable[[Path], object] = published) -> Iterator[RunDir]:
    """Release a run directory at the end of a block, and write the errors of the block into its log.

    Args:
        directory: its own.
        is_resumable: whether there is something in it to continue from.

    Raises:
        DiskFull: the block could not write something.
        RunDirLostError: it could not, because the directory was deleted or moved.
    """
    try:
        with ending_without_reader():
            yield directory
    except Exception as error:
        if directory.is_lost:
            raise RunDirLostError(directory.path) from error
        go_on = shell_command("resume", directory.path) if is_resumable(directory.path) else ""
        fault = DiskFull(error, go_on) if DiskFull.is_why(error) else error
        try:
            directory.note(without_controls(f"failed: {fault}"))
        except OSError as unwritten:  # must not hide why
            fault.add_note(f"(Nor could {LOG_FILE} be written: {unwritten.strerror}.)")
        if fault is not error:
            raise fault from error
        raise
    except (Interrupted, KeyboardInterrupt) as error:
        directory.note(str(error) or "stopped by SIGINT, at once")
        raise
    finally:
        directory.close()


def show(directory: RunDir, text: str, host: ProgramInfo) -> None:
    """Write text to run.log, and to the screen if the host shows progress."""
    if host.progress:
        say(text)
    directory.note(without_controls(text))


def is_over(manifest: Manifest, config: Config) -> bool:
    """Return whether a run has nothing left to do: it has done all iterations or is good enough, and was evaluated."""
    success, target = manifest.metrics.get("eval/success_once"), config.run.stop_at_success
    enough = manifest.iteration >= config.run.iterations or (target is not None and (success or 0.0) >= target)
    return "eval/return" in manifest.metrics and enough


def refuse_another_run(saved: Config, wanted: Config) -> None:
    """Compare the settings of a checkpoint with those that the run is to continue with.

    Raises:
        ChangeError: some that make it a different run have changed; names them.
    """
    plain = to_plain(wanted)
    single = [dotted(path) for path in all_paths(Config, plain) if is_resumable(Config, plain, path)]
    changed = {
        key: values
        for key, values in differences(saved, wanted).items()
        if key in FIXED or not (key.startswith(RESUMABLE) or key in single)
    }
    if changed:
        texts = [f"{key} = {now!r} (it was {before!r})" for key, (before, now) in changed.items()]
        back = [f"{key} back to {before!r}" for key, (before, _) in changed.items()]
        free = [*(key.rstrip(".") for key in RESUMABLE), *single]
        raise ChangeError(
            f"{', '.join(texts)} cannot change when a run continues: set {', '.join(back)}, or start a new run (only "
            f"{', '.join(free)} may change)"
        )


def closing_lines(summary: dict[str, Any], run_dir: Path) -> str:
    """Return the last lines on the screen: the result, and commands for the next step."""
    found = [metrics.get("eval/success_once") for _, metrics in sorted_evaluations(summary)]
    rates = ["-" if rate is None else f"{rate:.2f}" for rate in found]
    if len(rates) > SHOWN_RATES:
        rates = [*rates[:1], "...", *rates[1 - SHOWN_RATES :]]
    success = f"   success {' -> '.join(rates)}" if rates else ""
    stopped = summary["stopped_by"]
    steps = [
        shell_command("eval", run_dir),
        shell_command("resume", run_dir, f"run.iterations={2 * summary['iterations']}"),
    ]
    if (run_dir / TENSORBOARD).is_dir():
        steps.append(f"tensorboard --logdir {shlex.quote(str(run_dir))}")
    if stopped is not None:
        steps = [shell_command("resume", run_dir)]
    page = run_dir / REPORT_FILE
    report = f"report: {page}\n" if page.is_file() else ""  # tracking.report is false, or a warning said why
    return (
        f"{'done' if stopped is None else f'stopped by {stopped}, saved'} in {summary['wall_s']:.1f} s   "
        f"{counted(summary['env_steps'], 'env step')}, {summary['env_steps_per_s']:,.0f} per second{success}\n"
        f"{report}"
        "next: " + "\n      ".join(steps)
    )


def header(loaded: LoadedConfig, run_dir: Path) -> str:
    """Return the lines before the first iteration."""
    config = loaded.config
    alone = config.algorithm.needs(config).alone
    report = "report.html, " if config.tracking.report else ""
    written = (
        f"metrics.jsonl, {written_by(config, run_dir).name}/" if alone else f"metrics.jsonl, checkpoints/, {report}..."
    )
    rows = [
        ("config", f"OK  {loaded.values} values, 0 faults   seed {config.seed}   (--print-config shows them)"),
        ("machine", machine(config)),
        ("placement", "this process alone, without simulators" if alone else placement(config)),
        ("model", model(config)),
        ("simulator", simulator(config)),
        *(("", f"note: {note}") for note in loaded.notes),
        ("algorithm", config.algorithm.describe(config)),
        ("output", f"{run_dir}/  ({written})"),
    ]
    if code := code_of_its_own(config):
        rows.insert(-1, ("plug-ins", ", ".join(f"{name} ({where_from(name)})" for name in code)))
        if not can_sign():
            rows.insert(-1, ("", f"no key can be kept in {KEY_PLACE}, so resume and eval will need --trust"))
    if config.model.checkpoint and (unread := unread_note(Path(config.model.checkpoint))):
        rows.insert(4, ("", without_controls(f"note: {unread}")))
    if changed := other_options(config.model):
        rows.insert(4, ("", f"the checkpoint was saved with other options: {', '.join(changed)}"))
    title = f"embodyrl {__version__}   run {config.run.name}   ({loaded.source})"
    return loaded.hide("\n".join([title, *(f"  {name:<11}{text}" for name, text in rows)]))


def machine(config: Config) -> str:
    """Return the row on the cores that this process may use, memory, and the policy's device and precision."""
    device = config.engine.device
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    gpu, why_not = has_nvidia_gpu(), why_no_cuda()
    precision = computes_in(config, on_gpu=_is_on_gpu(config))
    if device is Device.auto and why_not is None:
        place = f"policy on CUDA, {precision} (auto)"
    elif device is Device.auto:
        place = f"policy on the CPU, {precision} (auto: {why_not if gpu else 'no NVIDIA GPU'})"
    else:
        place = f"policy on {device.value}, {precision}"
    return f"{counted(cores, 'usable core')}, {memory:.0f} GiB, {'NVIDIA GPU' if gpu else 'no GPU'} -> {place}"


def computes_in(config: Config, *, on_gpu: bool) -> str:
    """Predict the data type of forward passes without loading the policy; see `engine.compute.choose_precision`."""
    wanted = config.engine.precision
    if wanted is not Precision.auto:
        return wanted.value
    large = on_gpu and fact(SupportedModel, config.model.name, "blocks")
    return "bfloat16" if large or _held_in(config, on_gpu=on_gpu) == "bfloat16" else "float32"


def _is_on_gpu(config: Config) -> bool:
    return config.engine.device is not Device.cpu and why_no_cuda() is None


def _held_in(config: Config, *, on_gpu: bool) -> str | None:
    """Return the data type of the weights, if the model has an option for it."""
    if not hasattr(config.model, "dtype"):
        return None
    return weight_type(config.model, precision=config.engine.precision, gpu=on_gpu)


def placement(config: Config) -> str:
    """Return the row on rollout workers, ranks, simulator processes and NUMA nodes; of machines elsewhere, what the
    settings say of them."""
    if config.placement.backend is PlacementBackend.ray:
        return _on_cluster(config)
    here, place, envs = inventory(), rank_info_here(config), config.env.num_envs
    if count := config.placement.rollout.workers:
        plan = plan_run(config, [Machine(inventory=here)], place.size)
        simulators = counted(len(plan.role("env")) // count, "simulator process")
        learning = f"learning in {counted(place.size, 'rank')}; {describe_run_binding(config.env.numa, here, plan)}"
        each = f"{', each' if count > 1 else ''} with {counted(envs // count, 'env')}"
        if config.rollout.mode is RolloutMode.async_:
            learning = f"{config.rollout.max_staleness} ahead of {learning}"
        return f"{counted(count, 'rollout worker')}{each} in {simulators}; {learning}"
    near = policy_gpu(config.engine.device, here)
    workers = plan_env_workers(own_share(config.env, place, here), here, near)
    ranks = "" if place.size == 1 else f"{place.size} ranks, each with {counted(envs // place.size, 'env')} in "
    processes = counted(len(workers), "simulator process")
    return f"{ranks}{processes}; {describe_binding(config.env.numa, here, workers, near)}"


def _on_cluster(config: Config) -> str:
    """Return what is known of a run on a cluster before this is joined."""
    placement, ranks = config.placement, rank_info_here(config).size
    workers = placement.rollout.workers
    parts = [(counted(ranks, "rank"), placement.ranks.nodes)]
    parts += [(counted(workers, "rollout worker"), placement.rollout.nodes)] * (workers > 0)
    parts += [("simulators", placement.simulators.nodes)] * (placement.simulators.nodes is not None)
    said = ", ".join(name + ("" if label is None else f" on {label!r}") for name, label in parts)
    return f"Ray at {placement.address}: {said}"


def machines(plan: Plan) -> list[str]:
    """Return a row for each machine of a run on several, with its processes."""
    if not plan.is_spread:
        return []
    rows = []
    for machine in plan.machines:
        specs = [spec for spec in plan.specs if spec.machine == machine.name]
        roles = [spec.title for spec in specs if spec.role in ("rank", "rollout")]
        roles += [f"simulators of {plan.acting[spec.rank].title}" for spec in specs if spec.role == "simulators"]
        simulators = sum(spec.role == "env" for spec in specs)
        roles += [counted(simulators, "simulator process")] * (simulators > 0)
        rows.append(f"  {'processes':<11}{machine.name}: {', '.join(roles) or 'none'}")
    return rows


def model(config: Config) -> str:
    """Return the row on the policy: name, origin, and the data type of its weights."""
    origin = "random weights" if config.model.checkpoint is None else f"weights from {config.model.checkpoint}"
    held = _held_in(config, on_gpu=_is_on_gpu(config))
    return f"{config.model.name}, {origin}" + (f" held in {held}" if held else "")


def simulator(config: Config) -> str:
    """Return the row on tasks, cameras and envs."""
    env = config.env
    more = f" and {counted(len(env.tasks) - SHOWN_TASKS, 'other task')}" if len(env.tasks) > SHOWN_TASKS else ""
    frames = f", {env.frames} frames" if env.frames > 1 else ""
    size = "x".join(map(str, env.image_size))
    images = f"   cameras {', '.join(env.cameras)} ({size}{frames})" if env.cameras else ""
    return (
        f"{env.name} {', '.join(env.tasks[:SHOWN_TASKS])}{more}{images}   {counted(env.num_envs, 'env')}, "
        f"{_episodes(env.known_time_limit)}{perturbed(env.perturb)}"
    )


def _episodes(limit: int | None) -> str:
    """Describe episodes by their time limit [control steps]; None: it is not known yet."""
    if limit is None:
        return "episodes as long as the simulator says"
    return "episodes without a time limit" if limit == MOST_EPISODE_STEPS else f"episodes of {counted(limit, 'step')}"
