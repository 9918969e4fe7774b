"""Exporting a checkpoint to a folder that others can use: the policy in its public layout, with a model card."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from embodyrl.config import LoadedConfig
from embodyrl.config.plugins import TRAINING_FILE, code_of_its_own
from embodyrl.config.schema import Config
from embodyrl.engine.lora import add_adapters, load_adapted, merge
from embodyrl.errors import UserError
from embodyrl.files import digest, files_in
from embodyrl.hub import Kind, is_hub_name, parse
from embodyrl.models import Policy, build_policy
from embodyrl.models.saved import (
    ADAPTER_FOLDER,
    HEADS_FILE,
    from_own_folder,
    own_folder_settings,
    stands_alone,
    with_kept,
)
from embodyrl.registry import SupportedModel
from embodyrl.runner.checkpoint import POLICY, Manifest
from embodyrl.runner.reproduction import LOCK_FILE, digest_of
from embodyrl.runs import CONFIG_FILE
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
| actions per chunk | {chunk} |
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


class ExportError(UserError):
    """Raised when a policy cannot be exported; the output folder is then not created."""


def export(checkpoint: Path, loaded: LoadedConfig, out: Path, *, adapter: bool = False) -> str:
    """Write a policy's folder; returns a description of the checks, for people.

    Args:
        checkpoint: verified folder.
        loaded: its config.
        out: output folder; must not exist.
        adapter: of a run with `engine.lora`, write only the adapters; otherwise they are merged into the weights.

    Raises:
        ExportError: `out` exists, there are no adapters, a file cannot be read or written, or what was written is not
            what it should be.
    """
    if out.exists():
        raise ExportError(f"{out} exists already and is never overwritten: choose another folder")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        checked = _write(checkpoint, temporary, loaded.config, adapter)
        shutil.copyfile(checkpoint / CONFIG_FILE, temporary / TRAINING_FILE)
        if (checkpoint / LOCK_FILE).is_file() and stands_alone(checkpoint / POLICY):  # else it has other weights here
            shutil.copyfile(checkpoint / LOCK_FILE, temporary / LOCK_FILE)
        (temporary / CARD_FILE).write_text(model_card(loaded.written, Manifest.read(checkpoint), adapter=adapter))
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{checkpoint} could not be exported to {out}, where nothing is left: {_why(error)}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checked


def _why(error: Exception) -> str:
    """Describe the error of a file; of the first, if there were several."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return str(error)


def _write(checkpoint: Path, folder: Path, config: Config, adapter: bool) -> str:
    """Write the weights and their files, and read them again; returns a description of that check."""
    has_adapters = not stands_alone(checkpoint / POLICY)
    if adapter:
        if not has_adapters:
            raise ExportError("the policy has no adapters (engine.lora.rank was 0): leave out --adapter")
        return _write_adapter(checkpoint / POLICY, folder, config)
    if has_adapters:
        return _write_merged(checkpoint / POLICY, folder, config)
    shutil.copytree(checkpoint / POLICY, folder)
    _compare_files(folder, Manifest.read(checkpoint))
    if SupportedModel.entry(config.model.name).standalone:
        load_exported(folder, config)
        return "loaded again as a policy"
    return f"{count_tensors(folder)} tensors read again; the policy itself needs its simulator to be built"


def _write_adapter(policy: Path, folder: Path, config: Config) -> str:
    """Write the adapters in peft's layout, and the heads that learned in full."""
    if config.model.checkpoint is None:
        raise ExportError("the adapters belong to random weights that nobody else has: export them --merged")
    shutil.copytree(policy / ADAPTER_FOLDER, folder)
    shutil.copyfile(policy / HEADS_FILE, folder / HEADS_FILE)
    return f"{count_tensors(folder)} tensors read again"


def _write_merged(source: Path, folder: Path, config: Config) -> str:
    """Write the policy with its adapters merged into the weights, in its public layout."""
    written = _save_merged(source, folder, config)
    gc.collect()  # adapters refer to each other: the policy would stay beside the one that is loaded now
    for name, tensor in load_exported(folder, config).state_dict().items():
        if digest_of(tensor) != written[name]:
            raise ExportError(f"{name} was not written as it is: check the disk")
    return "adapters merged; loaded again as a policy"


