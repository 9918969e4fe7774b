"""Protocols: complete, sourced, found by name, and refused where they do not fit."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from embodyrl.evaluation.protocols import (
    ASPECTS,
    OWN,
    Protocol,
    ProtocolError,
    as_overrides,
    find,
    parts_of,
    read,
    shipped,
)

LIBERO_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
EVERY_SHIPPED = pytest.mark.parametrize("protocol", shipped().values(), ids=shipped())
SOURCE = re.compile(r"([\w-]+/[\w-]+@[0-9a-f]{7}:)?[\w./-]+\.(py|sh|yaml|md):\d+(-\d+)?(,\d+(-\d+)?)*")
MINE = """
simulator: gymnasium
episodes_per_task: 3
aspects:
  horizon: {says: short, set: {env.max_episode_steps: 30}}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@EVERY_SHIPPED
def test_a_shipped_protocol_says_something_on_every_aspect_and_where_it_is_from(protocol: Protocol) -> None:
    assert {aspect.name for aspect in protocol.aspects} >= set(ASPECTS)
    assert re.fullmatch(r"[\w-]+/[\w-]+", protocol.repository) and re.fullmatch(r"[0-9a-f]{40}", protocol.commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", protocol.checked) and protocol.title
    assert protocol.name == f"{protocol.simulator}/{protocol.short_name}"
    for aspect in protocol.aspects:
        assert aspect.says
        for place in aspect.source.split("; "):
            assert SOURCE.fullmatch(place), f"{aspect.name}: {place!r} is no file with lines"


def test_the_published_evaluations_are_there() -> None:
    names = set(shipped())
    assert names >= {
        f"libero/{name}" for name in ("openvla-oft", "openpi", "simplevla-rl", "rlinf-openpi", "rlinf-openvla-oft")
    }
    assert names >= {"metaworld/rlinf", "maniskill/rlinf"}


def test_protocols_set_what_their_sources_fix() -> None:
    """Against the table in published.yaml, completely: a setting without a row is as wrong as another value."""
    published = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
    assert set(published) == set(shipped())
    wrong = []
    for name, fixed in published.items():
        if shipped()[name].episodes_per_task != fixed["episodes"]:
            wrong.append(f"{name}: {shipped()[name].episodes_per_task} episodes")
        for (model, of_model), (task, of_task) in itertools.product(fixed["models"].items(), fixed["tasks"].items()):
            expected = fixed["settings"] | of_model | of_task | fixed.get("both", {}).get(f"{model} {task}", {})
            found = shipped()[name].settings_of(task, model, sees_images=True)
            wrong += [
                f"{name}, {model}, {task}: {key} is {found.get(key)}, not {expected.get(key)}"
                for key in sorted({*expected, *found})
                if expected.get(key) != found.get(key)
            ]
    assert not wrong, "\n".join(wrong)


def test_what_is_not_played_as_published_is_said() -> None:
    said = {(name, aspect.name): aspect for name, protocol in shipped().items() for aspect in protocol.aspects}
    for place, words, differs in (
        (("libero/rlinf-openpi", "episodes"), "of object 8 in all", "50 per task"),
        (("libero/simplevla-rl", "episodes"), "496 of the 500", "all 500"),
        (("libero/openvla", "images"), "a JPEG", "no JPEG"),
        (("libero/lerobot", "actions"), "100 of ACT, 50 of SmolVLA", "does not say"),
    ):
        assert words in said[place].says and differs in said[place].differs, place
    assert "action_utils.py:73-80" in said["libero/rlinf-openvla-oft", "gripper"].source
    assert "libero_spatial.yaml:19" in said["libero/rlinf-openpi", "seeds"].source


@pytest.mark.parametrize("suite", LIBERO_SUITES)
def test_horizons_in_libero_are_those_of_the_suite(suite: str) -> None:
    horizons = {
        name: find(name, "libero").settings_of(f"{suite}/3", "pi0", sees_images=True)["env.max_episode_steps"]
        for name in ("openpi", "simplevla-rl", "rlinf-openpi")
    }
    openpi = dict(zip(LIBERO_SUITES, (220, 280, 300, 520), strict=True))
    rlinf = dict(zip(LIBERO_SUITES, (240, 280, 320, 520), strict=True))
    assert horizons == {"openpi": openpi[suite], "simplevla-rl": 512, "rlinf-openpi": rlinf[suite]}


def test_variants_of_libero_pro_are_suites_that_there_are() -> None:
    pytest.importorskip("libero")
    from embodyrl.envs.libero.tasks import known_tasks

    found = find("libero-pro", "libero")
    played = [f"{suite}/{number}" for suite in LIBERO_SUITES for number in range(10)]
    changed = [task for variant in found.variants for task in found.tasks_of(variant, played)]
    assert len(set(changed)) == 160 and set(changed) <= set(known_tasks())
    assert found.tasks_of("swap", ["libero_goal/3", "libero_90/1"]) == ["libero_goal_swap/3"]


def test_variants_are_patterns(tmp_path: Path) -> None:
    for text in ("{swap: {a/*: b}}", "{swap: {a: b/*}}", "{swap: {a/*: 3}}"):
        path = written(tmp_path, f"{MINE}variants: {text}\n")
        with pytest.raises(
            ProtocolError, match=r"variants\.swap: 'a.* are no patterns of tasks that end in an asterisk"
        ):
            find(path, "gymnasium")


def test_tasks_with_the_same_settings_are_played_together() -> None:
    tasks = ["libero_goal/0", "libero_10/0", "libero_goal/1"]
    parts = parts_of(find("openpi", "libero"), tasks, "pi0", sees_images=True)
    assert [part.tasks for part in parts] == [("libero_goal/0", "libero_goal/1"), ("libero_10/0",)]
    assert [part.settings["env.max_episode_steps"] for part in parts] == [300, 520]


def test_what_concerns_images_or_another_model_is_left_out() -> None:
    seeing = find("rlinf", "metaworld").settings_of("reach-v3", "pi0", sees_images=True)
    blind = find("rlinf", "metaworld").settings_of("reach-v3", "mlp", sees_images=False)
    assert seeing["env.cameras"] == ["corner4"] and "env.cameras" not in blind
    oft = find("rlinf-openvla-oft", "libero").settings_of("libero_goal/0", "openvla_oft", sees_images=True)
    pi0 = find("rlinf-openvla-oft", "libero").settings_of("libero_goal/0", "pi0", sees_images=True)
    assert oft["model.temperature"] == 1.6 and "model.temperature" not in pi0


def test_settings_become_overrides() -> None:
    assert as_overrides({"env.cameras": ["wrist"], "env.end_at_success": True, "eval.actions": 5}) == [
        'env.cameras=["wrist"]',
        "env.end_at_success=true",
        "eval.actions=5",
    ]


@pytest.mark.parametrize(
    ("name", "simulator", "expected"),
    [
        ("openpy", "libero", "no protocol 'openpy' for libero - did you mean 'openpi'?"),
        (
            "openpi",
            "metaworld",
            "protocol 'openpi' is for libero, but this checkpoint plays metaworld (for metaworld: ",
        ),
        ("libero/openpi", "maniskill", "is for libero, but this checkpoint plays maniskill"),
        ("rlinf", "gymnasium", "is for maniskill, metaworld, but this checkpoint plays gymnasium (none comes with"),
        ("nothere.yaml", "libero", "cannot read protocol nothere.yaml: No such file or directory"),
    ],
)
def test_a_protocol_that_is_not_there_or_does_not_fit_is_named(name: str, simulator: str, expected: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(expected)) as caught:
        find(name, simulator)
    assert caught.value.exit_code == 2


def test_a_task_that_a_protocol_does_not_know_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"does not say its horizon for 'libero_90/3': it has tasks like libero_sp"):
        find("rlinf-openpi", "libero").settings_of("libero_90/3", "pi0", sees_images=True)


