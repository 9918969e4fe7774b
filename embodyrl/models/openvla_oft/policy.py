"""OpenVLA-OFT: a chunk of actions in one forward pass with bidirectional attention. It adds a regression head and a
token for the robot's state to OpenVLA.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `P` image tokens (and the proprio token), `L`
prompt tokens, `E` width of the language model, `C` actions in a chunk, `D` action dims, `N = C*D`, `S` proprio dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.openvla_oft.config import ACTION_HEAD, PROPRIO_PROJECTOR, ActionHead, OpenVLAOFTConfig
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Mode, PolicyObservation, mean_over_samples
from embodyrl.models.prismatic.policy import PrismaticPolicy
from embodyrl.models.prismatic.processor import Bounds, NormRange
from embodyrl.models.vla.processor import read_state

_BLOCKS = 2


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = features + self.ffn(features)
        return result


class _ResidualNetwork(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, features: Tensor) -> Tensor:
        features = functional.relu(self.fc1(self.layer_norm1(features)))
        for block in self.mlp_resnet_blocks:
            features = block(features)
        result: Tensor = self.fc2(self.layer_norm2(features))
        return result


class L1Head(nn.Module):
    """Regression of actions from hidden states; named after its loss, the mean absolute error."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualNetwork(action_dim * width, width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return normalised actions `[B, C*D]` for hidden states `[B, C*D, E]`."""
        per_action = torch.unflatten(hidden, 1, (-1, self.action_dim)).flatten(2)
        numbers: Tensor = self.model(per_action).flatten(1)
        return numbers


class ProprioProjector(nn.Module):
    """Embeds the robot's state as one token."""

    def __init__(self, proprio_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        """Return embeddings `[B, 1, E]` of states `[B, S]`."""
        token: Tensor = self.fc2(functional.gelu(self.fc1(proprio)))
        return token.unsqueeze(1)


class OpenVLAOFTPolicy(PrismaticPolicy):
    """All actions of a chunk at once, as tokens or by regression."""

    config: OpenVLAOFTConfig
    range_epsilon = 1e-8

    def __init__(self, config: OpenVLAOFTConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        self.num_images = config.num_images
        super().__init__(config, simulator, chunk_size)
        width = self.network.width
        self.l1_head = L1Head(width, self.spec.action_dim).to(self.dtype) if self._says_numbers else None
        self.proprio_projector: ProprioProjector | None = None
        if config.use_proprio:
            self.proprio_range = NormRange(self.read_range("proprio"), self.range_epsilon)
            self.proprio_projector = ProprioProjector(self.proprio_dim, width).to(self.dtype)

    @property
    def _says_numbers(self) -> bool:
        return self.config.action_head is ActionHead.l1

    @property
    def kind(self) -> str:  # type: ignore[override]
        """See `PolicySpec.kind`."""
        return "regression" if self._says_numbers else "parallel_token"

    @property
    def proprio_dim(self) -> int:
        """See `PrismaticPolicy.proprio_dim`."""
        return len(self.read_range("proprio").low) if self.config.use_proprio else 0

    @property
    def bounds(self) -> Bounds:
        """See `PrismaticPolicy.bounds`."""
        return self.config.normalization.value

    @property
    def positions_of_answer(self) -> int:
        """A placeholder for every action token, and the stop token."""
        return self.entries + self.config.append_stop_token

    def heads(self) -> dict[str, nn.Module]:
        """See `PrismaticPolicy.heads`."""
        heads: dict[str, nn.Module | None] = {ACTION_HEAD: self.l1_head, PROPRIO_PROJECTOR: self.proprio_projector}
        return {name: head for name, head in heads.items() if head is not None}

    def preprocess(self, observation: PolicyObservation) -> Inputs:
        """See `PrismaticPolicy.preprocess`."""
        inputs = super().preprocess(observation)
        if self.config.use_proprio:
            proprio = read_state(observation.proprio, self.proprio_dim, self.device)
            inputs["proprio"] = self.proprio_range.normalize(proprio)
        return inputs

    def embed_images(self, inputs: Inputs) -> Tensor:
        """See `PrismaticPolicy.embed_images`; the state follows the images."""
        images = super().embed_images(inputs)
        if self.proprio_projector is None:
            return images
        return torch.cat([images, self.proprio_projector(inputs["proprio"].to(self.dtype))], dim=1)

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the tokens `[B, N]`, counted from the first action token.

        Raises:
            PolicyError: mode is `train`, and the regression head has no probabilities.
        """
        hidden = self.slot_states(inputs)
        if self.l1_head is None:
            return self.acted(self.draw(self.network.action_logits(hidden), mode, generator), hidden[:, 0])
        if mode == "train":
            raise PolicyError(_NO_PROBABILITIES)
        numbers = self.l1_head(hidden).float()
        return ActOutput(
            actions=self.finish(numbers), logprobs=torch.zeros_like(numbers), values=self.value_head(hidden[:, 0])
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`.

        Raises:
            PolicyError: the regression head has no probabilities.
        """
        if self.l1_head is not None:
            raise PolicyError(_NO_PROBABILITIES)
        return self.scored(self.slot_states(inputs), trace["tokens"])

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`: cross-entropy of the action tokens over the whole vocabulary, or the mean absolute
        error of normalised actions."""
        hidden, target = self.slot_states(inputs), self.normalize(actions)
        if self.l1_head is not None:
            return mean_over_samples((self.l1_head(hidden).float() - target).abs(), inputs)
        logits = self.network.language_model.lm_head(hidden).float()
        tokens = self.bins.encode(target) + self.network.architecture.first_action_token
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return mean_over_samples(losses.view_as(tokens), inputs)

    def sequence(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the language model's inputs: embeddings `[B, P+L+N(+1), E]`, and a mask that is False for padding.

        After the prompt follow a placeholder of zeros for every action token, and the stop token.
        """
        embeddings, mask = self.assemble(inputs)
        batch = len(embeddings)
        tail = [embeddings.new_zeros(batch, self.entries, embeddings.shape[-1])]
        if self.config.append_stop_token:
            stop = torch.full((batch, 1), self.prompts.eos, device=embeddings.device)
            tail.append(self.network.embed_tokens(stop))
        whole = torch.cat([embeddings, *tail], dim=1)
        return whole, torch.cat([mask, mask.new_ones(batch, whole.shape[1] - mask.shape[1])], dim=1)

    def slot_states(self, inputs: Inputs) -> Tensor:
        """Return the hidden states `[B, N, E]` that predict the action tokens: each one position before its
        placeholder."""
        embeddings, mask = self.sequence(inputs)
        length = mask.shape[1]
        output = self.network.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=mask[:, None, None, :].expand(-1, 1, length, -1),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )
        first = length - self.entries - 1 - self.config.append_stop_token
        hidden: Tensor = output.last_hidden_state[:, first : first + self.entries]
        return hidden


_NO_PROBABILITIES = (
    "model.action_head = l1 is a regression without probabilities, so that reinforcement learning cannot improve it: "
    "set model.action_head=discrete, or train it on demonstrations"
)
