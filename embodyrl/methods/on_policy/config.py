"""Settings of the methods that learn from their newest rollout. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Idleness, IterationSize, Learns, Needs
from embodyrl.config.rules import fact
from embodyrl.config.schema import (
    AdvantageConfig,
    Aggregation,
    Config,
    FilterConfig,
    KLEstimator,
    Level,
    LossConfig,
    OldLogprobs,
    Proximal,
    RewardedConfig,
    RewardLevel,
    component,
    setting,
)
from embodyrl.registry import ADVANTAGES, REWARDS, load_target
from embodyrl.screen import counted

if TYPE_CHECKING:
    from embodyrl.pipelines.pipeline import Stage


@dataclass(frozen=True, kw_only=True)
class NewestConfig(RewardedConfig):
    """Learning from the newest rollout, a few epochs long, by the advantages of its chunks."""

    filter: FilterConfig = component(FilterConfig)
    """Groups to learn from: none (no filter, all groups), zero_variance (drops groups whose episodes have equal
    outcomes), accuracy (keeps groups whose success rate lies within limits)."""
    max_collections: int = setting(1, low=1)
    """Most rollouts per iteration (DAPO's dynamic sampling). Rollouts are repeated until num_envs / group_size groups
    pass the filter; surplus groups wait for the next iteration. 1: learn from the groups that one rollout leaves."""
    advantage: AdvantageConfig = component(AdvantageConfig)
    """Advantage estimator: gae (with a critic), grpo (relative to other episodes), reinforce_pp (the return), raw (the
    reward)."""
    normalize_advantages: bool = setting(True)
    """Scale the batch's advantages to mean 0 and standard deviation 1 before the update."""
    aggregation: Aggregation = setting(Aggregation.token_mean)
    """Reduction of the loss. token_mean: mean over all units that are compared (logprob_level, chunks otherwise). The
    others are means over episodes: of the episode's sum (seq_mean_token_sum), of its mean (seq_mean_token_mean), or of
    its sum divided by the length of the longest possible episode (seq_mean_token_sum_norm)."""
    epochs: int = setting(4, low=1)
    """Epochs of the update over each rollout."""
    minibatches: int = setting(4, low=1)
    """Minibatches, and so optimizer steps, per epoch; num_envs * num_chunks must be a multiple. batch_size in SB3 is
    num_envs * num_chunks / minibatches."""

    @property
    def family(self) -> str:
        """See `AlgorithmConfig`."""
        return "on_policy"

    @property
    def compared_levels(self) -> tuple[Level, RewardLevel]:
        """Unit of what the loss compares, and of the rewards that advantages are estimated from."""
        return Level.chunk, RewardLevel.chunk

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.on_policy import rules  # which read this class

        yield from rules.check_newest(config, self)

    def check_stages(self, config: Config, stages: Sequence[Stage]) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that they fit the filter and the advantage."""
        from embodyrl.methods.on_policy import rules

        yield from rules.check_stages(config, self, stages)

    def notes(self, config: Config) -> list[str]:
        """See `AlgorithmConfig`: those of the reward."""
        of_reward = fact(REWARDS, self.reward.name, "notes")
        return [] if of_reward is None else [*load_target(of_reward)(config)]

    def parts(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {"reward": self.reward, "filter": self.filter, "advantage": self.advantage}

    def batches(self, config: Config) -> IterationSize:
        """See `AlgorithmConfig`."""
        rollout = config.rollout
        decisions = rollout.num_chunks * config.env.num_envs * rollout.episodes_per_slot
        return IterationSize(
            decisions=decisions,
            steps=self.epochs * self.minibatches,
            minibatch=ceil(decisions / self.minibatches),
            passes=self.epochs,
        )

    def describe(self, config: Config) -> str:
        """See `AlgorithmConfig`."""
        rollout = config.rollout
        chunks = rollout.num_chunks * config.env.num_envs * rollout.episodes_per_slot
        episodes = f" x {rollout.episodes_per_slot} episodes" if rollout.episodes_per_slot > 1 else ""
        late = f" {counted(rollout.delay, 'step')} late" if rollout.delay else ""
        return (
            f"{self.name} ({self._names()})   {counted(config.run.iterations, 'iteration')} of "
            f"{counted(rollout.num_chunks, 'chunk')} x {counted(config.env.num_envs, 'env')}{episodes}, "
            f"chunks of {counted(rollout.chunk_size, 'action')}{late}, "
            f"{counted(self.epochs, 'epoch')} in minibatches of {chunks // self.minibatches}"
        )

    def _names(self) -> str:
        """Return the names of the components that make the method what it is."""
        return self.advantage.name

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        return ("rollout.group_size", "algorithm.epochs", "algorithm.minibatches")

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {"algorithm.minibatches": 1, "algorithm.epochs": 1}

    def why_idle(self, metrics: Mapping[str, float]) -> Idleness | None:
        """See `AlgorithmConfig`."""
        if "train/epochs" not in metrics:
            return None
        if not metrics.get("env/episodes", 1.0):
            return Idleness("no episode has ended", "more rollout.num_chunks, or a shorter env.max_episode_steps")
        kept = ""
        success = f" (success {metrics['env/success_once']:.2f})" if "env/success_once" in metrics else ""
        if "filter/groups_kept" in metrics:
            collected = metrics["filter/groups_collected"]
            kept = f" ({metrics['filter/groups_kept']:.0f} of {collected:.0f} groups were kept)"
        return Idleness(
            f"the episodes of each group end alike{success}{kept}",
            "start from a policy that sometimes succeeds (model.checkpoint), choose easier tasks, or a reward that "
            "distinguishes episodes (algorithm.reward=dense)",
        )


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(NewestConfig):
    """Learning from the newest rollout by log-probs: PPO, GRPO and their kin, which differ in advantage, loss, reward
    and filter."""

    reward_level: RewardLevel = setting(RewardLevel.chunk)
    """chunk: a chunk's rewards are summed and its actions share one advantage. action: every action has its own reward
    and advantage (only reinforce_pp and raw, since a critic predicts values of chunks)."""
    loss: LossConfig = component(LossConfig)
    """Policy loss: ppo, decoupled_ppo (for chunks of an older policy), cpgd (without a probability ratio), gspo (ratios
    of whole episodes)."""
    old_logprobs: OldLogprobs = setting(OldLogprobs.rollout)
    """Old log-probs in probability ratios. rollout: those under which the actions were sampled. recompute: those of the
    same policy in another forward pass, in the micro-batches of the first epoch, so that its ratios start at exactly 1;
    for bfloat16, which rounds differently in batches of another size. Chunks of earlier updates keep theirs."""
    logprob_level: Level = setting(Level.chunk)
    """Unit of probability ratios, the KL penalty and the entropy bonus: a whole chunk, an action of the chunk (action),
    or an action dim or token of the action (token)."""
    proximal: Proximal = setting(Proximal.recompute)
    """Proximal policy of losses that clip ratios around one (decoupled_ppo). recompute: the policy at the start of the
    update, by a forward pass. loglinear: interpolated between the policy that acted and the current one, by their
    versions."""
    value_coef: float = setting(0.5, low=0.0)
    """Weight of the value loss."""
    value_clip: float | None = setting(None, above=0.0)
    """Clip range of value estimates: largest change per update that still has a gradient [return]; null: no
    clipping."""
    value_huber: float | None = setting(None, above=0.0)
    """Huber threshold: errors of a value estimate beyond this count linearly [return]; null: squared error."""
    entropy_coef: float = setting(0.0, low=0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = setting(0.0, low=0.0)
    """Weight of the KL divergence from the reference policy, the one that the run starts from. 0: no reference
    policy."""
    kl_estimator: KLEstimator = setting(KLEstimator.k3)
    """Estimator of that divergence, of log-ratio r = log p - log p_ref: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r. The
    expected gradient of k1 is zero."""
    target_kl: float | None = setting(None, above=0.0)
    """Stop an update's epochs once the approximate KL to the rollout policy exceeds this [nats]; null: never."""

    @property
    def compared_levels(self) -> tuple[Level, RewardLevel]:
        """See `NewestConfig`."""
        return self.logprob_level, self.reward_level

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(
            learns=Learns.likelihood,
            rollouts=True,
            critic=bool(fact(ADVANTAGES, self.advantage.name, "critic")),
            reference=self.kl_coef > 0.0,
        )

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.on_policy import rules

        yield from super().check(config)
        yield from rules.check(config, self)

    def notes(self, config: Config) -> list[str]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.on_policy import rules

        return [*super().notes(config), *rules.notes(config, self)]

    def parts(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {"reward": self.reward, "filter": self.filter, "advantage": self.advantage, "loss": self.loss}

    def batches(self, config: Config) -> IterationSize:
        """See `AlgorithmConfig`."""
        again = (self.kl_coef > 0) + (self.old_logprobs is OldLogprobs.recompute)
        return replace(super().batches(config), passes=self.epochs + again)

    def _names(self) -> str:
        """See `NewestConfig`."""
        return f"{self.advantage.name}, {self.loss.name}"

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        return (
            *("rollout.group_size", "algorithm.epochs", "algorithm.minibatches", "algorithm.advantage.gae_lambda"),
            *("algorithm.loss.clip_high", "algorithm.entropy_coef", "algorithm.kl_coef"),
        )

    def why_idle(self, metrics: Mapping[str, float]) -> Idleness | None:
        """See `AlgorithmConfig`."""
        if "train/approx_kl" in metrics:
            return Idleness(
                f"the KL divergence was {metrics['train/approx_kl']:.2g} before the first step, beyond "
                f"algorithm.target_kl = {self.target_kl:g}",
                "algorithm.old_logprobs=recompute takes rounding out of it; else raise algorithm.target_kl",
            )
        return super().why_idle(metrics)


@dataclass(frozen=True, kw_only=True)
class SRPOConfig(OnPolicyConfig):
    """Self-referential policy optimisation: GRPO with a reward of its own."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that it has its reward, its only difference from GRPO."""
        yield from super().check(config)
        if self.reward.name != "srpo":
            yield ConfigIssue(
                ("algorithm.reward.name", "algorithm.name"),
                f"algorithm.name is 'srpo', but algorithm.reward is {self.reward.name!r}, which makes it GRPO",
                "set algorithm.reward to srpo, or algorithm.name to grpo",
                fix={"algorithm.reward": "srpo"},
            )
