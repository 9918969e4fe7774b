"""Options that all flow-matching policies share, and their check. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from embodyrl.config.infos import ModelInfo, model_info
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.needs import Learns
from embodyrl.config.rules import needs_of_all
from embodyrl.config.schema import WIDEST_LAYER, Config, ModelConfig, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import STEERING_FILE, read_steering
from embodyrl.models.vla.config import ActionUnits, Gripper, WeightType


class NoiseMethod(StrEnum):
    """Noise that is added to denoising steps, so that they have a probability."""

    flow_sde = "flow_sde"
    flow_cps = "flow_cps"
    flow_noise = "flow_noise"
    none = "none"


@dataclass(frozen=True, kw_only=True)
class IndicatorConfig:
    """Words behind task descriptions that tell a policy whether its actions are to be better than usual, and how much
    it is guided by them."""

    better: str = setting("Advantage: positive")
    """Words for better actions, which the policy is told when it acts."""
    worse: str = setting("Advantage: negative")
    """Words for all others, which it is told in learning alone."""
    guidance: float = setting(1.0, low=0.0)
    """Classifier-free guidance when it acts (Ho & Salimans 2022, arXiv:2207.12598): 1: velocities are those with the
    words. Above 1: beyond them, away from those without words, which takes two passes for each denoising step. 0:
    without words."""


def told_texts(tasks: Iterable[str], indicator: IndicatorConfig | None) -> list[str]:
    """Return task descriptions, also with the words behind them that a policy may be told."""
    words = [""] if indicator is None else ["", f" {indicator.better}", f" {indicator.worse}"]
    return [task + more for task in tasks for more in words]


@dataclass(frozen=True, kw_only=True)
class FlowConfig(ModelConfig):
    """A policy that turns noise into a chunk of actions, step by step."""

    denoising_steps: int = setting(10, low=1, high=100)
    """Steps from noise to actions, in rollouts, evaluation and learning alike."""
    noise_method: NoiseMethod = setting(NoiseMethod.flow_sde)
    """Noise of rollouts. flow_sde: steps follow the stochastic differential equation that has the flow's marginals
    (Flow-GRPO). flow_cps: part of the remaining noise is drawn anew (coefficients-preserving sampling). flow_noise: a
    small trained network adds noise to the deterministic step (ReinFlow). none: only the noise that a chunk begins with
    is drawn; its actions have no log-probs, and only methods that compare velocities learn from them."""
    noise_level: float = setting(0.5, above=0.0)
    """flow_sde: multiplies the noise. flow_cps: 0 .. 1, the share of the remaining noise that is drawn anew."""
    noise_level_end: float | None = setting(None, above=0.0)
    """Noise level that the run reaches at its end, in equal steps. null: it stays the same."""
    noise_low: float = setting(0.08, above=0.0)
    """flow_noise: least standard deviation of the added noise."""
    noise_high: float = setting(0.16, above=0.0)
    """flow_noise: largest standard deviation of the added noise."""
    joint_logprob: bool = setting(False)
    """False: one denoising step of a chunk, drawn anew for each chunk, is random; its log-probability is the chunk's.
    True: all steps are random; the log-probability is the mean over them and the initial noise."""
    indicator: IndicatorConfig | None = setting(None)
    """Words in the prompt about how good actions are to be. null: there are none."""
    detach_critic: bool = setting(True)
    """Train only the critic with the value loss, not the network that it reads."""
    value_sizes: list[int] = setting([512, 256, 128], low=1, high=WIDEST_LAYER)
    """Widths of the critic's hidden layers."""
    action_units: ActionUnits = setting(ActionUnits.simulator)
    """simulator: the model was trained on actions of this simulator. metric: its motions are in metres and radians."""
    gripper: Gripper = setting(Gripper.simulator)
    """simulator: the simulator's own numbers. one_opens: 1 opens and 0 closes, as in data converted from LIBERO."""
    binary_gripper: bool = setting(True)
    """Open or close fully, whichever is nearer. Without effect on a gripper in the simulator's own numbers."""
    rtc: float | None = setting(None, above=0.0)
    """Real-time chunking (Black et al. 2025, arXiv:2506.07339): where chunks overlap (`eval.delay`, `eval.actions`),
    denoising is guided so that a chunk goes on from the one before; the number is the largest weight of this guidance,
    5 as published. In evaluation and serving alone. null: no guidance."""
    dtype: WeightType = setting(WeightType.auto)
    """Type that weights are held in; bfloat16 halves their memory. auto: bfloat16 on a GPU that computes with it; on
    the CPU as in the checkpoint's files, but float32 for less than 100 million weights. float32 without a checkpoint,
    and where `engine.precision`, the type of computations, is float32."""


