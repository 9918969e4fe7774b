"""`embodyrl swap`: a file gets another choice and all that follows; what it does not touch stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embodyrl.cli import swap as command
from embodyrl.config import ConfigUse, list_options, load_config
from embodyrl.config.edit import EditError, choose, leave_out, set_value
from embodyrl.config.issues import ConfigError
from embodyrl.config.swap import SwapError, swap
from embodyrl.runner.start_rules import start_rules

FILE = """\
# my run, with notes
defaults:
  - env: gym/pendulum
  - model: mlp   # small
  - algorithm: ppo   # simple
  - _self_
seed: 3
rollout:
  num_chunks: 64   # a third of an episode
algorithm: {epochs: 7, gamma: 0.9}

# what learns
engine:
  optimizer:
    lr: 1.0e-3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return path


def test_all_that_follows_from_grpo_is_named_at_once_with_lines_that_mend_it(mine: Path) -> None:
    mine.write_text(FILE.replace("algorithm: ppo", "algorithm: grpo"))
    with pytest.raises(ConfigError) as caught:
        load_config("mine.yaml")
    text = str(caught.value)
    assert len(caught.value.faults) == 3 and "mine.yaml:9:15: then rollout.num_chunks = 64" in text
    assert "(or: embodyrl swap algorithm=grpo mine.yaml)" in text
    lines = text.partition("mine.yaml):\n")[2]
    assert yaml.safe_load(lines) == {"rollout": {"group_size": 4, "episodes": "whole", "num_chunks": 200}}
    pasted = mine.read_text().replace("rollout:\n  num_chunks: 64   # a third of an episode\n", "")
    mine.write_text(pasted + "\n".join(line[2:] for line in lines.splitlines()))
    assert load_config("mine.yaml").config.rollout.group_size == 4


def test_nothing_else_of_the_file_changes(mine: Path) -> None:
    swapped = swap("mine.yaml", {"algorithm": "grpo"})
    assert not swapped.faults
    wanted = FILE.replace("ppo   # simple", "grpo   # simple").replace("num_chunks: 64 ", "num_chunks: 200 ")
    wanted = wanted.replace("an episode\n", "an episode\n  group_size: 4\n  episodes: whole\n")
    assert swapped.after == wanted
    assert mine.read_text() == FILE, "only shown so far"


def test_settings_of_the_former_choice_go(mine: Path) -> None:
    swapped = swap("mine.yaml", {"algorithm": "sac"})
    assert not swapped.faults and yaml.safe_load(swapped.after)["model"] == {"head": "squashed"}
    assert yaml.safe_load(swapped.after)["algorithm"] == {"gamma": 0.9}
    mine.write_text(
        FILE + "env: {tasks: [Pendulum-v1], success_return: -300.0, num_envs: 4}\nmodel: {hidden_sizes: [8]}\n"
    )
    swapped = swap("mine.yaml", {"env": "gym/pendulum_rgb", "model": "cnn"})
    assert not swapped.faults and yaml.safe_load(swapped.after)["env"] == {"num_envs": 4}
    assert ("model", "hidden_sizes") in swapped.left_out or yaml.safe_load(swapped.after)["model"]


def test_a_file_that_names_components_itself_gets_a_list(mine: Path) -> None:
    mine.write_text(
        "# all of it\nenv: {name: gymnasium, tasks: [Pendulum-v1], num_envs: 16, success_return: -400.0}\n"
        "model: {name: mlp}\nalgorithm:\n  name: ppo\n  epochs: 3\nrollout: {num_chunks: 50}\n"
    )
    swapped = swap("mine.yaml", {"algorithm": "grpo"})
    assert swapped.after.startswith("# all of it\ndefaults:\n  - algorithm: grpo\n  - _self_\nenv: {name: gymnasium")
    assert not swapped.faults and "epochs" not in swapped.after


@pytest.mark.parametrize("group", ["algorithm", "model"])
def test_every_shipped_choice_leaves_only_what_is_for_the_user_to_decide(mine: Path, group: str) -> None:
    left = ("data.path", "cameras", "model.checkpoint", "flow policy", "scripted expert", "not installed", "model.url")
    left += ("cannot be trained",)
    for option in list_options(group):
        swapped = swap("mine.yaml", {group: option}, use=ConfigUse.elsewhere)
        for fault in swapped.faults:
            assert any(each in fault.message + fault.hint for each in left), f"{option}: {fault}"


