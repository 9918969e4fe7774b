"""embodyrl from Python: train, resume, sweep, evaluate, check, load a policy, step simulators."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import yaml

from embodyrl.config import ConfigError, ConfigUse, LoadedConfig, list_options, to_plain
from embodyrl.config.files import list_experiments
from embodyrl.config.infos import simulator_info
from embodyrl.config.issues import KeyPath, Location
from embodyrl.config.load import load_config as load_file
from embodyrl.config.plugins import TRAINING_FILE
from embodyrl.config.rules import Rule
from embodyrl.config.schema import Config
from embodyrl.config.values import escape
from embodyrl.envs import SimulatorSpec
from embodyrl.errors import RunError, UserError, did_you_mean, is_debugging, without_controls
from embodyrl.hub import Kind, fetch, is_hub_name, parse
from embodyrl.models.remote.options import model_at
from embodyrl.models.saved import from_own_folder
from embodyrl.registry import PYAV
from embodyrl.runner.build import ProgramInfo, SpecOnly, build_acting, open_simulators, settings_of_torch_kept
from embodyrl.runner.callbacks import check_callbacks
from embodyrl.runner.checkpoint import MANIFEST, POLICY, Manifest, Needs, find, to_act, to_verify
from embodyrl.runner.rundir import SOURCES, read_config, read_saved, refuse_other_than_run
from embodyrl.runner.session import Ending, go_on, start
from embodyrl.runner.start_rules import start_rules
from embodyrl.runner.stopping import raise_interrupt
from embodyrl.runs import CONFIG_FILE, METRICS_FILE, REPORT_FILE, ROBUSTNESS
from embodyrl.runs.metrics import read_rows
from embodyrl.runs.record import read_summary, sorted_evaluations
from embodyrl.runs.robustness import Robustness
from embodyrl.screen import counted, say, showing
from embodyrl.servers import is_url
from embodyrl.serving.options import ServeOptions
from embodyrl.sweeps.axes import Seeds
from embodyrl.sweeps.folder import SweepError, is_sweep, read_plan
from embodyrl.sweeps.results import Results, read_results
from embodyrl.sweeps.session import SweepEnding, SweepOptions
from embodyrl.sweeps.session import go_on as go_on_with_sweep
from embodyrl.sweeps.session import start as start_sweep
from embodyrl.tracking.report import write_report

if TYPE_CHECKING:  # these import torch
    from embodyrl.checking.promises import Finding
    from embodyrl.evaluation.journal import Command
    from embodyrl.evaluation.results import Comparison
    from embodyrl.evaluation.study import Load
    from embodyrl.evaluation.verification import Verification
    from embodyrl.runner.evaluation import Evaluation
    from embodyrl.runner.playing import Envs, LoadedPolicy
    from embodyrl.runner.vector import GymnasiumEnvs
    from embodyrl.serving.server import PolicyServer

ConfigSource = str | Path | Mapping[str, Any] | Config | LoadedConfig
"""A config: a YAML file, the name of a shipped experiment, a dict like the contents of such a file, or a loaded config.
"""
RECORDED_EPISODES = 4
"""Episodes on a video of an evaluation if the config records none."""
APIS = ("embodyrl", "gymnasium")
"""Shapes in which `make_envs` offers simulators."""
IN_PYTHON = "config"
"""Name in messages of a config that is no file."""


P = ParamSpec("P")
R = TypeVar("R")


def for_users(function: Callable[P, R]) -> Callable[P, R]:
    """Let errors whose text says everything leave a function without the frames of this package, and without the errors
    that they were made of: the text, with a simulator's own traceback if it has one, is what there is to read.
    `EMBODYRL_DEBUG=1` keeps both."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (UserError, RunError) as error:
            if is_debugging():
                raise
            raise error.with_traceback(None) from None

    return call