@dataclass(frozen=True, kw_only=True)
class SteeringConfig:
    """A small network that chooses the noise which a frozen flow policy turns into actions."""

    limit: float = setting(1.5, above=0.0)
    """Noise that is chosen lies in -limit .. limit. What the policy was trained with has a standard deviation of 1."""
    rows: int | None = setting(None, low=1)
    """Actions of the horizon whose noise is chosen, from the first on; all others get that of the last of them. null:
    as many as are executed, `rollout.chunk_size`."""
    hidden_sizes: list[int] = setting([128, 128, 128], low=1, high=WIDEST_LAYER)
    """Widths of the network's hidden layers."""


@dataclass(frozen=True)
class FlowSizes:
    """Sizes of a flow policy that its steering depends on."""

    horizon: int
    """`H`, actions that are denoised together."""
    action_dim: int
    """`A`, numbers of an action in the network."""
    value_width: int
    """Numbers that the policy's critic would read."""

    def features(self, chunk_size: int, action_dim: int) -> int:
        """Return the numbers of an observation that steering sees, for chunks of `C` actions of `D` numbers."""
        return self.value_width + chunk_size * action_dim

    def noise(self, steering: SteeringConfig, chunk_size: int) -> tuple[int, int]:
        """Return the shape of the noise that is chosen."""
        return steering.rows or chunk_size, self.action_dim


def flow_sizes(config: Config) -> FlowSizes | None:
    """Return the sizes of a config's flow policy; None if its checkpoint is not here or cannot be read, or if it is
    none."""
    info, folder = model_info(config.model.name, installed=True), config.model.checkpoint
    if not isinstance(info, FlowInfo) or folder is None or not Path(folder).is_dir():
        return None
    try:
        return info.sizes(config.model, config.rollout.chunk_size)
    except PolicyError:
        return None  # the model's own check says so


def other_steering(saved: Mapping[str, Any], asked: SteeringConfig, chunk_size: int) -> Iterator[tuple[str, str]]:
    """Yield name of and a text on each option that a saved policy is steered with differently than asked for."""
    wanted = dataclasses.asdict(dataclasses.replace(asked, rows=asked.rows or chunk_size))
    for name, value in wanted.items():
        if saved.get(name) != value:
            yield name, f"{name} = {value}, but the checkpoint was saved with {saved.get(name)}"