def _save_merged(source: Path, folder: Path, config: Config) -> dict[str, str]:
    """Save the policy with its adapters merged; returns digests of its tensors by name.

    Digests, because two policies of several billion weights do not fit into the memory of every machine.
    """
    below = dataclasses.replace(config.model, checkpoint=config.model.checkpoint or str(source))
    policy = build_policy(with_kept(below, source), None, chunk_size=config.rollout.chunk_size, seed=config.seed)
    add_adapters(policy, config.engine.lora, config.seed)
    load_adapted(policy, source)
    merge(policy)
    folder.mkdir()
    policy.save(folder, config.model)
    return {name: digest_of(tensor) for name, tensor in policy.state_dict().items()}


def _compare_files(folder: Path, manifest: Manifest) -> None:
    """Raise `ExportError` if a file differs from the checkpoint's."""
    for path in files_in(folder):
        if digest(path) != manifest.files[f"{POLICY}/{path.relative_to(folder)}"]["sha256"]:
            raise ExportError(f"{path.name} was not written as it is in the checkpoint: check the disk")


def load_exported(folder: Path, config: Config) -> Policy:
    """Build the policy from an exported folder, which compares names and shapes of all weights.

    Raises:
        PolicyError: they do not fit.
    """
    model = from_own_folder(config.model, folder)
    return build_policy(model, None, chunk_size=config.rollout.chunk_size, seed=config.seed)


def count_tensors(folder: Path) -> int:
    """Read every tensor of a folder.

    Raises:
        ExportError: a file is damaged, or there are no tensors.
    """
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                count += sum(1 for name in file.keys() if file.get_slice(name) is not None)  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ExportError(f"{path} cannot be read again ({error})") from error
    if not count:
        raise ExportError(f"{folder} holds no weights")
    return count


def model_card(config: Config, manifest: Manifest, *, adapter: bool = False) -> str:
    """Return the text of a policy's README.

    Args:
        config: of the run.
        manifest: of the checkpoint.
        adapter: the folder holds only adapters.
    """
    base = config.model.checkpoint
    return CARD.format(
        header=yaml.safe_dump(_header(config), sort_keys=False),
        title=f"{config.run.name}, iteration {manifest.iteration}",
        model=config.model.name,
        base=f" that started from `{base if is_hub_name(base) else Path(base).name}`" if base else "",
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
    """Return the metadata for model hubs."""
    base = config.model.checkpoint
    return {
        "library_name": "embodyrl",
        "pipeline_tag": "robotics",
        **({"base_model": parse(str(base), Kind.model).repo} if is_hub_name(base) else {}),
        "tags": ["robotics", "reinforcement-learning", config.model.name, config.env.name, config.algorithm.name],
    }


def _observations(config: Config) -> str:
    height, width = config.env.image_size
    images = f"{', '.join(config.env.cameras)} ({height}x{width})"
    return images if config.env.cameras else "states"


def _results(manifest: Manifest) -> str:
    """Return the rows on the evaluation of this checkpoint."""
    found = manifest.metrics
    if not found:
        return "| evaluation | none after this iteration |\n"
    success = "-"
    if "eval/success_once" in found:
        interval = f"(95 %: {found['eval/success_low']:.3f} to {found['eval/success_high']:.3f})"
        success = f"{found['eval/success_once']:.3f} in {found['eval/episodes']:.0f} held-out episodes {interval}"
    return f"| success | {success} |\n| mean return | {found['eval/return']:.2f} |\n"


def _merged_use(config: Config) -> str:
    return MERGED_USE.format(settings=" ".join(own_folder_settings(config.model, "."))) + _python(config)


def _python(config: Config) -> str:
    """Return a sentence on loading the policy in Python."""
    trust = ", trust=True" if code_of_its_own(config) else ""
    text = f"In Python: `embodyrl.load_policy('.'{trust})`"
    if SupportedModel.entry(config.model.name).standalone:
        text += f", or without its simulator `embodyrl.models.load_policy({config.model.name!r}, checkpoint='.')`"
    return f"{text}."
