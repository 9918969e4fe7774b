"""Trying all promises of a config, in processes that may hang or die."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from embodyrl.checking import simulators
from embodyrl.checking.promises import Bench, Finding, Promise, State, line_in
from embodyrl.checking.simulators import SimulatorBench, Trajectory
from embodyrl.config import LoadedConfig
from embodyrl.config.plugins import code_of_its_own
from embodyrl.config.schema import Config
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.manager.pool import with_task_descriptions
from embodyrl.placement.launcher import Worker, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec, inventory, plan_env_workers
from embodyrl.registry import SIMULATORS, Registry, SupportedModel

if TYPE_CHECKING:  # these import torch, which a hanging simulator should not have to wait for
    from embodyrl.checking.learning import LearningBench
    from embodyrl.checking.policies import PolicyBench

TIMEOUT_S = 60.0
"""Longest time for one promise [s]."""
CLOSE_S = 5.0
EPISODE = 3
"""The episode that a second process continues with."""


class Subject(StrEnum):
    """Whose promises they are."""

    simulator = "simulator"
    policy = "policy"
    learning = "learning"


class Examination:
    """The promises of a config, tried in this process. A worker's object, see `placement.launcher`."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded, config = loaded, loaded.config
        self._modules = modules_of(config)
        self._simulator = SimulatorBench(config.env, self._modules)
        self._policy: PolicyBench | None = None
        self._learning: LearningBench | None = None
        self._stack = ExitStack()

    def promises(self, subject: Subject) -> Sequence[str]:
        """Return the texts of all promises of a subject."""
        return [each.text for each in self._promises(subject)]

    def _promises(self, subject: Subject) -> Sequence[Promise[Any]]:
        if subject is Subject.simulator:
            return simulators.PROMISES
        from embodyrl.checking import learning, policies

        return policies.PROMISES if subject is Subject.policy else learning.PROMISES

    def spec(self) -> SimulatorSpec | None:
        """Return what the simulator offers in a run of the config; None if it could not be built."""
        try:
            spec = self._simulator.simulator.spec
        except Exception:  # which a promise reports
            return None
        env = self.loaded.config.env
        return with_task_descriptions(dataclasses.replace(spec, frames=env.frames), env.task_descriptions)

    def keep(self, subject: Subject, number: int, spec: SimulatorSpec | None) -> Finding:
        """Try a promise of a subject; `spec` is that of the simulators."""
        return self._bench(subject, spec).try_(self._promises(subject)[number])

    def _bench(self, subject: Subject, spec: SimulatorSpec | None) -> Bench:
        if subject is Subject.simulator:
            return self._simulator
        if subject is Subject.policy:
            from embodyrl.checking.policies import PolicyBench

            assert spec is not None
            self._policy = self._policy or PolicyBench(self.loaded.config, spec, self._modules)
            return self._policy
        from embodyrl.checking.learning import LearningBench

        if self._learning is None:
            folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="embodyrl-check-")))
            self._learning = LearningBench(self.loaded, folder, self._modules)
        return self._learning

    def line_of(self, subject: Subject, number: int, spec: SimulatorSpec | None) -> str:
        """Return ` (file:line)` of the method that a promise is about; builds nothing."""
        return self._bench(subject, spec).line_of(self._promises(subject)[number].method)

    def half_played(self) -> tuple[Trajectory, int, bytes]:
        """See `SimulatorBench.half_played`."""
        return self._simulator.half_played(EPISODE)

    def goes_on_alike(self, whole: Trajectory, done: int, state: bytes) -> Finding:
        """Compare with what another process has played."""

        def keep(bench: SimulatorBench) -> None:
            bench.goes_on_alike(EPISODE, whole, done, state)

        return self._simulator.try_(Promise(text=ELSEWHERE, keep=keep, method="reset"))

    def close(self) -> None:
        """Remove the folder of the run."""
        self._stack.close()


ELSEWHERE = "another process plays the same, and continues from a saved state"


def modules_of(config: Config) -> list[str]:
    """Return the modules of a config whose lines findings name."""
    targets = [_module_of(SIMULATORS, config.env.name), _module_of(SupportedModel, config.model.name)]
    return list(dict.fromkeys([*code_of_its_own(config), *filter(None, targets)]))


def _module_of(registry: Registry[Any], name: str) -> str:
    entry = registry.entry(name)
    if entry.source == "built-in":
        return ""
    target = entry.target
    return target.partition(":")[0] if isinstance(target, str) else str(getattr(target, "__module__", ""))