class Run:
    """A run: its metrics and its policy, read from its directory on first use.

    Args:
        path: the run directory.

    Raises:
        UserError: it is none; the text names one that is near.
    """

    path: Path
    _rows: Sequence[dict[str, float]] = ()
    _spec: SimulatorSpec | None = None
    _is_own = False

    @for_users
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if is_sweep(self.path):
            raise UserError(f"{path} is a sweep of several runs: open it with embodyrl.Sweep({str(path)!r})")
        refuse_other_than_run(self.path)
        if (self.path / MANIFEST).exists():
            run_dir = self.path.resolve().parents[1]
            raise UserError(f"{path} is a checkpoint: open its run with embodyrl.Run({str(run_dir)!r})")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """One row per iteration, with `iteration`; also one for the evaluation before training (iteration 0), and one
        for an evaluation that was made after a resume because a signal had left it out. In rows of an earlier process
        NaN also stands for infinity, which JSON cannot hold. Without the sink `jsonl` there are only rows of this
        process."""
        own, (earlier, _) = list(self._rows), read_rows(self.path / METRICS_FILE)
        first = max(0, len(earlier) - len(own))
        if [row["iteration"] for row in earlier[first:]] == [row["iteration"] for row in own]:
            earlier = earlier[:first]  # the rest of the file is what this process wrote
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in earlier] + own

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json: name, iterations, env_steps, wall_s, seed, versions, `evaluations` by iteration ...

        Raises:
            SummaryError: it is missing or damaged.
        """
        return read_summary(self.path)

    @property
    def stopped_by(self) -> str | None:
        """Cause of a stop before the end: `callback`, the name of a signal, or None."""
        found: str | None = self.summary.get("stopped_by")
        return found

    @property
    def evaluation(self) -> Evaluation | None:
        """The last evaluation; None if there was none."""
        from embodyrl.runner.evaluation import Evaluation

        if not (evaluations := sorted_evaluations(self.summary)):
            return None
        iteration, metrics = evaluations[-1]
        seconds = [row["time/eval"] for row in self.metrics if row["iteration"] == iteration and "time/eval" in row]
        return Evaluation.of(metrics, seconds[-1] if seconds else math.nan)

    @cached_property
    def policy(self) -> LoadedPolicy:
        """The policy of the last checkpoint, loaded on first use."""
        return _load(*_saved(self.path, (), None, trust=self._is_own, progress=False), self._spec)


class Sweep:
    """Several runs of one config: the runs and their results, read from their folder on first use.

    Args:
        path: the folder of the sweep.

    Raises:
        UserError: it is none, or damaged; the text names one that is near.
    """

    path: Path

    @for_users
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_sweep(self.path) and (self.path / CONFIG_FILE).is_file():
            raise SweepError(f"{path} is no sweep but a single run: open it with embodyrl.Run({str(path)!r})")
        self._plan = read_plan(self.path)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @cached_property
    def _results(self) -> Results:
        return read_results(self.path, self._plan)

    @property
    def runs(self) -> list[Run]:
        """The runs that have results, in the order of the sweep."""
        return [Run(self.path / run.point.name) for run in self._results.runs if run.summary]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, as in runs.csv: its folder (`run`), settings, state, and its last evaluation."""
        return [run.row() for run in self._results.runs]

    @property
    def summary(self) -> list[dict[str, Any]]:
        """A row for each setting, as in settings.csv: mean and 95 % interval of success and return over the seeds that
        have finished."""
        return [setting.row() for setting in self._results.settings]

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of `summary` with the highest mean success, at equal success the highest return; None if there is one
        setting, or none has finished."""
        found = self._results.best
        return None if found is None else found.row()

    @property
    def report(self) -> Path | None:
        """The page with all runs side by side; None if there is none yet."""
        page = self.path / REPORT_FILE
        return page if page.is_file() else None


@for_users
def train(
    config: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    progress: bool = False,
    callbacks: Sequence[object] = (),
    trust: bool = False,
) -> Run:
    """Train from the start, as `embodyrl run` does.

    Args:
        config: see `ConfigSource`.
        overrides: settings to change, as on the command line: `["seed=3", "env=gym/pendulum"]`.
        progress: print what the command line prints.
        callbacks: called after iterations and evaluations; may stop the run. See `Callback`.
        trust: run the plug-ins of a config from somebody else's run.

    Raises:
        UserError: the user can fix the cause, which the text names; `ConfigError` lists every issue of the config.
        RunError: the run cannot continue.
        KeyboardInterrupt: Ctrl-C; the iteration was finished and saved. A second one, 2 s later, does not wait.
        SystemExit: SIGTERM, SIGHUP or SIGUSR1, in the same way, with the code 128 + number of the signal.
    """
    check_callbacks(callbacks)
    rows = Rows()
    loaded = load_config(config, overrides, use=ConfigUse.run, trust=trust)
    return _run(start(loaded, _host(progress, rows, callbacks)), rows)


@for_users
def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    without_replay: bool = False,
    progress: bool = False,
    callbacks: Sequence[object] = (),
    trust: bool = False,
) -> Run:
    """Continue a run from its last checkpoint, as `embodyrl resume` does.

    Args:
        run_dir: the run directory.
        overrides: settings to change, e.g. `["run.iterations=160"]`.
        without_replay: continue with an empty replay, where the files of the saved one are damaged. The policy acts
            until there are `algorithm.off_policy.replay.start_after` decisions again.
        progress, callbacks, trust: see `train`.

    Raises:
        UserError, RunError, KeyboardInterrupt, SystemExit: see `train`.
    """
    check_callbacks(callbacks)
    rows = Rows()
    host = _host(progress, rows, callbacks)
    ending = go_on(Path(run_dir), _checked(overrides), without_replay=without_replay, trust=trust, host=host)
    return _run(ending, rows)


@for_users
def sweep(
    config: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    seeds: int | Sequence[int] | None = None,
    at_once: int | None = None,
    progress: bool = False,
    trust: bool = False,
) -> Sweep:
    """Run every combination of settings with several values, and seeds, as `embodyrl run --seeds` does. Each run is a
    process of its own.

    Args:
        config: see `ConfigSource`.
        overrides: settings, some with several values: `["algorithm.loss.clip_high=0.2,0.28"]`.
        seeds: their number, from the config's own on, or a list of them.
        at_once: number of runs at once; None: as many as the machine has room for.
        progress, trust: see `train`.

    Raises:
        RunError: runs failed, which the text names; the others have finished, and `Sweep(path)` has their results.
        UserError, KeyboardInterrupt, SystemExit: see `train`; a signal stops all runs.
    """

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(config, more, use=ConfigUse.run, also=[start_rules], trust=trust)

    options = SweepOptions(at_once=_count(at_once, "at_once"), trust=trust)
    return _sweep(start_sweep(load, _checked(overrides), seeds=_seeds(seeds), options=options, host=_host(progress)))


@for_users
def resume_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    at_once: int | None = None,
    progress: bool = False,
    trust: bool = False,
) -> Sweep:
    """Continue the runs of a sweep that have not finished, as `embodyrl resume` does.

    Args:
        path: the folder of the sweep.
        overrides: settings to change in all runs, e.g. `["run.iterations=160"]`.
        at_once, progress, trust: see `sweep`.

    Raises:
        RunError, UserError, KeyboardInterrupt, SystemExit: see `sweep`.
    """
    options = SweepOptions(at_once=_count(at_once, "at_once"), overrides=_checked(overrides), trust=trust)
    return _sweep(go_on_with_sweep(Path(path), options, _host(progress)))


@for_users
def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    episodes: int | None = None,
    sample: bool = False,
    config: ConfigSource | None = None,
    video: str | Path | None = None,
    progress: bool = False,
    trust: bool = False,
) -> Evaluation:
    """Evaluate a policy on held-out start states, as `embodyrl eval` does.

    Args:
        path: a checkpoint, a run directory (its last checkpoint), `<run directory>/last` or `/best`, an exported
            policy, or one on the hub (`hf://owner/name`, as a text); with `config`, also public weights, in a folder or
            on the hub, or what a server holds (`ws://host:port`, as a text).
        overrides: settings to change, e.g. `["eval.first_start_state=20000"]`.
        episodes: their number; None: `eval.episodes`.
        sample: draw actions from the policy's distribution instead of taking the most likely ones.
        config: to evaluate public weights or the policy of a server with.
        video: path of an MP4 of the first episodes.
        progress: print what the command line prints.
        trust: run the plug-ins of a checkpoint from somebody else.

    Raises:
        UserError, RunError: see `train`.
    """
    video = _video(video)
    loaded, weights, place = _saved(path, _wanted(overrides, episodes, sample), config, trust=trust, progress=progress)

    from embodyrl.envs.perturb.kinds import perturbed
    from embodyrl.evaluation.study import Part, acting, executed_so, play_in
    from embodyrl.runner.evaluation import VideoRecorder, held_out_episodes

    settings = loaded.config
    asked = counted(settings.eval.episodes, "episode")
    how = perturbed(settings.eval.perturb) + executed_so(settings)
    _say(progress, f"evaluating {place}: {asked} of {', '.join(settings.env.tasks)}{how}")
    part = Part(loaded=loaded, weights=weights)
    with showing() if progress else nullcontext(), acting(part, functools.partial(_say, progress)) as (manager, engine):
        chosen = held_out_episodes(settings)
        if video is None:
            result = play_in(manager, engine, settings, chosen)
        else:
            recorded = chosen[: settings.tracking.video.episodes or RECORDED_EPISODES]
            with VideoRecorder(manager, video, recorded) as recorder:
                result = play_in(manager, engine, settings, chosen, video=recorder)
            _say(progress, f"recorded the first {recorder.count}: {video}")
        for line in result.lines():
            _say(progress, line)
        if result.doubt is not None:
            _say(progress, f"warning: {result.doubt}")
    return result


@for_users
def compare(
    path: str | Path,
    other: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    protocols: Sequence[str] = ("own",),
    episodes: int | None = None,
    sample: bool = False,
    config: ConfigSource | None = None,
    video: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    trust: bool = False,
) -> Comparison:
    """Evaluate a policy under several protocols, or two policies on the same episodes, as `embodyrl eval --protocol`
    and `--compare` do.

    Args:
        path: see `evaluate`.
        other: a second policy; it plays the episodes of the first. That of a server needs no `config`: it acts in the
            simulators of the first.
        overrides: settings to change, also against the protocols.
        protocols: names (`embodyrl list protocols`), paths of YAML files, or `own` for the settings of the checkpoint;
            with `other` both policies play under each.
        episodes: their number in each evaluation; None: the protocol's.
        sample: draw actions from the policy's distribution.
        config: to evaluate public weights or the policy of a server with, both if there are two such policies.
        video: path of an MP4 that shows episodes which only one of two policies solved, side by side.
        out: folder for results.json and for the episodes as they end; it must hold none yet.
        resume: play only the episodes that `out` does not hold yet, after an interruption; without any it starts.
        progress: print what the command line prints.
        trust: run the plug-ins of a checkpoint from somebody else.

    Raises:
        UserError, RunError: see `train`. A protocol that is unknown, or that the policy cannot follow, is a UserError
            before anything starts.
    """
    from embodyrl.evaluation.journal import Command
    from embodyrl.evaluation.study import Study

    if resume and out is None:
        raise UserError("resume=True continues with the episodes in a folder: name it with out=")

    def policy(named: str | Path, config: ConfigSource | None, like: str | None = None) -> tuple[str, Load]:
        place = _saved(named, (), config, trust=trust, progress=progress, like=like)[2]
        return place, lambda texts: _saved(place, texts, config, trust=trust, progress=False, again=True, like=like)[:2]

    wanted, recorded = _wanted(overrides, episodes, sample), _video(video)
    place, load = policy(path, config)
    of_run = is_url(path) and other is not None and _has_config(other)
    other_place, load_other = (None, None) if other is None else policy(other, None if of_run else config, place)
    command = Command(
        policy=place,
        other=other_place,
        overrides=wanted,
        protocols=list(protocols),
        video=None if recorded is None else str(recorded),
        **_config_named(config),
        directory=str(Path.cwd()),
    )
    folder = None if out is None else Path(out)
    study = Study(command, load, load_other, folder, goes_on=resume, say=functools.partial(_say, progress))
    with showing() if progress else nullcontext():
        return study.run()


@for_users
def robustness(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    kinds: str | None = None,
    levels: str | None = None,
    episodes: int | None = None,
    sample: bool = False,
    config: ConfigSource | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    trust: bool = False,
) -> list[Robustness]:
    """Evaluate a policy on the same episodes without and with each kind and level of perturbation, as `embodyrl eval
    --robustness` does; returns what came of each, that without perturbation first.

    Args:
        path: see `evaluate`.
        overrides: settings to change.
        kinds: of perturbation, as in `camera,light`; None: all that are possible with simulator, model and tasks.
        levels: as in `1,3,5`, which is what None stands for.
        episodes: their number in each evaluation; None: `eval.episodes`.
        sample: draw actions from the policy's distribution.
        config: to evaluate public weights or the policy of a server with.
        out: folder for results.json, the figure, a video of the worst episodes, and the episodes as they end; it must
            hold none yet. None: the folder `robustness` of a run directory; for other policies nothing is kept.
        resume: play only the episodes that `out` does not hold yet, after an interruption.
        progress: print what the command line prints.
        trust: run the plug-ins of a checkpoint from somebody else.

    Raises:
        UserError, RunError: see `train`; also that there is no such kind or level, or that it is not possible.
    """
    from embodyrl.evaluation.robustness import grid_of

    grid, own = grid_of(kinds, levels), Path(path) / ROBUSTNESS
    in_run = out is None and not is_hub_name(str(path)) and (Path(path) / METRICS_FILE).is_file()
    folder = own if in_run else None if out is None else Path(out)
    return _robustness(
        path,
        _wanted(overrides, episodes, sample),
        grid,
        folder,
        config=config,
        goes_on=resume,
        progress=progress,
        trust=trust,
    )


def resume_robustness(folder: Path, asked: Command, *, progress: bool, trust: bool) -> list[Robustness]:
    """Play the episodes that an interrupted `robustness` lacks.

    Args:
        folder: of its results.
        asked: what `read_command` returned of the folder.
        progress, trust: see `robustness`.
    """
    return _robustness(
        asked.policy,
        asked.overrides,
        asked.perturb or {},
        folder,
        config=asked.config,
        goes_on=True,
        progress=progress,
        trust=trust,
    )


def _robustness(
    path: str | Path,
    overrides: Sequence[str],
    grid: dict[str, list[int]],
    folder: Path | None,
    *,
    config: ConfigSource | None = None,
    goes_on: bool,
    progress: bool,
    trust: bool,
) -> list[Robustness]:
    from embodyrl.evaluation.journal import Command
    from embodyrl.evaluation.robustness import RobustnessStudy, degradations

    if goes_on and folder is None:
        raise UserError("resume=True continues with the episodes in a folder: name it with out=")
    place = _saved(path, (), config, trust=trust, progress=progress)[2]
    command = Command(
        policy=place,
        other=None,
        overrides=list(overrides),
        protocols=["own"],
        video=None,
        **_config_named(config),
        directory=str(Path.cwd()),
        perturb=grid,
    )
    study = RobustnessStudy(
        command,
        lambda texts: _saved(place, texts, config, trust=trust, progress=False, again=True)[:2],
        folder,
        goes_on=goes_on,
        say=functools.partial(_say, progress),
    )
    with showing() if progress else nullcontext():
        found = degradations(study.run())
    if folder is None:
        _say(progress, "nothing was kept: to get results.json, the figure and a video, add --out DIR")
    elif folder.name == ROBUSTNESS and (report := folder.parent / REPORT_FILE).is_file():
        write_report(folder.parent)
        _say(progress, f"report: {report}")
    return found


@for_users
def steps_of_delay(
    path: str | Path,
    milliseconds: float,
    overrides: Sequence[str] = (),
    *,
    config: ConfigSource | None = None,
    trust: bool = False,
) -> int:
    """Return the control steps that the simulator of a policy makes in some time, rounded up, for `eval.delay`.

    Args:
        path, overrides, config, trust: see `evaluate`.
        milliseconds: from an observation to the first action of the chunk [ms].

    Raises:
        UserError: the simulator does not say how many steps it makes in a second before it runs.
    """
    env = _saved(path, _checked(overrides), config, trust=trust, progress=False)[0].config.env
    frequency = simulator_info(env.name).control_frequency(env)
    if frequency is None:
        raise UserError(
            f"simulator {env.name!r} does not say how many control steps it makes in a second before it runs: give "
            "the delay in control steps, eval.delay=N"
        )
    return math.ceil(milliseconds / 1000.0 * frequency - 1e-9)


def _wanted(overrides: object, episodes: int | None, sample: bool) -> list[str]:
    """Return overrides of an evaluation with those that have arguments of their own.

    Raises:
        PerturbationError: they perturb training episodes, which would do nothing.
    """
    count, named = [] if episodes is None else [f"eval.episodes={episodes}"], _checked(overrides)
    for text in named:
        if text.partition("=")[0].strip().split(".")[:2] == ["env", "perturb"]:
            from embodyrl.evaluation.robustness import PerturbationError

            raise PerturbationError(
                f"{text}: this perturbs training episodes, and an evaluation plays none: write eval.perturb, or "
                "measure each kind with --robustness (embodyrl.robustness)"
            )
    return [*named, *count, *(["eval.sample=true"] if sample else [])]


def _video(path: str | Path | None) -> Path | None:
    if path is not None and Path(path).suffix != ".mp4":
        raise UserError(f"video {path}: videos are MP4 files, so name one that ends in .mp4")
    if path is not None:
        PYAV.load(f"video {path}: videos are written")  # not after hours of episodes
    folder = None if path is None else Path(path).parent
    if folder is not None and not folder.is_dir():
        raise UserError(f"video {path}: there is no folder {folder} - run: mkdir -p {folder}")
    return None if path is None else Path(path)


@for_users
def verify(path: str | Path, *, episodes: int | None = None, trust: bool = False) -> Verification:
    """Compare what a run recorded with what this machine gives now, as `embodyrl verify` does.

    Args:
        path: a checkpoint, a run directory (its last checkpoint) or an exported policy.
        episodes: episodes of its evaluation to play again, 0: none; None: a few where a layer differs, else none.
        trust: see `evaluate`.

    Raises:
        LockError: there is no lock, it is damaged, or it belongs to something else.
        UserError, RunError: see `train`.
    """
    loaded, weights, place = _saved(path, (), None, trust=trust, progress=False, needs=to_verify)

    from embodyrl.evaluation.verification import verify as compare
    from embodyrl.runner.reproduction import Lock, find_lock

    lock = find_lock(Path(place))
    return compare(loaded, weights, Lock.load(lock), lock, episodes)


@for_users
def write_lock(path: str | Path, *, trust: bool = False) -> Path:
    """Play the evaluation of a saved policy and write a lock of what this machine gives, as `embodyrl verify --write`
    does; returns its path: beside a checkpoint, which does not change, or in the folder of an exported policy.

    Args:
        path, trust: see `verify`.

    Raises:
        LockError: a lock was written there before.
        UserError, RunError: see `train`.
    """
    loaded, weights, place = _saved(path, (), None, trust=trust, progress=False)

    from embodyrl.evaluation.verification import write
    from embodyrl.runner.reproduction import LOCK_FILE, LockError, place_beside

    folder = Path(place)
    is_checkpoint = weights is not None
    lock = place_beside(folder) if is_checkpoint else folder / LOCK_FILE
    if lock.exists():
        raise LockError(f"{lock} exists already and is never overwritten: remove it, or compare with it")
    write(loaded, weights, lock, Manifest.read(folder).iteration if is_checkpoint else 0)
    return lock


@for_users
def check(
    config: ConfigSource | None,
    overrides: Sequence[str] = (),
    *,
    timeout_s: float = 60.0,
    progress: bool = False,
    trust: bool = False,
) -> list[Finding]:
    """Try what the simulator and the model of a config promise, as `embodyrl check` does; returns what came of each
    promise, those that are broken with `state == "FAIL"`.

    Args:
        config, overrides: see `train`.
        timeout_s: longest time for one promise [s].
        progress: print each as soon as it is known.
        trust: see `train`.

    Raises:
        ConfigError: the config has faults, which come first.
        UserError, RunError: see `train`.
    """
    from embodyrl.checking.examination import examine

    loaded = load_config(config, overrides, use=ConfigUse.run, trust=trust)
    findings = []
    for finding in examine(loaded, timeout_s):
        findings.append(finding)
        _say(progress, str(finding))
    return findings


@for_users
def load_policy(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    config: ConfigSource | None = None,
    envs: Envs | None = None,
    trust: bool = False,
) -> LoadedPolicy:
    """Load a policy to act with.

    Args:
        path, overrides, config, trust: see `evaluate`.
        envs: simulators to act in. None: one is started for a moment to read its spec.

    Raises:
        UserError, RunError: see `train`.
    """
    loaded, weights, _ = _saved(path, _checked(overrides), config, trust=trust, progress=False)
    return _load(loaded, weights, path, None if envs is None else envs.spec)


@for_users
def serve(
    policy: LoadedPolicy | str | Path,
    overrides: Sequence[str] = (),
    *,
    host: str = ServeOptions.host,
    port: int = ServeOptions.port,
    protocol: str = ServeOptions.protocol,
    keys: Mapping[str, str] | None = None,
    resize: bool = False,
    token: str | None = None,
    sample: bool = ServeOptions.sample,
    seed: int | None = ServeOptions.seed,
    max_batch: int = ServeOptions.max_batch,
    wait_ms: float = ServeOptions.wait_ms,
    trust: bool = False,
) -> PolicyServer:
    """Let a policy act for robots and benchmarks over the network, as `embodyrl serve` does: from a thread of its own,
    within a `with` block.

    Args:
        policy: loaded, or a path as in `load_policy`.
        overrides, trust: see `load_policy`.
        host, port, protocol, keys, resize, token, sample, seed, max_batch, wait_ms: see `ServeOptions`; the port is
            afterwards in `PolicyServer.port`.

    Raises:
        UserError, RunError: see `train`; the policy cannot be served, or the port is taken.
    """
    from embodyrl.runner.playing import LoadedPolicy
    from embodyrl.serving.server import PolicyServer

    options = ServeOptions(
        host=host,
        port=port,
        protocol=protocol,
        keys=keys,
        resize=resize,
        token=token,
        sample=sample,
        seed=seed,
        max_batch=max_batch,
        wait_ms=wait_ms,
    )
    options.check()
    loaded = policy if isinstance(policy, LoadedPolicy) else load_policy(policy, overrides, trust=trust)
    return PolicyServer(loaded, options)


@overload
def make_envs(
    config: ConfigSource,
    num_envs: int | None = None,
    *,
    api: Literal["embodyrl"] = "embodyrl",
    overrides: Sequence[str] = (),
    chunk_size: int | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Envs: ...


@overload
def make_envs(
    config: ConfigSource,
    num_envs: int | None = None,
    *,
    api: Literal["gymnasium"],
    overrides: Sequence[str] = (),
    chunk_size: int | None = None,
    seed: int = 0,
    trust: bool = False,
) -> GymnasiumEnvs: ...


@for_users
def make_envs(
    config: ConfigSource,
    num_envs: int | None = None,
    *,
    api: str = "embodyrl",
    overrides: Sequence[str] = (),
    chunk_size: int | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Envs | GymnasiumEnvs:
    """Start simulators to step manually.

    Args:
        config: a shipped environment (`metaworld/reach`; `embodyrl list configs` names all); a run directory, a
            checkpoint, or an exported policy, also on the hub; or a config, of which the section `env` is used.
        num_envs: `B`, in as many processes as fit this machine; None: `env.num_envs`.
        api: `embodyrl` for `Envs`, `gymnasium` for a `gymnasium.vector.VectorEnv`.
        overrides: settings to change, e.g. `["env.cameras=[corner2]"]`.
        chunk_size: `C`, actions per step; None: `rollout.chunk_size` of the config.
        seed: of the training episodes that the envs play.
        trust: see `evaluate`.

    Raises:
        UserError: there is no such environment, or it cannot be started here.
        WorkerError: a simulator failed to start.
    """
    if api not in APIS:
        hint = did_you_mean(str(api), APIS, lead=" - ")
        raise UserError(f"api = {api!r:.60}: want one of {', '.join(map(repr, APIS))}{hint}")
    num_envs, chunk_size = _count(num_envs, "num_envs"), _count(chunk_size, "chunk_size")

    from embodyrl.envs.manager import start_env_manager
    from embodyrl.runner.playing import Envs, checked_seed

    seed = checked_seed(seed)
    loaded = _environment(config, _checked(overrides), trust)

    env = loaded.config.env
    if num_envs is not None:
        env = dataclasses.replace(env, num_envs=num_envs, workers="auto")
    manager = start_env_manager(
        env,
        chunk_size=loaded.config.rollout.chunk_size if chunk_size is None else chunk_size,
        plugins=loaded.config.plugins,
        plugin_path=str(loaded.plugin_dir),
    )
    envs = Envs(manager, env, seed=seed)
    if api == "embodyrl":
        return envs

    from embodyrl.runner.vector import GymnasiumEnvs

    return GymnasiumEnvs(envs)


class Rows:
    """A sink that keeps the rows of a run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep a row."""
        self.rows.append({"iteration": iteration} | dict(metrics))

    def message(self, text: str) -> None:
        """Messages are for people."""

    def close(self) -> None:
        """Rows are in memory."""


@for_users
def load_config(
    source: ConfigSource | None,
    overrides: Sequence[str] = (),
    *,
    plugin_dir: Path | None = None,
    use: ConfigUse = ConfigUse.check,
    not_needed: Sequence[KeyPath] = (),
    also: Sequence[Rule] = (),
    model: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> LoadedConfig:
    """Load and check a config from any source; the other arguments are those of `config.load_config`.

    Args:
        source: see `ConfigSource`; None: the default experiment.
        overrides: settings to change, as on the command line.
        plugin_dir: folder of plug-ins; by default that of a file, and the working directory for anything else.
        use: purpose of the config.
        not_needed: settings whose faults are ignored.
        also: rules besides those of `use`.
        model: options of a model that acts in place of the config's own, with its `name`.
        trust: see `train`.

    Raises:
        ConfigError: lists every issue.
        UserError: the source is nothing that a config can be read from.
    """
    overrides = _checked(overrides)
    if isinstance(source, LoadedConfig):
        if not overrides and model is None:
            return source
        source = source.config
    if source is None or isinstance(source, str | Path):
        return load_file(
            source,
            overrides,
            plugin_dir=plugin_dir,
            use=use,
            not_needed=not_needed,
            also=also,
            model=model,
            trust=trust,
        )
    settings = escape(to_plain(source)) if isinstance(source, Config) else source
    if not isinstance(settings, Mapping):
        raise UserError(f"the config is a {type(source).__name__}: give a path, a shipped experiment's name, or a dict")
    try:
        text = yaml.safe_dump(_plain(settings), sort_keys=False)
    except yaml.representer.RepresenterError as error:
        raise UserError(f"the config holds {error.args[1]!r:.60}: use numbers, texts, lists and dicts alone") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        try:
            loaded = load_file(
                path,
                overrides,
                plugin_dir=plugin_dir or Path.cwd(),
                use=use,
                not_needed=not_needed,
                also=also,
                model=model,
                trust=trust,
            )
        except ConfigError as error:  # lines of a temporary file would only confuse
            own = [fault.location is not None and fault.location.file == str(path) for fault in error.faults]
            raise ConfigError(
                [
                    dataclasses.replace(fault, location=Location(IN_PYTHON)) if mine else fault
                    for fault, mine in zip(error.faults, own, strict=True)
                ]
            ) from None
    return dataclasses.replace(loaded, source=IN_PYTHON, path=None)


def _plain(value: Any) -> Any:
    """Return the settings as types that YAML can write."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return str(value) if isinstance(value, Path) else value


