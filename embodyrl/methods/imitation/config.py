"""Settings that methods which imitate share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class FirstImitationConfig:
    """Imitation of demonstrations with which a run begins."""

    first_steps: int = setting(1000, low=0)
    """Optimizer steps of imitation alone before anything is collected, in minibatches of `data.batch_size`: behaviour
    cloning, whose success is printed beside that of every evaluation. 0: none; rollouts then begin with random
    actions."""