def test_a_protocol_of_ones_own_is_a_file(tmp_path: Path) -> None:
    mine = find(written(tmp_path, MINE), "gymnasium")
    assert (mine.episodes_per_task, mine.short_name) == (3, "mine")
    assert mine.settings_of("CartPole-v1", "mlp", sees_images=False) == {"env.max_episode_steps": 30}


@pytest.mark.parametrize(
    ("wrong", "right", "expected"),
    [
        ("episodes_per_tusk", "episodes_per_task", "episodes_per_tusk is unknown - did you mean 'episodes_per_task'?"),
        ("simulator: 3", "simulator: gymnasium", "simulator = 3: want str"),
        ("episodes_per_task: 0", "episodes_per_task: 3", "episodes_per_task = 0: want 1 or more"),
        ("horizon: {say: x", "horizon: {says: short", "aspects.horizon.say is unknown - did you mean 'says'?"),
        ("set: [1]", "set: {env.max_episode_steps: 30}", "aspects.horizon.set is no mapping of names to values"),
        ("aspects: {", "aspects:", "is no YAML: "),
        ("success: twice\naspects:", "aspects:", "success = 'twice': want one of once, at_end"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path: Path, wrong: str, right: str, expected: str) -> None:
    assert right in MINE
    with pytest.raises(ProtocolError, match=re.escape(expected)):
        read(Path(written(tmp_path, MINE.replace(right, wrong))), "mine")


def test_no_shipped_protocol_is_called_own() -> None:
    assert all(protocol.short_name != OWN for protocol in shipped().values())
