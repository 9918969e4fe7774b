"""An expert beside the policy, on a simulator whose every number is known: who acts when, what is kept of it, and that
neither schedules, deaths nor interruptions change it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from known_expert import CountingExpert
from known_numbers import LIMIT, KnownPolicy, make_collector

from embodyrl.config.replay import InterveneConfig, Labelled
from embodyrl.config.schema import EnvConfig
from embodyrl.envs import Observation
from embodyrl.envs.manager import Simulators, StepResult
from embodyrl.errors import UserError
from embodyrl.models.policy import ActOutput, Inputs
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.interventions import ExpertError, Source, shown_to_policy
from embodyrl.rollout.replay import Replay
from embodyrl.rollout.replay_fields import MIB, replay_fields


class Short(KnownPolicy):
    """Sees the start state alone, and chooses 0."""

    def act(self, inputs: Inputs, mode: str, generator: torch.Generator | None) -> ActOutput:
        observed = inputs["proprio"]
        assert observed.shape[1] == 1, "the step is for the expert alone"
        size = (len(observed), self.chunk_size, 2)
        return ActOutput(actions=torch.zeros(size), logprobs=observed, values=None, trace={"sample": observed})


def collectors(settings: InterveneConfig, expert: Any = None, **options: Any) -> Any:
    expert = expert or CountingExpert(EnvConfig(name="counter", tasks=["count"]))
    return make_collector(policy=lambda _, chunk: Short(chunk), expert=expert, intervene=settings, **options)


def collect(count: int, settings: InterveneConfig, **options: Any) -> Iterator[TrajectoryBatch]:
    with collectors(settings, **options) as collector:
        for _ in range(count):
            yield collector.collect().batch


def steps_of(batch: TrajectoryBatch) -> np.ndarray[Any, Any]:
    """Control steps of its episode before each decision, `[K, B]`."""
    return (batch["rewards"][..., 0] - 1).long().numpy()


def test_it_takes_over_once_an_episode_is_not_solved_in_time() -> None:
    for batch in collect(3, InterveneConfig(after=2)):
        steps, taken = steps_of(batch), batch["source"].numpy() == Source.expert
        assert (taken == (steps >= 2)).all() and taken.any() and not taken.all()
        assert torch.equal(batch["labelled"], torch.from_numpy(taken))
        # It sees the step, which the policy does not; it is asked for the first time in step 2.
        wanted = np.where(taken[..., None], np.stack([(steps - 1) / 100, steps / 8], -1), 0.0)
        for name in ("actions", "labels"):
            assert batch[name][:, :, 0].numpy() == pytest.approx(wanted, abs=1e-6)
        assert batch["proprio"].shape[2] == 1


def test_it_says_what_it_would_have_done_whoever_acts() -> None:
    for batch in collect(2, InterveneConfig(labels=Labelled.every)):
        assert batch["labelled"].all() and not batch["source"].any() and not batch["actions"].any()
        assert batch["labels"][:, :, 0, 1].numpy() == pytest.approx(steps_of(batch) / 8, abs=1e-6)


@pytest.mark.parametrize("options", [{"schedule": "pipeline"}, {"schedule": "ready_batch", "workers": 3}])
def test_its_share_is_drawn_from_the_seed_alone(options: dict[str, Any]) -> None:
    settings = InterveneConfig(share=0.4, after=4)
    found = [list(collect(4, settings)), list(collect(4, settings, **options))]
    for one, other in zip(*found, strict=True):
        for name in ("source", "labels", "labelled", "actions"):
            assert torch.equal(one[name], other[name]), name
    taken = torch.cat([batch["source"] == Source.expert for batch in found[0]])
    assert 0.2 < float(taken.float().mean()) < 0.7
    other_seed = torch.cat([batch["source"] == Source.expert for batch in collect(4, settings, seed=2)])
    assert not torch.equal(taken, other_seed)


def test_random_actions_are_told_from_the_policys() -> None:
    with collectors(InterveneConfig(after=3)) as collector:
        act = collector.engine.act
        # This policy has no random actions; who is asked for them is what counts here.
        collector.engine.act = lambda observation, mode, noise: act(observation, "train", noise)
        batch = collector.collect(mode="random").batch
    assert set(batch["source"].unique().tolist()) == {Source.expert, Source.random}


@pytest.mark.parametrize("whole", [False, True])
def test_interrupted_episodes_go_on_with_what_the_expert_remembers(whole: bool) -> None:
    settings = InterveneConfig(share=0.8)
    options: dict[str, Any] = {"whole": whole, "num_chunks": LIMIT if whole else 4}
    expected = list(collect(4, settings, **options))
    with collectors(settings, **options) as collector:
        first = [collector.collect().batch for _ in range(2)]
        slots = list(range(3))
        state = json.loads(json.dumps(collector.state_dict()))
        simulators = collector.manager.get_state(slots) if collector.in_progress else []
    with collectors(settings, **options) as again:
        if simulators:
            again.manager.set_state(slots, simulators)
        again.load_state_dict(state)
        found = [*first, *(again.collect().batch for _ in range(2))]
    for one, other in zip(expected, found, strict=True):
        for name in ("source", "labels", "actions", "proprio"):
            assert torch.equal(one[name], other[name]), name
    if not whole:
        # Of an episode that has only just begun it knows nothing yet.
        assert "" in state["experts"] and set(state["experts"]) - {"", "0"}, "too easy"


@pytest.mark.faults
def test_after_a_simulator_died_it_follows_the_next_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    monkeypatch.setenv("MORTAL", str(alive))
    expert = CountingExpert(EnvConfig(name="mortal", tasks=["count"]))
    options = {"num_envs": 2, "workers": 2, "simulator": "mortal", "on_worker_death": "restart"}
    lost = 0
    for batch in collect(4, InterveneConfig(share=1.0), expert=expert, **options):
        valid = batch["valid"].numpy()
        lost += int((~valid).sum())
        asked, steps = batch["actions"][:, :, 0, 0].numpy() * 100, steps_of(batch)
        assert asked[valid] == pytest.approx(steps[valid] + 1, abs=1e-4), "it began anew with each episode"
    assert lost and not alive.exists()


def test_an_action_that_is_no_number_is_an_error_that_names_the_env() -> None:
    class Confused(CountingExpert):
        def act(self, slots: Any, observation: Observation) -> Any:
            return np.where(slots[:, None] == 1, np.nan, super().act(slots, observation))

    expert = Confused(EnvConfig(name="counter", tasks=["count"]))
    with pytest.raises(ExpertError, match="not finite in env 1: "):
        next(collect(1, InterveneConfig(share=1.0), expert=expert))


def test_a_replay_draws_only_what_is_labelled_and_what_follows_is_still_right(tmp_path: Path) -> None:
    sizes = {"proprio_dim": 1, "action_dim": 2, "chunk_size": 1}
    fields, capacity = replay_fields(**sizes, corrected=True), 300  # type: ignore[arg-type]
    replay = Replay(
        capacity,
        slots=3,
        own=range(3),
        fields=fields,
        start_after=1,
        seed=1,
        memory=MIB,
        folder=tmp_path,
        only="labelled",
    )
    labelled = 0
    with collectors(InterveneConfig(after=2)) as collector:
        collector.following = True
        for _ in range(5):
            rollout = collector.collect()
            replay.add(rollout)
            labelled += int(rollout.batch["labelled"].sum())
            assert len(replay) == replay.added == labelled
    assert replay.take_updates(1.0) == int(rollout.batch["labelled"].sum())
    [minibatch] = replay.minibatches(1, 500)
    columns = minibatch.columns
    assert columns["labelled"].all() and (columns["source"] == Source.expert).all()
    assert columns["labels"][:, 0, 1] * 8 == pytest.approx(columns["rewards"][:, 0] - 1, abs=1e-5)
    alive = ~columns["terminated"]
    assert torch.equal(columns["next_proprio"][alive], columns["proprio"][alive]), "the start state stays"


def test_what_simulators_show_besides_is_for_the_expert_alone() -> None:
    """Every way in which observations leave the simulators."""
    expert = CountingExpert(EnvConfig(name="counter", tasks=["count"]))

    def shown(count: int) -> Observation:
        return Observation(
            proprio=np.arange(2.0 * count, dtype=np.float32).reshape(count, 2), task_descriptions=["count"] * count
        )

    class Made:
        spec = type("Spec", (), {})

        def __init__(self) -> None:
            with make_collector() as collector:
                self.spec = collector.manager.spec
            self.num_envs = 3
            both = shown(3)
            kept = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2)
            numbers: dict[str, Any] = dict.fromkeys(("rewards", "success", "terminated", "truncated", "steps", "lost"))
            self.result = StepResult(**numbers, observation=both, final_observation=both, step_proprio=kept)

        def observe(self, slots: Any) -> Observation:
            return shown(3)

        def reset(self, slots: Any, episodes: Any) -> Observation:
            return shown(3)

        def receive(self, slots: Any) -> StepResult:
            return self.result

        def receive_ready(self, at_least: int) -> Any:
            return np.arange(3), self.result

        def step(self, *_: Any) -> StepResult:
            return self.result

        def step_recorded(self, *_: Any) -> Any:
            return self.result, []

    made = Made()
    simulators = shown_to_policy(cast(Simulators, made), expert)
    assert simulators.spec.proprio_dim == 1 and simulators.num_envs == 3
    results = [simulators.receive([0]), simulators.receive_ready(1)[1], simulators.step([0], [])]
    results.append(simulators.step_recorded([0], [])[0])
    for result in results:
        assert result.final_observation is result.observation, "so that nobody takes it for a reset"
        assert result.step_proprio is not None and result.step_proprio[:, :, 0].tolist() == [[0, 2], [4, 6], [8, 10]]
    observations = [simulators.observe([0]), simulators.reset([0], []), *(each.observation for each in results)]
    for each in observations:
        assert each.proprio is not None and each.privileged is not None
        assert each.proprio.tolist() == [[0], [2], [4]] and each.privileged.shape == (3, 2)
    again = Observation.concat([observations[0].take(np.array([2, 0])), observations[1]])
    assert again.privileged is not None and again.privileged[:, 0].tolist() == [4, 0, 0, 2, 4]


def test_actions_of_another_shape_are_an_error_that_names_the_expert() -> None:
    class Terse(CountingExpert):
        def act(self, slots: Any, observation: Observation) -> Any:
            return super().act(slots, observation)[0]

    expert = Terse(EnvConfig(name="counter", tasks=["count"]))
    with pytest.raises(UserError, match=r"Terse.act\(\) returned an array \(2,\), want actions \[envs, action dims\]"):
        next(collect(1, InterveneConfig(share=1.0), expert=expert))
