"""Measure the memory of rollouts and training without weights: the policy's own code runs on tensors without numbers.

Every tensor is counted while it is alive, so that caches, checkpointing, adapters and lower precision are included
without a formula for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from embodyrl.config.schema import AlgorithmConfig, EngineConfig, Precision
from embodyrl.engine.compute import choose_precision, computing_in, recompute_blocks
from embodyrl.engine.lora import add_adapters
from embodyrl.engine.optimizer import HALF_TYPES
from embodyrl.engine.units import units
from embodyrl.envs import Observation
from embodyrl.methods.learner import Learner
from embodyrl.models.policy import ActOutput, Inputs, Policy, PolicyObservation
from embodyrl.planning.memory import FLOAT32, Line, Lines, Weights
from embodyrl.planning.shapes import CPU, META, Assuming, LiveBytes, Shapes, ShapeTensor

LossOf = Callable[[Policy, nn.Module | None, Inputs, ActOutput], Tensor]
SAMPLES = (4, 512)
"""Batch sizes of the dry runs; memory in between is interpolated linearly. The second must be large, because the
largest tensors of a tiny batch are others (gradients of weights)."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Memory of a policy."""

    weights: Weights
    lines: Lines
    trace_bytes: int
    """Bytes of the trace of a chunk."""
    entries: int
    """Log-probs of a chunk."""
    precision: torch.dtype
    """Type of forward passes."""
    on_host: frozenset[str]
    """Columns that stay in main memory, see `Policy.reads_on_host`."""
    trace_holds_images: bool
    """See `Policy.trace_holds_images`."""


def trace(
    policy: Policy,
    observation: Observation,
    config: EngineConfig,
    *,
    cuda: bool,
    supervised: bool = False,
    learner: type[Learner] | None = None,
    algorithm: AlgorithmConfig | None = None,
) -> Traced:
    """Run one rollout step and one training step of a weightless policy, for the batch sizes `SAMPLES`.

    Args:
        policy: from `build_weightless`; modified as the engine would (adapters, checkpointing).
        observation: of a few envs, at least two; others have the same shapes.
        config: config of the engine.
        cuda: whether the run would use a GPU, which determines the precision.
        supervised: whether the policy learns by its supervised loss.
        learner: class of the method's learner; None: that of none.
        algorithm: the method's settings.
    """
    dtype = _precision(config, policy, cuda)
    with Assuming(), torch.device("meta"):
        if config.lora.rank:
            add_adapters(policy, config.lora, seed=0)
        if config.gradient_checkpointing is True:
            recompute_blocks(policy)
    with Assuming():
        observed = PolicyObservation.of(observation)
        prepared = learned = policy.preprocess(observed)
        if policy.trace_holds_images and not supervised:
            learned = policy.preprocess(replace(observed, images=None))
    weights = weights_of(policy)
    give_bodies(policy)
    loss_of = beside = None
    if not supervised and learner is not None and algorithm is not None:
        loss_of, beside = partial(learner.trial_loss, algorithm), learner.beside(policy, algorithm)
    if beside is not None:
        give_bodies(beside)
    runs = [
        DryRun(policy, _batch(prepared, samples), _batch(learned, samples), samples, dtype, beside, loss_of)
        for samples in SAMPLES
    ]
    with Shapes(), policy.abridged():
        deciding = [run.decide() for run in runs]
        learning = [run.learn() for run in runs]
    decision = runs[-1].decision
    return Traced(
        weights=weights,
        lines=Lines(
            deciding=_line(deciding),
            kept=_line([kept for kept, _ in learning]),
            learning=_line([peak for _, peak in learning]),
        ),
        trace_bytes=sum(tensor.nbytes for tensor in decision.trace.values()) // SAMPLES[-1],
        entries=decision.logprobs.shape[1],
        precision=dtype,
        on_host=policy.reads_on_host,
        trace_holds_images=policy.trace_holds_images,
    )


def _precision(config: EngineConfig, policy: Policy, cuda: bool) -> torch.dtype:
    """Return the precision that `choose_precision` would return on the run's device."""
    if config.precision is Precision.auto and cuda and policy.parallel_plan().blocks:
        return torch.bfloat16
    return choose_precision(config.precision, policy, CPU)


