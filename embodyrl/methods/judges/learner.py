"""Learning a small network from demonstrations that judges observations for a reward.

It is learned in seconds to minutes, without simulators: a run that was interrupted begins again.
"""

from __future__ import annotations

import dataclasses
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from embodyrl.config.schema import Config
from embodyrl.data.judgements import Judged
from embodyrl.data.store import EpisodeStore
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.judges.config import JudgeConfig
from embodyrl.methods.learner import BuildEngine, LearnerAlone
from embodyrl.models.classifier import Judge
from embodyrl.models.judging import JudgeFacts, JudgeInput


class JudgeLearner(LearnerAlone):
    """Learns to judge observations. A subclass says what of, and how right it is.

    Args:
        config: of the run.
        build: builds the engine of a network.

    Raises:
        DatasetError: the demonstrations do not suffice.
    """

    judge_class: ClassVar[type[Judge]]
    labels: ClassVar[type[Judged]]
    """The answers to learn from."""

    def __init__(self, config: Config, build: BuildEngine) -> None:
        assert isinstance(config.algorithm, JudgeConfig), "its registration says so"
        self.config = config
        store = EpisodeStore.open(config)
        self.shown = self.labels(store, config.algorithm.held_out)
        env = config.env
        height, width = env.image_size if env.cameras else (0, 0)
        self._seen = JudgeInput(
            state_dim=store.dataset.spec.state_dim,
            cameras=tuple(env.cameras),
            image_size=(height, width),
            frames=env.frames,
        )
        single = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, chunk_size=1))
        self._engine = build(single, self.judge_class.spec(self._seen))
        self._imitation = Imitation(self._engine)
        self.judge = self.judge_class(self._engine.policy)

    def describe(self) -> str:
        """See `LearnerAlone`."""
        return f"demonstrations: {self.shown.describe()}"

    def iterate(self, number: int) -> dict[str, float]:
        """See `LearnerAlone`."""
        steps = self.config.data.steps
        return self._imitation.learn(self.shown.batches((number - 1) * steps, steps))

    @abstractmethod
    def held_out(self) -> dict[str, Any]:
        """Return how right it is about what was held out, for its file."""

    def write(self, folder: Path) -> None:
        """See `LearnerAlone`: the network, written beside its place and renamed."""
        from embodyrl.engine.lora import save_policy

        config, kind = self.config, self.judge_class.kind
        facts = JudgeFacts(
            model=config.model.name, seen=self._seen, tasks=tuple(config.env.tasks), held_out=self.held_out()
        )
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{kind.folder}.") as temporary:
            place = Path(temporary) / kind.folder
            place.mkdir()
            save_policy(self._engine.policy, place, config.model)
            facts.write(place, kind)
            place.rename(folder / kind.folder)
