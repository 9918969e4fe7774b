"""What every policy promises: the engine, the losses and checkpoints rely on it.

Promises are tried on observations that are made up for the simulator's spec.

Shapes: `B` envs, `C` actions in a chunk, `D` action dims, `N` log-probs of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodyrl.checking.promises import Bench, Broken, DoesNotApply, Promise, needed, promise
from embodyrl.checking.simulators import global_seed
from embodyrl.config.rules import is_supervised, replay_of
from embodyrl.config.schema import Config
from embodyrl.engine.compute import choose_device, choose_precision, computing_in
from embodyrl.engine.lora import save_policy
from embodyrl.envs import Observation, SimulatorSpec
from embodyrl.models import build_policy
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy, PolicyObservation, SoftPolicy
from embodyrl.registry import SupportedModel
from embodyrl.runner.build import with_weight_type

B = 3
"""Envs that are decided for."""
TOLERANCE = 1e-4
"""Largest difference of numbers that should be the same, absolute or relative, in float32."""
COARSE = 0.05
"""The same for computations in 16 bits."""
SEEDS = 4
"""Seeds of actions of which some have to differ."""
Mode = Literal["train", "eval"]

PROMISES: list[Promise[PolicyBench]] = []
_promise = functools.partial(promise, PROMISES)


def made_up(spec: SimulatorSpec, count: int) -> Observation:
    """Return observations of `count` envs (B) of a simulator, with random contents."""
    random, descriptions = np.random.default_rng(0), list(spec.tasks.values())
    images = random.integers(0, 256, (count, spec.num_images, *spec.image_size, 3), np.uint8) if spec.cameras else None
    proprio = random.standard_normal((count, spec.proprio_dim), np.float32) if spec.proprio_dim else None
    tasks = [descriptions[number % len(descriptions)] for number in range(count)]
    return Observation(images=images, proprio=proprio, task_descriptions=tasks)


class PolicyBench(Bench):
    """The policy of a config, and observations to decide for."""

    def __init__(self, config: Config, spec: SimulatorSpec, modules: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self.config, self.spec = config, spec
        self.device = choose_device(config.engine.device)

    def owners(self) -> list[type]:
        """Return the classes whose methods promises name."""
        target = SupportedModel.entry(self.config.model.name).target
        built = self.built.get("policy")
        known = [type(built)] if built is not None else [target] if isinstance(target, type) else []
        return [*known, *(each for each in super().owners() if issubclass(each, Policy))]

    def build(self, seed: int) -> Policy:
        """Build the policy with random weights from a seed, or those of its checkpoint."""
        model, algorithm = with_weight_type(self.config.model, self.config.engine, None), self.config.algorithm
        steering = algorithm.needs(self.config).steering
        chunk = self.config.rollout.chunk_size
        policy = build_policy(model, self.spec, chunk_size=chunk, seed=seed, steering=steering)
        return policy.to(self.device).eval()

    @needed
    def policy(self) -> Policy:
        """The policy."""
        return self.build(self.config.seed)

    @needed
    def inputs(self) -> Inputs:
        """What preprocess returns."""
        return self.policy.preprocess(PolicyObservation.of(made_up(self.spec, B)))

    def act(self, mode: Mode, seed: int = 0, rows: slice = slice(None), policy: Policy | None = None) -> ActOutput:
        """Decide for some of the envs, under a generator of this seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        inputs = {name: tensor[rows].clone() for name, tensor in self.inputs.items()}
        with torch.no_grad(), computing_in(self.precision, self.device):
            return (policy or self.policy).act(inputs, mode, generator)

    @needed
    def sampled(self) -> ActOutput:
        """What act returns in train mode."""
        self.must_sample()
        return self.act("train")

    @needed
    def most_likely(self) -> ActOutput:
        """What act returns in eval mode."""
        return self.act("eval")

    @needed
    def scored(self) -> EvalOutput:
        """What evaluate returns."""
        self.must_score()
        inputs = {name: tensor.clone() for name, tensor in self.inputs.items()}
        with computing_in(self.precision, self.device):
            return self.policy.evaluate(inputs, dict(self.sampled.trace))

    def must_sample(self) -> None:
        """Raise `DoesNotApply` if the config's algorithm has the policy draw no actions."""
        if is_supervised(self.config):
            raise DoesNotApply(f"algorithm {self.config.algorithm.name!r} imitates: no action is drawn")

    def must_score(self) -> None:
        """Raise `DoesNotApply` if the config's algorithm does not score chunks again."""
        self.must_sample()
        if replay_of(self.config) is not None:
            raise DoesNotApply(
                f"algorithm {self.config.algorithm.name!r} learns from a replay: no chunk is scored again"
            )

    @property
    def precision(self) -> torch.dtype:
        """Type of matrix products."""
        return choose_precision(self.config.engine.precision, self.policy, self.device)

    def is_close(self, one: Tensor, other: Tensor) -> bool:
        """Return whether numbers are the same within the tolerance."""
        near = TOLERANCE if self.precision is torch.float32 else COARSE
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), atol=near, rtol=near)


