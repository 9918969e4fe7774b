"""Questions in the background: again where that helps, within a budget, and never twice."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from embodyrl.algorithms.asked import Gives, VLMRewardConfig
from embodyrl.chat import ChatError
from embodyrl.errors import RewardError, UserError
from embodyrl.rollout.asking import EpisodeImages, smaller, value_of
from embodyrl.rollout.inquiries import ANSWERS, Answer, Inquiries, Kept, NoAnswerError, Spent


class Somebody:
    """Answers a number after as many failures as it says."""

    name = "somebody"

    def __init__(self, failures: int = 0, *, error: ChatError | None = None, takes_s: float = 0.0) -> None:
        self.failures, self.takes_s = failures, takes_s
        self.error = error or ChatError("busy", passes=True, wait_s=7.0)
        self.asked: list[float] = []
        self._lock = threading.Lock()

    def digest(self, question: float) -> str:
        return f"hash of {question}"

    def ask(self, question: float) -> Answer:
        with self._lock:
            self.asked.append(question)
            fails = self.asked.count(question) <= self.failures
        time.sleep(self.takes_s)
        if fails:
            raise self.error
        return Answer(value=question, said=f"it is {question}", spent=Spent(tokens=10, cost=0.5))


def settings(**options: object) -> VLMRewardConfig:
    return VLMRewardConfig(name="vlm", **{"retries": 2, "backoff_s": 2.0, "deadline_s": 1.0, **options})


def test_it_is_asked_again_after_pauses_that_grow(tmp_path: Path) -> None:
    somebody, pauses = Somebody(3), list[float]()
    inquiries = Inquiries(somebody, Kept(tmp_path, "a"), settings(retries=3), sleep=pauses.append)
    assert inquiries.ask(0.25).result(5).value == 0.25
    assert pauses == [7.0, 7.0, 8.0], "the server asks for 7 s, and the third pause is longer by itself"
    rows = [json.loads(line) for line in (tmp_path / ANSWERS / "a.jsonl").read_text().splitlines()]
    assert [row.get("failed") for row in rows] == ["busy"] * 3 + [None]
    assert rows[-1] | {"question": ""} == {
        **{"question": "", "value": 0.25, "said": "it is 0.25"},
        **{"calls": 1, "tokens": 10, "cost": 0.5},
    }


@pytest.mark.parametrize(
    ("error", "attempts"), [(ChatError("busy", passes=True), 3), (ChatError("no such model", passes=False), 1)]
)
def test_what_has_no_answer_is_an_error_and_no_number(error: ChatError, attempts: int, tmp_path: Path) -> None:
    somebody = Somebody(99, error=error)
    inquiries = Inquiries(somebody, Kept(tmp_path, "a"), settings(), sleep=lambda seconds: None)
    with pytest.raises(RewardError, match=str(error)):
        inquiries.ask(0.5).result(5)
    assert len(somebody.asked) == attempts
    assert Kept(tmp_path, "a").known == {} and Kept(tmp_path, "a").spent.calls == attempts


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    somebody = Somebody(takes_s=0.05)
    inquiries = Inquiries(somebody, Kept(tmp_path, "a"), settings())
    both = [inquiries.ask(0.5), inquiries.ask(0.5), inquiries.ask(0.75)]
    assert [each.result(5).value for each in both] == [0.5, 0.5, 0.75] and len(somebody.asked) == 2
    assert inquiries.ask(0.5).result(5).value == 0.5
    for kept in (Kept(tmp_path, "a"), Kept(tmp_path, "b"), Kept(tmp_path / "other", "a", [tmp_path])):
        again = Inquiries(somebody, kept, settings())
        assert again.ask(0.75).result(5).value == 0.75
    assert len(somebody.asked) == 2, "neither after a restart, nor by another process or run that may read it"


def test_many_are_under_way_at_once_and_no_more_than_said(tmp_path: Path) -> None:
    somebody = Somebody(takes_s=0.1)
    inquiries = Inquiries(somebody, Kept(tmp_path, "a"), settings(concurrency=4))
    begun = time.monotonic()
    asked = [inquiries.ask(number / 8) for number in range(8)]
    assert time.monotonic() - begun < 0.09, "asking does not wait"
    assert [each.result(5).value for each in asked] == [number / 8 for number in range(8)]
    assert 0.19 < time.monotonic() - begun < 0.6


@pytest.mark.parametrize(
    ("limit", "answered"), [({"max_calls": 3}, 3), ({"max_tokens": 25}, 3), ({"max_cost": 1.0}, 2)]
)
def test_a_budget_is_that_of_the_run_resumed_or_not(limit: dict[str, float], answered: int, tmp_path: Path) -> None:
    somebody = Somebody()
    given = settings(**limit, price_in=1.0, concurrency=1)
    first = Inquiries(somebody, Kept(tmp_path, "a"), given)
    assert first.ask(0.0).result(5).value == 0.0
    resumed = Inquiries(somebody, Kept(tmp_path, "a"), given)
    with pytest.raises(RewardError, match=rf"{next(iter(limit))} = .* Raise it to continue"):
        for number in range(1, 10):
            assert resumed.ask(number / 10).result(5).value == number / 10
    assert len(somebody.asked) == answered
    assert resumed.ask(0.1).result(5).value == 0.1, "what is known costs nothing"
    half = Inquiries(somebody, Kept(tmp_path / "two", "a"), settings(max_calls=4), share=0.5)
    with pytest.raises(RewardError):
        for number in range(3):
            half.ask(number / 10).result(5)
    assert len(somebody.asked) == answered + 2


def test_what_garbage_took_is_paid(tmp_path: Path) -> None:
    error = NoAnswerError(ChatError("hm", passes=True), Spent(tokens=40, cost=1.0))
    inquiries = Inquiries(Somebody(1, error=error), Kept(tmp_path, "a"), settings(), sleep=lambda seconds: None)
    inquiries.ask(0.5).result(5)
    assert Kept(tmp_path, "a").spent == Spent(calls=2, tokens=50, cost=1.5)


def test_a_line_that_was_cut_off_is_asked_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    Inquiries(Somebody(), Kept(tmp_path, "a"), settings()).ask(0.5).result(5)
    file = tmp_path / ANSWERS / "a.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:30])
    kept = Kept(tmp_path, "a")
    assert kept.known.keys() == {"hash of 0.5"}
    Inquiries(Somebody(), kept, settings()).ask(0.75).result(5)
    assert Kept(tmp_path, "a").known.keys() == {"hash of 0.5", "hash of 0.75"}
    for wrong in ({"value": 2.0}, {"value": True}, {"value": "1"}, {"calls": -1}, {"tokens": 1.5}, {"question": 3}):
        file.write_text(json.dumps(json.loads(whole) | wrong) + "\n")
        with pytest.raises(UserError, match=r"a\.jsonl, line 1, is no answer"):
            Kept(tmp_path, "a")


@pytest.mark.parametrize(
    ("text", "gives", "value"),
    [
        *(('{"success": true}', "success", 1.0), ('```json\n{"success": false}\n```', "success", 0.0)),
        ('First {"success": true}, no: {"success": false, "why": "it fell"}.', "success", 0.0),
        *(('{"progress": 0.25}', "progress", 0.25), ('{"progress": 1}', "progress", 1.0)),
        *(("yes", "success", None), ('{"success": "true"}', "success", None), ('{"success": 1}', "success", None)),
        *(('{"progress": 1.5}', "progress", None), ('{"progress": NaN}', "progress", None)),
        *(
            ('{"progress": true}', "progress", None),
            ('{"success": true}', "progress", None),
            ("{" * 9999, "success", None),
        ),
    ],
)
def test_what_an_answer_says(text: str, gives: str, value: float | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match="answers without"):
            value_of(text, Gives(gives))
    else:
        assert value_of(text, Gives(gives)) == value


@pytest.mark.parametrize("frames", [1, 2, 3, 8])
def test_images_of_an_episode_are_its_beginning_its_end_and_evenly_spread_between(frames: int) -> None:
    for length in range(1, 70):
        images = EpisodeImages(frames)
        for number in range(length):
            images.add(np.full((1, 1, 1, 3), number, np.uint8))
            assert len(images._kept) <= 2 * frames
        shown = [int(image.flat[0]) for image in images.end(np.full((1, 1, 1, 3), length, np.uint8))]
        assert shown[-1] == length and len(shown) == min(frames, length + 1)
        assert shown == sorted(set(shown)) and (frames == 1 or shown[0] == 0)
        if len(shown) == frames > 2:
            gaps = np.diff(shown)
            assert gaps.max() <= 3 * length / (frames - 1)


def test_large_images_become_smaller() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (300, 600, 3), dtype=np.uint8)
    assert smaller(image, 64).shape == (32, 64, 3) and smaller(image, 600) is not None
    assert np.array_equal(smaller(image, 600), image) and smaller(image[:1], 64).shape == (1, 64, 3)
