"""The state of a run in files: exact, and nothing in them is executed, whoever wrote them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Runs, copy_of

from embodyrl.cli import train
from embodyrl.files import digest
from embodyrl.rollout.episodes import NEWEST, FinishedEpisode, newest_means, newest_with
from embodyrl.runner.checkpoint import DamageError
from embodyrl.runner.state import ADDED, Progress, TrainerState, check_alike, load_tree, save_tree

COUNTERS = "trainer/counters.json"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and type(one) is type(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "half": torch.ones(2, dtype=torch.bfloat16)}, 7: {}},
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-5, "fused": True, "note": None, "name": "a/b"}],
        "tied": {"a": shared, "b": shared, "view": shared.view(2, 3).T, "empty": torch.empty(0, 4)},
        "random": torch.Generator().get_state(),
    }
    save_tree(tree, tmp_path, "engine")
    assert same(load_tree(tmp_path, "engine"), tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json", "engine.safetensors"]


def test_what_a_tree_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"engine/guard/seen is a set, which a checkpoint cannot hold"):
        save_tree({"guard": {"seen": {1}}}, tmp_path, "engine")
    with pytest.raises(TypeError, match="two tensors of the state would be called engine/a/b"):
        save_tree({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path, "engine")


def test_counters_of_older_checkpoints_are_those_of_a_run_in_which_nothing_was_counted() -> None:
    older = {name: value for name, value in vars(Progress(iteration=3)).items() if name not in ADDED}
    state = TrainerState(counters={"progress": older}, engine={}, simulators=[])
    assert Progress.of(state) == Progress(iteration=3)


def test_a_counter_that_had_another_name_is_the_same_one() -> None:
    named = vars(Progress(restores_exactly=False))
    older = {"comes_back" if name == "restores_exactly" else name: value for name, value in named.items()}
    state = TrainerState(counters={"progress": older}, engine={}, simulators=[])
    assert not Progress.of(state).restores_exactly


def test_means_are_over_the_newest_episodes_or_all_of_a_larger_rollout() -> None:
    def ended(count: int, reward: float, success: bool | None) -> list[FinishedEpisode]:
        return [FinishedEpisode(slot=0, total_reward=reward, length=9, success=success) for _ in range(count)]

    newest: dict[str, Any] = {}
    assert newest_means(newest, []) == {}
    newest = newest_with(newest, ended(50, 1.0, None))
    assert newest_means(newest, []) == {"env/return_recent": 1.0}
    assert newest_means(newest, ended(25, 4.0, True)) == {"env/return_recent": 2.0, "env/success_recent": 1 / 3}
    newest = newest_with(newest, ended(75, 2.0, False))
    assert newest_means(newest, []) == {"env/return_recent": 1.75, "env/success_recent": 0.0}
    assert newest_means(newest, ended(300, 3.0, True)) == {"env/return_recent": 3.0, "env/success_recent": 1.0}
    assert len(newest_with(newest, ended(300, 3.0, True))["returns"]) == NEWEST


@pytest.mark.parametrize(
    "newest",
    [{"returns": 3}, {"returns": [1.0]}, {"returns": ["1"], "successes": [None]}, {"returns": [1.0], "successes": [2]}],
)
def test_newest_episodes_of_another_form_are_refused(newest: dict[str, Any]) -> None:
    counters = {"progress": vars(Progress(newest=newest))}
    with pytest.raises(DamageError, match="no returns and successes"):
        Progress.of(TrainerState(counters=counters, engine={}, simulators=[]))


def test_every_difference_is_named() -> None:
    expected = {"iteration": 0, "train_s": 0.0, "evaluations": {}, "collector": {"numbers": [1, 2]}}
    check_alike({**expected, "train_s": 3, "evaluations": {"1": {}}}, expected, "progress")
    wrong = {"iteration": "x", "evaluations": {}, "collector": {"numbers": [1]}, "more": 1}
    with pytest.raises(DamageError) as caught:
        check_alike(wrong, expected, "progress")
    for words in (
        "train_s is missing",
        "more is unknown",
        "iteration is 'x' instead of a int",
        "collector.numbers has 1 entries instead of 2",
    ):
        assert words in str(caught.value)


def plant(place: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree, as whoever can write into the folder could."""
    (place / name).write_bytes(content)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": digest(place / name)}
    (place / "manifest.json").write_text(json.dumps(manifest))


class Hostile:
    """Unpickling one makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.faults
def test_hostile_files_are_refused_and_never_run(small_runs: Runs, tmp_path: Path) -> None:
    run, mark = copy_of(small_runs("run.iterations=1"), tmp_path / "run"), tmp_path / "it ran"
    place = (run / "checkpoints/last").resolve()
    poison = pickle.dumps(Hostile(mark))
    pickle.loads(poison)
    assert mark.exists(), "the poison works"
    mark.unlink()
    originals = {name: (place / name).read_bytes() for name in ("trainer/engine.safetensors", COUNTERS)}
    for name in ("trainer/engine.pt", "trainer/.metadata", "policy/pytorch_model.bin"):
        (place / name).write_bytes(poison)
        with pytest.raises(DamageError, match=rf"{name} is not in the manifest"):
            train.resume(run, ["run.iterations=2"])
        (place / name).unlink()
    for name, original in originals.items():
        plant(place, name, poison)
        with pytest.raises(DamageError, match="does not hold the state of a run"):
            train.resume(run, ["run.iterations=2"])
        plant(place, name, original)
    for name in ("trainer/engine.pt", "trainer/.metadata"):
        plant(place, name, poison)
    assert train.resume(run, ["run.iterations=2"]) == 0  # what the manifest lists and nobody asks for is not opened
    assert not mark.exists()


@pytest.mark.faults
def test_counters_that_are_not_those_of_the_run_are_refused_by_name(small_runs: Runs, tmp_path: Path) -> None:
    run = copy_of(small_runs("run.iterations=1"), tmp_path / "run")
    place = (run / "checkpoints/last").resolve()
    counters = json.loads((place / COUNTERS).read_text())

    def refuse(changed: dict[str, Any] | str, words: str) -> None:
        text = changed if isinstance(changed, str) else json.dumps(changed)
        plant(place, COUNTERS, text.encode())
        with pytest.raises(DamageError, match=words):
            train.resume(run, ["run.iterations=2"])

    (place / COUNTERS).write_text("{}")
    with pytest.raises(DamageError, match=r"trainer/counters\.json has 2 bytes instead of"):
        train.resume(run, [])
    refuse("{", r"does not hold the state of a run \(JSONDecodeError")
    refuse("[1]", "does not hold the state of a run")
    refuse({"collector": counters["collector"]}, "progress does not fit this run")
    refuse(counters | {"progress": counters["progress"] | {"iteration": None}}, "iteration is None instead of a int")
    short = counters["collector"] | {"numbers": counters["collector"]["numbers"][1:]}
    refuse(counters | {"collector": short}, "collector does not fit this run: numbers has 3 entries instead of 4")
