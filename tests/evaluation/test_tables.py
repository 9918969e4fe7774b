"""Tables of evaluations on the screen: what fits beside each other, and what is left out."""

from __future__ import annotations

from embodyrl.evaluation.results import Comparison, Row
from embodyrl.runner.evaluation import EpisodeRecord


def row(label: str, outcomes: dict[str, list[bool]]) -> Row:
    records = tuple(
        EpisodeRecord(
            task=task, start_state=state, seed=state, success=won, success_at_end=won, total_reward=0, length=1
        )
        for task, each in outcomes.items()
        for state, won in enumerate(each)
    )
    states = tuple(record.start_state for record in records)
    return Row(
        label=label,
        policy="p",
        protocol=None,
        records=records,
        initial_states=states,
        sampled=False,
        seconds=0,
        settings=(),
    )


def by_task(*rows: Row) -> str:
    return Comparison(rows=rows).text().split("\n\n", 2)[-1]


def test_rows_with_the_same_tasks_stand_side_by_side_up_to_the_width_of_the_screen() -> None:
    rows = [row(f"a protocol with name {number}", {"pick": [True, False], "place": [True]}) for number in range(4)]
    blocks = by_task(*rows).split("\n\n")
    assert len(blocks) == 2 and max(len(line) for block in blocks for line in block.splitlines()) <= 80
    assert [line.split()[0] for block in blocks for line in block.splitlines()] == ["task", "pick", "place"] * 2
    assert " ".join(blocks).count("1/2") == 4 and " ".join(blocks).count("1/1") == 4


def test_variants_of_a_protocol_play_tasks_of_their_own_in_tables_of_their_own() -> None:
    outcomes = {name: {f"{name}/{task}": [True, False, task == 0] for task in (0, 1)} for name in ("own", "changed")}
    rows = [row("one", outcomes["own"]), row("other", outcomes["own"]), row("other changed", outcomes["changed"])]
    assert Comparison(rows=tuple(rows)).text().split("\n\n")[-2:] == [
        "task   one  other\nown/0  2/3    2/3\nown/1  1/3    1/3",
        "task       other changed\nchanged/0            2/3\nchanged/1            1/3",
    ]
