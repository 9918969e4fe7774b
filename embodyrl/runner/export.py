"""From a checkpoint of a run to a folder that others can use: the policy in its public layout, with a model card."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from embodyrl.config import LoadedConfig
from embodyrl.config.plugins import TRAINING_FILE
from embodyrl.config.schema import Config
from embodyrl.engine.lora import add_adapters, load_adapted, merge
from embodyrl.errors import UserError
from embodyrl.models import Policy, build_policy
from embodyrl.models.saved import ADAPTER_FOLDER, HEADS_FILE, from_own_folder, stands_alone, with_kept
from embodyrl.registry import SupportedModel
from embodyrl.runner.checkpoint import POLICY, Manifest, digest, files_in
from embodyrl.runner.model_card import CARD_FILE, model_card
from embodyrl.runner.rundir import CONFIG_FILE


class ExportError(UserError):
    """Raised when a policy cannot be exported; nothing is left where it was to go."""


def export(checkpoint: Path, loaded: LoadedConfig, out: Path, *, adapter: bool = False) -> str:
    """Write a policy's folder; returns how it was checked, for people.

    Args:
        checkpoint: verified folder.
        loaded: its config.
        out: where to; must not exist.
        adapter: of a run with `engine.lora`, write the adapters alone; otherwise they are added to the weights.

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
    """What went wrong with a file; the first one, if several did."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return str(error)


def _write(checkpoint: Path, folder: Path, config: Config, adapter: bool) -> str:
    """Write the weights and what belongs to them, and read them again; returns how."""
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
    """The adapters in peft's layout, and the heads that learned in full beside them."""
    if config.model.checkpoint is None:
        raise ExportError("the adapters belong to random weights that nobody else has: export them --merged")
    shutil.copytree(policy / ADAPTER_FOLDER, folder)
    shutil.copyfile(policy / HEADS_FILE, folder / HEADS_FILE)
    return f"{count_tensors(folder)} tensors read again"


def _write_merged(source: Path, folder: Path, config: Config) -> str:
    """The policy with its adapters added to the weights, in its public layout."""
    below = dataclasses.replace(config.model, checkpoint=config.model.checkpoint or str(source))
    policy = build_policy(with_kept(below, source), None, chunk_size=config.rollout.chunk_size, seed=config.seed)
    add_adapters(policy, config.engine.lora, config.seed)
    load_adapted(policy, source)
    merge(policy)
    folder.mkdir()
    policy.save(folder, config.model)
    again = load_exported(folder, config).state_dict()
    for name, tensor in policy.state_dict().items():
        if not again[name].equal(tensor):
            raise ExportError(f"{name} was not written as it is: look at the disk")
    return "adapters merged; loaded again as a policy"


def _compare_files(folder: Path, manifest: Manifest) -> None:
    """That files were written as they are in the checkpoint."""
    for path in files_in(folder):
        if digest(path) != manifest.files[f"{POLICY}/{path.relative_to(folder)}"]["sha256"]:
            raise ExportError(f"{path.name} was not written as it is in the checkpoint: look at the disk")


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
