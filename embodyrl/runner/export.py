"""From a checkpoint of a run to a folder that others can use: the policy in its public layout, with a model card."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config
from embodyrl.errors import UserError
from embodyrl.registry import SupportedModel
from embodyrl.runner.checkpoint import POLICY, Manifest, digest, files_in
from embodyrl.runner.model_card import CARD_FILE, model_card
from embodyrl.runner.rundir import CONFIG_FILE

TRAINING_FILE = "training.yaml"
"""The whole config of the run that the policy comes from."""


class ExportError(UserError):
    """Raised when a policy cannot be exported; nothing is left where it was to go."""


def export(checkpoint: Path, loaded: LoadedConfig, out: Path) -> str:
    """Write a policy's folder; returns how it was checked, for people.

    Args:
        checkpoint: verified folder.
        loaded: its config.
        out: where to; must not exist.

    Raises:
        ExportError: `out` exists, or what was written is not what it should be.
    """
    if out.exists():
        raise ExportError(f"{out} exists already and is never overwritten: choose another folder")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(checkpoint / POLICY, temporary)
        shutil.copyfile(checkpoint / CONFIG_FILE, temporary / TRAINING_FILE)
        manifest = Manifest.read(checkpoint)
        (temporary / CARD_FILE).write_text(model_card(loaded.config, manifest))
        checked = _check(temporary, manifest, loaded.config)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return checked


def _check(folder: Path, manifest: Manifest, config: Config) -> str:
    """Compare what was written with the checkpoint, and load it as a user would."""
    for path in files_in(folder):
        facts = manifest.files.get(f"{POLICY}/{path.relative_to(folder)}")
        if facts is not None and digest(path) != facts["sha256"]:
            raise ExportError(f"{path.name} was not written as it is in the checkpoint: look at the disk")
    if SupportedModel.entry(config.model.name).facts.get("standalone"):
        load_exported(folder, config)
        return "loaded again as a policy"
    return f"{count_tensors(folder)} tensors read again; the policy itself needs its simulator to be built"


def load_exported(folder: Path, config: Config) -> None:
    """Build the policy from an exported folder, which compares names and shapes of all weights.

    Raises:
        PolicyError: they do not fit.
    """
    from embodyrl.models import build_policy

    options = {"checkpoint": str(folder)} | ({"adapter": None} if hasattr(config.model, "adapter") else {})
    model = dataclasses.replace(config.model, **options)  # type: ignore[arg-type]
    build_policy(model, None, chunk_size=config.rollout.chunk_size, seed=config.seed)


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
