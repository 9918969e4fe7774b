"""Questions to somebody outside, asked in the background: again after a while where that may help, within a budget, and
never twice, because every answer is kept in the run's folder by what it depends on.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from embodyrl.algorithms.asked import AskedRewardConfig
from embodyrl.chat import MOST_SHOWN, MOST_WAIT_S, ChatError
from embodyrl.errors import RewardError, UserError, without_controls

ANSWERS = "answers"
"""Folder of a run with the answers that it got."""
MOST_LINE = 2**16
"""Characters of a line of such a file."""
MOST_PAUSE_S = 60.0
"""Longest pause between two attempts that nobody asked for [s]."""

Q = TypeVar("Q")
Q_contra = TypeVar("Q_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What questions have taken."""

    calls: int = 0
    """Attempts, also those without an answer."""
    tokens: int = 0
    cost: float = 0.0
    """In the unit of the prices."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(calls=self.calls + other.calls, tokens=self.tokens + other.tokens, cost=self.cost + other.cost)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and what it took."""

    value: float
    """0 .. 1."""
    said: str = ""
    """Its words, shortened."""
    spent: Spent = field(default_factory=Spent)


class NoAnswerError(ChatError):
    """Raised when what is said is no answer, with what it took.

    Args:
        error: why.
        spent: see `Spent`.
    """

    def __init__(self, error: ChatError, spent: Spent) -> None:
        super().__init__(str(error), passes=error.passes, wait_s=error.wait_s)
        self.spent = spent


class Respondent(Protocol[Q_contra]):
    """Somebody who is asked. Both methods are called by several threads."""

    @property
    def name(self) -> str:
        """Who it is, for people."""
        ...

    def digest(self, question: Q_contra) -> str:
        """Return a hash of all that an answer depends on."""
        ...

    def ask(self, question: Q_contra) -> Answer:
        """Ask once, within a deadline of its own.

        Raises:
            ChatError: there is no answer.
            UserError: it cannot be asked at all.
        """
        ...


