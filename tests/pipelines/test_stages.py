"""The stages on batches whose numbers are known, and on real rollouts where a batch comes from a simulator."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from embodyrl.algorithms.options import GIVEN
from embodyrl.config import load_config
from embodyrl.config.schema import Config
from embodyrl.engine.exchange import Exchange
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.parallel import SINGLE_PROCESS
from embodyrl.envs.manager import EnvManager
from embodyrl.errors import UserError
from embodyrl.methods.on_policy.embeddings import episode_embeddings
from embodyrl.methods.on_policy.filtering import filter_groups, informative_groups
from embodyrl.methods.on_policy.learner import OnPolicyLearner
from embodyrl.methods.on_policy.stages import chunks_to_learn_from, estimate_advantages, shape_rewards, update
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.registry import ADVANTAGES, ENCODERS, FILTERS, REWARDS, Registry
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import Rollout
from embodyrl.rollout.rollouts import Rollouts
from embodyrl.runner.build import build_method
from embodyrl.runner.share import LocalEnvs, LocalRollouts
from tests.rollout.spread_program import equal

SMALL = [
    "env.num_envs=4",
    "env.workers=1",
    "env.max_episode_steps=6",
    "rollout.num_chunks=3",
    "rollout.chunk_size=2",
    "rollout.episodes=whole",
    "algorithm.minibatches=1",
    "algorithm.reward_scale=1.0",
    "model.hidden_sizes=[8]",
]
DAPO = ["algorithm=dapo", "rollout.group_size=2"]


def config_of(*overrides: str) -> Config:
    return load_config("experiment/gym_pendulum", [*SMALL, *overrides]).config


def batch_of(lengths: Sequence[int], success: Sequence[bool], reward: float = 1.0) -> TrajectoryBatch:
    """One whole episode per slot of K = 3 decisions of C = 2 actions with D = 2 entries; a length of 0 is an episode
    that was lost. Every action is paid `reward`, success comes with the last one."""
    slots, actions = len(lengths), torch.arange(6).view(3, 1, 2)
    steps = (torch.tensor(lengths) - 2 * torch.arange(3).unsqueeze(1)).clamp(0, 2)
    executed = actions < torch.tensor(lengths).view(1, -1, 1)
    last = actions == torch.tensor(lengths).view(1, -1, 1) - 1
    valid = steps > 0
    columns: dict[str, Tensor | dict[str, Tensor]] = {
        "task_index": torch.zeros(3, slots, dtype=torch.long),
        "actions": torch.zeros(3, slots, 2, 2),
        "logprobs": -torch.ones(3, slots, 4),
        "rewards": reward * executed,
        "success": last & torch.tensor(success).view(1, -1, 1),
        "terminated": torch.zeros(3, slots, dtype=torch.bool),
        "truncated": last.any(2),
        "steps": steps,
        "valid": valid,
        "episode": torch.zeros(3, slots, dtype=torch.long),
        "group": (torch.arange(slots) // 2).expand(3, slots).contiguous(),
        "version": torch.zeros(3, slots, dtype=torch.long),
        "proprio": torch.arange(3.0 * slots).view(3, slots, 1) + 1,
        "trace": {"sample": torch.zeros(3, slots, 4)},
    }
    return TrajectoryBatch(columns, ["swing up"])


class Scripted:
    """Stands for the collector where a test says what it collects."""

    def __init__(self, batches: Sequence[TrajectoryBatch]) -> None:
        self.batches = list(batches)
        self.surplus: TrajectoryBatch | None = None

    def collect(self) -> Rollout:  # type: ignore[override]
        batch = self.batches.pop(0)
        return Rollout(batch=batch, finished=[], env_steps=int(batch["steps"].sum()))

    def forget_batch(self, *but: TrajectoryBatch) -> None:
        """One process holds every column in its batch."""


class Idle:
    """Stands for the engine where none of its numbers matter."""

    exchange = Exchange(SINGLE_PROCESS)
    ranks, policy, device = SINGLE_PROCESS, None, torch.device("cpu")

    def rollout_mode(self) -> AbstractContextManager[None]:
        return nullcontext()


def iteration_of(config: Config, *batches: TrajectoryBatch) -> Iteration:
    """An iteration whose first rollout is there."""
    collector = Scripted(batches)
    return begun(config, collector, Idle(), collector.collect())  # type: ignore[arg-type]


def method_of(config: Config, engine: Any = None) -> OnPolicyLearner:
    """The method that a config names."""
    return OnPolicyLearner(engine or Idle(), config.algorithm, None)  # type: ignore[arg-type]


def begun(config: Config, collector: Rollouts, engine: HybridEngine, first: Rollout) -> Iteration:
    """An iteration of these parts, with this rollout."""
    return Iteration(
        config=config,
        learner=method_of(config, engine),
        collector=collector,
        engine=engine,
        batch=first.batch,
        rollouts=[first],
    )


MIXED, SOLVED, FAILED = [True, False], [True, True], [False, False]


def test_groups_that_teach_nothing_are_replaced_and_the_surplus_waits() -> None:
    # Wanted are two groups. Kept: one of the first rollout, none of the second, two of the third.
    rollouts = [
        batch_of([6, 6, 6, 6], [*SOLVED, *MIXED], reward=1.0),
        batch_of([6, 6, 6, 6], [*FAILED, *SOLVED], reward=2.0),
        batch_of([4, 4, 4, 4], [*MIXED, *MIXED], reward=3.0),
    ]
    iteration = iteration_of(config_of(*DAPO), *rollouts)
    collector = iteration.collector
    filter_groups(iteration)
    assert iteration.batch is not None and iteration.batch.size == (3, 4)
    assert iteration.batch["rewards"].amax((0, 2)).tolist() == [1, 1, 3, 3]
    assert collector.surplus is not None and collector.surplus["rewards"].amax((0, 2)).tolist() == [3, 3]
    counts = {name.removeprefix("filter/"): value for name, value in iteration.metrics.items() if "filter" in name}
    assert counts == {
        "collections": 3,
        "groups_collected": 6,
        "groups_kept": 3,
        "groups_learned": 2,
        "groups_waiting": 1,
    }
    assert iteration.metrics["env/steps"] == 24 + 24 + 16
    # The group that waited comes first in the next iteration, whatever its rollout brings.
    following = iteration_of(config_of(*DAPO), batch_of([6] * 4, [*MIXED, *SOLVED], reward=4.0))
    following.collector.surplus = collector.surplus
    filter_groups(following)
    assert following.batch is not None
    assert following.batch["rewards"].amax((0, 2)).tolist() == [3, 3, 4, 4]
    assert following.collector.surplus is None and following.metrics["filter/groups_kept"] == 1


def test_collecting_again_is_bounded() -> None:
    hopeless = [batch_of([6] * 4, [*FAILED, *SOLVED]) for _ in range(4)]
    iteration = iteration_of(config_of(*DAPO, "algorithm.max_collections=3"), *hopeless)
    filter_groups(iteration)
    assert len(iteration.rollouts) == 3
    assert iteration.batch is not None and iteration.batch.size[1] == 0


def test_an_iteration_without_a_group_learns_nothing_and_goes_on() -> None:
    config = config_of(*DAPO, "algorithm.max_collections=1")
    for overrides in ([], ["algorithm.advantage.std_level=batch"], ["algorithm.advantage=raw"]):
        config = config_of(*DAPO, "algorithm.max_collections=1", *overrides)
        iteration = iteration_of(config, batch_of([6] * 4, [*FAILED, *SOLVED]))
        for stage in (filter_groups, shape_rewards, estimate_advantages, update):
            stage(iteration)
        assert iteration.metrics["train/epochs"] == 0


def chunks(batch: TrajectoryBatch, config: Config) -> Any:
    return chunks_to_learn_from(batch, method_of(config).algorithm, config.rollout.num_chunks)


def kept_of(batch: TrajectoryBatch, config: Config) -> TrajectoryBatch:
    return informative_groups(batch, method_of(config).filter, config.rollout.group_size)


def test_lost_episodes_do_not_make_a_group_informative() -> None:
    batch = batch_of([6, 0, 6, 6, 0, 0], [True, False, True, False, False, False])
    assert kept_of(batch, config_of(*DAPO))["steps"].sum() == 12


def test_groups_are_not_told_apart_by_the_order_of_their_rewards() -> None:
    config, batch = config_of(*DAPO, "algorithm.filter.metric=total_reward"), batch_of([6] * 4, FAILED + FAILED)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # float32 tells some of them apart
        rewards = torch.rand(6, generator=generator)
        shuffled = torch.stack([rewards[torch.randperm(6, generator=generator)] for _ in range(4)])
        batch["rewards"] = shuffled.view(4, 3, 2).transpose(0, 1).contiguous()
        assert kept_of(batch, config).size[1] == 0
    batch["rewards"][0, 0, 0] += 1e-3
    assert kept_of(batch, config).size[1] == 2


def test_success_is_judged_before_shaping() -> None:
    # A time penalty makes the returns of a group differ; its successes do not.
    batch = batch_of([6, 4], SOLVED)
    assert kept_of(batch, config_of(*DAPO, "algorithm.time_penalty=0.5")).size[1] == 0


def test_shaped_rewards_are_paid_for_executed_actions_alone() -> None:
    iteration = iteration_of(
        config_of("algorithm.reward=success", "algorithm.time_penalty=0.1"), batch_of([6, 3], SOLVED)
    )
    shape_rewards(iteration)
    assert iteration.batch is not None
    per_slot = iteration.batch["shaped_rewards"].sum((0, 2))
    torch.testing.assert_close(per_slot, torch.tensor([1 - 0.6, 1 - 0.3]))
    assert iteration.metrics["rollout/shaped_reward_per_step"] == pytest.approx((2 - 0.9) / 9)


def test_a_reward_of_ones_own_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_state(*, proprio: Tensor, executed: Tensor) -> Tensor:
        return proprio.expand_as(executed)

    monkeypatch.setattr(REWARDS, "_entries", {entry.name: entry for entry in REWARDS.entries()})
    REWARDS.register("last_state", target=last_state, whole=False, summary="a test")
    iteration = iteration_of(config_of("algorithm.reward=last_state"), batch_of([6, 3], SOLVED))
    shape_rewards(iteration)
    assert iteration.batch is not None
    assert iteration.batch["shaped_rewards"].sum((0, 2)).tolist() == [2 * (1 + 3 + 5), 2 * 2 + 4]


def test_a_reward_of_ones_own_gets_no_option_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*, rewards: Tensor, scale: float = 0.01) -> Tensor:
        return rewards * scale

    monkeypatch.setattr(REWARDS, "_entries", {entry.name: entry for entry in REWARDS.entries()})
    REWARDS.register("scaled", target=scaled, whole=False, summary="a test")
    iteration = iteration_of(config_of("algorithm.reward=scaled"), batch_of([6, 3], SOLVED))
    shape_rewards(iteration)
    assert iteration.batch is not None
    torch.testing.assert_close(iteration.batch["shaped_rewards"].sum((0, 2)), torch.tensor([0.06, 0.03]))


def probe(names: Sequence[str], seen: dict[str, object], result: str) -> Callable[..., object]:
    """A function that asks for everything in `names` by name, notes it in `seen`, and returns what it gives for
    `result`."""
    scope: dict[str, Any] = {"seen": seen}
    exec(f"def probed(*, {', '.join(names)}):\n    seen.update(locals())\n    return {result}", scope)
    return scope["probed"]


@pytest.mark.parametrize(
    ("registry", "key", "absent", "result"),
    [
        (REWARDS, "reward", {"images", "embeddings"}, "rewards"),
        (FILTERS, "filter", set(), "played.any(1)"),
        (ADVANTAGES, "advantage", set(), "(rewards, rewards)"),
    ],
)
def test_functions_get_all_that_validate_says_is_there(
    registry: Registry[Any], key: str, absent: set[str], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, seen = [name for name in GIVEN[key] if name not in absent], {}
    monkeypatch.setattr(registry, "_entries", {entry.name: entry for entry in registry.entries()})
    known = {"reward": {"whole": False}, "filter": {}, "advantage": {"critic": True, "whole": False}}[key]
    registry.register("probe", target=probe(names, seen, result), summary="a test", **known)
    more = [*DAPO, "algorithm.max_collections=1"] if key == "filter" else ["algorithm=ppo"]
    batch = batch_of([6, 3], SOLVED)
    batch["values"] = batch["next_values"] = torch.zeros(3, 2)
    iteration = iteration_of(config_of(*more, f"algorithm.{key}=probe"), batch)
    for stage in (filter_groups,) if key == "filter" else (shape_rewards, estimate_advantages):
        stage(iteration)
    assert seen.keys() == set(names)


def scalar(*, rewards: Tensor) -> Tensor:
    return rewards.sum()


def of_slots(*, played: Tensor) -> Tensor:
    return played


def of_floats(*, played: Tensor) -> Tensor:
    return played.any(1).float()


WRONG: list[tuple[Registry[Any], Callable[..., Any], str]] = [
    (
        REWARDS,
        scalar,
        r"reward .*scalar returned rewards of shape \(\), expected \(3, 2, 2\): \[K, B, C\]: return a rew",
    ),
    (REWARDS, lambda *, rewards: rewards.sum(2), r"rewards of shape \(3, 2\), expected \(3, 2, 2\)"),
    (REWARDS, lambda *, rewards: 1.0, "returned rewards as float, expected a torch tensor"),
    (REWARDS, lambda *, rewards: rewards.to("meta"), "returned rewards on meta, expected cpu"),
    (REWARDS, lambda *, rewards: rewards / rewards, r"rewards with nan at \[1, 1, 1\], expected finite numbers"),
    (
        FILTERS,
        of_slots,
        r"filter .*of_slots returned groups of shape \(1, 2\), expected \(1,\): \[P\]: return one bool",
    ),
    (FILTERS, of_floats, "groups of type torch.float32, expected bool"),
    (ADVANTAGES, lambda *, rewards: rewards, r"advantage .* returned Tensor, expected a pair: return advantages, ret"),
    (ADVANTAGES, lambda *, rewards: (rewards.mean(), rewards), r"returned advantages of shape \(\), expected \(3, 2\)"),
    (
        ADVANTAGES,
        lambda *, rewards: (rewards, rewards / 0.0),
        r"returned returns with inf at \[0, 0\], expected finite",
    ),
]
"""A registry, a function in it that returns something else than it should, and what is said then."""


def test_functions_that_return_something_else_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    own = {registry: {entry.name: entry for entry in registry.entries()} for registry, *_ in WRONG}
    for registry, function, message in WRONG:
        monkeypatch.setattr(registry, "_entries", dict(own[registry]))
        known = {"reward": {"whole": False}, "advantage": {"critic": False, "whole": False}}.get(registry.kind, {})
        registry.register("wrong", target=function, summary="a test", **known)
        more = [*DAPO, "algorithm.max_collections=1"] if registry is FILTERS else REINFORCE
        iteration = iteration_of(config_of(*more, f"algorithm.{registry.kind}=wrong"), batch_of([6, 3], SOLVED))
        with pytest.raises(UserError) as caught:
            for stage in (filter_groups,) if registry is FILTERS else (shape_rewards, estimate_advantages):
                stage(iteration)
        said.append((message, str(caught.value)))
    assert not [pair for pair in said if re.search(*pair) is None]


def test_an_encoder_that_returns_something_else_is_named() -> None:
    config = config_of("algorithm=srpo", "rollout.group_size=2")
    for encode, message in (
        (
            lambda images, proprio, *, dim: proprio,
            r"encoder .* returned an embedding of shape \(64, 1\), expected .* \[E\]",
        ),
        (lambda images, proprio, *, dim: proprio.flatten() / 0.0, r"returned an embedding with inf at \[0\]"),
    ):
        with pytest.raises(UserError, match=message):
            episode_embeddings(batch_of([6, 2], MIXED), encode, config.algorithm.reward, Idle.exchange)


def test_an_encoder_of_ones_own_sees_frames_spread_over_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames_themselves(images: Tensor | None, proprio: Tensor | None, *, dim: int) -> Tensor:
        assert images is None and proprio is not None
        return proprio.flatten()

    monkeypatch.setattr(ENCODERS, "_entries", {entry.name: entry for entry in ENCODERS.entries()})
    ENCODERS.register("frames_themselves", target=frames_themselves, summary="a test")
    config = config_of("algorithm=srpo", "rollout.group_size=2", "algorithm.reward.encoder=frames_themselves")
    batch = batch_of([6, 2, 0], [True, False, False])
    embeddings = episode_embeddings(batch, frames_themselves, config.algorithm.reward, Idle.exchange)
    assert embeddings.shape == (3, 64)
    assert sorted(set(embeddings[0].tolist())) == [1, 4, 7] and set(embeddings[1].tolist()) == {2}
    assert not embeddings[2].any()


def advantages_of(batch: TrajectoryBatch, *overrides: str) -> Tensor:
    iteration = iteration_of(config_of(*overrides, "algorithm.normalize_advantages=false"), batch)
    shape_rewards(iteration)
    estimate_advantages(iteration)
    assert iteration.batch is not None
    return iteration.batch["advantages"]


REINFORCE = ["algorithm=reinforce_pp", "algorithm.gamma=0.5"]
ACTIONS = [*REINFORCE, "algorithm.reward_level=action", "algorithm.logprob_level=action"]


def test_returns_of_decisions_and_of_actions_by_hand() -> None:
    batch = batch_of([3], [False])  # two decisions: both actions of the first, one of the second; each is paid 1
    assert advantages_of(batch, *REINFORCE).flatten().tolist() == [2 + 0.5 * 1, 1, 0]
    # One factor per action: 1 + 0.5 (1 + 0.5 * 1), 1 + 0.5 * 1, 1.
    per_action = advantages_of(batch, *ACTIONS, "algorithm.discount_per=action")
    assert per_action.shape == (3, 1, 2)
    assert per_action.flatten().tolist() == [1.75, 1.5, 1, 0, 0, 0]
    # An episode that ends with the second action of a chunk: the first one of that chunk still gains from it.
    full = advantages_of(batch_of([4], [False]), *ACTIONS, "algorithm.discount_per=action")
    assert full.flatten().tolist() == [1.875, 1.75, 1.5, 1, 0, 0]
    # One factor per decision: 1 + 1 + 0.5 * 1, 1 + 0.5 * 1, 1.
    assert advantages_of(batch, *ACTIONS).flatten().tolist() == [2.5, 1.5, 1, 0, 0, 0]


@pytest.mark.parametrize(("level", "counted"), [("chunk", 2), ("action", 3), ("token", 6)])
def test_what_the_engine_learns_from_at_each_level(level: str, counted: int) -> None:
    # An episode of three actions, and one that was lost.
    config = config_of("algorithm=reinforce_pp", f"algorithm.logprob_level={level}")
    iteration = iteration_of(config, batch_of([3, 0], [False, False]))
    shape_rewards(iteration)
    estimate_advantages(iteration)
    assert iteration.batch is not None
    decisions = chunks(iteration.batch, config)
    shape = {"chunk": (2,), "action": (2, 2), "token": (2, 2, 2)}[level]
    for name in ("old_logprobs", "advantages", "valid", "weights"):
        assert decisions[name].shape == shape, name
    # Every entry has log-prob -1, two to an action; what was not executed counts nowhere.
    assert decisions["old_logprobs"].sum() == -6
    assert decisions["valid"].sum() == counted
    assert decisions["weights"].sum() == pytest.approx(1.0)
    assert not decisions["weights"][~decisions["valid"]].any()


@pytest.fixture(scope="module")
def manager() -> Iterator[EnvManager]:
    with EnvManager(config_of().env, chunk_size=2) as opened:
        yield opened


def test_dynamic_sampling_on_a_real_simulator(manager: EnvManager) -> None:
    """Every group of Pendulum differs in its total reward, so one rollout is enough and nothing is left over."""
    config = config_of(*DAPO, "algorithm.filter.metric=total_reward")
    engine = build_method(config, manager, weights=None).engine
    collector = LocalRollouts(LocalEnvs(config, manager, engine))
    first = collector.collect()
    iteration = begun(config, collector, engine, first)
    filter_groups(iteration)
    assert iteration.metrics["filter/groups_learned"] == 2 and collector.surplus is None
    assert iteration.batch is not None and equal(iteration.batch, first.batch)


GROUPED = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "cpgd", "gspo"]
ONE_RETURN = {
    "success with a penalty": ["algorithm.reward=success", "algorithm.time_penalty=0.1"],
    "rewards in another order, scaled": ["algorithm.reward_scale=0.3"],
    "the same last reward": ["algorithm.reward=difference"],
}


@pytest.mark.parametrize(
    ("algorithm", "rewards"),
    [
        *itertools.product(["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "cpgd", "gspo"], ONE_RETURN),
        ("srpo", ""),
    ],
)
def test_episodes_with_one_return_change_no_weight(manager: EnvManager, algorithm: str, rewards: str) -> None:
    """Real decisions, made one return: not a bit of the policy or of its optimiser moves, and an ordinary batch of the
    same engine afterwards moves them."""
    changes = [f"algorithm={algorithm}", "rollout.group_size=4", "engine.optimizer.lr=0.1"]
    config = config_of(*changes, *ONE_RETURN.get(rewards, []))
    engine = build_method(config, manager, weights=None).engine
    collector = LocalRollouts(LocalEnvs(config, manager, engine))
    first = collector.collect()
    ordinary = first.batch["rewards"].clone()
    first.batch["rewards"] = torch.zeros(3, 4, 2)
    if rewards == "rewards in another order, scaled":
        paid = torch.tensor([[1, 1, 1, 1, 1, 1], [6, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 1], [0, 1, 1, 1, 3, 0]])
        first.batch["rewards"] = paid.float().view(4, 3, 2).transpose(0, 1)
    elif rewards == "the same last reward":
        first.batch["rewards"] = ordinary
        first.batch["rewards"][-1, :, -1] = 0.7
    first.batch["success"] = torch.zeros(3, 4, 2, dtype=torch.bool)
    first.batch["success"][torch.tensor([0, 1, 2, 1]), torch.arange(4), torch.tensor([0, 1, 0, 0])] = True
    before = bits_of(engine)
    iteration = begun(config, collector, engine, first)
    for stage in (shape_rewards, estimate_advantages):
        stage(iteration)
    assert not first.batch["advantages"].any()
    update(iteration)
    assert iteration.metrics["train/epochs"] == 0
    iteration.learner.update(chunks(first.batch, config), first.batch.task_descriptions)  # not even when asked to
    assert bits_of(engine) == before
    first.batch["advantages"] = ordinary.sum(2)
    iteration.learner.update(chunks(first.batch, config), first.batch.task_descriptions)
    assert bits_of(engine) != before


def bits_of(engine: HybridEngine) -> dict[str, list[int]]:
    """Every parameter of the policy, as bytes."""
    named = engine.policy.named_parameters()
    return {name: parameter.detach().view(torch.uint8).flatten().tolist() for name, parameter in named}
