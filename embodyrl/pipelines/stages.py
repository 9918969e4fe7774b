"""The stages that come with embodyrl. Each reads and writes the columns of the batch that its docstring names.

Shapes: `K` chunks, `B` slots (with whole episodes: episodes), `C` actions of a chunk, `M` valid chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.algorithms.advantages import advantages_by, explained_variance, normalize
from embodyrl.algorithms.columns import (
    Bound,
    OutputError,
    chunk_rewards,
    executed_actions,
    expand_to_level,
    function_name,
    in_chunks,
    in_time,
    logprobs_at_level,
    require_finite,
    require_output,
    valid_at,
)
from embodyrl.algorithms.losses import sequence_numbers, token_weights
from embodyrl.algorithms.off_policy_options import (
    DAggerConfig,
    IQLConfig,
    ReplayAlgorithmConfig,
    begins_randomly,
    demonstrated_share,
)
from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.algorithms.rewards import groups_by, rewards_by
from embodyrl.config.schema import AlgorithmConfig, Bootstrap, Config, DiscountPer, RewardLevel
from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.large import APART
from embodyrl.engine.parallel import Ranks
from embodyrl.engine.soft import CriticLearner, Minibatch, SoftActorCritic
from embodyrl.errors import UserError
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.registry import ADVANTAGES, ENCODERS, FILTERS, REWARDS
from embodyrl.rollout.batch import BatchError, TrajectoryBatch, concat, type_name
from embodyrl.rollout.episodes import EARLY_SUCCESS, Rollout, success_doubt, success_rate
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.replay import Beside, Replay
from embodyrl.rollout.spread import bring_large, bring_own, is_here, rows_here

MOST_CLIPPED = 0.05
"""Share of clipped numbers in a rollout above which there is a warning."""
HOPELESS = 20
"""Episodes without a success after which there is a warning."""
RANDOM_UPDATES, RANDOM_MARGIN = 2000, 0.05
"""Updates after which a policy should not be random any more, and the entropy below the largest that tells it, for each
number of a chunk of actions [nats]."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """The functions that the section `algorithm` chooses, with their options; docs/algorithms.md describes them. The
    loss is the engine's."""

    reward: Bound[Tensor]
    """Rewards `[K, B, C]`."""
    encoder: Callable[..., Tensor] | None
    """Of episodes, for a reward that names `embeddings`; None unless the reward has one."""
    filter: Bound[Tensor]
    """Which of `P` groups to keep, bool `[P]`."""
    advantage: Bound[tuple[Tensor, Tensor]]
    """Advantages and returns, `[K, B]`, or `[K*C, B]` with `algorithm.reward_level: action`."""

    @classmethod
    def of(cls, settings: AlgorithmConfig) -> Components:
        """Import the components, once for all iterations; see `registry.Entry.load` for what is raised."""
        encoder = settings.reward.encoder if isinstance(settings.reward, EncodingRewardConfig) else None
        return cls(
            reward=Bound(REWARDS.load(settings.reward.name), settings.reward),
            encoder=None if encoder is None else ENCODERS.load(encoder),
            filter=Bound(FILTERS.load(settings.filter.name), settings.filter),
            advantage=Bound(ADVANTAGES.load(settings.advantage.name), settings.advantage),
        )


