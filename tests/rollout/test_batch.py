from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodyrl.rollout.batch import COLUMNS, Along, BatchError, TrajectoryBatch, concat, type_name
from tests.rollout.spread_program import equal

SIZES = {"C": 4, "D": 7, "N": 28, "S": 5, "V": 2, "H": 3, "W": 2, "3": 3}


def columns(k: int = 2, b: int = 3, seed: int = 0) -> dict[str, Tensor | dict[str, Tensor]]:
    """Every column of the table, with contents that tell each entry from the others."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor | dict[str, Tensor]] = {}
    for name, column in COLUMNS.items():
        shape = [(SIZES | {"K": k, "B": b})[letter] for letter in column.shape.split()]
        numbers = torch.randint(0, 2 if column.dtype is torch.bool else 250, shape, generator=generator)
        made[name] = numbers.to(column.dtype)
    made["task_index"] = torch.arange(k * b).reshape(k, b) % 2
    made["trace"] = {"sample": torch.arange(k * b).view(k, b, 1)}
    return made


def batch_of(k: int = 2, b: int = 3, seed: int = 0) -> TrajectoryBatch:
    return TrajectoryBatch(columns(k, b, seed), ["push", "reach"])


def test_decisions_are_flattened_in_order() -> None:
    flat = batch_of().decisions("trace", "valid")
    assert flat["valid"].shape == (6,) and flat["trace"]["sample"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "rewards",
            torch.zeros(2, 3),
            r"'rewards' is float32 \[2, 3\], expected float32 \[K, B, C\] with K = 2, B = 3",
        ),
        ("rewards", torch.zeros(2, 3, 5), r"'rewards' is float32 \[2, 3, 5\], expected .* K = 2, B = 3, C = 4"),
        ("logprobs", torch.zeros(2, 3, 4, 7), r"'logprobs' is float32 \[2, 3, 4, 7\], expected float32 \[K, B, N\]"),
        ("values", torch.zeros(3, 2), r"'values' is float32 \[3, 2\], expected float32 \[K, B\] with K = 2, B = 3"),
        ("values", torch.zeros(2, 3).double(), r"'values' is float64 \[2, 3\], expected float32"),
        ("images", torch.zeros(2, 3, 2, 3, 2, 4).byte(), r"'images' is uint8 \[2, 3, 2, 3, 2, 4\], .* W, 3\]"),
        ("my_own", torch.zeros(3, 2), r"'my_own' is float32 \[3, 2\], expected a shape that begins with \[2, 3\]"),
    ],
)
def test_a_wrong_shape_or_type_names_column_got_and_want(name: str, value: Tensor, message: str) -> None:
    batch = batch_of()
    with pytest.raises(BatchError, match=message):
        batch[name] = value
    if name != "rewards":
        with pytest.raises(BatchError, match=f"'{name}' is"):
            TrajectoryBatch(columns() | {name: value}, ["push", "reach"])


def test_missing_columns_are_named() -> None:
    incomplete = columns()
    del incomplete["rewards"], incomplete["episode"]
    with pytest.raises(BatchError, match="missing from the batch: rewards, episode"):
        TrajectoryBatch(incomplete, ["push"])
    with pytest.raises(BatchError, match="has no column 'advantages'"):
        batch_of()["advantages"]


def test_a_selection_shares_its_columns() -> None:
    batch = batch_of()
    chosen = batch.select("rewards", "trace")
    assert chosen.columns() == ["rewards", "trace"] and chosen["rewards"] is batch["rewards"]
    chosen["returns"] = torch.zeros(2, 3)
    assert "returns" not in batch
    with pytest.raises(BatchError, match=r"has no column 'reward' \(has: rewards, trace\)"):
        batch.select("rewards", "trace").select("reward")


def test_the_table_in_the_documentation_is_the_one_in_the_code(repository: Path) -> None:
    rows = [line for line in (repository / "docs" / "pipelines.md").read_text().splitlines() if line.startswith("| `")]
    wanted = [
        f"| `{name}` | {type_name(column.dtype)} [{', '.join(column.shape.split())}] | {column.meaning}"
        f"{'' if column.required else ' (optional)'} |"
        for name, column in COLUMNS.items()
    ]
    assert rows[: len(wanted)] == wanted


along = st.sampled_from(["K", "B"])
number = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(number, number, along, st.data())
def test_parts_make_up_the_whole(k: int, b: int, along: Along, data: st.DataObject) -> None:
    batch = batch_of(k, b)
    whole = k if along == "K" else b
    cut = data.draw(st.integers(0, whole))
    assert equal(concat(batch.split([cut, whole - cut], along), along), batch)
    assert equal(concat(batch.chunk(whole, along), along), batch)
    parts = batch.chunk(whole, along)
    assert all(part.size == ((1, b) if along == "K" else (k, 1)) for part in parts)


def test_concat_knows_decisions_from_slots() -> None:
    first, second = batch_of(2, 3, seed=1), batch_of(2, 3, seed=2)
    longer, wider = concat([first, second], "K"), concat([first, second], "B")
    assert longer.size == (4, 3) and torch.equal(longer["rewards"][2:], second["rewards"])
    assert wider.size == (2, 6) and torch.equal(wider["rewards"][:, 3:], second["rewards"])


def test_concat_renumbers_tasks() -> None:
    first, second = batch_of(1, 2), batch_of(1, 2)
    second.task_descriptions = ["reach", "open"]
    joined = concat([first, second], "B")
    assert joined.task_descriptions == ["push", "reach", "open"]
    assert [joined.task_descriptions[index] for index in joined["task_index"][0].tolist()] == [
        "push",
        "reach",
        "reach",
        "open",
    ]
    assert second["task_index"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.select("rewards"), "not all batches have the columns actions, .*trace/sample"),
        (lambda batch: batch.pad(9, "K"), r"cannot be joined along B: column '\w+' is .* in one and .* in another"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(
    change: Callable[[TrajectoryBatch], TrajectoryBatch], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        concat([batch_of(), change(batch_of())], "B")


def test_uneven_parts_are_refused() -> None:
    with pytest.raises(BatchError, match="B = 3 cannot be split into 2 equal parts"):
        batch_of().chunk(2, "B")
    with pytest.raises(BatchError, match=r"parts of \[2, 2\] do not make up B = 3"):
        batch_of().split([2, 2], "B")


@settings(max_examples=40, deadline=None)
@given(number, number, along, st.integers(0, 4))
def test_padding_adds_decisions_or_slots_that_do_not_count(k: int, b: int, along: Along, more: int) -> None:
    batch = batch_of(k, b)
    size = k if along == "K" else b
    padded = batch.pad(size + more, along)
    assert padded.size == ((k + more, b) if along == "K" else (k, b + more))
    own, added = padded.split([size, more], along)
    assert equal(own, batch) and not added["valid"].any()


def test_padding_does_not_cut() -> None:
    with pytest.raises(BatchError, match="K = 2 is more than the 1 to pad to"):
        batch_of().pad(1, "K")


@settings(max_examples=20, deadline=None)
@given(number, number, st.lists(st.text(), min_size=2, max_size=3, unique=True))
def test_a_saved_batch_is_loaded_exactly(k: int, b: int, task_descriptions: list[str]) -> None:
    batch = TrajectoryBatch(columns(k, b), task_descriptions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.safetensors"
        for saved in (batch, batch.split([1, b - 1], "B")[1], batch.select("rewards"), batch.select()):
            saved.save(path)
            assert equal(TrajectoryBatch.load(path), saved)


def test_a_part_of_a_batch_is_saved_without_the_rest(tmp_path: Path) -> None:
    batch = batch_of(8, 8)
    batch.save(tmp_path / "all")
    batch.split([1, 7], "K")[0].save(tmp_path / "part")
    assert (tmp_path / "part").stat().st_size < (tmp_path / "all").stat().st_size / 2


def test_to_moves_every_column() -> None:
    moved = batch_of().to("meta")
    assert {moved[name].device.type for name in COLUMNS} == {"meta"} and moved.task_descriptions == ["push", "reach"]
