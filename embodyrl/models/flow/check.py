"""What is wrong with a config of a flow-matching policy, told without importing torch."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.schema import Config
from embodyrl.models.flow.options import FlowConfig, NoiseMethod

Objection = tuple[str, str, str]
"""Path of a setting, what is wrong, what to do."""


def check(config: Config) -> Iterator[Objection]:
    """Object to what no flow-matching policy can do."""
    model = config.model
    assert isinstance(model, FlowConfig)
    if model.noise_low >= model.noise_high:
        yield (
            "model.noise_low",
            f"model.noise_low = {model.noise_low} is not below model.noise_high = {model.noise_high}",
            "lower it",
        )
    entropy_coef = config.algorithm.entropy_coef
    if entropy_coef > 0.0 and model.noise_method is not NoiseMethod.flow_noise:
        yield (
            "algorithm.entropy_coef",
            f"algorithm.entropy_coef = {entropy_coef} has no use: with model.noise_method = "
            f"{model.noise_method.value} noise is as large as the settings say, whatever is learned",
            "set algorithm.entropy_coef to 0, or model.noise_method to flow_noise",
        )
    if model.noise_method is not NoiseMethod.flow_cps:
        return
    if model.denoising_steps == 1:
        yield (
            "model.denoising_steps",
            "model.noise_method = flow_cps adds no noise in the last step, and model.denoising_steps = 1 has no other",
            "set model.denoising_steps to 2 or more",
        )
    for name in ("noise_level", "noise_level_end"):
        level = getattr(model, name)
        if level is not None and level > 1.0:
            yield (
                f"model.{name}",
                f"model.{name} = {level}, but flow_cps draws at most all noise anew",
                "set it to 1 or less",
            )