class Kept:
    """Answers in the folder `answers` of a run, a file for each process that asks, a line for each attempt.

    Args:
        folder: of the run.
        name: of this process's file.
        others: folders of other runs whose answers count, too.

    Raises:
        UserError: a file is damaged.
    """

    def __init__(self, folder: Path, name: str, others: Sequence[Path] = ()) -> None:
        self._path = folder / ANSWERS / f"{name}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        own = [*_rows(folder / ANSWERS)]
        self.spent = sum((_spent(row) for row in own), Spent())
        """What the whole run has spent when this began."""
        every = [*own, *(row for other in others for row in _rows(other / ANSWERS))]
        self.known = {row["question"]: Answer(value=row["value"]) for row in every if "value" in row}
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._write("\n")  # after a line that was cut off

    def add(self, digest: str, answer: Answer) -> None:
        """Keep an answer."""
        self._note(digest, answer.spent, {"value": answer.value, "said": answer.said})
        self.known[digest] = answer

    def add_failure(self, digest: str, reason: str, spent: Spent) -> None:
        """Keep what an attempt without an answer took."""
        self._note(digest, spent, {"failed": without_controls(reason)[:MOST_SHOWN]})

    def _note(self, digest: str, spent: Spent, more: Mapping[str, Any]) -> None:
        row = {"question": digest, **more, "calls": spent.calls, "tokens": spent.tokens, "cost": spent.cost}
        with self._lock:
            self._write(json.dumps(row) + "\n")

    def _write(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of all files of a folder, which somebody else may have written; one that was cut off is skipped.

    Raises:
        UserError: another one cannot be read.
    """
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line) if len(line) <= MOST_LINE else None
                if not isinstance(row, dict) or not isinstance(row["question"], str):
                    raise ValueError("no question")
                value = row.get("value", 0.0)
                if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
                    raise ValueError("a value that is none")
                _spent(row)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if line and not _is_cut(text, line):
                    raise UserError(
                        f"{path}, line {number}, is no answer ({error}): remove that line; its question is asked again"
                    ) from None
                continue
            yield row


def _is_cut(text: str, line: str) -> bool:
    """Return whether a process was killed while it wrote a line: the last one, or one that does not close."""
    return not line.endswith("}") or (text.endswith(line) and not text.endswith("\n"))


def _spent(row: Mapping[str, Any]) -> Spent:
    calls, tokens, cost = row["calls"], row["tokens"], row["cost"]
    if type(calls) is not int or type(tokens) is not int or not isinstance(cost, int | float):
        raise ValueError("counts that are none")
    if calls < 0 or tokens < 0 or not 0.0 <= cost < math.inf:
        raise ValueError("counts that are none")
    return Spent(calls=calls, tokens=tokens, cost=float(cost))


class Inquiries(Generic[Q]):
    """Asks questions in the background.

    Args:
        respondent: is asked.
        kept: the answers so far.
        settings: deadlines, attempts, budget.
        share: of the run's budget that is this process's, 0 .. 1.
        sleep: waits between attempts.
    """

    def __init__(
        self,
        respondent: Respondent[Q],
        kept: Kept,
        settings: AskedRewardConfig,
        share: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._respondent, self._kept, self._settings, self._sleep = respondent, kept, settings, sleep
        self._limits = {
            name: limit if limit is None else max(limit - getattr(kept.spent, name), 0.0) * share
            for name, limit in settings.limits.items()
        }
        self._lock = threading.Lock()
        self._spent = Spent()
        self._under_way: dict[str, Future[Answer]] = {}
        self._waiting: queue.SimpleQueue[tuple[str, Q, Future[Answer]]] = queue.SimpleQueue()
        self._threads = 0

    def ask(self, question: Q) -> Future[Answer]:
        """Ask a question, unless its answer is kept, or the same one is under way; returns at once."""
        digest = self._respondent.digest(question)
        with self._lock:
            if (there := self._under_way.get(digest)) is not None:
                return there
            answer: Future[Answer] = Future()
            if (known := self._kept.known.get(digest)) is not None:
                answer.set_result(known)
                return answer
            self._under_way[digest] = answer
            self._waiting.put((digest, question, answer))
            # Daemons: a run that ends does not wait for answers that nobody wants any more.
            if self._threads < min(self._settings.concurrency, len(self._under_way)):
                self._threads += 1
                threading.Thread(target=self._work, name=f"asking-{self._threads}", daemon=True).start()
        return answer

    def longest_s(self, questions: int) -> float:
        """Return the longest time that so many questions can take [s]."""
        settings = self._settings
        each = (settings.retries + 1) * (2.0 * settings.deadline_s + max(MOST_PAUSE_S, MOST_WAIT_S))
        return math.ceil(questions / settings.concurrency) * each

    def _work(self) -> None:
        while True:
            digest, question, answer = self._waiting.get()
            try:
                found = self._answer(digest, question)
            except BaseException as error:  # whoever waits for the answer raises it
                answer.set_exception(error)
            else:
                answer.set_result(found)
            with self._lock:
                del self._under_way[digest]

    def _answer(self, digest: str, question: Q) -> Answer:
        """Ask until there is an answer.

        Raises:
            RewardError: there is none.
        """
        settings = self._settings
        for attempt in range(settings.retries + 1):
            self._begin_call()
            try:
                answer = self._respondent.ask(question)
            except ChatError as error:
                spent = Spent(calls=1) + (error.spent if isinstance(error, NoAnswerError) else Spent())
                self._pay(spent)
                self._kept.add_failure(digest, str(error), spent)
                if not error.passes or attempt == settings.retries:
                    tried = f" after {attempt + 1} attempts" if attempt else ""
                    raise RewardError(f"a reward was asked for and not given{tried}: {error}") from None
                pause = min(settings.backoff_s * 2.0**attempt, MOST_PAUSE_S)
                self._sleep(max(pause, error.wait_s))
            else:
                spent = Spent(calls=1) + answer.spent
                self._pay(spent)
                kept = Answer(value=answer.value, said=answer.said, spent=spent)
                self._kept.add(digest, kept)
                return kept
        raise AssertionError("the last attempt returns or raises")

    def _begin_call(self) -> None:
        """Raise `RewardError` if this process's share of the budget is used up. Calls count from their beginning;
        tokens are known at their end, so that those under way may go a little beyond."""
        with self._lock:
            used = {"calls": float(self._spent.calls), "tokens": float(self._spent.tokens), "cost": self._spent.cost}
            used["calls"] += self._calling
            for name, limit in self._limits.items():
                if limit is not None and (used[name] + 1 > limit if name == "calls" else used[name] >= limit):
                    raise RewardError(
                        f"the budget of {self._respondent.name} is used up: algorithm.reward.max_{name} = "
                        f"{self._settings.limits[name]:g} for the whole run, of which {used[name]:g} were left to this "
                        "process and are spent. Raise it to continue"
                    )
            self._calling += 1

    _calling = 0
    """Calls that have begun and not been paid."""

    def _pay(self, spent: Spent) -> None:
        with self._lock:
            self._calling -= 1
            self._spent += spent
