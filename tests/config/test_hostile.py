"""Configs that nobody has written by hand: refused at once, whatever they would become."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from embodyrl.config import load_config, to_commented_yaml
from embodyrl.config.plugins import UntrustedError
from embodyrl.runner.rundir import read_config, write_config

START = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\n"
DEADLINE_S = 5.0
"""Of CPU time."""


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Nothing here takes long."""
    started = time.process_time()
    yield
    assert time.process_time() - started < DEADLINE_S


def doubling(levels: int) -> str:
    """Texts each of which is the one before, twice."""
    steps = [f"    a{n}: ${{env.kwargs.a{n - 1}}}${{env.kwargs.a{n - 1}}}" for n in range(1, levels)]
    return "env:\n  kwargs:\n    a0: word\n" + "\n".join(reversed(steps)) + "\n"


def laughing(levels: int, merged: bool) -> str:
    """Aliases each of which is the one before, ten times."""
    key = "<<" if merged else "x"
    steps = [f"b{n}: &b{n} {{{key}: [{', '.join([f'*b{n - 1}'] * 10)}], y{n}: 1}}" for n in range(1, levels)]
    return "b0: &b0 {y0: 1}\n" + "\n".join(steps) + "\n"


HOSTILE = {
    "many bytes": ("# " + "x" * 50_000_000, "the file is longer than 1000000 characters"),
    "many keys": ("\n".join(f"k{n}: ${{seed}}" for n in range(20_001)), "the file holds more than 20000 values"),
    "many items": (f"plugins: [{', '.join(['a'] * 20_001)}]", "the file holds more than 20000 values"),
    "one text of many": ("run: {dir: '" + "${seed}" * 100_000 + "'}", "run.dir holds more than 100 interpolations"),
    "aliases": (laughing(12, merged=False), "the file holds more than 20000 values"),
    "merged aliases": (laughing(12, merged=True), "the file holds more than 20000 values"),
    "interpolations": (doubling(40), "it stands for more than 1000000 characters"),
    "a circle": ("run: {name: '${run.dir}', dir: '${run.name}'}", "it leads back to itself"),
    "a chain": (doubling(90).replace("}${", "}#${").replace("word", "''"), "cannot be resolved"),
    "deep lists": ("seed: " + "[" * 3000 + "]" * 3000, "the file is nested too deeply"),
    "depth": ("env: {kwargs: " + "{a: " * 3000 + "1" + "}" * 3000 + "}", "the file is nested too deeply"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_too_large_is_refused_at_once(workplace, kind: str) -> None:
    text, words = HOSTILE[kind]
    faults = workplace.faults(START + text + "\n")
    assert any(words in fault for fault in faults), faults[:3]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('tracking: {sinks: ["json\\el"]}', r'tracking.sinks[0] = "json\u001bl" holds control characters'),
        ('env: {tasks: ["Pen\\x9b31m"]}', r'env.tasks[0] = "Pen\x9b31m" holds control characters'),
        ('run: {name: "a\\u202eb"}', r'run.name = "a\u202eb" holds control characters'),
        ('env: {kwargs: {g: ["\\x7f"]}}', r'env.kwargs holds control characters in "\x7f"'),
        ('env: {kwargs: {g: {"\\r": 1}}}', r'env.kwargs holds control characters in "\r"'),
        (
            'env: {task_descriptions: {Pendulum-v1: "up\\a"}}',
            r'env.task_descriptions holds control characters in "up\u0007"',
        ),
    ],
)
def test_control_characters_are_refused_and_shown_as_text(workplace, text: str, fault: str) -> None:
    found = workplace.faults(START + text + "\n")
    assert any(fault in each and "leave them out" in each for each in found), found


def test_a_task_description_may_have_several_lines(workplace) -> None:
    task_description = workplace.load(
        START + 'env: {task_descriptions: {Pendulum-v1: "swing\\n\\tup"}}\n'
    ).env.task_descriptions
    assert task_description == {"Pendulum-v1": "swing\n\tup"}


