"""Runs whose rewards somebody is asked for: a stand-in for a vision-language model sees the images of episodes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import KEY, Behave, Stand, drip, images_of, say, send, standing_in, texts_of
from learners import COUNTER
from small_runs import Run, Runs, assert_alike, assert_same_run, copy_of, resumed

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.errors import RewardError
from embodyrl.runner.checkpoint import find_and_tell
from embodyrl.runner.session import ChangeError

CONFIG = """
defaults: [model: cnn, algorithm: grpo, _self_]
plugins: [counter_simulator]
env: {name: counter, tasks: [count], num_envs: 4, workers: 1, max_episode_steps: 4, start_states: 40,
  cameras: [top, side], image_size: [16, 16]}
model: {encoder: drq, channels: [4, 4], strides: [2, 2], image_features: 8, state_features: 4, hidden_sizes: [16]}
rollout: {num_chunks: 4, episodes: whole, episodes_per_slot: 2, group_size: 2, blocks: 2}
algorithm:
  epochs: 1
  minibatches: 1
  reward: {name: vlm, url: URL, model: judge, retries: 1, backoff_s: 0.01, deadline_s: 5}
run: {name: asked, iterations: 4, save_every: 2, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


def truth(body: dict[str, Any]) -> bool:
    """Whether an episode was solved, read from its first and last image; see `counter_simulator`."""
    first, last = (int(image.flat[0]) for image in images_of(body)[::2])
    start = next(state for state in range(40) if 5 * state % 200 == first)
    return last - first == start % 7 + 1


def honest(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
    say(handler, json.dumps({"success": truth(body)}))


def lying(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
    say(handler, json.dumps({"success": not truth(body)}))


def runs_with(folder: Path, stand: Stand) -> Runs:
    folder.mkdir(exist_ok=True)
    for name, text in COUNTER.items():
        (folder / name).write_text(text)
    (folder / "my.yaml").write_text(CONFIG.replace("URL", stand.url))
    return Runs(folder, folder / "my.yaml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Stand]:
    """A run that an honest model pays."""
    with standing_in(honest) as stand:
        run = runs_with(tmp_path_factory.mktemp("asked"), stand)()
    return run, stand


def test_episodes_are_paid_what_is_answered_about_them(whole: tuple[Run, Stand]) -> None:
    run, stand = whole
    for row in run.metrics():
        assert row["env/disagreement"] == 0.0 and row["env/answer"] == row["env/success_once"]
        assert row["rollout/shaped_reward_per_step"] * row["env/steps"] == pytest.approx(row["env/answer"] * 8)
    assert {0.0, 1.0} != {row["env/answer"] for row in run.metrics()}, "some succeed and some fail"
    said = texts_of(stand.asked[0])
    assert said[0] == "Task: count up" and "Moment 1 of 2 (the beginning), camera top:" in said
    assert len(images_of(stand.asked[0])) == 4 and images_of(stand.asked[0])[0].shape == (16, 16, 3)
    assert "Authorization" not in stand.headers[0]


def test_nothing_is_asked_twice_and_a_run_that_was_cut_goes_on_bit_for_bit(
    whole: tuple[Run, Stand], tmp_path: Path
) -> None:
    run, stand = whole
    files = [*(run.path / "answers").iterdir()]
    questions = [json.loads(line)["question"] for file in files for line in file.read_text().splitlines()]
    assert len(questions) == len(set(questions)) == len(stand.asked)
    again = resumed(copy_of(run, tmp_path / "again", 2))  # nobody is there any more
    assert_same_run(run, again, 4)
    elsewhere = Runs(run.path.parent, run.path.parent / "my.yaml").fresh(
        tmp_path / "repeated", f"algorithm.reward.answers_from={run.path}"
    )
    assert elsewhere.merged() == run.merged()
    assert not list((tmp_path / "repeated" / "answers").iterdir()), "the other run's answers are not its own"


def test_two_ranks_and_a_rollout_worker_ask_for_their_own_episodes(whole: tuple[Run, Stand], tmp_path: Path) -> None:
    run, _ = whole
    with standing_in(honest) as stand:
        runs = runs_with(tmp_path, stand)
        two = runs("engine.parallel.world_size=2", "env.workers=2")
        assert_alike(run, two)
        assert len([*(two.path / "answers").iterdir()]) == 2
        worker = runs("placement.rollout.workers=1", "run.iterations=2")
        assert [row["env/answer"] for row in worker.metrics()] == [row["env/answer"] for row in run.metrics()[:2]]
        assert (worker.path / "answers").is_dir()


def test_answers_are_waited_for_while_other_episodes_go_on(tmp_path: Path) -> None:
    def slow(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
        time.sleep(0.2)
        honest(stand, handler, body)

    with standing_in(slow) as stand:
        begun = time.monotonic()
        runs_with(tmp_path, stand)("run.iterations=1", "run.save_every=0")
        assert stand.most_at_once > 1
        assert time.monotonic() - begun < 60


def garbage(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
    say(handler, "I cannot tell.\x1b[2J")


def busy(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
    send(handler, 429, b"slow down", Retry_After="0.01")


def too_large(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
    send(handler, 413, b"images are too large")


@pytest.mark.parametrize(
    ("behave", "said", "calls"),
    [
        (garbage, r"not given after 2 attempts: judge at .* answers without .*I cannot tell\.\\\\x1b", 2),
        (busy, "status 429: slow down", 2),
        (too_large, "status 413: images are too large", 1),
        (drip, "no whole answer within 0.2 s", 2),
    ],
)
def test_what_is_not_answered_ends_the_run_with_a_checkpoint(
    behave: Behave, said: str, calls: int, tmp_path: Path
) -> None:
    """The first iteration is answered, and nothing after it."""

    def after_a_while(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
        (honest if len(stand.asked) <= first else behave)(stand, handler, body)

    with standing_in(honest) as stand:
        runs_with(tmp_path / "first", stand)("run.iterations=1")
        first = len(stand.asked)
    with standing_in(after_a_while) as stand:
        runs, path = runs_with(tmp_path, stand), tmp_path / "run"
        words = [f"run.dir={path}", "algorithm.reward.concurrency=1", "algorithm.reward.deadline_s=0.2"]
        with pytest.raises(RewardError, match=said) as caught:
            train.run(load_config(runs.config, words, trust=True))
        # The other questions may be under way when the first has failed.
        assert first + calls <= len(stand.asked)
        assert "What was learned before it is saved. Continue with embodyrl resume" in str(caught.value)
        assert find_and_tell(path).name == "000001"
        stand.behave = honest
        assert resumed(path).merged().keys() == {1, 2, 3, 4}


def test_nobody_there_and_a_budget_end_a_run_which_a_larger_budget_continues(tmp_path: Path) -> None:
    with standing_in(honest) as stand:
        runs = runs_with(tmp_path, stand)
        with pytest.raises(RewardError, match="max_calls = 10 for the whole run"):
            runs.fresh(tmp_path / "budget", "algorithm.reward.max_calls=10")
        more = ["algorithm.reward.max_calls=1000", f"algorithm.reward.url={stand.url}"]
        assert resumed(tmp_path / "budget", *more).merged().keys() == {1, 2, 3, 4}
    with pytest.raises(ChangeError, match=r"rubric = 'Other'.*cannot change"):
        resumed(tmp_path / "budget", "algorithm.reward.rubric=Other", "run.iterations=5")
    with pytest.raises(RewardError, match="cannot be asked"):
        runs.fresh(tmp_path / "nobody")


def test_a_model_that_contradicts_the_simulator_is_refused(tmp_path: Path) -> None:
    with standing_in(lying) as stand:
        runs = runs_with(tmp_path, stand)
        limit = ["algorithm.reward.max_disagreement=0.5", "algorithm.reward.disagreement_episodes=8"]
        with pytest.raises(RewardError, match=r"answers about 100% of the 8 episodes.*max_disagreement = 0.5"):
            runs.fresh(tmp_path / "refused", *limit)
        shown = runs.fresh(tmp_path / "shown", "run.iterations=1")
    assert shown.metrics()[0]["env/disagreement"] == 1.0


def test_the_key_is_in_no_file_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    def echo(stand: Stand, handler: Any, body: dict[str, Any]) -> None:
        assert handler.headers["Authorization"] == f"Bearer {KEY}"
        say(handler, json.dumps({"success": truth(body), "why": f"you sent {handler.headers['Authorization']}"}))

    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with standing_in(echo) as stand:
        runs = runs_with(tmp_path, stand)
        run = runs.fresh(tmp_path / "run", "algorithm.reward.key_variable=JUDGE_KEY", "run.iterations=1")
        stand.behave = lambda stand, handler, body: send(handler, 401, handler.headers["Authorization"].encode())
        with pytest.raises(RewardError, match="another key than that of JUDGE_KEY") as caught:
            runs.fresh(tmp_path / "refused", "algorithm.reward.key_variable=JUDGE_KEY")
    assert KEY not in repr(caught.value) and KEY not in capsys.readouterr().out + caplog.text
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    monkeypatch.delenv("JUDGE_KEY")
    assert train.evaluate(str(run.path), []) == 0, "whoever only acts needs no key"


Refuse = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """What is said of a config with these words."""
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for name, text in COUNTER.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my.yaml").write_text(CONFIG.replace("URL", "http://localhost:1/v1"))

    def refuse(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "my.yaml", words, trust=True)
        return str(caught.value)

    return refuse


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.reward.url=null"], "algorithm.reward.url is null - name a server"),
        (["algorithm.reward.url=localhost:8000"], "algorithm.reward.url is no address"),
        (["algorithm.reward.url=https://me:pass@host/v1"], "it may hold no password"),
        (["algorithm.reward.model=null"], "algorithm.reward.model is null - name the server's model"),
        (["algorithm.reward.key_variable=JUDGE_KEY"], "environment variable JUDGE_KEY is not set - set it to the key"),
        (["env.cameras=[]", "model.state=true"], "shows images of episodes, and there are none"),
        (["algorithm.reward.cameras=[tpo]"], "names 'tpo', which env.cameras does not - did you mean 'top'?"),
        (
            ["rollout.episodes=continuous", "rollout.episodes_per_slot=1"],
            "need whole episodes, but",
        ),
        (["algorithm.reward.max_cost=1"], "but nothing has a price"),
        (["algorithm.reward.answers_from=nowhere"], "is no folder"),
        (["algorithm.reward.max_disagreement=0.1"], "disagreement_episodes = 32, and an iteration has 8 episodes"),
    ],
)
def test_what_cannot_be_is_refused_at_validate(words: list[str], said: str, refused: Refuse) -> None:
    assert said in refused(*words)


def test_a_key_in_place_of_its_variable_is_not_shown(refused: Refuse) -> None:
    said = refused(f"algorithm.reward.key_variable={KEY}")
    assert "is no name of an environment variable" in said and KEY not in said


def test_a_replay_is_refused(tmp_path: Path) -> None:
    text = (
        CONFIG.replace("grpo", "sac")
        .replace("URL", "http://localhost:1/v1")
        .replace("hidden_sizes", "head: squashed, hidden_sizes")
    )
    text = "\n".join(line for line in text.splitlines() if "epochs" not in line and "minibatches" not in line)
    for name, plugin in COUNTER.items():
        (tmp_path / name).write_text(plugin)
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match="reward 'vlm' is computed from whole episodes, and a replay holds single"):
        load_config(tmp_path / "my.yaml", trust=True)


def test_a_key_that_others_can_read_on_its_way_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refuse
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    words = ["algorithm.reward.key_variable=JUDGE_KEY", "algorithm.reward.url=http://10.1.2.3/v1"]
    [note] = [each for each in load_config(tmp_path / "my.yaml", words, trust=True).notes if "encrypted" in each]
    assert "use https, or a tunnel to localhost" in note and KEY not in note