def collect(iteration: Iteration) -> None:
    """Run the policy in the simulators; with a replay, random actions until it holds `start_after` decisions, unless it
    is filled again. Writes the columns of a rollout, and `env/` metrics of the episodes that ended."""
    replay = iteration.replay
    begins = replay is not None and not (replay.has_begun or replay.is_refilled)
    random = begins and begins_randomly(iteration.config.algorithm)
    rollout = iteration.collector.collect(random=True) if random else iteration.collector.collect()
    iteration.rollouts.append(rollout)
    iteration.batch = rollout.batch
    iteration.metrics |= rollout_metrics(iteration.rollouts)
    if (doubt := success_doubt(rollout.finished)) is not None:
        iteration.warn(EARLY_SUCCESS, doubt)
    if rollout.finished and success_rate(rollout.finished) is None and iteration.components.reward.takes("success"):
        settings = iteration.config
        raise UserError(
            f"algorithm.reward = {settings.algorithm.reward.name!r} rewards success, but simulator "
            f"{settings.env.name!r} does not say whether {', '.join(settings.env.tasks)} is solved: set "
            "env.success_return where the simulator has it, or algorithm.reward=dense"
        )


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the metrics of an iteration's rollouts; those of episodes only if any has ended."""
    env_steps = sum(rollout.env_steps for rollout in rollouts)
    rewards = sum(float(rollout.batch["rewards"].sum()) for rollout in rollouts)
    finished = [episode for rollout in rollouts for episode in rollout.finished]
    metrics = {
        "env/steps": float(env_steps),
        "env/episodes": float(len(finished)),
        "rollout/reward_per_step": rewards / max(env_steps, 1),
    }
    if rollouts and "source" in rollouts[0].batch:
        taken = [rollout.batch["source"][rollout.batch["valid"]] == Source.expert for rollout in rollouts]
        metrics["env/interventions"] = float(torch.cat(taken).float().mean())
    if finished and "judged" in rollouts[0].batch:
        judged = sum(int(rollout.batch["judged"][rollout.batch["valid"]].sum()) for rollout in rollouts)
        metrics["env/judged_success"] = judged / len(finished)
    if finished:
        metrics["env/return"] = float(np.mean([each.total_reward for each in finished]))
        if (rate := success_rate(finished)) is not None:
            metrics["env/success_once"] = rate
        metrics["env/episode_length"] = float(np.mean([each.length for each in finished]))
    return metrics