def weights_of(policy: Policy) -> Weights:
    """Return the sizes of a policy's weights in their own types."""
    parameters = list(policy.parameters())
    *blocks, outside = _parameters_by_unit(policy)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    return Weights(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in learned),
        weight_bytes=sum(tensor.nbytes for tensor in [*parameters, *policy.buffers()]),
        gradient_bytes=sum(parameter.nbytes for parameter in learned),
        half_trainable=sum(parameter.numel() for parameter in learned if parameter.dtype in HALF_TYPES),
        head_bytes=sum(_bytes_of(policy.get_submodule(head).parameters()) for head in policy.parallel_plan().heads),
        largest_block=max((_bytes_of(block) for block in blocks), default=0),
        outside_blocks=_bytes_of(outside),
        gradients_of_block=max(
            sum(each.nbytes + FLOAT32 * each.numel() for each in unit if each.requires_grad)
            for unit in (*blocks, outside)
        ),
    )


def _parameters_by_unit(policy: Policy) -> list[list[Tensor]]:
    """Return the parameters of each sharding unit; the last are those in no block."""
    found: list[list[Tensor]] = []
    known: set[Tensor] = set()
    for unit in units(policy):  # inner ones come first
        found.append([parameter for parameter in unit.parameters() if parameter not in known])
        known.update(found[-1])
    return found


def _bytes_of(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _line(peaks: Sequence[int]) -> Line:
    (low, high), (first, last) = SAMPLES, peaks
    return Line.through((low, first), (high, last))


def _batch(few: Inputs, samples: int) -> Inputs:
    """Return inputs of `samples` observations without numbers, whose rows lie in memory as those of `few` do."""
    return {
        name: ShapeTensor(torch.empty_strided((samples, *each.shape[1:]), each.stride(), dtype=each.dtype, device=META))
        for name, each in few.items()
    }


def give_bodies(policy: nn.Module) -> None:
    """Replace the weights of a weightless policy by tensors with which it can compute."""
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name, nn.Parameter(ShapeTensor.like(parameter.data), requires_grad=parameter.requires_grad)
            )
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = ShapeTensor.like(buffer)


class DryRun:
    """A rollout step and a training step with one batch of tensors without numbers.

    Args:
        policy: policy of `ShapeTensor`.
        inputs: inputs of a rollout step.
        learned: those of a training step.
        samples: their number of samples.
        dtype: type of computations in forward passes.
        beside: what learns beside the policy, of `ShapeTensor`; None: nothing does.
        loss_of: see `Learner.trial_loss`; None: the policy's supervised loss.
    """

    decision: ActOutput

    def __init__(
        self,
        policy: Policy,
        inputs: Inputs,
        learned: Inputs,
        samples: int,
        dtype: torch.dtype,
        beside: nn.Module | None = None,
        loss_of: LossOf | None = None,
    ) -> None:
        self._policy, self._inputs, self._learned, self._samples, self._dtype = policy, inputs, learned, samples, dtype
        self._beside, self._loss_of = beside, loss_of

    def decide(self) -> int:
        """Sample chunks of actions; return the peak of bytes alive."""
        live = self._counter()
        with torch.no_grad(), live, computing_in(self._dtype, CPU):
            self.decision = self._policy.act(self._inputs, "eval", None)
        return _bytes(self._inputs) + live.peak

    def learn(self) -> tuple[int, int]:
        """Run a training step; return the bytes alive after the forward pass, and their peak. Gradients exist already
        and are not counted."""
        for parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        live = self._counter()
        with live:
            # What learns beside the policy, and its encoder, computes in float32.
            with computing_in(torch.float32 if self._beside else self._dtype, CPU):
                loss = self._imitation() if self._loss_of is None else self._trial(self._loss_of)
            kept = live.now
            loss.backward()
        there = _bytes(self._learned)
        return there + kept, there + live.peak

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._policy.parameters(), *(() if self._beside is None else self._beside.parameters())]

    def _counter(self) -> LiveBytes:
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return LiveBytes(
            [*parameters, *self._policy.buffers(), *gradients, *self._inputs.values(), *self._learned.values()]
        )

    def _imitation(self) -> Tensor:
        spec = self._policy.spec
        actions = torch.zeros(self._samples, spec.chunk_size, spec.action_dim)
        draws = self._policy.imitation_draws(self._samples, torch.Generator())
        return self._policy.sft_loss(self._learned, actions, draws)

    def _trial(self, loss_of: LossOf) -> Tensor:
        """Return a scalar that depends on all outputs that are trained."""
        return loss_of(self._policy, self._beside, self._learned, self.decision)


def _bytes(inputs: Inputs) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())
