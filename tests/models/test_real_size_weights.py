"""benchmarks/real_size.py: the weights that it writes are those that the public loader reads."""

from __future__ import annotations

import json
from pathlib import Path

import drivers
import pytest
import torch
from libero_files import needs_assets
from safetensors.torch import load_file, save_file

from embodyrl.models.saved import shard_files
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)
pytest.importorskip("transformers")


def test_the_page_shows_the_results() -> None:
    real_size = drivers.load("real_size")
    results = json.loads(real_size.RESULTS.read_text())
    assert real_size.TABLE.read_text() == "\n".join(real_size.table(results)).rstrip() + "\n"


@needs_assets
def test_every_written_tensor_is_loaded_byte_for_byte_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    real_size = drivers.load("real_size")
    case = real_size.Case("gr00t", "tiny", tmp_path, [])
    written = real_size.write_checkpoint(case.config(), "tiny", case.checkpoint)
    assert written["shards"] > 1
    compared = real_size.compare_loaded(case.config())
    assert compared["compared"] == compared["equal"] >= real_size.SAMPLED

    adapter = tmp_path / "policy" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"target_modules": []}')
    heads = adapter.parent / "heads.safetensors"
    save_file({"start": torch.zeros(1)}, heads)
    untouched = real_size.compare_exported("gr00t", adapter.parent, case.checkpoint)
    assert untouched["equal"] == untouched["compared"] > 0

    shard = shard_files(case.checkpoint)[0]
    tensors = load_file(shard)
    name = real_size.sampled(list(tensors))[0]
    save_file(tensors | {name: -tensors[name]}, shard)
    assert real_size.compare_exported("gr00t", adapter.parent, case.checkpoint)["wrong"] == 1

    save_file({f"network.{real_size.GR00T_NAMES.own(name)}": torch.zeros(1)}, heads)
    found = real_size.compare_exported("gr00t", adapter.parent, case.checkpoint)
    assert (found["learned"], found["wrong"]) == (1, 0), "a head learns in full"