def filter_groups(iteration: Iteration) -> None:
    """Keep the groups that `algorithm.filter` finds worth learning from: dynamic sampling (Yu et al. 2025,
    arXiv:2503.14476, section 3.2).

    It collects again until there are as many groups as a rollout has, or `algorithm.max_collections` is reached, or
    nothing is kept and no episode has succeeded: a policy that never succeeds would fail every further collection too.
    Groups beyond what is needed wait for the next iteration.

    Reads rewards, success, steps, valid; the batch has other slots afterwards, and `filter/` metrics count them.
    """
    config, waiting = iteration.config, iteration.collector.surplus
    size, limit = config.rollout.group_size, config.algorithm.max_collections
    wanted, kept = config.env.num_envs * config.rollout.episodes_per_slot, [] if waiting is None else [waiting]
    succeeded = False
    while True:
        collected = _batch(iteration)
        kept.append(informative_groups(collected, iteration.components.filter, size))
        succeeded = succeeded or bool((collected["success"] & executed_in(collected)).any())
        slots = sum(batch.size[1] for batch in kept)
        if not slots:
            _warn_of_no_group(iteration, succeeded)
        if slots >= wanted or len(iteration.rollouts) >= limit or not (slots or succeeded):
            break
        collect(iteration)
    # Collections end after different numbers of chunks; the padding is invalid, so nothing is learned from it.
    longest = max(batch.size[0] for batch in kept)
    batch = concat([each.pad(longest, "K") for each in kept], "B")
    iteration.batch, surplus = batch.split([min(wanted, batch.size[1]), max(batch.size[1] - wanted, 0)], "B")
    iteration.collector.surplus = surplus if surplus.size[1] else None
    iteration.collector.forget_batch(iteration.batch)
    iteration.metrics |= {
        "filter/collections": float(len(iteration.rollouts)),
        "filter/groups_collected": float(len(iteration.rollouts) * wanted // size),
        "filter/groups_kept": float(sum(each.size[1] for each in kept[-len(iteration.rollouts) :]) // size),
        "filter/groups_learned": float(iteration.batch.size[1] // size),
        "filter/groups_waiting": float(surplus.size[1] // size),
    }


def _warn_of_no_group(iteration: Iteration, succeeded: bool) -> None:
    """Warn that the filter has kept no group so far; each kind of warning is shown once in a run."""
    settings, limit = iteration.config.algorithm.filter, iteration.config.algorithm.max_collections
    if succeeded:
        again = f"it collects up to {limit} times per iteration" if limit > 1 else "the iteration learns nothing"
        return iteration.warn(
            "filter_keeps_nothing",
            f"algorithm.filter={settings.name} keeps no group of a collection, because the episodes of each end alike; "
            f"{again}: choose other tasks, or a filter and reward that distinguish episodes "
            f"(algorithm.filter.name=none, algorithm.reward=dense)",
        )
    iteration.warn(
        "filter_without_success",
        f"no episode succeeded, and algorithm.filter={settings.name} keeps no group: such an iteration stops after "
        f"one collection and learns nothing. Start from a policy that sometimes succeeds (model.checkpoint), choose "
        f"easier tasks, or learn from a reward that distinguishes failures (algorithm.filter.name=none, "
        f"algorithm.reward=dense)",
    )


def informative_groups(batch: TrajectoryBatch, keeps: Bound[Tensor], size: int) -> TrajectoryBatch:
    """Return the slots of the groups that a filter keeps; `size` slots are a group."""
    executed = executed_in(batch)
    outcomes = {
        "success": (batch["success"] & executed).any(2).any(0),
        # Summed in float64: rewards that come in another order must not make equal episodes differ.
        "total_reward": (batch["rewards"].double() * executed).sum((0, 2)).float(),
        "played": batch["valid"].any(0),
    }
    of_groups = {name: column.view(-1, size) for name, column in outcomes.items()}
    return batch.take(torch.nonzero(groups_by(keeps, of_groups).repeat_interleave(size)).squeeze(1), "B")


def shape_rewards(iteration: Iteration) -> None:
    """Compute the rewards to learn from by `algorithm.reward`. Reads steps, valid, and those of observations,
    task_index, actions, rewards, success, terminated, truncated, episode and group that the reward function names;
    writes `shaped_rewards` `[K, B, C]`."""
    settings, batch = iteration.config.algorithm, _batch(iteration)
    reward, encode = iteration.components.reward, iteration.components.encoder
    executed = executed_in(batch)
    exchange = iteration.engine.exchange
    named = [name for name in APART if reward.takes(name)]
    whole = bring_large(batch, exchange, [True] * exchange.ranks.size, named) if named else batch
    columns = {name: whole[name] for name in whole.columns()} | {"executed": executed}
    if reward.takes("embeddings"):
        assert encode is not None and isinstance(settings.reward, EncodingRewardConfig), "the config rules ask for it"
        columns["embeddings"] = episode_embeddings(batch, encode, settings.reward, exchange)
    rewards = rewards_by(reward, columns)
    # All of them, also those of actions that were not executed: 0 * NaN is NaN.
    what, everything = f"reward {function_name(reward.function)} returned rewards", torch.ones_like(executed)
    require_finite(what, rewards, everything, reward.given(columns))
    shaped = (rewards - settings.time_penalty) * executed
    batch["shaped_rewards"] = shaped
    iteration.metrics["rollout/shaped_reward_per_step"] = float(shaped.sum() / executed.sum().clamp(min=1))


def episode_embeddings(
    batch: TrajectoryBatch, encode: Callable[..., Tensor], settings: EncodingRewardConfig, exchange: Exchange
) -> Tensor:
    """Return a vector for every slot's episode, `[B, E]`, from frames spread evenly over its chunks; 0 for an episode
    that was lost. Where images lie with several ranks, each encodes the episodes that it has collected."""
    embeddings: dict[int, Tensor] = {}
    for slot in range(batch.size[1]):
        decided = torch.nonzero(batch["valid"][:, slot]).squeeze(1)
        if not len(decided) or not is_here(batch, exchange, int(decided[0]), slot):
            continue
        frames = decided[torch.linspace(0, len(decided) - 1, settings.frames).round().long()]
        images = rows_here(batch, exchange, "images", frames, slot)
        proprio = batch["proprio"][frames, slot] if "proprio" in batch else None
        embeddings[slot] = _embedding(encode, encode(images, proprio, dim=settings.dim), embeddings)
    return joined_embeddings(embeddings, batch.size[1], settings.dim, exchange.ranks)


def _embedding(encode: Callable[..., Tensor], vector: object, others: Mapping[int, Tensor]) -> Tensor:
    """Return the vector of an episode, after checking that it is one, as long as those before and finite."""
    what = f"encoder {function_name(encode)} returned an embedding"
    if not isinstance(vector, Tensor) or vector.dim() != 1:
        found = f"of shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else f"as {type(vector).__name__}"
        raise OutputError(f"{what} {found}, expected a torch tensor [E]: return one vector for the episode")
    like = next(iter(others.values()), vector)
    require_output(what, vector, like, "as many numbers for every episode")
    require_finite(what, vector, torch.ones_like(vector, dtype=torch.bool), {})
    return vector


def joined_embeddings(own: Mapping[int, Tensor], slots: int, usual: int, ranks: Ranks) -> Tensor:
    """Return the vectors of all slots `[B, E]`, of which each rank has its own; 0 where none has one.

    Args:
        own: by slot.
        slots: `B`.
        usual: `E` if there is no vector.
        ranks: those of the run.
    """
    example = next(iter(own.values()), None)
    known = ranks.gather_values(None if example is None else [len(example), type_name(example.dtype)])
    size, kind = next((each for each in known if each is not None), (usual, "float32"))
    found = torch.zeros(slots, size, dtype=getattr(torch, kind))
    for slot, vector in own.items():
        found[slot] = vector
    return ranks.sum(found) if ranks.size > 1 else found


def estimate_advantages(iteration: Iteration) -> None:
    """Estimate advantages by `algorithm.advantage`. Reads shaped_rewards, terminated, truncated, steps, valid, and with
    a critic values and next_values; writes `advantages` and `returns`, float32 `[K, B]`, or `[K, B, C]` with
    `algorithm.reward_level: action`."""
    settings, batch = iteration.config.algorithm, _batch(iteration)
    of_actions = settings.reward_level is RewardLevel.action
    steps = steps_of_actions(batch, settings) if of_actions else steps_of_chunks(batch, settings)
    steps["rewards"] = steps["rewards"] * settings.reward_scale
    columns: dict[str, Any] = steps | {"group_size": iteration.config.rollout.group_size}
    advantages, returns = (column.float() for column in advantages_by(iteration.components.advantage, columns))
    valid = steps["valid"]
    # Before normalisation, which changes what the advantages are, not how good the critic was.
    if "values" in batch and bool(valid.any()):
        iteration.metrics["train/explained_variance"] = explained_variance(batch["values"][valid], returns[valid])
    if settings.normalize_advantages:
        advantages = normalize(advantages, valid)
    for name, column in (("advantages", advantages), ("returns", returns)):
        batch[name] = in_chunks(column, batch["rewards"].shape[2]) if of_actions else column


def update(iteration: Iteration) -> None:
    """Learn from the batch; adds `train/` metrics. Reads task_index, trace, logprobs, steps, valid, episode, version,
    advantages, the observations, and with a critic values and returns. A batch without a gradient makes no step. With
    `env.offload` the simulators are ended meanwhile; `memory/` metrics report what offloading frees, `traffic/` metrics
    what came from other ranks."""
    batch = _batch(iteration)
    if iteration.config.env.offload:
        iteration.metrics["memory/simulators_freed_mib"] = iteration.collector.offload() / 2**20
    # A step with gradient 0 would still move the weights: by momentum and by weight decay.
    if not teaches(batch, iteration.config):
        iteration.metrics["train/epochs"] = 0.0
        return
    chunks = chunks_to_learn_from(batch, iteration.config)
    exchange = iteration.engine.exchange
    before = exchange.received
    with iteration.engine.train_mode():
        iteration.metrics |= iteration.engine.update(chunks, batch.task_descriptions)
    if ADDRESS in batch:
        iteration.metrics["traffic/fetched_mib"] = (exchange.received - before) / 2**20
    iteration.metrics |= iteration.engine.memory_metrics()


def teaches(batch: TrajectoryBatch, config: Config) -> bool:
    """Return whether a batch has a gradient. It has none if a filter left nothing of it, or if every advantage is 0
    (all episodes of each group ended alike) and no other term of the loss is in use."""
    settings = config.algorithm
    other_terms = "values" in batch or settings.kl_coef > 0 or settings.entropy_coef > 0
    return bool(batch["valid"].any()) and (other_terms or bool(batch["advantages"].any()))


def remember(iteration: Iteration) -> None:
    """Add the rollout's decisions to the replay. Reads observations, actions, rewards, success, terminated, truncated,
    steps, valid and episode; adds `replay/` metrics, and the success of the newest episodes as `env/`."""
    replay = _replay(iteration)
    # Each rank keeps the images of its own envs, so that none travel.
    batch = bring_own(_batch(iteration), iteration.engine.exchange, replay.own)
    replay.add(replace(iteration.rollouts[-1], batch=batch))
    iteration.metrics |= replay.metrics()
    _go_on_with_statistics(iteration, batch)


def improve(iteration: Iteration) -> None:
    """Learn from decisions drawn from the replay, once it holds `start_after`: `updates_per_step` steps for each that
    was added since. Adds `train/` metrics."""
    replay = _replay(iteration)
    settings = iteration.config.algorithm
    assert isinstance(settings, ReplayAlgorithmConfig), "the config rules ask for it"
    steps = replay.take_owed(settings.off_policy.updates_per_step)
    if iteration.config.env.offload:
        iteration.metrics["memory/simulators_freed_mib"] = iteration.collector.offload() / 2**20
    if steps:
        _learn_from(iteration, replay.minibatches(steps, settings.off_policy.batch_size, _beside(iteration)))
    if settings.reward.name == "success" and replay.ended["episodes"] >= HOPELESS and not replay.ended["successes"]:
        iteration.warn(
            "replay_without_success",
            f"no episode of {replay.ended['episodes']} has succeeded, and algorithm.reward=success rewards nothing "
            "else: the critics have nothing to learn. Choose easier tasks, a longer env.max_episode_steps, or "
            "algorithm.reward=dense",
        )
    iteration.metrics |= iteration.engine.memory_metrics()


def improve_offline(iteration: Iteration) -> None:
    """Learn from demonstrations alone, `data.steps` steps. Adds `train/` metrics."""
    replay, config = _replay(iteration), iteration.config
    assert iteration.transitions is not None, "the config rules ask for data.path"
    assert isinstance(config.algorithm, IQLConfig), "no other algorithm learns so"
    alone = Beside(demonstrations=iteration.transitions, share=1.0)
    _learn_from(iteration, replay.minibatches(config.data.steps, config.algorithm.off_policy.batch_size, alone))
    iteration.metrics |= replay.metrics() | iteration.engine.memory_metrics()


def _learn_from(iteration: Iteration, minibatches: Iterator[Minibatch]) -> None:
    """Learn from minibatches, with statistics of what has been seen; warn of what looks wrong."""
    learner = iteration.engine.soft
    assert learner is not None, "the config rules ask for it"
    _begin_statistics(iteration)
    iteration.metrics |= iteration.engine.improve(minibatches, _task_descriptions(iteration))
    _warn_of_values(iteration, learner)
    if isinstance(learner, SoftActorCritic):
        _warn_of_randomness(iteration, learner)


def _begin_statistics(iteration: Iteration) -> None:
    """Take the statistics of what scales observations from all that have been seen, unless it has some: from a
    checkpoint, or from imitation that came first."""
    for one, scaling in iteration.engine.observers.items():
        seen = _seen(iteration, one.scaled)
        if seen is not None and not scaling.count:
            iteration.engine.add_to_statistics(seen, one)


def _go_on_with_statistics(iteration: Iteration, batch: TrajectoryBatch) -> None:
    """Add the rollout's observations to the statistics, once there are any; warn of what the policy cannot see."""
    shares = []
    for one, scaling in iteration.engine.observers.items():
        seen = _replay(iteration).own_of(batch, one.scaled)
        if seen is not None and scaling.count:
            shares.append(iteration.engine.add_to_statistics(seen, one))
    if not shares:
        return
    iteration.metrics["train/clipped_features"] = max(shares)
    if max(shares) > MOST_CLIPPED:
        iteration.warn(
            "features_clipped",
            f"{max(shares):.0%} of the numbers that the policy sees of the newest rollout lie more than ten standard "
            "deviations from what was seen before, where it cannot distinguish them. The statistics continue with "
            "every rollout; if train/clipped_features stays high, collect more at random first (raise "
            "algorithm.off_policy.replay.start_after), or set model.normalize_observations=false if the model has it",
        )


def _task_descriptions(iteration: Iteration) -> Sequence[str]:
    """Return those that the column `task_index` of minibatches refers to."""
    known = _batch(iteration) if iteration.transitions is None else iteration.transitions
    return known.task_descriptions


def _beside(iteration: Iteration) -> Beside | None:
    """Return the demonstrations that are in every minibatch, if there are any."""
    share, shown = demonstrated_share(iteration.config.algorithm), iteration.transitions
    if share is None or shown is None:
        return None
    return Beside(
        demonstrations=shown,
        share=len(shown) / (len(shown) + len(_replay(iteration))) if isinstance(share, str) else share,
        # What is only imitated has a label, whoever acted: there is nothing to distinguish.
        interventions_join=not isinstance(iteration.config.algorithm, DAggerConfig),
    )


def _seen(iteration: Iteration, name: str) -> Tensor | None:
    """Return what has been seen before learning begins, a column `[M, ...]` of this rank's decisions, and on the first
    rank also of the demonstrations; None if there is no such column."""
    seen = _replay(iteration).seen(name)
    shown = None if iteration.transitions is None else getattr(iteration.transitions, name)
    if seen is None or shown is None or not iteration.engine.ranks.is_first:
        return seen
    return torch.cat([seen, torch.from_numpy(shown)])


def learn_corrections(iteration: Iteration) -> None:
    """Imitate what an expert would have done in decisions drawn from the replay: `updates_per_step` steps for each that
    was added since. Adds `train/` metrics."""
    replay = _replay(iteration)
    settings = iteration.config.algorithm
    assert isinstance(settings, DAggerConfig), "the config rules ask for it"
    steps = replay.take_owed(settings.off_policy.updates_per_step)
    if iteration.config.env.offload:
        iteration.metrics["memory/simulators_freed_mib"] = iteration.collector.offload() / 2**20
    if steps:
        minibatches = replay.minibatches(steps, settings.off_policy.batch_size, _beside(iteration))
        _begin_statistics(iteration)
        iteration.metrics |= iteration.engine.imitate_labels(minibatches, _task_descriptions(iteration))
    iteration.metrics["train/updates"] = float(replay.taken)
    iteration.metrics |= iteration.engine.memory_metrics()


def _warn_of_values(iteration: Iteration, learner: CriticLearner) -> None:
    """Warn of values that no rewards add up to, once."""
    metrics, settings = iteration.metrics, iteration.config.algorithm
    chunk = iteration.config.rollout.chunk_size if settings.discount_per is DiscountPer.action else 1
    gamma = settings.gamma**chunk
    bound = learner.largest_return / (1.0 - gamma) if gamma < 1.0 else math.inf
    if metrics.get("train/q_max", -math.inf) > bound > 0.0:
        iteration.warn(
            "values_too_large",
            f"the critics value an action at {metrics['train/q_max']:.3g}, more than the largest reward so far for "
            f"ever ({learner.largest_return:.3g} / (1 - gamma) = {bound:.3g}): they overestimate. Lower "
            "engine.optimizer.critic_lr or algorithm.off_policy.updates_per_step, keep "
            "algorithm.off_policy.critics.layer_norm on, or use more critics",
        )


def _warn_of_randomness(iteration: Iteration, soft: SoftActorCritic) -> None:
    """Warn of an entropy that stays as large as it can be, once."""
    metrics = iteration.metrics
    learned = metrics.get("train/updates", 0.0) >= RANDOM_UPDATES and soft.settings.temperature.learn
    if learned and metrics.get("train/entropy", -math.inf) > soft.largest_entropy - RANDOM_MARGIN * soft.size:
        iteration.warn(
            "policy_stays_random",
            f"after {metrics['train/updates']:.0f} updates the policy is still as good as random (entropy "
            f"{metrics['train/entropy']:.2f} of at most {soft.largest_entropy:.2f} nats): its entropy weighs more than "
            "rewards do. Lower algorithm.off_policy.temperature.initial, or raise "
            "algorithm.off_policy.temperature.lr or algorithm.reward_scale",
        )


def _replay(iteration: Iteration) -> Replay:
    if iteration.replay is None:
        raise BatchError("there is no replay: choose an algorithm that learns from one, such as sac")
    return iteration.replay


def sft_step(iteration: Iteration) -> None:
    """Learn from the next `data.steps` minibatches of demonstrations; adds `train/` metrics."""
    if iteration.demonstrations is None:
        raise BatchError("there are no demonstrations to learn from: set data.path")
    steps = iteration.config.data.steps
    batches = iteration.demonstrations.batches(iteration.engine.version * steps, steps)
    with iteration.engine.train_mode():
        iteration.metrics |= iteration.engine.sft_step(batches)
    iteration.metrics |= iteration.engine.memory_metrics()


def _batch(iteration: Iteration) -> TrajectoryBatch:
    if iteration.batch is None:
        raise BatchError("no stage has collected a batch yet: an iteration starts with a stage that does")
    return iteration.batch


def executed_in(batch: TrajectoryBatch) -> Tensor:
    """Return a mask of the actions that were executed, bool `[K, B, C]`."""
    return executed_actions(batch["steps"], batch["valid"], batch["rewards"].shape[2])


def steps_of_chunks(batch: TrajectoryBatch, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """Return columns `[K, B]` for an advantage estimator: a chunk's rewards are summed, in float64."""
    per_action = settings.discount_per is DiscountPer.action
    columns = {name: batch[name] for name in ("values", "terminated", "valid") if name in batch} | {
        "rewards": chunk_rewards(batch["shaped_rewards"].double(), settings.gamma if per_action else 1.0),
        "ended": batch["terminated"] | batch["truncated"],
        "discounts": settings.gamma ** (batch["steps"].float() if per_action else batch["valid"].float()),
    }
    if "next_values" in batch:
        # `bootstrap: none` takes a time limit for an end of the task, as many published implementations do.
        cut_off = batch["truncated"] & (settings.bootstrap is Bootstrap.none)
        columns["next_values"] = batch["next_values"].masked_fill(cut_off, 0.0)
    return columns


def steps_of_actions(batch: TrajectoryBatch, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """Return columns `[K*C, B]` for an advantage estimator: every action is a step of its own; rewards are float64."""
    executed = executed_in(batch)
    # The last executed action of each chunk: the episode ends in it, and a discount per chunk is charged to it.
    last = executed & (executed.cumsum(2) == batch["steps"].unsqueeze(2))
    discounted = executed if settings.discount_per is DiscountPer.action else last
    ended = last & (batch["terminated"] | batch["truncated"]).unsqueeze(2)
    return {
        "rewards": in_time(batch["shaped_rewards"].double()),
        "valid": in_time(executed),
        "ended": in_time(ended),
        "discounts": settings.gamma ** in_time(discounted).float(),
    }


def chunks_to_learn_from(batch: TrajectoryBatch, config: Config) -> TensorDictBase:
    """Return the valid chunks `[M]` of a batch, with the columns that `HybridEngine.update` takes."""
    level, chunk_size = config.algorithm.logprob_level, batch["rewards"].shape[2]
    per_action = batch["logprobs"].shape[2] // chunk_size
    executed = executed_in(batch)
    observed = [name for name in ("proprio", "images", "trace", ADDRESS) if name in batch]
    critic = ["returns"] if "values" in batch else []
    chunks = batch.decisions("task_index", "version", "valid", *observed, *critic)
    columns = {
        "executed": executed,
        "old_logprobs": logprobs_at_level(level, batch["logprobs"], executed),
        "advantages": expand_to_level(level, batch["advantages"], executed, per_action),
        "valid": valid_at(level, executed, per_action),
        "sequence": sequence_numbers(batch["episode"]),
    }
    if critic:
        columns["old_values"] = batch["values"]
    # Padding and lost episodes leave the batch here, so that minibatches hold only chunks that count.
    taken = torch.nonzero(batch["valid"].flatten()).squeeze(1)
    for name, column in columns.items():
        chunks[name] = column.flatten(0, 1)
    chunks = chunks[taken]
    # Weights are made over the whole batch, before it is cut into minibatches (see `algorithms.losses`).
    longest = config.rollout.num_chunks * int(chunks["valid"][0].numel()) if len(taken) else 1
    chunks["weights"] = token_weights(chunks["valid"], chunks["sequence"], config.algorithm.aggregation, longest)
    return chunks
