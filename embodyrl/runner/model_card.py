"""The README of an exported policy: what it is, what it was trained on, how well it does, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from embodyrl.config.schema import Config
from embodyrl.models.saved import own_folder_settings
from embodyrl.registry import SupportedModel
from embodyrl.runner.checkpoint import Manifest
from embodyrl.version import __version__

CARD_FILE = "README.md"

CARD = """\
---
{header}---

# {title}

A `{model}` policy{base}, post-trained with `{algorithm}` in the simulator `{simulator}` by embodyrl {version}.

| | |
|---|---|
| tasks | {tasks} |
| iterations | {iterations} |
| actions per decision | {chunk} |
| observations | {observations} |
| seed | {seed} |
{results}
## Use

`training.yaml` is the whole config of the run. {use}

## Limits

What is measured above are start states of the same simulator and tasks that training did not see. Nothing is known
about other tasks, other cameras or a real robot.
"""

MERGED_USE = """In this folder,

```
embodyrl run training.yaml {settings} run.dir=NEW
```

trains the policy further. """
ADAPTER_USE = """The folder holds LoRA adapters for the weights named above (`adapter_config.json`), as
the package peft reads them, and `heads.safetensors`: the parts that learned in full beside them."""


def model_card(config: Config, manifest: Manifest, *, adapter: bool = False) -> str:
    """The text of a policy's README.

    Args:
        config: of the run.
        manifest: of the checkpoint.
        adapter: the folder holds adapters alone.
    """
    base = config.model.checkpoint
    return CARD.format(
        header=yaml.safe_dump(_header(config), sort_keys=False),
        title=f"{config.run.name}, iteration {manifest.iteration}",
        model=config.model.name,
        base=f" that started from `{Path(base).name}`" if base else "",
        algorithm=config.algorithm.name,
        simulator=config.env.name,
        version=__version__,
        tasks=", ".join(config.env.tasks),
        iterations=manifest.iteration,
        chunk=config.rollout.chunk_size,
        observations=_observations(config),
        seed=config.seed,
        results=_results(manifest),
        use=ADAPTER_USE if adapter else _merged_use(config),
    )


def _header(config: Config) -> dict[str, Any]:
    """What model hubs read."""
    return {
        "library_name": "embodyrl",
        "pipeline_tag": "robotics",
        "tags": ["robotics", "reinforcement-learning", config.model.name, config.env.name, config.algorithm.name],
    }


def _observations(config: Config) -> str:
    height, width = config.env.image_size
    pictures = f"{', '.join(config.env.cameras)} ({height}x{width})"
    return pictures if config.env.cameras else "states"


def _results(manifest: Manifest) -> str:
    """A row for the evaluation of this checkpoint."""
    found = manifest.metrics
    if not found:
        return "| evaluation | none after this iteration |\n"
    return (
        f"| success | {found['eval/success_once']:.3f} in {found['eval/episodes']:.0f} held-out episodes "
        f"(95 %: {found['eval/success_low']:.3f} to {found['eval/success_high']:.3f}) |\n"
        f"| mean return | {found['eval/return']:.2f} |\n"
    )


def _merged_use(config: Config) -> str:
    return MERGED_USE.format(settings=" ".join(own_folder_settings(config.model, "."))) + _python(config)


def _python(config: Config) -> str:
    """How to load it in Python, where that takes no simulator."""
    if not SupportedModel.entry(config.model.name).standalone:
        return "In Python it is built together with its simulator (`embodyrl.models.build_policy`)."
    return f"In Python: `embodyrl.models.load_policy({config.model.name!r}, checkpoint='.')`."
