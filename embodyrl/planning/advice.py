"""Find settings with which a run would fit into memory, by planning with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from embodyrl.config import ConfigError
from embodyrl.config.schema import Config
from embodyrl.errors import UserError
from embodyrl.planning.planner import Planner, batches_of

MOST_SETTINGS, MOST_ADVICE = 3, 3


def remedies(config: Config) -> Iterator[list[str]]:
    """Yield settings that save memory, the least costly first. Each may have several values, the mildest first."""
    micro, slots = batches_of(config).micro_batch, config.env.num_envs
    yield [f"engine.micro_batch_size={2**power}" for power in range(micro.bit_length() - 1, -1, -1) if 2**power < micro]
    yield ["engine.gradient_checkpointing=true"]
    yield ["engine.offload=optimizer", "engine.offload=all"]
    yield ["model.dtype=bfloat16"]
    yield ["engine.lora.rank=32"]
    yield ["engine.optimizer.name=adamw_8bit"]
    yield ["engine.optimizer.master_weights=false"]
    yield ["rollout.schedule=pipeline"]
    yield [f"env.num_envs={slots // parts}" for parts in (2, 4, 8) if slots % parts == 0]


class Adviser:
    """Plans a config with other settings.

    Args:
        planner: planner for the machine.
        load: loads the config with further overrides.
    """

    def __init__(self, planner: Planner, load: Callable[[Sequence[str]], Config]) -> None:
        self._planner, self._load = planner, load
        self._known: dict[tuple[str, ...], bool] = {}

    def advise(self, config: Config) -> list[list[str]]:
        """Return the smallest sets of settings with which a config would fit; empty if none helps."""
        known = [values for values in remedies(config) if values and self._changes(config, values[-1])]
        for count in range(1, MOST_SETTINGS + 1):
            found = []
            for chosen in combinations(known, count):
                if self._fits([values[-1] for values in chosen]):
                    found.append(self._mildest(chosen))
                if len(found) == MOST_ADVICE:
                    break
            if found:
                return found
        return []

    def _mildest(self, chosen: Sequence[list[str]]) -> list[str]:
        """Return each setting with the mildest value that is enough."""
        settings = [values[-1] for values in chosen]
        for number, values in enumerate(chosen):
            for value in values:
                trial = [*settings[:number], value, *settings[number + 1 :]]
                if self._fits(trial):
                    settings = trial
                    break
        return settings

    def _changes(self, config: Config, setting: str) -> bool:
        """Return whether a setting is valid and changes the config."""
        try:
            return self._load([setting]) != config
        except ConfigError:
            return False

    def _fits(self, settings: Sequence[str]) -> bool:
        key = tuple(settings)
        if key not in self._known:
            try:
                changed = self._load(settings)
                self._known[key] = not self._planner.excesses(changed)
            except UserError:  # these settings do not go together, or not with this model
                self._known[key] = False
        return self._known[key]