def _checked(overrides: object) -> list[str]:
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        raise UserError(f"overrides = {overrides!r:.60}: give a list of texts, for instance ['seed=3']")
    for override in overrides:
        if not isinstance(override, str):
            raise UserError(f"overrides hold {override!r:.60}: give texts, for instance ['seed=3']")
    return list(overrides)


def _count(value: int | None, name: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"{name} = {value!r}: want an integer of 1 or more, or None")
    return value


def _seeds(seeds: int | Sequence[int] | None) -> Seeds:
    """Return the seeds of a sweep as it takes them."""
    if seeds is None or isinstance(seeds, int):
        return _count(seeds, "seeds")
    if isinstance(seeds, str) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UserError(f"seeds = {seeds!r:.60}: give their number, or a list of them, for instance [3, 7, 9]")
    return tuple(map(str, seeds))


def _host(progress: bool, rows: Rows | None = None, callbacks: Sequence[object] = ()) -> ProgramInfo:
    return ProgramInfo(progress=progress, rows=rows, callbacks=callbacks, leave=raise_interrupt)


def _run(ending: Ending, rows: Rows) -> Run:
    """Return the finished run; raise the exception that stands for a signal in Python if one has stopped it."""
    if ending.exit_code == 130:
        raise KeyboardInterrupt(f"stopped and saved: embodyrl.resume({str(ending.run_dir)!r}) continues")
    if ending.exit_code:
        raise SystemExit(ending.exit_code)
    run = Run.__new__(Run)  # not opened: a rank on another machine may not see the folder
    run.path = ending.run_dir
    run._rows, run._spec, run._is_own = rows.rows, ending.spec, True
    return run


