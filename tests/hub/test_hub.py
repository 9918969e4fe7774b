"""`hf://owner/name` in place of a folder, against a stand-in for the hub."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml

from embodyrl.hub import name_of
from embodyrl.registry import SupportedModel

pytest.importorskip("huggingface_hub", reason="needs the extra hub")

needs_vla = pytest.mark.skipif(bool(SupportedModel.entry("openvla").missing()), reason="needs the extra vla")
SHARED = Path(__file__).parents[3] / "shared"

SMALL = (
    *("experiment/gym_pendulum", "env.num_envs=2", "env.workers=1", "env.max_episode_steps=10"),
    *("rollout.num_chunks=8", "algorithm.minibatches=2", "run.iterations=1", "eval.episodes=2"),
    *("run.eval_every=0", "tracking.report=false", "run.dir=out"),
)
START = (*SMALL, "model.checkpoint=hf://me/pendulum")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done."""
    folder = tmp_path_factory.mktemp("run")
    done = programs.run(["-m", "embodyrl", "run", *SMALL], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="session")
def policy(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy, with files beside it that no download may fetch."""
    saved = tmp_path_factory.mktemp("policy") / "policy"
    shutil.copytree(run / "checkpoints" / "last" / "policy", saved)
    (saved / "modeling.py").write_text("raise SystemExit")
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x02")
    return saved


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_a_run_starts_from_the_hub_and_goes_on_from_exactly_that(hub: Any, policy: Path, tmp_path: Path) -> None:
    first = hub.add("models/me/pendulum", policy)
    pinned = f"hf://me/pendulum@{first.commit}"
    done = hub.embodyrl("run", *START, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"weights from {pinned}" in done.stdout
    assert sorted(hub.downloads) == ["model.safetensors", "policy.json"]  # each once, and neither code nor pickles
    assert config_of(tmp_path / "out")["model"]["checkpoint"] == pinned
    assert config_of(tmp_path / "out" / "checkpoints" / "last")["model"]["checkpoint"] == pinned
    hub.repositories.clear()
    hub.requests.clear()
    again = hub.embodyrl("resume", "out", "run.iterations=2", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not hub.requests
    assert config_of(tmp_path / "out")["model"]["checkpoint"] == pinned


def test_validate_says_what_a_run_would_download_and_fetches_nothing(hub: Any, policy: Path, tmp_path: Path) -> None:
    commit = hub.add("models/me/pendulum", policy).commit
    size = sum((policy / name).stat().st_size for name in ("model.safetensors", "policy.json")) / 2**20
    before = hub.embodyrl("validate", *START, cwd=tmp_path)
    assert f"me/pendulum@main (commit {commit[:12]}): a run downloads 2 of 2 files, {size:.1f} MiB" in before.stdout
    assert not hub.downloads
    offline = hub.embodyrl("validate", *START, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0
    assert (
        "is not in the cache; hf://me/pendulum@main cannot be looked up, because HF_HUB_OFFLINE is set"
        in offline.stdout
    )
    assert hub.embodyrl("run", *START, cwd=tmp_path).returncode == 0
    after = hub.embodyrl("validate", *START, "run.dir=more", cwd=tmp_path)
    assert f"(commit {commit[:12]}) is in the cache" in after.stdout
    assert hub.embodyrl("run", *START, "run.dir=more", cwd=tmp_path, HF_HUB_OFFLINE="1").returncode == 0
    hub.repositories["models/me/pendulum"].files["policy.json"] += b"\n"
    moved = hub.embodyrl("validate", *START, "run.dir=another", cwd=tmp_path)
    assert "a run downloads 1 of 2 files" in moved.stdout


def wrong(hub: Any, folder: Path, checkpoint: str, command: str = "run", **environment: str) -> str:
    """The one sentence about a name that cannot be had; no run directory is made, and nothing downloaded."""
    done = hub.embodyrl(command, *START, f"model.checkpoint='{checkpoint}'", cwd=folder, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (folder / "out").exists() and not hub.downloads
    return done.stderr


@pytest.mark.parametrize("command", ["run", "validate"])
def test_names_that_the_hub_does_not_know(hub: Any, policy: Path, tmp_path: Path, command: str) -> None:
    hub.add("models/me/pendulum", policy)
    hub.add("models/me/closed", policy, gated=True)
    error = wrong(hub, tmp_path, "hf://me/pendulun", command)
    assert "the hub has no model 'me/pendulun' (no token is set)" in error
    assert "did you mean 'me/pendulum'?" in error
    error = wrong(hub, tmp_path, "hf://me/pendulum@v2", command)
    assert "me/pendulum has no revision 'v2'" in error and "name a branch, tag or commit of http://127" in error
    error = wrong(hub, tmp_path, "hf://me/closed", command)
    assert "hf://me/closed@main is gated: no token is set" in error and "HF_TOKEN" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://pendulum", "'hf://pendulum' is no name on the hub - write hf://owner/name"),
        ("hf://me/pendulum@", "is no name on the hub"),
        ("hf://me/../../etc", "is no name on the hub"),
        ("hf://datasets/me/pendulum", "names a data set, not a model - write hf://owner/name"),
    ],
)
def test_malformed_names(hub: Any, tmp_path: Path, name: str, message: str) -> None:
    assert message in wrong(hub, tmp_path, name)
    assert not hub.requests


def test_a_hub_that_cannot_be_asked(hub: Any, policy: Path, tmp_path: Path) -> None:
    hub.add("models/me/pendulum", policy)
    error = wrong(hub, tmp_path, "hf://me/pendulum", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in error and "unset it" in error
    error = wrong(hub, tmp_path, "hf://me/pendulum", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub http://127.0.0.1:9 gives no answer on hf://me/pendulum@main" in error


def test_more_than_the_disk_holds_is_not_begun(hub: Any, policy: Path, tmp_path: Path) -> None:
    hub.add("models/me/pendulum", policy)
    hub.sizes["model.safetensors"] = 2**60
    error = wrong(hub, tmp_path, "hf://me/pendulum")
    assert "needs 1073741824.0 GiB" in error and "set HF_HOME to a folder on another disk" in error


def test_the_rest_of_the_config_is_checked_before_the_hub_is_asked(hub: Any, tmp_path: Path) -> None:
    done = hub.embodyrl("run", *START, "run.iterations=-1", cwd=tmp_path)
    assert done.returncode == 2 and "run.iterations" in done.stderr and "1 fault" in done.stderr
    assert not hub.requests


def test_a_policy_goes_to_the_hub_and_is_evaluated_from_there(hub: Any, run: Path, tmp_path: Path) -> None:
    refused = hub.embodyrl("export", str(run), "--push", "me/swings", cwd=tmp_path, HF_TOKEN="hf_me")
    assert refused.returncode == 2 and "stdin is no terminal" in refused.stderr and not hub.requests
    nowhere = hub.embodyrl("export", str(run), cwd=tmp_path)
    assert nowhere.returncode == 2 and "give --out DIR, --push OWNER/NAME or both" in nowhere.stderr
    stranger = hub.embodyrl("export", str(run), "--push", "me/swings", "--yes", cwd=tmp_path)
    assert stranger.returncode == 2 and "no token is set" in stranger.stderr
    done = hub.embodyrl("export", str(run), "--push", "me/swings", "--yes", cwd=tmp_path, HF_TOKEN="hf_me")
    assert done.returncode == 0, done.stderr
    assert "/me/swings/commit/" in done.stdout
    assert hub.made[-1]["visibility"] == "private"
    assert {"README.md", "training.yaml", "model.safetensors"} <= hub.repositories["models/me/swings"].files.keys()
    played = hub.embodyrl("eval", "hf://me/swings", "eval.episodes=1", cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert "evaluating" in played.stdout


def test_an_export_names_nothing_on_this_machine(hub: Any, policy: Path, tmp_path: Path) -> None:
    commit = hub.add("models/me/pendulum", policy).commit
    assert hub.embodyrl("run", *START, cwd=tmp_path).returncode == 0
    done = hub.embodyrl("export", "out", "--push", "me/better", "--yes", cwd=tmp_path, HF_TOKEN="hf_me")
    assert done.returncode == 0, done.stderr
    files = hub.repositories["models/me/better"].files
    assert json.loads(files["policy.json"])["options"]["checkpoint"] == f"hf://me/pendulum@{commit}"
    assert not [name for name, content in files.items() if str(hub.home).encode() in content]
    del hub.repositories["models/me/pendulum"]
    elsewhere = {"HF_HOME": str(tmp_path / "another cache")}
    played = hub.embodyrl("eval", "hf://me/better", "eval.episodes=1", cwd=tmp_path, **elsewhere)
    assert played.returncode == 0, played.stderr


def answered(hub: Any, words: list[str], cwd: Path, keys: bytes) -> tuple[int, str]:
    """Exit code and output of a command at a terminal, where someone presses `keys`."""
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": subprocess.PIPE, "text": True}
    environment = hub.environment(HF_TOKEN="hf_me")
    with programs.Program(["-m", "embodyrl", *words], cwd=cwd, env=environment, **streams, **hub.anew) as program:
        os.close(theirs)
        os.write(ours, keys)
        text = program.communicate(timeout=240)[0]
        os.close(ours)
        return program.returncode, text


@pytest.mark.parametrize("keys", [b"n\n", b"\n", b"\x04"], ids=["no", "nothing", "end of file"])
def test_without_a_yes_nothing_is_uploaded(hub: Any, run: Path, tmp_path: Path, keys: bytes) -> None:
    code, text = answered(hub, ["export", str(run), "--push", "me/swings"], tmp_path, keys)
    assert code == 0 and "nothing was uploaded" in text
    assert not hub.made and not hub.repositories


def test_a_yes_uploads(hub: Any, run: Path, tmp_path: Path) -> None:
    code, text = answered(hub, ["export", str(run), "--push", "me/swings"], tmp_path, b"y\n")
    assert code == 0 and "/me/swings/commit/" in text


def test_a_download_that_was_cut_short_is_not_taken_for_the_whole(hub: Any, policy: Path, tmp_path: Path) -> None:
    commit = hub.add("models/me/pendulum", policy).commit
    assert hub.embodyrl("run", *START, cwd=tmp_path).returncode == 0
    [weights] = hub.home.rglob(f"snapshots/{commit}/model.safetensors")
    weights.unlink()
    pinned = (f"model.checkpoint=hf://me/pendulum@{commit}", "run.dir=again")
    alone = hub.embodyrl("run", *START, *pinned, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert alone.returncode == 2 and "HF_HUB_OFFLINE is set" in alone.stderr
    assert hub.embodyrl("run", *START, *pinned, cwd=tmp_path).returncode == 0 and weights.is_file()


def test_ranks_share_one_download(hub: Any, policy: Path, tmp_path: Path) -> None:
    hub.add("models/me/pendulum", policy)
    done = hub.embodyrl("run", *START, "env.workers=2", "engine.parallel.world_size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(hub.downloads) == ["model.safetensors", "policy.json"]


@needs_vla
def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(hub: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gr00t_n1_5"}')
    (other / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    hub.add("models/me/other", other)
    words = ("metaworld_ppo_pi0", "model.checkpoint=hf://me/other", "run.dir=out")
    done = hub.run(["-m", "embodyrl", "run", *words], cwd=tmp_path, preload=(*hub.anew["preload"], *programs.VLA))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.checkpoint: config.json is that of a 'gr00t' model: set model.name to that one" in done.stderr
    assert not (tmp_path / "out").exists()


def test_other_options_name_files_of_this_machine(hub: Any, tmp_path: Path) -> None:
    words = ("experiment/gym_pendulum", "model=pi0", "model.tokenizer=hf://google/paligemma-3b-pt-224@main")
    done = hub.embodyrl("validate", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "model.tokenizer = hf://google/paligemma-3b-pt-224@main is on the hub, from where only" in done.stderr
    assert "run: hf download google/paligemma-3b-pt-224 --local-dir DIR" in done.stderr


IMPATIENT = """
import embodyrl.hub
from embodyrl.cli.main import main
assert embodyrl.hub.TIMEOUT_S <= 10
embodyrl.hub.TIMEOUT_S = 0.2
main()
"""


def test_a_hub_that_never_answers(hub: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = hub.environment(HF_ENDPOINT=address, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
        done = hub.run(["-c", IMPATIENT, "run", *START], cwd=tmp_path, env=environment)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert f"the hub {address} gives no answer on hf://me/pendulum@main" in done.stderr


LOADING = """
import sys
import torch
from embodyrl.models import load_policy
options = dict(word.split("=") for word in sys.argv[4:])
there = load_policy(sys.argv[1], checkpoint=sys.argv[2], **options).state_dict()
here = load_policy(sys.argv[1], checkpoint=sys.argv[3], **options).state_dict()
assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
"""


@needs_vla
@pytest.mark.parametrize(("model", "folder"), [("openvla", "openvla"), ("openvla_oft", "openvla_oft/l1")])
def test_public_layouts_come_from_the_hub_as_from_a_folder(hub: Any, model: str, folder: str) -> None:
    here = SHARED / "reference" / folder / "checkpoint"
    if not here.is_dir():
        pytest.skip("needs a small checkpoint in ../shared")
    hub.add(f"models/me/{model}", here)
    words = ["-c", LOADING, model, f"hf://me/{model}", str(here), "unnorm_key=bridge_orig"]
    done = hub.run(words, preload=(*hub.anew["preload"], *programs.VLA, f"embodyrl.models.{model}.policy"))
    assert done.returncode == 0, done.stderr
    shards = [name for name in hub.downloads if name.endswith(".safetensors")]
    assert len(shards) == len(set(shards)) == len(list(here.glob("*.safetensors")))


def test_of_a_data_set_only_tables_and_videos_are_fetched(hub: Any, tmp_path: Path) -> None:
    read = ["meta/info.json", "data/chunk-000/file-000.parquet", "videos/observation.images.a/chunk-000/file-000.mp4"]
    for name in (*read, "README.md", "load.py", "raw/data.bin"):
        (tmp_path / "demos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "demos" / name).write_text(name)
    commit = hub.add("datasets/me/demos", tmp_path / "demos").commit
    code = "from embodyrl.hub import *; print(fetch(parse('hf://datasets/me/demos', Kind.dataset)))"
    done = hub.run(["-c", code])
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == commit
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.is_file()) == sorted(read)
    words = ("algorithm=sft", "data.path=hf://datasets/me/demos")
    used = hub.embodyrl("validate", "experiment/gym_pendulum", *words, cwd=tmp_path)
    assert used.returncode == 2 and "info.json" in used.stderr  # of which that was none
    kept = hub.embodyrl("collect", "experiment/gym_pendulum", *words, "--episodes", "1", cwd=tmp_path)
    assert kept.returncode == 2 and "is on the hub, where nothing is recorded: give --out DIR" in kept.stderr


def test_other_jobs_do_not_import_the_library() -> None:
    code = "import sys; from embodyrl.config import load_config; load_config('gym_pendulum'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "huggingface_hub" not in done.stdout.split()


def test_a_folder_of_the_cache_has_a_name() -> None:
    commit = "0123456789" * 4
    found = name_of(f"/home/me/.cache/huggingface/hub/models--me--my-policy/snapshots/{commit}")
    assert found is not None and (found.repo, found.revision) == ("me/my-policy", commit)
    assert str(found) == f"hf://me/my-policy@{commit}"
    assert name_of("/weights/models--me--my-policy") is None
