"""HybridEngine: one set of weights that rolls out and trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.algorithms.call import call_with
from embodyrl.algorithms.losses import LossOutput, masked_mean, value_loss
from embodyrl.config.schema import AlgorithmConfig, Device, EngineConfig, LearningRate, OptimizerConfig
from embodyrl.envs import Observation
from embodyrl.errors import RunError, UserError
from embodyrl.models.policy import ActOutput, Policy
from embodyrl.seeding import derive_seed

SETTINGS_FOR_LOSSES = ("clip_low", "clip_high")


Columns = dict[str, Any]
"""A batch by column: tensors `[M, ...]`, and `trace`, a table of its own."""


class NumericsError(RunError):
    """Raised when a loss or a gradient is not a finite number."""


def choose_device(device: Device) -> torch.device:
    """The torch device that `engine.device` stands for.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise UserError("engine.device is cuda, but torch finds no CUDA device here: set engine.device=auto or cpu")
    if device is Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def observation_from(columns: Columns, sentences: Sequence[str]) -> Observation:
    """The observations in a batch's columns `[M]`, as `Policy.preprocess` takes them."""
    return Observation(
        images=columns.get("images"),
        proprio=columns.get("proprio"),
        tasks=[sentences[index] for index in columns["task"].tolist()],
    )


class HybridEngine:
    """Owns the policy, its optimiser, and the random streams of acting and learning.

    Args:
        policy: moved to the engine's device.
        config: device, threads, optimiser.
        algorithm: epochs, minibatches, loss weights.
        loss: policy loss from the registry.
        iterations: length of the run, for the learning-rate schedule.
        seed: the run's seed.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        config: EngineConfig,
        algorithm: AlgorithmConfig,
        loss: Callable[..., LossOutput],
        iterations: int,
        seed: int,
    ) -> None:
        self.device = choose_device(config.device)
        torch.set_num_threads(1 if config.threads == "auto" else int(config.threads))
        self.policy = policy.to(self.device)
        self.algorithm = algorithm
        self.loss = loss
        self.version = 0
        """Updates so far; every chunk is labelled with the version that produced it."""
        self._optimizer_config = config.optimizer
        self._iterations = iterations
        self._optimizer = build_optimizer(policy, config.optimizer)
        self._action_noise = torch.Generator(self.device).manual_seed(derive_seed(seed, "actions"))
        self._shuffling = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))

    @torch.inference_mode()
    def act(self, observation: Observation, mode: Literal["train", "eval"]) -> ActOutput:
        """Decide for each slot; see `Policy.act`."""
        return self.policy.act(self.policy.preprocess(observation), mode, self._action_noise)

    def update(self, batch: TensorDictBase, sentences: Sequence[str]) -> dict[str, float]:
        """Learn from a batch, `epochs` times over in shuffled minibatches.

        Args:
            batch: `[M]` decisions: observation columns, `trace`, and old_logprobs, advantages, returns, old_values
                (the last two only matter with a critic), valid.
            sentences: task sentences that the column `task` indexes.

        Returns:
            Metrics, each the mean over the optimiser steps taken.
        """
        columns: Columns = dict(batch.to(self.device).items())
        self._set_learning_rate()
        history: list[dict[str, Tensor]] = []
        passes = 0
        for _ in range(self.algorithm.epochs):
            if not self._one_pass(columns, sentences, history):
                break
            passes += 1
        self.version += 1
        self.policy.update_statistics(self.policy.preprocess(observation_from(columns, sentences)))
        return mean_metrics(history) | {
            "train/passes": float(passes),
            "train/learning_rate": self._optimizer.param_groups[0]["lr"],
        }

    def _one_pass(self, columns: Columns, sentences: Sequence[str], history: list[dict[str, Tensor]]) -> bool:
        """One epoch; False if the policy moved so far from the rollout's that it ended early."""
        order = torch.randperm(len(columns["valid"]), generator=self._shuffling).to(self.device)
        for index in order.tensor_split(min(self.algorithm.minibatches, len(order))):
            output = self._loss({name: column[index] for name, column in columns.items()}, sentences)
            history.append(output.metrics)
            target = self.algorithm.target_kl
            if target is not None and float(output.metrics["approx_kl"]) > target:
                return False
            output.metrics["grad_norm"] = self._descend(output.loss)
        return True

    def _loss(self, minibatch: Columns, sentences: Sequence[str]) -> LossOutput:
        """Policy loss + value loss - entropy bonus of one minibatch, each decision counting once."""
        settings = self.algorithm
        evaluated = self.policy.evaluate(
            self.policy.preprocess(observation_from(minibatch, sentences)), dict(minibatch["trace"].items())
        )
        valid = minibatch["valid"]
        available = {name: getattr(settings, name) for name in SETTINGS_FOR_LOSSES}
        available |= {key: minibatch[key] for key in ("old_logprobs", "advantages", "valid")}
        output = call_with(self.loss, available | {"logprobs": evaluated.logprobs.sum(-1)})
        entropy = masked_mean(evaluated.entropy.sum(-1), valid)
        output.metrics |= {"policy_loss": output.loss.detach(), "entropy": entropy.detach()}
        if settings.entropy_coef > 0.0:
            output.loss = output.loss - settings.entropy_coef * entropy
        if settings.value_coef > 0.0:
            assert evaluated.values is not None, "the config rules ask for a critic"
            error = value_loss(
                evaluated.values, minibatch["old_values"], minibatch["returns"], valid, settings.value_clip
            )
            output.metrics["value_loss"] = error.detach()
            output.loss = output.loss + settings.value_coef * error
        return output

    def _descend(self, loss: Tensor) -> Tensor:
        """One optimiser step; returns the gradient norm before clipping."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trainable(), self._optimizer_config.max_grad_norm)
        if not torch.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {float(norm)} in update {self.version + 1} (loss {float(loss.detach())}); "
                "weights were left as they were. Lower engine.optimizer.lr, or look at the rewards and observations"
            )
        self._optimizer.step()
        return norm.detach()

    def _trainable(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _set_learning_rate(self) -> None:
        config = self._optimizer_config
        remaining = 1.0 - self.version / self._iterations if config.schedule is LearningRate.linear else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * max(remaining, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimiser, random streams, version."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "action_noise": self._action_noise.get_state(),
            "shuffling": self._shuffling.get_state(),
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._action_noise.set_state(state["action_noise"])
        self._shuffling.set_state(state["shuffling"])
        self.version = state["version"]


def mean_metrics(history: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Mean of each metric over the rows that have it, under `train/`."""
    names = dict.fromkeys(name for row in history for name in row)
    return {f"train/{name}": float(torch.stack([row[name] for row in history if name in row]).mean()) for name in names}


def build_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that require gradients."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
