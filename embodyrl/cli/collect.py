"""`embodyrl collect`: records demonstrations."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.cli.arguments import ImageFormat, Keep, check_place
from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Observe
from embodyrl.errors import UserError
from embodyrl.hub import is_hub_name
from embodyrl.registry import EXPERTS
from embodyrl.screen import counted, say, showing, task
from embodyrl.servers import is_url

if TYPE_CHECKING:
    from embodyrl.config.issues import KeyPath
    from embodyrl.data.experts import Demonstrator
    from embodyrl.data.recorder import Attempt
    from embodyrl.envs.manager import Simulators

ATTEMPTS_PER_EPISODE = 20
"""Most attempts per requested episode."""


class RequestError(UserError):
    """Raised when the request cannot be recorded; nothing was started."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line, see `embodyrl collect --help`."""

    out: Path
    episodes: int
    keep: Keep
    policy: Path | str | None
    """Checkpoint of the policy to record, or the URL of its server; None: the scripted expert."""
    sample: bool
    pushes: float
    after_success: int
    images: ImageFormat


def checkpoint_of(policy: str | Path | None) -> Path | None:
    """Return the checkpoint that `--policy` names; None without it, or if it is the URL of a server.

    Raises:
        UserError: there is no checkpoint.
    """
    if policy is None or is_url(policy):
        return None
    from embodyrl.runner.checkpoint import find_and_tell, to_act

    return find_and_tell(Path(policy), to_act)


def not_needed(checkpoint: Path | None) -> Sequence[KeyPath]:
    """Return the settings that recording does not use: it reads no dataset and evaluates nothing, and neither the
    scripted expert nor a checkpoint needs the files of the config's model."""
    from embodyrl.runner.rundir import SOURCES, sources_not_needed

    return [
        ("data", "path"),
        ("eval", "episodes"),
        *(SOURCES if checkpoint is None else sources_not_needed(checkpoint)),
    ]


def destination(loaded: LoadedConfig, out: Path | None) -> Path:
    """Return the folder of the recording: `--out`, else data.path, where a config that learns from it reads.

    Raises:
        RequestError: both are missing.
        CommandLineError: nothing can be made there.
    """
    path = loaded.config.data.path
    if out is None and (is_hub_name(path) or ("data", "path") in loaded.from_hub):
        raise RequestError("data.path is on the hub, where nothing is recorded: give --out DIR")
    if out is None and path is None:
        raise RequestError(f"nothing says where to write: give --out DIR, since data.path is null in {loaded.source}")
    place = out or Path(str(path))
    check_place(place, "--out")
    return place


def collect(loaded: LoadedConfig, options: Options) -> int:
    """Record demonstrations; returns the exit code."""
    _check(loaded, options)

    from embodyrl.data.layout import Images
    from embodyrl.data.recorder import Recorder, dataset_spec, demonstration_episodes
    from embodyrl.data.writer import DatasetWriter
    from embodyrl.runner.stopping import Stopper

    config = loaded.config
    episodes = demonstration_episodes(config.env, config.seed)
    most = options.episodes if options.keep is Keep.all else ATTEMPTS_PER_EPISODE * options.episodes
    say(_title(loaded, options))
    with (
        opened(loaded, options) as (manager, demonstrator),
        Stopper(unit="the episodes under way") as stopper,
        showing(),
        task("recording", options.episodes, "episodes") as progress,
    ):
        spec = dataset_spec(
            config.env,
            manager,
            demonstrator,
            images=Images(options.images.value),
            perturbed=options.pushes > 0,
        )
        recorder = Recorder(
            manager,
            demonstrator,
            pushes=options.pushes,
            after_success=options.after_success,
            seed=config.seed,
        )
        count = _Count()
        with (
            DatasetWriter(options.out, spec, perturb=config.env.perturb) as writer,
            closing(recorder.record(episodes[:most])) as attempts,
        ):
            for attempt in attempts:
                kept = attempt.success or options.keep is Keep.all
                if kept:
                    writer.add(attempt.episode)
                count.note(attempt, kept)
                progress.done = count.kept
                progress.note = f"{count.successes} of {count.played} successful"
                if stopper.agree() or count.kept == options.episodes:
                    break
    say(count.closing(options, _next(loaded, options), stopped=stopper.stopped_by is not None))
    if count.kept < options.episodes and stopper.stopped_by is None:
        raise UserError(
            f"only {count.kept} of {counted(options.episodes, 'episode')} recorded, in {count.played} attempts "
            f"(successes: {count.successes}): use --keep all, a better demonstrator, or a larger env.start_states"
        )
    return stopper.exit_code