class FlowInfo(ModelInfo):
    """A flow-matching policy, whose noise may be chosen."""

    def sizes(self, model: Any, chunk_size: int) -> FlowSizes:
        """Return the sizes that steering depends on, from the files of the checkpoint.

        Args:
            model: the section `model`.
            chunk_size: `C`.

        Raises:
            PolicyError: these are missing or damaged.
        """
        raise NotImplementedError

    def check_learning(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue if evaluations would guide what rollouts do not."""
        model = config.model
        assert isinstance(model, FlowConfig)
        if model.rtc is not None:
            yield ConfigIssue(
                "model.rtc",
                f"model.rtc = {model.rtc:g}: rollouts are not guided, because nothing knows the probability of guided "
                "actions",
                f"set it to null, and evaluate the run afterwards with embodyrl eval RUN model.rtc={model.rtc:g}",
                fix={"model.rtc": LEAVE_OUT},
            )

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield issues that concern every flow-matching policy."""
        model = config.model
        assert isinstance(model, FlowConfig)
        if model.noise_low >= model.noise_high:
            yield ConfigIssue(
                "model.noise_low",
                f"model.noise_low = {model.noise_low} is not below model.noise_high = {model.noise_high}",
                "lower it",
            )
        yield from _steered(config)
        yield from _explores(config, model)
        yield from _is_told(config, model)
        entropy_coef = getattr(config.algorithm, "entropy_coef", 0.0)  # of methods with such a bonus
        if entropy_coef > 0.0 and model.noise_method is not NoiseMethod.flow_noise:
            yield ConfigIssue(
                "algorithm.entropy_coef",
                f"algorithm.entropy_coef = {entropy_coef}, but with model.noise_method = {model.noise_method.value} "
                "the settings determine the noise, and nothing learned does",
                "set algorithm.entropy_coef to 0, or model.noise_method to flow_noise",
            )
        if model.noise_method is not NoiseMethod.flow_cps:
            return
        if model.denoising_steps == 1:
            yield ConfigIssue(
                "model.denoising_steps",
                "model.noise_method = flow_cps adds no noise in the last step, and model.denoising_steps = 1 has "
                "no other",
                "set model.denoising_steps to 2 or more",
            )
        for name in ("noise_level", "noise_level_end"):
            level = getattr(model, name)
            if level is not None and level > 1.0:
                yield ConfigIssue(
                    f"model.{name}",
                    f"model.{name} = {level}, but flow_cps draws at most all noise anew",
                    "set it to 1 or less",
                )


def _explores(config: Config, model: FlowConfig) -> Iterator[ConfigIssue]:
    """Yield an issue if steps of denoising are random for a method that asks for none, or the other way round."""
    learns, has_none = config.algorithm.needs(config).learns, model.noise_method is NoiseMethod.none
    name = config.algorithm.name
    if has_none and model.joint_logprob:
        yield ConfigIssue(
            ("model.joint_logprob", "model.noise_method"),
            "model.joint_logprob = true, but with model.noise_method = none no step is random",
            "leave it out",
            fix={"model.joint_logprob": LEAVE_OUT},
        )
    if learns is Learns.likelihood and has_none:
        able = [other for other, needs in needs_of_all(config).items() if needs.learns is Learns.velocity]
        yield ConfigIssue(
            ("model.noise_method", "algorithm.name"),
            f"algorithm {name!r} learns by log-probs of actions, which they do not have with model.noise_method = none",
            f"set model.noise_method to flow_sde, or algorithm to {' or '.join(able)}",
            fix={"model.noise_method": LEAVE_OUT},
        )
    if learns is Learns.velocity and not has_none:
        yield ConfigIssue(
            ("model.noise_method", "algorithm.name"),
            f"algorithm {name!r} needs no log-probs of actions, and model.noise_method = {model.noise_method.value} "
            "would add noise to them",
            "set model.noise_method to none",
            fix={"model.noise_method": NoiseMethod.none.value},
        )


def _is_told(config: Config, model: FlowConfig) -> Iterator[ConfigIssue]:
    """Yield an issue if words say nothing, or if rollouts are guided by them, and a method would learn from what
    unguided ones choose."""
    if model.indicator is not None and model.indicator.better == model.indicator.worse:
        yield ConfigIssue(
            ("model.indicator.worse", "model.indicator.better"),
            f"model.indicator.better and worse are both {model.indicator.better!r}, so that a policy is told nothing",
            "choose other words for one of them",
        )
    learns = config.algorithm.needs(config).learns
    guidance = 1.0 if model.indicator is None else model.indicator.guidance
    if guidance != 1.0 and learns in (Learns.likelihood, Learns.velocity):
        yield ConfigIssue(
            ("model.indicator.guidance", "algorithm.name"),
            f"model.indicator.guidance = {guidance:g} changes what the policy chooses, and algorithm "
            f"{config.algorithm.name!r} would learn as if it had not",
            "set model.indicator.guidance to 1",
            fix={"model.indicator.guidance": 1.0},
        )


def _steered(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if an algorithm would learn weights of a policy that is saved with a network that steers it."""
    checkpoint = config.model.checkpoint
    if checkpoint is None or config.algorithm.needs(config).learns is Learns.noise:
        return
    try:
        if read_steering(Path(checkpoint)) is None:
            return
    except PolicyError:
        return  # of a damaged file, which others report
    steering = [name for name, needs in needs_of_all(config).items() if needs.learns is Learns.noise]
    yield ConfigIssue(
        ("algorithm.name", "model.checkpoint"),
        f"model.checkpoint holds a policy that is steered through its noise ({STEERING_FILE}), whose weights algorithm "
        f"{config.algorithm.name!r} would change",
        f"set algorithm to {' or '.join(steering)}, or name the checkpoint that the steered policy came from",
    )