def _sweep(ending: SweepEnding) -> Sweep:
    """Return the finished sweep, or raise what its end means in Python."""
    again = f"embodyrl.resume_sweep({str(ending.path)!r})"
    if ending.exit_code == 130:
        raise KeyboardInterrupt(f"stopped and saved: {again} continues")
    if ending.failed and ending.exit_code == 1:
        reasons = "\n".join(ending.failed)
        raise RunError(
            f"{len(ending.failed)} of {len(ending.results.runs)} runs failed, and {again} tries them again:\n{reasons}"
        )
    if ending.exit_code:
        raise SystemExit(ending.exit_code)
    return Sweep(ending.path)


def _say(progress: bool, text: str) -> None:
    if progress:
        say(text)


def _saved(
    path: str | Path,
    overrides: Sequence[str],
    config: ConfigSource | None,
    *,
    trust: bool,
    progress: bool,
    needs: Needs = to_act,
    again: bool = False,
    like: str | None = None,
) -> tuple[LoadedConfig, Path | None, str]:
    """Find a saved policy; returns the config to build it with, the folder of its weights (None: the config names it),
    and its name for people. Of a checkpoint the files that it `needs` must be whole; `again` repeats no warning. The
    policy of a server may have the config of another one that it is `like`."""
    unread: list[KeyPath] = [("data", "path")]
    if is_url(path):
        return _served(str(path), overrides, config, like, trust=trust), None, str(path)
    if isinstance(path, str) and "://" in path and not is_hub_name(path) and not Path(path).exists():
        raise UserError(f"{path} is no folder: the URL of a policy server begins with ws:// or wss://")
    if config is not None and (Path(path) / CONFIG_FILE).is_file():
        raise UserError(f"{path} knows its own config: leave out --config (config=), and name what differs, KEY=VALUE")
    if config is not None:
        if not is_hub_name(path) and not Path(path).is_dir():
            raise UserError(f"{path} is no folder: give the folder of the weights, or hf://owner/name")
        quoted = str(path).replace("\\", "\\\\").replace("'", "\\'")
        named = [f"model.checkpoint='{quoted}'", *overrides]
        return load_config(config, named, use=ConfigUse.play, not_needed=unread, trust=trust), None, str(path)
    path = fetch(parse(str(path), Kind.model)) if is_hub_name(path) else Path(path)
    if (path / TRAINING_FILE).is_file():
        unread += SOURCES
        loaded = load_file(path / TRAINING_FILE, overrides, use=ConfigUse.play, not_needed=unread, trust=trust)
        model = from_own_folder(loaded.config.model, path)
        return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, model=model)), None, str(path)
    found = find(path, needs)
    if found.warning is not None and progress:
        _say(progress, found.warning)
    elif found.warning is not None and not again:
        warnings.warn(without_controls(found.warning.removeprefix("warning: ")), stacklevel=3)
    return read_saved(found.place, overrides, trust=trust), found.place / POLICY, str(found.place)