def test_also_through_a_defaults_list(workplace) -> None:
    workplace.write(HOSTILE["merged aliases"][0], "env/mine.yaml")
    workplace.write(HOSTILE["aliases"][0], "model/mine.yaml")
    faults = workplace.faults("defaults: [env: mine, model: mine, algorithm: ppo, _self_]\n")
    assert len([fault for fault in faults if "the file holds more than 20000 values" in fault]) == 2


def test_also_on_the_command_line(workplace) -> None:
    [fault] = workplace.faults(START, "plugins=[" + ",".join(["a"] * 50_000) + "]")
    assert fault == "command line: plugins=... is longer than 10000 characters - write it into the file"


def test_thousands_of_unknown_keys_are_all_named(workplace) -> None:
    faults = workplace.faults(START + "\n".join(f"k{n}: 1" for n in range(4000)))
    assert len(faults) == 4000 and "unknown key 'k3999'" in faults[-1]


SECRET = START + "env: {kwargs: {g: '${oc.decode:${oc.env:A_NUMBER}}', render_mode: '${oc.env:A_SECRET}'}}\n"
SECRET += "run: {name: 'of-${env.kwargs.render_mode}'}\n"


@pytest.fixture
def secret(monkeypatch) -> str:
    monkeypatch.setenv("A_NUMBER", "4.25")
    monkeypatch.setenv("A_SECRET", "hunter2")
    return "hunter2"


def test_a_secret_is_used_and_not_written(workplace, secret: str) -> None:
    workplace.write(SECRET)
    loaded = load_config("my.yaml")
    assert loaded.config.env.kwargs == {"g": 4.25, "render_mode": secret} and loaded.config.run.name == f"of-{secret}"
    text = to_commented_yaml(loaded.written)
    assert secret not in text and "4.25" not in text
    again = workplace.load(text)
    assert (
        again == loaded.config and "${oc.decode:${oc.env:A_NUMBER}}" in text and "of-${env.kwargs.render_mode}" in text
    )
    assert loaded.hide(f"run of-{secret}") == "run of-${env.kwargs.render_mode}"


def test_ones_own_run_resolves_it_again_and_a_strangers_does_not(workplace, secret: str, monkeypatch) -> None:
    workplace.write(SECRET)
    run_dir = workplace.folder / "run"
    run_dir.mkdir()
    write_config(run_dir, load_config("my.yaml"))
    monkeypatch.setenv("A_SECRET", "another")
    assert read_config(run_dir, []).config.env.kwargs == {"g": 4.25, "render_mode": "another"}
    origin = json.loads((run_dir / "origin.json").read_text())
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace("A_SECRET", "A_NUMBER"))
    for signature in (origin["signature"], ""):
        (run_dir / "origin.json").write_text(json.dumps(origin | {"signature": signature}))
        with pytest.raises(UntrustedError) as caught:
            read_config(run_dir, [])
        assert "it would read environment variables for" in str(caught.value)
        assert "env.kwargs.g = ${oc.decode:${oc.env:A_NUMBER}}, " in str(caught.value)
    assert read_config(run_dir, [], trust=True).config.env.kwargs["g"] == 4.25


def test_no_spelling_reads_the_environment_of_a_strangers_config(workplace, secret: str) -> None:
    workplace.write("{}", "run/origin.json")
    plain = "${oc.env:A_SECRET}"
    for text in (plain, "${ oc.env : A_SECRET}", "${oc.env:'A_SECRET',x}", f"${{oc.decode:'{plain}'}}"):
        workplace.write(START + f'run: {{dir: "{text}"}}\n', "run/config.yaml")
        with pytest.raises(UntrustedError):
            load_config("run/config.yaml")
    for text in ("${${run.name}:A_SECRET}", "${oc.${run.name}:A_SECRET}", "${oc.select:run.name}"):
        workplace.write(START + f'run: {{name: env, dir: "{text}"}}\n', "run/config.yaml")
        with pytest.raises(ValueError, match="no interpolation that is known here"):
            load_config("run/config.yaml")


def test_a_fault_does_not_tell_the_secret(workplace, secret: str) -> None:
    [fault] = workplace.faults(START + "seed: ${oc.env:A_SECRET}\n")
    assert secret not in fault and "${oc.env:A_SECRET}" in fault