def _require(holds: object, found: str, remedy: str = "", *, method: str = "") -> None:
    if not holds:
        raise Broken(found, remedy, method=method)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def _is_tensor(found: object, shape: tuple[int | str, ...], name: str, remedy: str = "", method: str = "act") -> Tensor:
    """Return a tensor that an output must have: float32 of a shape whose texts stand for any size, finite."""
    text = f"{name} is {_described(found)}, want float32 ({', '.join(map(str, shape))})"
    if not isinstance(found, Tensor):
        raise Broken(text, remedy, method=method)
    _require(found.dtype == torch.float32, text, "call .float() on it", method=method)
    sizes = zip(found.shape, shape, strict=False)
    fits = found.dim() == len(shape) and all(isinstance(want, str) or have == want for have, want in sizes)
    _require(fits, text, remedy, method=method)
    _require(torch.isfinite(found).all(), f"{name} holds NaN or infinity", method=method)
    return found


@_promise("the policy is built for this simulator", "__init__")
def is_built(bench: PolicyBench) -> None:
    """Check that it starts at all."""
    policy = bench.policy
    _require(isinstance(policy, Policy), f"it is a {type(policy).__name__}", "derive it from embodyrl.models.Policy")
    remedy = "register weights as nn.Parameter, or as modules that are attributes"
    _require(any(True for _ in policy.parameters()), "it has no parameters: nothing can be learned", remedy)


@_promise("its spec has the sizes of config and simulator", "__init__")
def spec_has_the_sizes(bench: PolicyBench) -> None:
    """Check `PolicySpec`."""
    spec = bench.policy.spec
    wanted = {"chunk_size": bench.config.rollout.chunk_size, "action_dim": bench.spec.action_dim}
    for name, size in wanted.items():
        found = getattr(spec, name)
        _require(found == size, f"PolicySpec.{name} is {found}, want {size}", f"pass the {name} that __init__ is given")
    fits = spec.proprio_dim in (0, bench.spec.proprio_dim)
    text = f"PolicySpec.proprio_dim is {spec.proprio_dim}, want {bench.spec.proprio_dim}, or 0 if no state is read"
    _require(fits, text, "pass simulator.proprio_dim")


@_promise("preprocess gives tensors with a row for each env", "preprocess")
def preprocess_gives_rows(bench: PolicyBench) -> None:
    """Check network inputs."""
    inputs = bench.inputs
    _require(isinstance(inputs, dict) and inputs, f"it returned {_described(inputs)}, want a dict of tensors")
    _check_rows(inputs, bench, "preprocess")


def _check_rows(tensors: dict[str, Any], bench: PolicyBench, method: str) -> None:
    for name, tensor in tensors.items():
        fits = isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == B
        _require(fits, f"{name!r} is {_described(tensor)}, want a tensor ({B}, ...) for {B} envs", method=method)
        near = tensor.device.type == bench.device.type
        _require(near, f"{name!r} is on {tensor.device}, the policy on {bench.device}", "move it", method=method)


@_promise("act returns the actions of a chunk for each env", "act")
def actions_have_their_shape(bench: PolicyBench) -> None:
    """Check shapes and types in both modes."""
    size = (B, bench.config.rollout.chunk_size, bench.spec.action_dim)
    remedy = "want [B, C, D]: envs, actions in a chunk, action dims; .unsqueeze(1) adds C where it is 1"
    outputs = [bench.most_likely] if is_supervised(bench.config) else [bench.most_likely, bench.sampled]
    for output in outputs:
        _require(isinstance(output, ActOutput), f"act returned {_described(output)}", "return ActOutput(...)")
        _is_tensor(output.actions, size, "actions", remedy)


@_promise("actions lie within the limits of the simulator", "act")
def actions_lie_within_limits(bench: PolicyBench) -> None:
    """Check most likely actions and drawn ones."""
    low, high = (torch.from_numpy(end).to(bench.device) for end in (bench.spec.action_low, bench.spec.action_high))
    room = TOLERANCE * (high - low)
    outputs = [bench.most_likely]
    if not is_supervised(bench.config):
        outputs += [bench.sampled, *(bench.act("train", seed) for seed in range(1, SEEDS))]
    for output in outputs:
        outside = (output.actions < low - room) | (output.actions > high + room)
        if outside.any():
            _, _, entry = (int(each) for each in outside.nonzero()[0])
            value = float(output.actions[outside][0])
            text = f"action[{entry}] is {value:.3g}, the simulator takes {low[entry]:g} .. {high[entry]:g}"
            raise Broken(text, "embodyrl.envs.conventions.from_unit_range clips and scales")


