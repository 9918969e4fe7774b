"""Whatever is misspelt is reported where it stands."""

from __future__ import annotations

import string

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from embodyrl.config import ConfigError, load_config, to_commented_yaml

CONFIG = load_config(None).config
LINES = to_commented_yaml(CONFIG).splitlines()
KEYS = [index for index, line in enumerate(LINES) if line and not line.lstrip().startswith("#")]
DATA = LINES.index("data:")
KNOWN = {LINES[index].partition(":")[0].lstrip() for index in KEYS}

edits = st.tuples(
    st.sampled_from(["drop", "double", "swap", "insert", "replace"]),
    st.integers(0, 40),
    st.sampled_from(string.ascii_lowercase + "_"),
)
common = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def edited(word: str, edit: tuple[str, int, str]) -> str:
    """`word` with one typing mistake."""
    kind, where, letter = edit
    at = where % len(word)
    return {
        "drop": word[:at] + word[at + 1 :],
        "double": word[: at + 1] + word[at:],
        "swap": word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
        "insert": word[:at] + letter + word[at:],
        "replace": word[:at] + letter + word[at + 1 :],
    }[kind]


@common
@given(index=st.sampled_from(KEYS), edit=edits)
@example(index=DATA, edit=("drop", 0, "a"))  # below it stand words of other libraries
@example(index=DATA, edit=("swap", 0, "a"))
def test_a_misspelt_key_is_reported_with_its_place(workplace, index, edit):
    key, _, rest = LINES[index].partition(":")
    indent, key = key[: len(key) - len(key.lstrip())], key.lstrip()
    wrong = edited(key, edit)
    assume(wrong and wrong not in KNOWN and isinstance(yaml.safe_load(wrong), str))
    workplace.write("\n".join([*LINES[:index], f"{indent}{wrong}:{rest}", *LINES[index + 1 :]]))
    with pytest.raises(ConfigError) as caught:
        load_config("my.yaml")
    first = [fault for fault in caught.value.faults if fault.message.startswith("unknown key")]
    assert [(fault.location.line, fault.location.column) for fault in first] == [(index + 1, len(indent) + 1)]
    assert first[0].path[-1] == wrong


@common
@given(
    index=st.sampled_from(KEYS),
    junk=st.sampled_from(["[[]]", "{a: {b: 1}}", ".nan", "2024-01-01", "!!python/name:os.system", "*x"]),
)
def test_a_value_of_the_wrong_kind_is_reported_with_its_line_or_is_legal_text(workplace, index, junk):
    key = LINES[index].partition(":")[0]
    indent = len(key) - len(key.lstrip())
    following = LINES[index + 1 :]
    while following and following[0].startswith(" " * (indent + 1)):
        following.pop(0)  # what stood below a section
    workplace.write("\n".join([*LINES[:index], f"{key}: {junk}", *following]))
    try:
        loaded = load_config("my.yaml")
    except ConfigError as error:
        assert any(fault.location.line == index + 1 for fault in error.faults)
    else:
        assert junk == "2024-01-01"
        assert "2024-01-01" in to_commented_yaml(loaded.config)


@common
@given(text=st.text(alphabet="abc:-[]{}'\"#&*!|>%@ \n\t0123.${}~?,", max_size=60))
def test_any_text_gives_faults_and_nothing_else(workplace, text):
    workplace.write(text)
    with pytest.raises(ConfigError) as caught:
        load_config("my.yaml")
    assert all(fault.location.file == "my.yaml" for fault in caught.value.faults)


@common
@given(text=st.text(max_size=40))
def test_any_command_line_gives_a_config_or_faults(text):
    try:
        load_config(None, [text])
    except ConfigError as error:
        assert all(str(fault).startswith("command line: ") for fault in error.faults)


@common
@given(
    key=st.sampled_from(["run.name", "seed", "env", "env.tasks", "engine.optimizer", "plugins", "algorithm.bootstrap"]),
    value=st.text(max_size=30),
)
def test_any_value_on_the_command_line_gives_a_config_or_faults(key, value):
    try:
        load_config(None, [f"{key}={value}"])
    except ConfigError as error:
        assert all(str(fault).startswith("command line: ") for fault in error.faults)