def _check(loaded: LoadedConfig, options: Options) -> None:
    """Check the request before anything starts."""
    env = loaded.config.env
    if options.out.exists():
        raise RequestError(f"{options.out} exists already and is never overwritten: name another folder, or remove it")
    if options.policy is None and env.name not in EXPERTS:
        raise RequestError(
            f"simulator {env.name!r} has no scripted expert (those that have one: {', '.join(EXPERTS.names())}): "
            f"record a policy with --policy CHECKPOINT"
        )
    if options.policy is None and (refusal := EXPERTS.entry(env.name).cannot_play(env.tasks)) is not None:
        raise RequestError(f"{refusal}; record a policy with --policy CHECKPOINT, or other tasks")
    if options.policy is not None and env.frames > 1:
        raise RequestError(
            f"--policy {options.policy} reads env.frames = {env.frames} images of its last decisions, and a recording "
            "has none between them: record the scripted expert, or a policy that reads one"
        )
    if options.sample and is_url(options.policy):
        raise RequestError(
            f"--sample draws actions from a policy's distribution, which the server at {options.policy} does not tell: "
            "leave it out"
        )
    if options.sample and options.policy is None:
        raise RequestError("--sample draws the actions of a policy: give one with --policy, or leave it out")
    possible = env.start_states * len(env.tasks)
    if options.episodes > possible:
        raise RequestError(
            f"--episodes {options.episodes} is more than the {possible} training episodes that there are "
            f"({len(env.tasks)} tasks x env.start_states = {env.start_states}): ask for fewer, or "
            f"raise env.start_states"
        )


@contextmanager
def opened(loaded: LoadedConfig, options: Options) -> Iterator[tuple[Simulators, Demonstrator]]:
    """Open the simulators and the demonstrator: the scripted expert or a policy."""
    from embodyrl.data.experts import scripted_expert
    from embodyrl.runner.build import build_acting, open_simulators
    from embodyrl.runner.checkpoint import POLICY

    config = loaded.config
    weights = options.policy / POLICY if isinstance(options.policy, Path) else None
    expert = scripted_expert(config.env) if options.policy is None else None
    single = dataclasses.replace(config.rollout, chunk_size=1, observe=Observe.chunk_end)
    whole = dataclasses.replace(config.eval, actions=None, ensemble=None)
    # Every step is recorded, so that the images before it are those of the rows before.
    env = dataclasses.replace(expert.env if expert else config.env, frames=1)
    shown = dataclasses.replace(config, env=env, rollout=single, eval=whole)
    with (
        tempfile.TemporaryDirectory() as logs,
        open_simulators(dataclasses.replace(loaded, config=shown), Path(logs), policy=expert is None) as manager,
    ):
        if expert is not None:
            yield manager, expert
            return

        from embodyrl.runner.playing import PolicyDemonstrator

        engine = build_acting(config, manager, weights)
        with closing(engine.policy), engine.rollout_mode():
            yield manager, PolicyDemonstrator(config.env, engine, "train" if options.sample else "eval")


def _title(loaded: LoadedConfig, options: Options) -> str:
    from embodyrl.envs.perturb.kinds import perturbed

    env = loaded.config.env
    who = f"policy {options.policy}" if options.policy else f"the scripted expert of {env.name}"
    what = "successful episodes" if options.keep is Keep.successes else "episodes"
    more = f" and {counted(len(env.tasks) - 3, 'other task')}" if len(env.tasks) > 3 else ""
    tasks = ", ".join(env.tasks[:3]) + more
    return (
        f"recording {options.episodes} {what} of {tasks} by {who}{perturbed(env.perturb)}   seed {loaded.config.seed}"
    )


@dataclass(kw_only=True)
class _Count:
    """Counts of episodes so far, for the screen."""

    played: int = 0
    successes: int = 0
    kept: int = 0
    frames: int = 0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def note(self, attempt: Attempt, kept: bool) -> None:
        """Count an attempt."""
        self.played += 1
        self.successes += attempt.success
        self.kept += kept
        self.frames += len(attempt.episode) * kept

    def closing(self, options: Options, following: str, *, stopped: bool) -> str:
        """Return the last lines of the screen output, with the command that follows."""
        seconds = time.monotonic() - self._started
        rate = f"{self.successes} of {self.played} attempts successful ({self.successes / max(self.played, 1):.0%})"
        start = "stopped" if stopped else "done"
        if not self.kept:
            return f"{start} in {seconds:.1f} s   nothing to keep, {rate}"
        return (
            f"{start} in {seconds:.1f} s   {counted(self.kept, 'episode')}, {counted(self.frames, 'frame')}, {rate}\n"
            f"written to {options.out}\n"
            f"next: {following}"
        )


def _next(loaded: LoadedConfig, options: Options) -> str:
    """Return the command that learns from the recording: of the same config, if it learns from demonstrations."""
    learner = shlex.quote(loaded.source.removeprefix("experiment/"))
    what = "CONFIG algorithm=sft" if loaded.config.data.path is None else learner
    return f"embodyrl run {what} {shlex.quote(f'data.path={options.out}')}"