@_promise("log-probs are [B, N], and N is a multiple of the chunk", "act")
def logprobs_have_their_shape(bench: PolicyBench) -> None:
    """Check those of drawn actions; those of whole chunks may be any number."""
    chunk = bench.config.rollout.chunk_size
    remedy = ".flatten(1) makes [B, N] of [B, C, D]; .unsqueeze(1) of [B]"
    logprobs = _is_tensor(bench.sampled.logprobs, (B, "N"), "logprobs", remedy)
    count, counted = logprobs.shape[1], bench.sampled.counted
    if counted is not None:
        are = counted.dtype == torch.bool and counted.shape == (B, count)
        _require(are, f"counted is {_described(counted)}", "want bool [B, N]: whether the chunk has each log-prob")
        _require(bool(counted.any(1).all()), "a chunk has no log-prob", "count at least one")
        _require(not bool(logprobs[~counted].any()), "log-probs that do not count are not 0", "set them to 0")
        return
    _require(count and count % chunk == 0, f"logprobs has N = {count}, no multiple of {chunk} actions", remedy)


@_promise("the trace holds tensors with a row for each env", "act")
def trace_has_rows(bench: PolicyBench) -> None:
    """Check what `evaluate` gets."""
    _check_rows(bench.sampled.trace, bench, "act")


@_promise("values are [B] where the algorithm has a critic", "act")
def values_are_there(bench: PolicyBench) -> None:
    """Check values of act."""
    bench.must_score()
    values, name = bench.sampled.values, bench.config.model.name
    if values is None and not bench.config.algorithm.needs(bench.config).critic:
        raise DoesNotApply(f"algorithm {bench.config.algorithm.name!r} needs none with these settings")
    _require(
        values is not None,
        f"values is None, but model {name!r} is registered with critic=True",
        "return values [B], or register it with critic=False",
    )
    _is_tensor(values, (B,), "values", ".squeeze(-1) makes [B] of [B, 1]")


@_promise("eval mode draws nothing: twice the same actions", "act")
def eval_mode_is_deterministic(bench: PolicyBench) -> None:
    """Check other generators and other global seeds."""
    found = []
    for seed in (1, 2):
        with global_seed(seed):
            found.append(bench.act("eval", seed).actions)
    remedy = 'take the most likely action where mode == "eval"'
    _require(torch.equal(*found), 'act(inputs, "eval") gave two actions for one observation', remedy)


@_promise("train mode draws from the generator that it is given, and from nothing else", "act")
def train_mode_draws_from_the_generator(bench: PolicyBench) -> None:
    """Check equal generators under other global seeds, and other generators under one."""
    bench.must_sample()
    found = []
    for seed in (1, 2):
        with global_seed(seed):
            found.append(bench.act("train", 7).actions)
    remedy = "pass generator=generator to every function of torch that draws"
    _require(torch.equal(*found), "one generator gave two actions: global random numbers are used", remedy)
    others = []
    for seed in range(SEEDS):
        with global_seed(0):
            others.append(bench.act("train", seed).actions)
    explores = any(not torch.equal(others[0], each) for each in others[1:])
    _require(explores, f"{SEEDS} seeds of the generator gave the same actions: nothing is explored", remedy)


@_promise("each env is decided for by its own observation", "act")
def rows_do_not_mix(bench: PolicyBench) -> None:
    """Check one env alone against it among others."""
    if not torch.equal(bench.act("eval", 1).actions, bench.most_likely.actions):
        raise DoesNotApply("eval mode draws, see above")
    alone = bench.act("eval", rows=slice(1, 2)).actions
    remedy = "compute nothing across envs, and reshape with B in front"
    _require(bench.is_close(alone, bench.most_likely.actions[1:2]), "an env alone gets another action", remedy)


