"""What is known of a mix of simulators before they run: what is known of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from embodyrl.config.infos import SimulatorInfo, simulator_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.mix import MixConfig, moved
from embodyrl.config.rules import described_tasks
from embodyrl.config.schema import Config, EnvConfig


class MixInfo(SimulatorInfo[MixConfig]):
    """Several simulators as one."""

    def further_tasks(self, env: MixConfig) -> dict[str, str] | None:
        """See `SimulatorInfo`: all tasks are further ones."""
        found: dict[str, str] = {}
        for source in env.sources:
            own = source.env
            known = described_tasks(own.name, own.tasks) | (_info(own, installed=True).further_tasks(own) or {})
            known |= own.task_descriptions
            found |= {source.task(task): known[task] for task in own.tasks if task in known}
        return found

    def state_dim(self, env: MixConfig) -> int | None:
        """See `SimulatorInfo`."""
        found: int | None = _agreed(env, lambda own: _info(own).state_dim(own))
        return found

    def environment_state(self, env: MixConfig) -> tuple[int, int] | None:
        """See `SimulatorInfo`."""
        found: tuple[int, int] | None = _agreed(env, lambda own: _info(own).environment_state(own))
        return found

    def action_dim(self, env: MixConfig) -> int | None:
        """See `SimulatorInfo`."""
        found: int | None = _agreed(env, lambda own: _info(own).action_dim(own))
        return found

    def control_frequency(self, env: MixConfig) -> float | None:
        """See `SimulatorInfo`."""
        found: float | None = _agreed(env, lambda own: _info(own).control_frequency(own))
        return found

    def discrete(self, env: MixConfig) -> bool | None:
        """See `SimulatorInfo`."""
        found: bool | None = _agreed(env, lambda own: _info(own).discrete(own))
        return found

    def time_limit(self, env: MixConfig) -> int | None:
        """See `SimulatorInfo`: the longest of the simulators'."""
        limits = [each.env.known_time_limit for each in env.sources]
        return max((each for each in limits if each is not None), default=None) if None not in limits else None

    def perturbations(self, env: MixConfig) -> Sequence[str]:
        """See `SimulatorInfo`: what all of them can do."""
        able = [_info(each.env, installed=True).perturbations(each.env) for each in env.sources]
        return [kind for kind in able[0] if all(kind in each for each in able)] if able else []

    def fills_gpu(self, env: MixConfig) -> bool:
        """See `SimulatorInfo`."""
        return any(_info(each.env).fills_gpu(each.env) for each in env.sources)

    def check_here(self, config: Config) -> Iterator[ConfigIssue]:
        """See `SimulatorInfo`."""
        for index, source in enumerate(config.env.sources):
            for issue in _info(source.env, installed=True).check_here(replace(config, env=source.env)):
                yield moved(issue, index, source)


def _info(env: EnvConfig, *, installed: bool = False) -> SimulatorInfo[Any]:
    return simulator_info(env.name, installed=installed)


def _agreed(env: MixConfig, ask: Callable[[EnvConfig], Any]) -> Any:
    """Return what all simulators answer; None if they do not agree, or one does not know it."""
    answers = [ask(each.env) for each in env.sources]
    return answers[0] if answers and all(each == answers[0] for each in answers) else None