def test_the_command_shows_the_difference_and_writes_only_when_told(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_bytes(FILE.replace("\n", "\r\n").encode())
    mine.chmod(0o600)
    link = mine.with_name("link.yaml")
    link.symlink_to(mine)
    assert command.run(["algorithm=grpo", "link.yaml"], write=False, elsewhere=False) == 0
    shown = capsys.readouterr().out
    assert "-  - algorithm: ppo   # simple\n+  - algorithm: grpo   # simple\n" in shown and "--write writes it" in shown
    assert b"ppo" in mine.read_bytes()
    assert command.run(["algorithm=grpo", "link.yaml"], write=True, elsewhere=False) == 0
    assert link.is_symlink() and mine.read_bytes().count(b"\r\n") == mine.read_bytes().count(b"\n") == len(
        swap("mine.yaml", {"algorithm": "grpo"}).after.splitlines()
    )
    assert mine.stat().st_mode & 0o777 == 0o600
    assert command.run(["algorithm=sft", "mine.yaml"], write=False, elsewhere=False) == 2, "data.path is for the user"
    assert "1 fault left for you." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "source", "message"),
    [
        ({"algorithm": "gpro"}, "mine.yaml", "did you mean 'gspo'"),
        ({"algoritm": "grpo"}, "mine.yaml", "no config group 'algoritm'"),
        ({"algorithm": "grpo"}, "gym_pendulum", "comes with embodyrl: make a file of your own first: embodyrl run"),
    ],
)
def test_what_cannot_be_swapped_is_refused(mine: Path, choice: dict[str, str], source: str, message: str) -> None:
    with pytest.raises(SwapError, match=message):
        swap(source, choice)
    assert mine.read_text() == FILE


def test_the_record_of_a_run_and_a_file_changed_meanwhile_are_left_alone(mine: Path) -> None:
    swapped = swap("mine.yaml", {"algorithm": "grpo"})
    mine.write_text(FILE + "# later\n")
    with pytest.raises(SwapError, match="was changed meanwhile"):
        swapped.write()
    (mine.parent / "origin.json").write_text("{}")
    with pytest.raises(SwapError, match="is the record of a run"):
        swap("mine.yaml", {"algorithm": "grpo"})


def test_single_settings_are_changed_in_every_layout() -> None:
    text = "a: {b: 1, c: 2}  # both\nd:\n  e: |\n    some\n    lines\n  f: [1, 2]  # two\ng:\n"
    assert set_value(text, ("a", "b"), 3).startswith("a: {b: 3, c: 2}  # both\n")
    assert set_value(text, ("a", "x"), "yes").startswith('a: {b: 1, c: 2, x: "yes"}  # both\n')
    assert set_value(text, ("d", "f"), [3]).count("f: [3]  # two\n") == 1
    assert set_value(text, ("d", "x"), 1.0).endswith("  f: [1, 2]  # two\n  x: 1.0\ng:\n")
    assert set_value(text, ("g", "h", "i"), None).endswith("g:\n  h:\n    i: null\n")
    assert leave_out(text, ("a", "c")).startswith("a: {b: 1}  # both\n")
    assert leave_out(leave_out(text, ("d", "e")), ("d", "f")) == "a: {b: 1, c: 2}  # both\ng:\n"
    assert choose("defaults: [env: x]", "model", "mlp") == "defaults: [env: x, model: mlp]"
    with pytest.raises(EditError):
        set_value("a: &x {b: 1}\nc: *x\n", ("c", "b"), 2)


def test_a_reward_of_success_stays_with_an_algorithm_that_names_none(mine: Path) -> None:
    text = FILE.replace("algorithm: ppo", "algorithm: dapo").replace("algorithm: {epochs: 7, gamma: 0.9}\n", "")
    mine.write_text(text)
    swapped = swap("mine.yaml", {"algorithm": "grpo"}, use=ConfigUse.elsewhere)
    assert yaml.safe_load(swapped.after)["algorithm"]["reward"] == "success"
    mine.write_text(text.replace("algorithm: dapo", "algorithm: srpo"))
    swapped = swap("mine.yaml", {"algorithm": "grpo"}, use=ConfigUse.elsewhere)
    assert "reward" not in yaml.safe_load(swapped.after).get("algorithm", {})


def test_published_weights_are_left_open_and_asked_for(mine: Path) -> None:
    swapped = swap("mine.yaml", {"env": "metaworld/reach_rgb", "model": "pi0"})
    assert yaml.safe_load(swapped.after)["model"]["checkpoint"] == "<weights>"
    assert any("left open" in fault.message for fault in swapped.faults)


def test_a_list_of_choices_comes_before_the_comment_of_the_first_setting() -> None:
    assert choose("# about the file\n\n# of seed\nseed: 1\n", "env", "gym/pendulum") == (
        "# about the file\n\ndefaults:\n  - env: gym/pendulum\n  - _self_\n# of seed\nseed: 1\n"
    )
    assert choose("# about the file\nseed: 1\n", "env", "gym/pendulum").startswith("# about the file\ndefaults:")


def test_what_only_this_run_would_refuse_is_said_and_changes_nothing(mine: Path) -> None:
    """Images that the model does not read are a choice of the user's, not to be switched off."""
    swapped = swap("mine.yaml", {"env": "gym/pendulum_rgb"}, also=[start_rules])
    assert "cameras" not in swapped.after
    assert any("env.cameras" in str(fault) for fault in swapped.faults)
