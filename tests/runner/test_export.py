"""Exported policies: the weights of the checkpoint, in a folder that models load, with a card that tells the truth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import Run, Runs, copy_of, evaluation_in, resumed

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.files import digest
from embodyrl.models import load_policy
from embodyrl.registry import SupportedModel
from embodyrl.runner.checkpoint import CheckpointError, Manifest
from embodyrl.runner.export import ExportError, count_tensors

TINY = """\
defaults: [env: gym/pendulum_rgb, model: openvla_oft, algorithm: grpo, _self_]
run: {iterations: 1, eval_every: 0, dir: out}
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [48, 48]}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm: {minibatches: 2, reward: dense}
"""


def test_an_exported_policy_is_the_one_that_was_trained(small_runs: Runs, tmp_path: Path) -> None:
    run, out = small_runs("run.iterations=1"), tmp_path / "for others" / "policy"
    assert train.export(run.path, out) == 0
    place = (run.path / "checkpoints/last").resolve()
    for name in ("model.safetensors", "policy.json"):
        assert digest(out / name) == Manifest.read(place).files[f"policy/{name}"]["sha256"]
    settings = [f"model.checkpoint={out}", f"run.dir={tmp_path / 'more'}", "run.iterations=1"]
    assert train.run(load_config(out / "training.yaml", settings)) == 0
    began = Run(tmp_path / "more").summary["evaluations"]["0"]
    assert began == run.summary["evaluations"]["1"]
    card = (out / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "embodyrl" and {"mlp", "ppo", "gymnasium"} <= set(header["tags"])
    assert f"| success | {began['eval/success_once']:.3f} in 5 held-out episodes" in card
    assert f"| mean return | {began['eval/return']:.2f} |" in card
    assert "| actions per chunk | 1 |" in card and "In Python: `embodyrl.load_policy('.')`." in card


def test_a_policy_outlives_what_it_was_made_from(
    small_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluating, exporting and training it further takes nothing but its checkpoint."""
    first = copy_of(small_runs("run.iterations=1"), tmp_path / "first")
    start = ["run.iterations=2", "run.save_every=1", f"model.checkpoint={first}/checkpoints/last/policy"]
    whole = small_runs(*start)
    near = small_runs.fresh(tmp_path / "near", *start, "run.iterations=1", "algorithm.kl_coef=0.1")
    second = copy_of(whole, tmp_path / "second", 1)
    assert train.evaluate(second, []) == 0
    before = evaluation_in(capsys.readouterr().out)
    shutil.rmtree(first)
    assert train.evaluate(second, []) == 0
    assert evaluation_in(capsys.readouterr().out) == before
    assert train.export(second, tmp_path / "exported") == 0
    assert resumed(second).digest(2) == whole.digest(2) != whole.digest(1)
    assert train.evaluate(near.path, []) == 0
    with pytest.raises(ConfigError, match=r"model\.checkpoint = .* does not exist"):  # it is to stay near what is gone
        train.resume(near.path, ["run.iterations=2"])


def test_nothing_is_overwritten_and_nothing_damaged_exported(small_runs: Runs, tmp_path: Path) -> None:
    run, out = copy_of(small_runs("run.iterations=1"), tmp_path / "run"), tmp_path / "policy"
    out.mkdir()
    with pytest.raises(ExportError, match="exists already and is never overwritten"):
        train.export(run, out)
    out.rmdir()
    weights = run / "checkpoints/last/policy/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"nope")
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors is altered"):
        train.export(run, out)
    assert not out.exists()
    (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(ExportError, match="cannot be read again"):
        count_tensors(tmp_path)
    with pytest.raises(ExportError, match="holds no weights"):
        count_tensors(run)


@pytest.mark.slow
@pytest.mark.skipif(bool(SupportedModel.entry("openvla_oft").missing()), reason="openvla_oft is not installed")
def test_a_vision_language_action_model_in_its_public_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole weights; then adapters for them, merged and alone."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    assert train.run(load_config("tiny.yaml")) == 0
    out = tmp_path / "exported"
    assert train.export(Path("out"), out) == 0
    assert "loaded again as a policy" in capsys.readouterr().out
    for name in ("config.json", "dataset_statistics.json", "tokenizer.json", "preprocessor_config.json"):
        json.loads((out / name).read_text())
    whole, saved = loaded(out), loaded(Path("out/checkpoints/last/policy"))
    assert whole.keys() == saved.keys() and all(torch.equal(whole[name], saved[name]) for name in saved)
    mark = tmp_path / "it ran"
    (out / "modeling_prismatic.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: pass\n")
    told = json.loads((out / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_prismatic.Model", "AutoModelForVision2Seq": "modeling_prismatic.Model"}
    (out / "config.json").write_text(json.dumps(told | {"auto_map": auto_map}))
    assert loaded(out).keys() == whole.keys() and not mark.exists(), "code of a checkpoint was executed"
    with pytest.raises(ExportError, match="has no adapters"):
        train.export(Path("out"), tmp_path / "no adapters", adapter=True)

    pytest.importorskip("peft", reason="needs peft")
    adapted = ["engine.lora.rank=2", "engine.optimizer.lr=0.01", f"model.checkpoint={out}", "run.dir=adapted"]
    adapted += ["algorithm=ppo", "rollout.group_size=1"]  # it has a critic, which learns in full
    assert train.run(load_config("tiny.yaml", adapted)) == 0
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    assert train.export(Path("adapted"), merged) == 0
    assert train.export(Path("adapted"), alone, adapter=True) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "heads.safetensors"} <= {
        path.name for path in alone.iterdir()
    }
    together = loaded(out, adapter=str(alone))
    of_checkpoint = loaded(out, adapter="adapted/checkpoints/last/policy/adapter")
    assert all(torch.equal(tensor, of_checkpoint[name]) for name, tensor in together.items())
    found = loaded(merged)
    changed = [name for name in found if not torch.equal(found[name], whole[name])]
    assert len([name for name in changed if name.startswith("network.")]) > 10, "the adapters changed nothing"
    assert any(name.startswith("value_head.") for name in changed), "what learns in full beside them changed nothing"
    for name in found:
        assert torch.allclose(found[name], together[name], rtol=0, atol=1e-6), name


def loaded(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The weights of a policy from a folder."""
    return load_policy("openvla_oft", checkpoint=folder, chunk_size=2, use_proprio=False, **options).state_dict()