@dataclass
class _Post:
    """A process that tries promises, and is replaced when it dies."""

    loaded: LoadedConfig
    number: int

    def __post_init__(self) -> None:
        config = self.loaded.config
        self._launcher = LocalLauncher(plugins=config.plugins, plugin_path=str(self.loaded.plugin_dir))
        self._worker: Worker | None = None
        one = dataclasses.replace(config.env, num_envs=1, workers=1)
        (planned,) = plan_env_workers(one, inventory())
        self._spec = WorkerSpec(role="check", rank=self.number, env_vars=planned.env_vars)

    def ask(self, method: str, *arguments: object, timeout: float) -> Any:
        """Call a method of the `Examination` there.

        Raises:
            WorkerError: it died or hung; the next call starts another one.
        """
        try:
            if self._worker is None:
                start_s = self.loaded.config.env.startup_timeout_s
                given = [(self.loaded,)]
                (self._worker,) = self._launcher.start([self._spec], Examination, given, timeout=start_s)
            return self._launcher.gather([self._worker.request(method, *arguments, timeout=timeout)], timeout=timeout)[
                0
            ]
        except (WorkerDied, WorkerTimeout):
            self._worker = None
            raise

    def close(self) -> None:
        """End it."""
        self._launcher.close(timeout=CLOSE_S)


def examine(loaded: LoadedConfig, timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Try all promises of a config, and yield what came of each as it is known. A process that hangs or dies ends the
    promises of its subject, and no others.

    Args:
        loaded: the config, whose plug-ins are run.
        timeout_s: longest time for one promise [s].
    """
    with ExitStack() as stack:
        posts, here = [_Post(loaded, number) for number in (0, 1)], Examination(loaded)
        for close in (here.close, *(post.close for post in posts)):
            stack.callback(close)
        first, second = posts
        spec: SimulatorSpec | None = None
        lost: set[Subject] = set()
        for subject in Subject:
            texts = first.ask("promises", subject, timeout=loaded.config.env.startup_timeout_s)
            for number, text in enumerate(texts):
                if why := _why_not(subject, lost, number > 0 and subject is Subject.simulator and spec is None):
                    yield Finding(promise=text, state=State.does_not_apply, found=why)
                    continue
                try:
                    yield first.ask("keep", subject, number, spec, timeout=timeout_s)
                    if subject is Subject.simulator and spec is None:
                        spec = first.ask("spec", timeout=timeout_s)
                except (WorkerDied, WorkerTimeout) as error:
                    yield _lost(text, error, timeout_s, here.line_of(subject, number, spec))
                    lost.add(subject)
            if subject is Subject.simulator:
                yield _elsewhere(first, second, _why_not(subject, lost, spec is None), timeout_s)
                if spec is None:
                    lost.update(Subject)


def _why_not(subject: Subject, lost: set[Subject], is_unbuilt: bool) -> str:
    """Return why the promises of a subject are not tried any more; empty if they are."""
    if is_unbuilt:
        return "the simulator was not built"
    if subject in lost:
        whose = "simulator was not built" if len(lost) == len(Subject) else f"{subject} hung or died before"
        return f"the {whose}"
    return "the simulator hung or died" if subject is Subject.learning and Subject.simulator in lost else ""


def _lost(text: str, error: WorkerError, timeout_s: float, place: str = "") -> Finding:
    """Return the finding for a promise during which the process was lost; `place` is named where its stacks tell
    nothing."""
    if isinstance(error, WorkerTimeout):
        found, remedy = f"no answer within {timeout_s:g} s", "let it return; --timeout gives it longer"
    else:
        found, remedy = f"the process died: {str(error).splitlines()[0]}", "nothing may end the process"
    return Finding(promise=text, state=State.broken, found=found, place=line_in(str(error)) or place, remedy=remedy)


def _elsewhere(first: _Post, second: _Post, why_not: str, timeout_s: float) -> Finding:
    """Compare what two processes play."""
    if why_not:
        return Finding(promise=ELSEWHERE, state=State.does_not_apply, found=why_not)
    try:
        played = first.ask("half_played", timeout=timeout_s)
    except WorkerError:
        return Finding(promise=ELSEWHERE, state=State.does_not_apply, found="no episode can be played, see above")
    try:
        found: Finding = second.ask("goes_on_alike", *played, timeout=timeout_s)
    except (WorkerDied, WorkerTimeout) as error:
        return _lost(ELSEWHERE, error, timeout_s)
    return found
