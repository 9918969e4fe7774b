"""Which files a checkpoint's weights are in, also where their index is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import INDEX_FILE, SINGLE_FILE, shard_files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ("[]", "object"),
        ("{}", "holds no weight_map"),
        ('{"weight_map": [1]}', "holds no weight_map"),
        ('{"weight_map": {}}', "names 'nothing', names of files in its folder were expected"),
        ('{"weight_map": {"a": "../1.safetensors"}}', "names '../1.safetensors', names of files in its folder were"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names '/etc/passwd', names of files"),
        ('{"weight_map": {"a": 1}}', "holds no weight_map"),
        ('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}', "lacks 2.safetensors, which its"),
    ],
)
def test_an_index_that_is_none_is_named(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").touch()
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(PolicyError, match=said) as caught:
        shard_files(tmp_path)
    assert INDEX_FILE in str(caught.value)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="holds neither"):
        shard_files(tmp_path)
    (tmp_path / SINGLE_FILE).touch()
    assert shard_files(tmp_path) == [tmp_path / SINGLE_FILE]
