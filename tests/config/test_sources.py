"""Which file a name means, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config

GOOD = "defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, _self_]\n"


def fault_for(name: str) -> str:
    """The one fault that a missing file gives."""
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    [fault] = caught.value.faults
    return str(fault)


def test_nothing_means_the_default_experiment():
    loaded = load_config(None)
    assert (loaded.source, loaded.path, loaded.config.env.name) == ("experiment/metaworld_reach", None, "metaworld")
    assert loaded.plugin_dir == Path.cwd()


@pytest.mark.parametrize("name", ["metaworld_reach", "experiment/metaworld_reach", "experiment/metaworld_reach.yaml"])
def test_a_built_in_experiment_goes_by_its_name(name):
    assert load_config(name).source == "experiment/metaworld_reach"


def test_a_file_is_loaded_by_its_path(workplace):
    path = workplace.write(GOOD, "deep/my.yaml")
    for name in ("deep/my.yaml", path):
        loaded = load_config(name)
        assert (loaded.source, loaded.path, loaded.plugin_dir) == (str(name), path, path.parent)


def test_a_file_goes_before_an_experiment_of_the_same_name(workplace):
    workplace.write(GOOD + "seed: 77\n", "metaworld_reach.yaml")
    assert load_config("metaworld_reach.yaml").config.seed == 77


def test_a_missing_file_names_the_nearest(workplace):
    workplace.write(GOOD, "deep/push.yaml")
    assert fault_for("deep/psuh.yaml") == "deep/psuh.yaml: no such file - did you mean 'deep/push.yaml'?"


def test_a_misspelt_experiment_names_the_nearest(workplace):
    wanted = "did you mean 'experiment/metaworld_reach'?"
    assert fault_for("experiment/metawrold_reach") == f"experiment/metawrold_reach: no such file - {wanted}"
    assert fault_for("metaworld_raech") == f"metaworld_raech: no such file - {wanted}"


def test_a_missing_file_without_neighbours_lists_the_experiments(workplace):
    assert fault_for("nope/x.yaml").startswith("nope/x.yaml: no such file - `embodyrl list configs` shows")


def test_a_folder_is_no_config(workplace):
    workplace.write(GOOD, "runs/one/config.yaml")
    assert (
        fault_for("runs/one")
        == "runs/one: is a folder, not a config file - name the file in it, as in runs/one/config.yaml"
    )


def test_a_file_that_is_not_text_is_refused(workplace):
    (workplace.folder / "my.yaml").write_bytes(b"seed: \xff\xfe\n")
    assert fault_for("my.yaml") == "my.yaml: the file is not UTF-8 text (byte 6) - save it as UTF-8"
    (workplace.folder / "my.yaml").write_bytes(b"seed: \x00\n")
    assert fault_for("my.yaml") == "my.yaml: the file contains the character U+0000, which YAML forbids - remove it"


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(workplace):
    (workplace.folder / "my.yaml").write_bytes(b"\xef\xbb\xbf" + (GOOD + "seed: 5\n").replace("\n", "\r\n").encode())
    assert load_config("my.yaml").config.seed == 5


def test_comments_alone_are_an_empty_file(workplace):
    workplace.write("# nothing yet\n")
    assert fault_for("my.yaml") == "my.yaml: the file is empty - `embodyrl run --print-config` shows a whole config"