@_promise("evaluate gives the log-probs of act at equal weights", "evaluate")
def evaluate_agrees_with_act(bench: PolicyBench) -> None:
    """Check log-probs, values and the shape of the entropy."""
    scores, acted = bench.scored, bench.sampled
    _require(isinstance(scores, EvalOutput), f"evaluate returned {_described(scores)}", "return EvalOutput(...)")
    shape = tuple(acted.logprobs.shape)
    logprobs = _is_tensor(scores.logprobs, shape, "logprobs", "want those of act", "evaluate")
    _is_tensor(scores.entropy, shape, "entropy", "one for each log-prob", "evaluate")
    difference = float((logprobs.detach() - acted.logprobs).abs().max())
    text = f"log-probs of evaluate and act differ by up to {difference:.2g}"
    remedy = "score the sample that the trace keeps, before it is clipped, under the same distribution"
    _require(bench.is_close(logprobs.detach(), acted.logprobs), text, remedy)
    if acted.values is not None:
        values = _is_tensor(scores.values, (B,), "values", "want those of act", "evaluate")
        _require(bench.is_close(values.detach(), acted.values), "values of evaluate and act differ")


@_promise("evaluate is differentiable in the weights", "evaluate")
def evaluate_is_differentiable(bench: PolicyBench) -> None:
    """Check gradients of log-probs and values."""
    if not bench.policy.has_likelihood:
        raise DoesNotApply(f"model.head of {bench.policy.name!r} has no likelihood")
    scores = bench.scored
    parameters = [each for each in bench.policy.parameters() if each.requires_grad]
    parts = {"logprobs": scores.logprobs, "values": scores.values}
    for name, part in parts.items():
        if part is None:
            continue
        reaches = part.requires_grad and bool(parameters)
        found = torch.autograd.grad(part.sum(), parameters, retain_graph=True, allow_unused=True) if reaches else []
        moved = any(each is not None and bool(each.any()) for each in found)
        _require(moved, f"{name} of evaluate have no gradient in any weight", "leave out .detach() and torch.no_grad")
        whole = all(each is None or bool(torch.isfinite(each).all()) for each in found)
        _require(whole, f"the gradient of {name} is NaN or infinite")


@_promise("what it shows to critics of a replay has the declared size", "encode")
def encoding_has_its_size(bench: PolicyBench) -> None:
    """Check `SoftPolicy.encode`, `draw` and `mode`."""
    policy, algorithm = bench.policy, bench.config.algorithm.name
    if not isinstance(policy, SoftPolicy) or replay_of(bench.config) is None:
        raise DoesNotApply(f"algorithm {algorithm!r} learns from no replay")
    if not policy.learns_from_replay or bench.config.algorithm.needs(bench.config).steering is not None:
        raise DoesNotApply(f"the critics of {algorithm!r} see other features")
    with torch.no_grad():
        features = _is_tensor(policy.encode(bench.inputs), (B, policy.feature_dim), "encode", method="encode")
        decided, logprobs = policy.draw(features, torch.zeros(B, policy.decision_size, device=bench.device))
        _is_tensor(decided, (B, policy.decision_size), "draw()[0]", method="draw")
        _is_tensor(logprobs, (B,), "draw()[1]", method="draw")
        _is_tensor(policy.mode(features), (B, policy.decision_size), "mode", method="mode")


@_promise("the supervised loss is a finite number that depends on the weights", "sft_loss")
def supervised_loss_is_differentiable(bench: PolicyBench) -> None:
    """Check `sft_loss`."""
    policy = bench.policy
    if type(policy).sft_loss is Policy.sft_loss or not bench.config.algorithm.needs(bench.config).imitates:
        raise DoesNotApply(f"algorithm {bench.config.algorithm.name!r} does not imitate")
    weights = torch.ones(B, bench.config.rollout.chunk_size, device=bench.device)
    generator = torch.Generator(bench.device).manual_seed(0)
    draws = policy.imitation_draws(B, generator)
    loss = policy.sft_loss(bench.inputs | {"action_weights": weights}, bench.most_likely.actions.clone(), draws)
    _require(isinstance(loss, Tensor) and loss.dim() == 0, f"sft_loss returned {_described(loss)}", "return a scalar")
    _require(bool(torch.isfinite(loss)), f"sft_loss is {float(loss.detach())}")
    _require(loss.requires_grad, "sft_loss does not depend on the weights", "leave out .detach() and torch.no_grad")


@_promise("saved weights load into a policy with others, which then acts the same", "save")
def saved_weights_load(bench: PolicyBench) -> None:
    """Check `save` and `load`."""
    wanted = bench.most_likely.actions
    with TemporaryDirectory(prefix="embodyrl-") as folder:
        save_policy(bench.policy, Path(folder), bench.config.model)
        other = bench.build(bench.config.seed + 1)
        other.load(Path(folder))
    found = bench.act("eval", policy=other).actions
    remedy = "register what decides actions as nn.Parameter, nn.Module or with register_buffer"
    _require(bench.is_close(found, wanted), "the loaded policy acts otherwise: some of it is not saved", remedy)