def _served(
    url: str, overrides: Sequence[str], config: ConfigSource | None, like: str | None, *, trust: bool
) -> LoadedConfig:
    """Return the config with which the policy of a server acts: `config`, or that of a saved policy."""
    unread: list[KeyPath] = [("data", "path"), *SOURCES]
    model = model_at(url)
    if config is not None:
        return load_config(config, overrides, use=ConfigUse.play, not_needed=unread, model=model, trust=trust)
    if like is None:
        raise UserError(
            f"{url} is the policy of a server, and nothing says in which simulator it acts: add --config EXPERIMENT "
            "(`embodyrl eval` takes it; in Python config=...)"
        )
    saved = Path(like) / TRAINING_FILE
    if saved.is_file():
        return load_file(saved, overrides, use=ConfigUse.play, not_needed=unread, model=model, trust=trust)
    return read_saved(Path(like), overrides, model=model, trust=trust)


def _has_config(path: str | Path) -> bool:
    """Return whether a policy was saved here, with its config."""
    if is_url(path) or is_hub_name(str(path)):
        return False
    return not Path(path).is_dir() or any((Path(path) / name).is_file() for name in (CONFIG_FILE, TRAINING_FILE))


def _config_named(config: ConfigSource | None) -> dict[str, Any]:
    """Return what `Command` keeps of a config: its name, if it has one."""
    named = isinstance(config, str | Path)
    return {"config": str(config) if named else None, "has_config": config is not None and not named}


