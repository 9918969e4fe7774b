"""Demonstrations as decisions for critics: what a dataset does not say is not made up."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.algorithms.off_policy import decision_returns, following_factors, soft_targets
from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import Bootstrap, Config, DiscountPer
from embodyrl.data.layout import DatasetError, DatasetSpec, Episode
from embodyrl.data.reader import Dataset
from embodyrl.data.store import EpisodeStore
from embodyrl.data.transitions import Transitions
from embodyrl.data.writer import DatasetWriter

S, D = 2, 1


def config(*overrides: str) -> Config:
    words = ["env=metaworld/push", "algorithm=sac", "model.head=squashed", "env.max_episode_steps=8", *overrides]
    return load_config("experiment/metaworld_reach_sac", words).config


def episode(length: int, *, solved: int | None = None, number: int = 0, **changes: Any) -> Episode:
    """Frame `i` has the state `(number, i)`, action `10 * number + i` and reward `i + 1`; action `solved` solved
    the task."""
    frame = np.arange(length)
    success = np.zeros(length, np.bool_) if solved is None else frame >= solved
    return Episode(
        task="count",
        proprio=np.stack([np.full(length, number), frame], 1).astype(np.float32),
        actions=(10.0 * number + frame)[:, None].astype(np.float32),
        rewards=(frame + 1.0).astype(np.float32),
        success=success,
        **changes,
    )


def written(folder: Path, *episodes: Episode, **changes: Any) -> Dataset:
    facts = {
        "outcome": True,
        "perturbed": episodes[0].perturbed is not None,
        "executed": episodes[0].executed is not None,
        "ends": episodes[0].last_proprio is not None,
    }
    spec = DatasetSpec(action_names=("push",), state_dim=S, fps=20, **(facts | changes))
    with DatasetWriter(folder, spec) as writer:
        for each in episodes:
            writer.add(each)
    return Dataset(folder)


def last(number: int, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([number, length], np.float32)


def found(dataset: Dataset, *overrides: str) -> dict[str, Any]:
    transitions = Transitions(EpisodeStore(dataset, config(*overrides)))
    return {name: each.tolist() for name, each in transitions.take(np.arange(len(transitions))).items()}


def test_every_frame_is_followed_by_what_followed_it(tmp_path: Path) -> None:
    rows = found(
        written(tmp_path / "d", episode(4, last_proprio=last(0, 4)), episode(3, number=1, last_proprio=last(1, 3)))
    )
    assert rows["proprio"] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2]]
    assert rows["next_proprio"] == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 1], [1, 2], [1, 3]]
    assert rows["actions"] == rows["labels"] == [[[0]], [[1]], [[2]], [[3]], [[10]], [[11]], [[12]]]
    assert rows["rewards"] == [[1], [2], [3], [4], [1], [2], [3]]
    assert not any(rows["terminated"]) and not any(rows["truncated"]) and all(rows["labelled"])


def test_without_what_followed_the_last_frame_it_is_left_out(tmp_path: Path) -> None:
    rows = found(written(tmp_path / "d", episode(4)))
    assert rows["proprio"] == [[0, 0], [0, 1], [0, 2]]
    assert rows["next_proprio"][-1] == [0, 3]


def test_a_success_terminates_and_what_came_after_it_does_not_exist(tmp_path: Path) -> None:
    dataset = written(tmp_path / "d", episode(5, solved=2, last_proprio=last(0, 5)))
    rows = found(dataset)
    assert rows["terminated"] == [False, False, True] and rows["success"] == [[False], [False], [True]]
    on = found(dataset, "env.end_at_success=false")
    assert len(on["steps"]) == 5 and not any(on["terminated"])
    assert on["success"] == [[False], [False], [True], [False], [False]], "solved once is solved"


@pytest.mark.parametrize("at_success", ["true", "false"])
def test_where_a_classifier_ends_rollouts_a_success_ends_demonstrations(at_success: str, tmp_path: Path) -> None:
    dataset = written(
        tmp_path / "d", episode(5, solved=2, last_proprio=last(0, 5)), episode(3, number=1, last_proprio=last(1, 3))
    )
    words = [f"env.end_at_success={at_success}"]

    def rows(judge_ends: bool | None) -> dict[str, Any]:
        transitions = Transitions(EpisodeStore(dataset, config(*words)), judge_ends=judge_ends)
        return {name: each.tolist() for name, each in transitions.take(np.arange(len(transitions))).items()}

    ends, goes_on, none = rows(True), rows(False), rows(None)
    assert ends["terminated"] == [False, False, True, False, False, False], "whatever the simulator does"
    assert ends["judged"] == ends["success"], "demonstrations say themselves what was solved, once"
    assert "judged" not in none and goes_on["judged"] == goes_on["success"]
    for each in (goes_on, none):
        assert each["terminated"] == (ends["terminated"] if at_success == "true" else [False] * 8)


def test_a_time_limit_is_no_termination(tmp_path: Path) -> None:
    rows = found(written(tmp_path / "d", episode(8, last_proprio=last(0, 8))))
    assert rows["truncated"] == [False] * 7 + [True] and not any(rows["terminated"])
    assert rows["next_proprio"][-1] == [0, 8], "what followed is the last observation"


def test_frames_beyond_the_time_limit_of_the_run_are_left_out(tmp_path: Path) -> None:
    rows = found(written(tmp_path / "d", episode(11, solved=9)))
    assert len(rows["steps"]) == 8 and rows["truncated"][-1] and rows["next_proprio"][-1] == [0, 8]
    assert not any(rows["terminated"]), "it was solved only after that"


@pytest.mark.parametrize("ended", ["by time", "by success"])
def test_what_ended_an_episode_decides_about_its_targets(ended: str, tmp_path: Path) -> None:
    """The same numbers, and a value of 10 of whatever follows: with gamma 0.5 the last target is 8 or 13."""
    solved = 7 if ended == "by success" else None
    dataset = written(tmp_path / "d", episode(8, solved=solved, last_proprio=last(0, 8)))
    rows = Transitions(EpisodeStore(dataset, config()))
    import torch

    columns = {name: torch.from_numpy(each) for name, each in rows.take(np.array([7])).items()}
    discounts: dict[str, Any] = {"gamma": 0.5, "discount_per": DiscountPer.chunk}
    targets = soft_targets(
        decision_returns(columns["rewards"], **discounts),
        following_factors(
            columns["steps"], columns["terminated"], columns["truncated"], bootstrap=Bootstrap.truncation, **discounts
        ),
        torch.full((2, 1), 10.0),
        torch.zeros(1),
        temperature=torch.tensor(0.0),
        entropy=False,
    )
    assert targets.item() == (8.0 if ended == "by success" else 13.0)


def test_an_end_that_the_simulator_made_counts_unless_it_was_a_success_that_ends_nothing_here(tmp_path: Path) -> None:
    failed = written(tmp_path / "failed", episode(3, last_proprio=last(0, 3), terminated=True))
    assert found(failed)["terminated"] == [False, False, True]
    solved = written(tmp_path / "solved", episode(3, solved=2, last_proprio=last(0, 3), terminated=True))
    assert not any(found(solved, "env.end_at_success=false")["terminated"])


def test_where_a_push_interfered_the_executed_action_counts_and_the_wanted_one_is_imitated(tmp_path: Path) -> None:
    pushed = np.array([False, True, False, False])
    executed = np.array([[0], [-5], [2], [3]], np.float32)
    known = found(written(tmp_path / "a", episode(4, perturbed=pushed, executed=executed, last_proprio=last(0, 4))))
    assert known["actions"] == [[[0]], [[-5]], [[2]], [[3]]] and known["labels"] == [[[0]], [[1]], [[2]], [[3]]]
    assert all(known["labelled"])
    unknown = found(written(tmp_path / "b", episode(4, perturbed=pushed)))
    assert unknown["proprio"] == [[0, 0], [0, 2]], (
        "what was executed in frame 1 is unknown, and nothing follows frame 3"
    )


def test_chunks_begin_anywhere_and_reach_beyond_the_end_only_into_a_success(tmp_path: Path) -> None:
    goes_on = found(written(tmp_path / "a", episode(5, last_proprio=last(0, 5))), "rollout.chunk_size=3")
    assert goes_on["proprio"] == [[0, 0], [0, 1], [0, 2]] and goes_on["steps"] == [3, 3, 3]
    assert goes_on["next_proprio"] == [[0, 3], [0, 4], [0, 5]]
    solved = found(written(tmp_path / "b", episode(5, solved=4)), "rollout.chunk_size=3")
    assert solved["steps"] == [3, 3, 3, 2, 1] and solved["terminated"] == [False, False, True, True, True]
    assert solved["rewards"][3] == [4, 5, 0] and solved["success"][3] == [False, True, False]
    assert all(solved["labelled"])
    dropped = found(Dataset(tmp_path / "b"), "rollout.chunk_size=3", "data.at_end=drop")
    assert dropped["labelled"] == [True, True, True, False, False]


def test_chunks_with_a_push_inside_are_executed_but_explained_only_before_it(tmp_path: Path) -> None:
    pushed = np.array([False, False, True, False, False])
    executed = np.arange(5, dtype=np.float32)[:, None] - 7.0
    dataset = written(tmp_path / "d", episode(5, perturbed=pushed, executed=executed, last_proprio=last(0, 5)))
    rows = found(dataset, "rollout.chunk_size=2")
    assert len(rows["steps"]) == 4 and rows["labelled"] == [True, True, False, True]
    assert rows["actions"][1] == [[-6], [-5]] and rows["labels"][1] == [[1], [2]]


def test_images_are_there_once_and_those_of_earlier_decisions_come_with_them(tmp_path: Path) -> None:
    shades = np.arange(5, dtype=np.uint8)
    images = np.broadcast_to(shades[:, None, None, None, None], (5, 1, 8, 8, 3)).copy()
    whole = episode(4, images=images[:4], last_proprio=last(0, 4), last_images=images[4])
    dataset = written(tmp_path / "d", whole, cameras=("corner4",), image_size=(8, 8))
    plain = config()
    env = dataclasses.replace(plain.env, cameras=["corner4"], image_size=[8, 8], frames=2)
    transitions = Transitions(EpisodeStore(dataset, dataclasses.replace(plain, env=env)))
    rows = transitions.take(np.arange(4))
    assert rows["images"].shape == (4, 2, 8, 8, 3) and rows["images"].dtype == np.uint8
    assert rows["images"][:, :, 0, 0, 0].tolist() == [[0, 0], [1, 0], [2, 1], [3, 2]]
    assert rows["next_images"][:, :, 0, 0, 0].tolist() == [[1, 0], [2, 1], [3, 2], [4, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no outcome", "does not hold both rewards and successes"),
        ("not finite", "not finite"),
        ("too short", "can be learned from by critics"),
        ("too large", "raise data.memory_mib"),
    ],
)
def test_what_critics_cannot_learn_from_is_refused(change: str, message: str, tmp_path: Path) -> None:
    whole = episode(4)
    overrides = ["rollout.chunk_size=5"] if change == "too short" else []
    if change == "no outcome":
        dataset = written(tmp_path / "d", dataclasses.replace(whole, rewards=None, success=None), outcome=False)
    else:
        dataset = written(tmp_path / "d", whole)
    settings = config(*overrides)
    if change == "too large":
        dataset.info = dataclasses.replace(dataset.info, frames=10**9)
    if change == "not finite":  # written by another program, since ours refuses it
        original = dataset.read

        def read(*given: Any, **named: Any) -> Episode:
            return dataclasses.replace(original(*given, **named), rewards=np.array([0, np.nan, 0, 0], np.float32))

        dataset.read = read  # type: ignore[method-assign]
    with pytest.raises(DatasetError, match=message):
        Transitions(EpisodeStore(dataset, settings))


# ---- before anything starts


def refused(folder: Path, *overrides: str, experiment: str = "push_rlpd") -> str:
    words = [f"data.path={folder}", *overrides]
    with pytest.raises(ConfigError) as caught:
        load_config(experiment, words)
    return str(caught.value)


def of_metaworld(folder: Path, **changes: Any) -> Path:
    """Demonstrations with the sizes of MetaWorld's states and actions, or others."""
    shapes: dict[str, Any] = {"state_dim": 39, "actions": 4, "fps": 40, "outcome": True} | changes
    names = tuple(f"action_{number}" for number in range(shapes.pop("actions")))
    rewards, task = shapes.pop("rewards", np.zeros(4, np.float32)), shapes.pop("task", "push")
    with DatasetWriter(folder, DatasetSpec(action_names=names, **shapes)) as writer:
        writer.add(
            Episode(
                task=task,
                proprio=np.zeros((4, shapes["state_dim"]), np.float32),
                actions=np.zeros((4, len(names)), np.float32),
                rewards=rewards if shapes["outcome"] else None,
                success=np.zeros(4, np.bool_) if shapes["outcome"] else None,
            )
        )
    return folder


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"actions": 3}, [], "actions of the demonstrations in .* have 3 numbers, those of the simulator 4"),
        ({"state_dim": 4}, [], "states of the demonstrations in .* have 4 numbers, those of the simulator 39"),
        ({}, ["env.action_repeat=4"], "have 40 actions per second, the simulator 20"),
        ({"outcome": False}, [], "do not hold both rewards and successes"),
        ({}, ["env.action_repeat=4"], "set env.action_repeat to 2, or record"),
        ({"fps": 37}, [], "the simulator 40: an action of theirs does something else - record them with"),
        ({}, ["data.steps=7"], "data.steps is set, but"),
        (
            {},
            ["algorithm.off_policy.imitation.better_only=true", "algorithm.off_policy.imitation.coef=0"],
            "does nothing",
        ),
        (
            {},
            ["algorithm.off_policy.imitation.first_steps=0", "algorithm.off_policy.imitation.cloned_coef=1"],
            "cloned_coef = 1.0 does nothing while",
        ),
        (
            {},
            ["algorithm.off_policy.imitation.first_steps=0", "algorithm.off_policy.demonstrations=0"],
            "nothing is learned from data.path",
        ),
    ],
    ids=[
        "actions",
        "states",
        "action_repeat",
        "outcome",
        "its value",
        "no value",
        "steps",
        "better_only",
        "cloned_coef",
        "nothing",
    ],
)
def test_demonstrations_of_another_task_are_refused_before_anything_starts(
    changes: dict[str, Any], overrides: list[str], message: str, tmp_path: Path
) -> None:
    assert re.search(message, refused(of_metaworld(tmp_path / "d", **changes), *overrides))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": 3}, "actions of the demonstrations in .* have 3 numbers, those of the simulator 4"),
        ({"state_dim": 4}, "states of the demonstrations in .* have 4 numbers, those of the simulator 39"),
    ],
    ids=["actions", "states"],
)
def test_demonstrations_of_other_sizes_are_not_imitated(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d", **changes)
    assert re.search(message, refused(folder, experiment="metaworld_reach_sft"))


def test_what_is_only_imitated_needs_no_rewards(tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d", outcome=False)
    loaded = load_config("push_dagger", [f"data.path={folder}"]).config
    transitions = Transitions(EpisodeStore(Dataset(folder), loaded))
    taken = transitions.take(np.arange(len(transitions)))
    assert len(transitions) > 0 and taken["labelled"].all() and not taken["terminated"].any()
    with pytest.raises(DatasetError, match="does not hold both rewards and successes, which critics learn from"):
        Transitions(EpisodeStore(Dataset(folder), config()))


def spoil(path: Path, name: str, value: float) -> None:
    """Replace a number of the second row of a table, as only another program does, since ours refuses such values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    cells, field = table[name].to_pylist(), table.schema.field(place)
    cells[min(1, len(cells) - 1)] = [value] * len(cells[0]) if isinstance(cells[0], list) else value
    pq.write_table(table.set_column(place, field, pa.array(cells, field.type)), path)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("column", ["action", "observation.state", "next.reward"])
def test_numbers_that_are_not_finite_are_refused_before_anything_starts(
    column: str, value: float, tmp_path: Path
) -> None:
    folder = of_metaworld(tmp_path / "d")
    [path] = (folder / "data").glob("*/*.parquet")
    spoil(path, column, value)
    assert (
        f"column '{column}' of the demonstrations in {folder} holds numbers that are not finite, in episode 0 - "
        in (refused(folder))
    )


def test_a_state_after_the_last_action_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", episode(4, last_proprio=last(0, 4))).folder
    spoil(folder / "meta/ends.parquet", "observation.state", np.nan)
    assert "column 'meta/ends.parquet:observation.state'" in refused(folder)


def test_rewards_matter_only_to_who_learns_from_them(tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d")
    [path] = (folder / "data").glob("*/*.parquet")
    spoil(path, "next.reward", np.nan)
    load_config("metaworld_reach", [f"data.path={folder}", "algorithm=sft", "env=metaworld/push"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta/stats.json", r"stats.json is damaged \(.*\) - record or download the dataset anew"),
        ("meta/ends.parquet", r"ends.parquet is damaged \(.*\) - record or download the dataset anew"),
        ("meta/tasks.parquet", r"tasks.parquet is damaged \(.*\) - record"),
    ],
)
def test_a_small_file_that_was_cut_short_is_found_before_anything_starts(
    name: str, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "d", episode(4, last_proprio=last(0, 4))).folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert re.search(message, refused(tmp_path / "d"))


def test_a_dataset_without_statistics_is_incomplete(tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d")
    (folder / "meta/stats.json").unlink()
    assert "stats.json is missing: the dataset is incomplete - record or download the dataset anew" in refused(folder)


PUSH, REACH = "push the puck to the goal", "reach the goal position"


@pytest.mark.parametrize("algorithm", ["rlpd", "iql", "dagger"])
def test_demonstrations_that_are_certainly_of_another_task_are_refused(algorithm: str, tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d", task=REACH, robot="metaworld")
    message = (
        f"the demonstrations in {folder} are of 'reach-v3', and env.tasks is 'push-v3' - set env.tasks to [reach-v3], "
        "or record demonstrations of 'push-v3'"
    )
    assert message in refused(folder, experiment=f"push_{algorithm}")


def test_demonstrations_of_another_simulator_are_refused(tmp_path: Path) -> None:
    folder = of_metaworld(tmp_path / "d", task=REACH, robot="metaworld")
    assert "are of 'reach-v3' of simulator 'metaworld', and env.tasks is 'Pendulum-v1'" in (
        refused(folder, "env=gym/pendulum")
    )


def test_demonstrations_that_are_described_otherwise_are_doubted_only(tmp_path: Path) -> None:
    def notes(task: str, *overrides: str) -> str:
        folder = of_metaworld(tmp_path / f"{len(list(tmp_path.iterdir()))}", task=task, robot="metaworld")
        words = [f"data.path={folder}", "env.max_episode_steps=8", *overrides]
        return " ".join(load_config("experiment/push_rlpd", words).notes)

    doubt = "make sure that they show these tasks"
    assert f"are described as 'shove it', and env.tasks as '{PUSH}': {doubt}" in notes("shove it")
    assert doubt not in notes(PUSH)
    assert doubt not in notes("push-v3")
    assert doubt not in notes("shove it", "env.task_descriptions={push-v3: shove it}")
    assert doubt not in notes(PUSH, "env.task_descriptions={push-v3: shove it}")


def test_offline_learning_that_reads_no_demonstration_is_refused(tmp_path: Path) -> None:
    nothing = ["algorithm.off_policy.offline_iterations=0", "algorithm.off_policy.demonstrations=0"]
    assert "so that nothing is learned from data.path - raise one of them, or set algorithm to sac" in (
        refused(of_metaworld(tmp_path / "d"), *nothing, experiment="push_iql")
    )


def test_demonstrations_of_other_sizes_than_an_environment_says_of_itself_are_refused(tmp_path: Path) -> None:
    message = refused(of_metaworld(tmp_path / "d"), "env=gym/pendulum")
    for words in ("have 4 numbers, those of the simulator 1", "have 39 numbers, those of the simulator 3"):
        assert words in message
    assert "have 40 actions per second, the simulator 20" in message
