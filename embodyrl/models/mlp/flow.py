"""Small flow policies: a network of velocities makes chunks of actions of noise in a few steps, or another one,
distilled from it, in one (Park et al. 2025, "Flow Q-Learning", arXiv:2502.02538). Critics may choose among several
chunks.

Velocities point from data to noise, as in `models.flow`: at the share s of noise a chunk is `(1 - s) a + s z`, and its
velocity `z - a`. Shapes: `B` samples, `F` features, `N` numbers of a chunk in -1 .. 1, `n` candidates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.models.critics.config import CandidatesConfig
from embodyrl.models.critics.network import Critics, critic_weights
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.denoising import euler, prior
from embodyrl.models.mlp.heads import FlowHead
from embodyrl.models.mlp.network import MODULES, build_network
from embodyrl.models.mlp.options import Distribution, HeadConfig, MLPConfig
from embodyrl.models.mlp.policy import ActorCritic, MLPPolicy
from embodyrl.models.policy import (
    ACTION_WEIGHTS,
    WEIGHTS_FILE,
    ActOutput,
    EvalOutput,
    Inputs,
    Mode,
    mean_over_samples,
)
from embodyrl.models.saved import read_candidates, write_description
from embodyrl.seeding import derive_seed

NOISE, SHARES = "noise", "shares"
"""Names in traces, and in what is drawn for the supervised loss."""


class Judge(nn.Module):
    """Critics by which a policy chooses one of several chunks.

    Args:
        critics: values of chunks; they may be learned by someone else meanwhile.
        config: how many chunks, and how critics agree.
        size: `N`.
    """

    start: Tensor

    def __init__(self, critics: Critics, config: CandidatesConfig, size: int) -> None:
        super().__init__()
        self.critics, self.config = critics, config
        generator = torch.Generator().manual_seed(derive_seed(0, "candidates"))
        # Evaluations draw nothing: these are the same for all, the first of them that of a policy without a choice.
        others = torch.randn(config.candidates - 1, size, generator=generator)
        self.register_buffer("start", torch.cat([torch.zeros(1, size), others]))

    def best(self, features: Tensor, chunks: Tensor) -> Tensor:
        """Return which of `chunks [B, n, N]` has the highest value, int64 `[B]`."""
        batch, candidates, _ = chunks.shape
        values = self.critics(features.repeat_interleave(candidates, 0), chunks.flatten(0, 1))
        agreed = values.mean(0) if self.config.mean else values.amin(0)
        best: Tensor = agreed.view(batch, candidates).argmax(1)
        return best


class FlowActorCritic(ActorCritic):
    """Base class of small policies with `model.head` flow or one_step. They have no likelihood; the log-probs of a
    decision are those of its noise."""

    head: FlowHead
    has_likelihood = False

    def __init__(self, config: HeadConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        self.judge: Judge | None = None
        """Chooses among several chunks; None: there is only one."""

    def build_actor(self, config: HeadConfig, hidden_sizes: Sequence[int]) -> None:
        """See `ActorCritic`; also the network that takes one step, if the policy acts so."""
        super().build_actor(config, hidden_sizes)
        self.one_step: nn.Module | None = None
        """From features and noise to a chunk."""
        if config.head is Distribution.one_step:
            sizes = [self.feature_dim + self.head.size, *hidden_sizes, self.head.size]
            self.one_step = build_network(sizes, MODULES[config.activation], 0.01)

    # ---- chunks

    def denoise(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the chunks `[B, N]` that the velocities make of `noise [B, N]` by Euler steps, in -1 .. 1."""
        chunk, shares = noise, torch.linspace(1.0, 0.0, self.head.steps + 1, device=noise.device, dtype=noise.dtype)
        for before, after in pairwise(shares):
            chunk = euler(chunk, self._velocities(features, chunk, before.expand(len(chunk))), before, after)
        return chunk.clamp(-1.0, 1.0)

    def flow_losses(
        self, features: Tensor, wanted: Tensor, noise: Tensor, shares: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the losses `[B]` of flow matching (Lipman et al. 2023, arXiv:2210.02747, on straight lines): the mean
        squared errors of velocities.

        Args:
            features: `[B, F]`.
            wanted: chunks that are imitated, `[B, N]` in -1 .. 1.
            noise: standard normal `[B, N]`.
            shares: of noise, `[B]` in 0 .. 1.
            weights: how much each action counts, `[B, C]`; None: all alike.
        """
        noisy = wanted + shares[:, None] * (noise - wanted)
        errors = (self._velocities(features, noisy, shares) - (noise - wanted)).square()
        return self._over_actions(errors, weights)

    def distances(self, features: Tensor, noise: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean squared distances `[B]` of the chunks that one step makes of `noise [B, N]` from those that
        denoising does, through which no gradient flows (Park et al. 2025, section 4); `weights` as in `flow_losses`."""
        with torch.no_grad():
            wanted = self.denoise(features, noise)
        return self._over_actions((self.in_one_step(features, noise) - wanted).square(), weights)

    def in_one_step(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the chunks `[B, N]` that one step makes of `noise [B, N]`; they may leave -1 .. 1 a little."""
        assert self.one_step is not None, "model.head is one_step"
        made: Tensor = self.one_step(torch.cat([features, noise], -1)).float()
        return made

    def chosen(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chunk `[B, N]` of the highest value that is made of `noise [B, n, N]`, and its noise `[B, N]`;
        without critics, n is 1."""
        chunks, _ = self.draw(features.repeat_interleave(noise.shape[1], 0), noise.flatten(0, 1))
        chunks = chunks.view_as(noise)
        if self.judge is None:
            return chunks[:, 0], noise[:, 0]
        rows = torch.arange(len(noise), device=noise.device), self.judge.best(features, chunks)
        return chunks[rows], noise[rows]

    def choose_by(self, critics: Critics, config: CandidatesConfig) -> None:
        """Take the best of several chunks from now on, by critics that another one may go on to learn."""
        self.judge = Judge(critics, config, self.head.size).to(self.head.centre.device)

    def _velocities(self, features: Tensor, noisy: Tensor, shares: Tensor) -> Tensor:
        velocities: Tensor = self.actor(torch.cat([features, noisy, shares[:, None]], -1)).float()
        return velocities

    def _over_actions(self, errors: Tensor, weights: Tensor | None) -> Tensor:
        """Return the means `[B]` of errors `[B, N]`, each action weighted."""
        in_chunks = errors.view(len(errors), self.spec.chunk_size, -1)
        return (in_chunks if weights is None else in_chunks * weights[..., None]).mean((1, 2))

    # ---- acting

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the noise `[B, N]`. In evaluation noise is zero, or that of candidates
        always the same."""
        features = self.encode(inputs)
        noise = self._eval_noise(len(features))
        if mode == "train":
            noise = torch.randn(noise.shape, generator=generator, device=noise.device)
        unit, noise = self.chosen(features, noise)
        return self._decided(unit, noise)

    def explore(self, inputs: Inputs, generator: torch.Generator) -> ActOutput:
        """See `SoftPolicy`."""
        size = (len(next(iter(inputs.values()))), self.head.size)
        noise = torch.randn(size, generator=generator, device=generator.device)
        # The distribution function of normal noise is spread evenly.
        return self._decided((noise / math.sqrt(2.0)).erf(), noise)

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`: of the noise, whatever the weights are."""
        likely = prior(trace[NOISE])
        return EvalOutput(logprobs=likely.logprob(trace[NOISE]), entropy=likely.entropy(), values=None)

    def _decided(self, unit: Tensor, noise: Tensor) -> ActOutput:
        return ActOutput(
            actions=self.head.from_unit(unit), logprobs=prior(noise).logprob(noise), values=None, trace={NOISE: noise}
        )

    def _eval_noise(self, batch: int) -> Tensor:
        """Return the noise `[B, n, N]` of evaluations."""
        start = self.head.centre.new_zeros(1, self.head.size) if self.judge is None else self.judge.start
        return start.expand(batch, -1, -1)

    # ---- learning

    @property
    def learns_from_replay(self) -> bool:
        """See `SoftPolicy`."""
        return True

    def imitation_draws(self, samples: int, generator: torch.Generator) -> Inputs:
        """See `Policy.imitation_draws`: noise, and its shares."""
        device = generator.device
        return {
            NOISE: torch.randn(samples, self.head.size, generator=generator, device=device),
            SHARES: torch.rand(samples, generator=generator, device=device),
        }

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`: that of velocities, and of one step if the policy acts so."""
        features, weights = self.encode(inputs), inputs.get(ACTION_WEIGHTS)
        wanted = self.head.to_unit(actions).clamp(-1.0, 1.0)
        losses = self.flow_losses(features, wanted, draws[NOISE], draws[SHARES], weights)
        if self.one_step is not None:
            losses = losses + self.distances(features, draws[NOISE], weights)
        return mean_over_samples(losses, inputs)

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See `SoftPolicy`; one chunk for each, none is chosen. The log-probabilities are those of the noise."""
        if self.one_step is None:
            chunks = self.denoise(features, noise)
        else:
            chunks = self.in_one_step(features, noise).clamp(-1.0, 1.0)
        return chunks, prior(noise).logprob(noise).sum(-1)

    def mode(self, features: Tensor) -> Tensor:
        """See `SoftPolicy`: the chunks of evaluations."""
        return self.chosen(features, self._eval_noise(len(features)))[0]

    def errors(self, features: Tensor, actions: Tensor) -> Tensor:
        """See `SoftPolicy`."""
        return (self.mode(features) - self.head.to_unit(actions).clamp(-1.0, 1.0)).square().mean(-1)

    def to_unit(self, decided: Tensor) -> Tensor:
        """See `SoftPolicy`. Recorded actions may lie outside."""
        return self.head.to_unit(decided).clamp(-1.0, 1.0)

    # ---- files

    def save(self, folder: Path, config: HeadConfig) -> None:  # type: ignore[override]
        """See `Policy.save`; critics that choose are among the weights, and described beside the options."""
        super().save(folder, config)
        if self.judge is not None:
            write_description(folder, config, self.spec, candidates=dataclasses.asdict(self.judge.config))

    def load(self, folder: Path) -> None:
        """See `Policy.load`; critics that chose when it was saved choose again.

        Raises:
            PolicyError: also: what describes them is damaged.
        """
        saved = None if self.judge is not None else read_candidates(folder)
        if saved is not None:
            inputs, path = self.feature_dim + self.head.size, folder / WEIGHTS_FILE
            if path.is_file() and 4 * critic_weights(inputs, saved) > path.stat().st_size:
                raise PolicyError(f"{path} is smaller than the critics that policy.json describes", "take another one")
            # Weights that nobody learns, until a method brings its own.
            self.choose_by(Critics(inputs, saved, torch.Generator()).requires_grad_(False), saved)
        super().load(folder)


class FlowMLPPolicy(FlowActorCritic, MLPPolicy):
    """A small flow policy on state observations."""


def mlp_policy(config: MLPConfig, simulator: SimulatorSpec, chunk_size: int) -> MLPPolicy:
    """Build the MLP policy that a config names."""
    return (FlowMLPPolicy if config.is_flow else MLPPolicy)(config, simulator, chunk_size)