def _load(loaded: LoadedConfig, weights: Path | None, place: str | Path, spec: SimulatorSpec | None) -> LoadedPolicy:
    """Load the policy for simulators with `spec`; None: for those of its config."""
    from embodyrl.runner.playing import LoadedPolicy

    if spec is None:
        env = dataclasses.replace(loaded.config.env, num_envs=1, workers=1)
        single = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, env=env))
        with tempfile.TemporaryDirectory() as logs, open_simulators(single, Path(logs)) as manager:
            spec = manager.spec
    with settings_of_torch_kept():
        return LoadedPolicy(loaded.config, build_acting(loaded.config, SpecOnly(spec), weights), spec)


def _environment(config: ConfigSource, overrides: list[str], trust: bool) -> LoadedConfig:
    """Load a config for its section `env`; the other sections need not fit it."""
    if not isinstance(config, str | Path):
        return load_config(config, overrides, use=ConfigUse.show, trust=trust)
    path, name = Path(config), str(config)
    if is_hub_name(config):
        path = fetch(parse(name, Kind.model))
    if (path / TRAINING_FILE).is_file():
        unread = [("data", "path"), *SOURCES]
        return load_file(path / TRAINING_FILE, overrides, use=ConfigUse.show, not_needed=unread, trust=trust)
    if path.is_dir() or path.name in ("last", "best"):
        place = find(path, to_act).place
        return read_config(place, overrides, [("data", "path"), *SOURCES], trust=trust)
    known = list_options("env")
    if name in known:
        defaults = [{"env": name}, {"model": "mlp"}, {"algorithm": "ppo"}, "_self_"]
        return load_config({"defaults": defaults}, overrides, use=ConfigUse.show, trust=trust)
    experiments = [found.removeprefix("experiment/") for found in list_experiments()]
    if not path.is_file() and name.removeprefix("experiment/") not in experiments:
        hint = did_you_mean(name, [*known, *experiments], lead=" - ")
        raise UserError(f"there is no environment {name!r}{hint} (shipped: {', '.join(known)})")
    return load_file(config, overrides, use=ConfigUse.show, trust=trust)
