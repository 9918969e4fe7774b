"""OpenVLA: a language model that generates an action token by token.

Shapes: `B` samples, `P` image tokens, `L` prompt tokens, `E` width of the language model, `N` tokens of an action.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.openvla.config import OpenVLAConfig
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Mode, mean_over_samples
from embodyrl.models.prismatic.policy import PrismaticPolicy
from embodyrl.models.sampling import Choice
from embodyrl.models.vla.transformer import KeyValueCache, positions_of


def causal(mask: Tensor) -> Tensor:
    """Return which positions each position attends to `[B, 1, L, L]`: itself and those before it, without padding.

    transformers would ask the device whether there is padding, and wait for the answer.
    """
    return mask[:, None, None, :] & mask.new_ones(mask.shape[1], mask.shape[1]).tril()


class OpenVLAPolicy(PrismaticPolicy):
    """Autoregressive over the tokens of one action."""

    kind = "ar_token"
    range_epsilon = 0.0

    def __init__(self, config: OpenVLAConfig, simulator: SimulatorSpec | None, chunk_size: int) -> None:
        if chunk_size != 1:
            raise PolicyError("openvla decides on one action at a time", f"set rollout.chunk_size=1, not {chunk_size}")
        super().__init__(config, simulator, chunk_size)

    @property
    def positions_of_answer(self) -> int:
        """Every token but the last is an input again."""
        return self.entries - 1

    def cache_bytes(self, task: str) -> int:
        """See `Policy.cache_bytes`: a key and a value for every position in every layer."""
        llama: Any = self.network.language_model.config
        width = llama.hidden_size // llama.num_attention_heads * llama.num_key_value_heads
        return int(2 * llama.num_hidden_layers * width * self.dtype.itemsize) * self.tokens_per_observation(task)

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the tokens `[B, N]`, counted from the first action token."""
        embeddings, mask = self.assemble(inputs)
        length = mask.shape[1]
        whole = torch.cat([mask, mask.new_ones(len(mask), self.entries - 1)], dim=1)
        cache, positions = KeyValueCache(whole.shape[1]), positions_of(mask)
        seen = causal(mask)
        choices: list[Choice] = []
        states: list[Tensor] = []
        while True:
            states.append(self._run(embeddings, seen, positions, cache)[:, -1])
            choices.append(self.draw(self.network.action_logits(states[-1]), mode, generator))
            if len(choices) == self.entries:
                break
            embeddings = self._embed(choices[-1].tokens.unsqueeze(1))
            positions = positions[:, -1:] + 1
            seen = whole[:, None, None, : length + len(choices)]
        return self.acted(Choice.joined(choices), states[0])

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`; one forward pass over all tokens of the action."""
        return self.scored(self.answer_states(inputs, trace["tokens"]), trace["tokens"])

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`: cross-entropy of the action tokens over the whole vocabulary."""
        tokens = self.bins.encode(self.normalize(actions))
        logits = self.network.language_model.lm_head(self.answer_states(inputs, tokens)).float()
        wanted = tokens + self.network.architecture.first_action_token
        losses = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return mean_over_samples(losses.view_as(wanted), inputs)

    def answer_states(self, inputs: Inputs, tokens: Tensor) -> Tensor:
        """Return the hidden states `[B, N, E]` that predict the action tokens `[B, N]`."""
        embeddings, mask = self.assemble(inputs)
        answer = self._embed(tokens[:, :-1])
        embeddings = torch.cat([embeddings, answer], dim=1)
        mask = torch.cat([mask, mask.new_ones(answer.shape[:2])], dim=1)
        return self._run(embeddings, causal(mask), positions_of(mask), None)[:, -tokens.shape[1] :]

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.network.embed_tokens(tokens + self.network.architecture.first_action_token)

    def _run(self, embeddings: Tensor, seen: Tensor, positions: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return hidden states `[B, L, E]`; `seen [B, 1, L, M+L]` says what they attend to, `M` cached ones first."""
        output = self.network.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden
