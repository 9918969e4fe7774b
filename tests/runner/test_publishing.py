"""Checkpoints on the disk: which are found, which are kept, and what is said about those that are damaged."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from embodyrl.files import link_or_copy
from embodyrl.runner.checkpoint import DamageError, Retention, VersionError, find, verify, writing
from embodyrl.runs import published

BEST = Retention(last=2, best="eval/success_once")


def publish(
    run_dir: Path, iteration: int, content: str = "", metrics: Mapping[str, float] | None = None, keep: Retention = BEST
) -> Path:
    with writing(run_dir, iteration, metrics=metrics or {}, retention=keep) as publication:
        (publication.folder / "policy").mkdir()
        (publication.folder / "policy" / "weights").write_text(content or f"weights of {iteration}")
    return publication.place


def names(run_dir: Path) -> list[str]:
    return [place.name for _, place in published(run_dir)]


def leads_to(run_dir: Path, link: str) -> str:
    return (run_dir / "checkpoints" / link).resolve().name


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    rates = {1: 0.1, 2: 0.7, 3: None, 4: 0.7, 5: 0.3, 6: None}
    for iteration, rate in rates.items():
        publish(tmp_path, iteration, metrics={} if rate is None else {"eval/success_once": rate})
    assert names(tmp_path) == ["000002", "000005", "000006"]
    assert (leads_to(tmp_path, "last"), leads_to(tmp_path, "best")) == ("000006", "000002")
    publish(tmp_path, 7, metrics={"eval/success_once": 0.8})
    assert names(tmp_path) == ["000006", "000007"] and leads_to(tmp_path, "best") == "000007"
    assert not list((tmp_path / "checkpoints").glob(".*")), "something was left behind"


def test_damage_to_a_file_leaves_the_best_checkpoint_and_some_of_the_others_whole(tmp_path: Path) -> None:
    def shared(run_dir: Path, keep: Retention, rates: Sequence[float]) -> list[int]:
        """Publish checkpoints that link the file of the one before; returns the number of the file of each one kept."""
        run_dir.mkdir()
        before = None
        for iteration, rate in enumerate(rates):
            with writing(run_dir, iteration, metrics={"eval/success_once": rate}, retention=keep) as publication:
                folder = publication.folder / "trainer"
                folder.mkdir()
                (folder / "same").write_text("same") if before is None else link_or_copy(before, folder / "same")
            before = publication.place / "trainer/same"
        places = [place for _, place in published(run_dir)]
        assert all(verify(place) for place in places)
        files = [(place / "trainer/same").stat().st_ino for place in places]
        return [sorted(set(files), key=files.index).index(file) for file in files]

    found = {
        "all kept": shared(tmp_path / "a", Retention(), [0.0] * 12),
        "three kept, first": shared(tmp_path / "b", Retention(last=3), [0.0] * 6),
        "three kept, later": shared(tmp_path / "c", Retention(last=3), [0.0] * 7),
        "one kept": shared(tmp_path / "d", Retention(last=1), [0.0] * 5),
        "best": shared(tmp_path / "e", Retention(best="eval/success_once"), [0.1, 0.0, 0.2, 0.0, 0.0]),
    }
    assert found == {
        "all kept": [0] * 10 + [1, 1],
        "three kept, first": [0, 1, 1],
        "three kept, later": [0, 0, 1],
        "one kept": [0],
        "best": [0, 1, 2, 3, 3],
    }
    # A copy of what was damaged meanwhile is not whole.
    with writing(tmp_path / "b", 6, metrics={}, retention=Retention(last=3)) as publication:
        (publication.folder / "trainer").mkdir()
        before = tmp_path / "b/checkpoints/last/trainer/same"
        before.write_text("sane")
        link_or_copy(before, publication.folder / "trainer/same")
    assert (publication.place / "trainer/same").stat().st_nlink == 1, "this one is a copy"
    with pytest.raises(DamageError, match="trainer/same is altered"):
        verify(publication.place)


def test_without_limits_all_are_kept_and_none_is_best(tmp_path: Path) -> None:
    for iteration in range(4):
        publish(tmp_path, iteration, metrics={"eval/success_once": 1.0}, keep=Retention())
    assert len(names(tmp_path)) == 4 and not (tmp_path / "checkpoints" / "best").exists()


def test_the_same_iteration_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    metrics = {"eval/success_once": 0.5}
    for content in ("first", "second", "third"):
        place = publish(tmp_path, 3, content, metrics)
        assert [tmp_path / "checkpoints" / name for name in names(tmp_path)] == [place]
        assert (find(tmp_path).place / "policy" / "weights").read_text() == content
        assert leads_to(tmp_path, "best") == place.name


def test_a_step_back_does_not_let_older_ones_go_first(tmp_path: Path) -> None:
    """Iterations 5 and 6 are damaged, the run goes on from 4: what is to be redone does not count as newer."""
    for iteration in (3, 4, 5, 6):
        publish(tmp_path, iteration, keep=Retention())
    publish(tmp_path, 4, "again", keep=Retention(last=2))
    assert names(tmp_path) == ["000003", "000004-2", "000005", "000006"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def link(path: Path, target: str) -> None:
    """Put a link in the place of a file, with the same contents if it is followed."""
    copy = path.parents[3] / "copy"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy if target == "copy" else target)


def listen(path: Path) -> None:
    """Leave a socket."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def name_outside(place: Path, name: str) -> None:
    """Add a file outside the folder to the manifest, with its right size and hash."""
    manifest = json.loads((place / "manifest.json").read_text())
    (place.parents[1] / "outside").write_text("12characters")
    manifest["files"][name.format(outside=place.parents[1] / "outside")] = manifest["files"]["policy/weights"]
    (place / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    r"policy/weights is a link, not a file": lambda place: link(place / "policy/weights", "copy"),
    r"policy/more is a link, not a file": lambda place: (place / "policy/more").symlink_to("nowhere"),
    r"policy/folder is a link, not a file": lambda place: (place / "policy/folder").symlink_to(place.parents[1]),
    r"policy/more is a pipe, not a file": lambda place: os.mkfifo(place / "policy/more"),
    r"policy/more is a socket, not a file": lambda place: listen(place / "policy/more"),
    r"/.*/outside is no name of a file in it": lambda place: name_outside(place, "{outside}"),
    r"\.\./\.\./outside is no name of a file in it": lambda place: name_outside(place, "../../outside"),
    r"policy/\.\./policy/weights is no name of": lambda place: name_outside(place, "policy/../policy/weights"),
    r"manifest\.json cannot be read \(not a file": lambda place: (
        (place / "manifest.json").unlink(),
        os.mkfifo(place / "manifest.json"),
    ),
    r"manifest\.json cannot be read \(maximum recursion": lambda place: (place / "manifest.json").write_text(
        '{"format":' + "[" * 100_000
    ),
    r"policy/weights has 11 bytes instead of 12": lambda place: truncate(place / "policy/weights"),
    r"policy/weights is altered": lambda place: flip(place / "policy/weights"),
    r"policy/weights is missing": lambda place: (place / "policy/weights").unlink(),
    r"policy/more is not in the manifest": lambda place: (place / "policy/more").touch(),
    r"manifest\.json cannot be read \(Expecting": lambda place: (place / "manifest.json").write_text("{"),
    r"manifest\.json cannot be read \('files'\)": lambda place: (place / "manifest.json").write_text(
        '{"format": 3, "embodyrl": "1", "iteration": 3, "metrics": {}}'
    ),
    r"manifest\.json cannot be read \(.*subscriptable": lambda place: (place / "manifest.json").write_text("3"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_one_is_named_and_the_newest_whole_one_taken(tmp_path: Path, words: str) -> None:
    publish(tmp_path, 1)
    whole = publish(tmp_path, 2)
    damaged = publish(tmp_path, 3, "12characters", keep=Retention())
    damage: Callable[[Path], None] = DAMAGES[words]
    damage(damaged)
    found = find(tmp_path)
    assert found.place == whole.resolve() and found.warning is not None
    assert re.search(f"warning: checkpoints/000003 is damaged: {words}.*Taking 000002 instead", found.warning)


def test_which_one_is_asked_for_matters(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    damaged = publish(tmp_path, 2)
    flip(damaged / "policy/weights")
    for path in (damaged, tmp_path / "checkpoints" / "last"):
        with pytest.raises(DamageError, match=r"is damaged: policy/weights is altered\. Use another one"):
            find(path)
    flip(tmp_path / "checkpoints/000001/policy/weights")
    with pytest.raises(
        DamageError, match=r"no checkpoint of .* is whole\. .*000002 is damaged.*000001 is damaged.*: put back"
    ):
        find(tmp_path)


def test_a_run_that_lost_its_link_is_found_by_its_newest(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    newest = publish(tmp_path, 2)
    (tmp_path / "checkpoints" / "last").unlink()
    found = find(tmp_path)
    assert found.place == newest.resolve()
    assert found.warning is not None and "checkpoints/last leads nowhere" in found.warning
    verify(found.place)


@pytest.mark.parametrize(("number", "words"), [(999, "by a newer version, embodyrl 9.9"), (1, "by an older version")])
def test_another_version_is_said_and_nothing_older_taken_instead(tmp_path: Path, number: int, words: str) -> None:
    publish(tmp_path, 1)
    place = publish(tmp_path, 2)
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps(manifest | {"format": number, "embodyrl": "9.9"}))
    with pytest.raises(VersionError, match=words):
        find(tmp_path)
