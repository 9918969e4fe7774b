"""Rewards that somebody is asked for: images of each episode and its task description go out when it has ended, while
the others go on, and the answers are in the rollout when it ends.

Shapes: `B` slots of a decision, `M` slots of results, `V` cameras, `H, W` pixels, `K` chunks, `C` actions in a chunk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLateError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.algorithms.asked import AskedRewardConfig, Gives, VLMRewardConfig
from embodyrl.chat import MOST_SHOWN, ChatError, ChatServer, Question, Reply
from embodyrl.errors import RewardError, without_controls
from embodyrl.rollout.hooks import Decision, Hook
from embodyrl.rollout.inquiries import Answer, Inquiries, Kept, NoAnswerError, Respondent, Spent
from embodyrl.rollout.judging import Seat

if TYPE_CHECKING:
    from embodyrl.envs.manager import StepResult

FORMS = {
    Gives.success: ('{"success": true} or {"success": false}', "whether the task is done at the end"),
    Gives.progress: ('{"progress": 0.0}, with a number from 0 to 1', "how much of the task is done at the end"),
}
"""Form of an answer, and what it says."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What somebody sees of an episode."""

    task_description: str
    frames: Sequence[NDArray[np.uint8]]
    """Images `[V, H, W, 3]` in the order of time."""
    cameras: tuple[str, ...]


class EpisodeImages:
    """Images of an episode, at most twice as many as are shown, evenly spread over what has passed of it.

    Args:
        frames: that are shown at its end.
    """

    def __init__(self, frames: int) -> None:
        self._frames, self._stride, self._seen = frames, 1, 0
        self._kept: list[NDArray[np.uint8]] = []

    def add(self, images: NDArray[np.uint8]) -> None:
        """Keep a copy of the images of a moment, if it is one of those that are kept."""
        if self._frames > 1 and self._seen % self._stride == 0:
            if len(self._kept) == 2 * self._frames:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
            if self._seen % self._stride == 0:
                self._kept.append(images.copy())
        self._seen += 1

    def end(self, images: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Return what is shown, given the last images."""
        count = min(self._frames - 1, len(self._kept))
        # The last of them is the end, so that these are spread from the beginning to before it.
        chosen = [round(each * len(self._kept) / max(count, 1)) for each in range(count)]
        return [*(self._kept[each] for each in chosen), images.copy()]


class AskedReward(Hook):
    """Asks about every episode that ends.

    Args:
        inquiries: asks.
        settings: what is shown.
        num_envs: slots of this process.
        cameras: names of an observation's images, of one moment.
    """

    def __init__(
        self, inquiries: Inquiries[Shown], settings: AskedRewardConfig, num_envs: int, cameras: tuple[str, ...]
    ) -> None:
        self._inquiries, self._settings, self._num_envs = inquiries, settings, num_envs
        self._cameras = tuple(settings.cameras) or cameras
        # The newest images come first where there are those of earlier decisions, too.
        self._views = [cameras.index(camera) for camera in self._cameras]
        self._numbers = np.full(num_envs, -1, np.int64)
        self._images: list[EpisodeImages] = [EpisodeImages(settings.frames) for _ in range(num_envs)]
        self._asked: dict[tuple[int, int], Future[Answer]] = {}
        """By slot and number of the episode."""

    def begin(self, slots: NDArray[np.int64]) -> None:
        """See `Hook`."""
        self._numbers[slots] = -1

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """See `Hook`: keep what is seen."""
        images = decision.observation.images
        assert images is not None, "the config rules ask for cameras"
        for row, (slot, number) in enumerate(zip(decision.slots.tolist(), decision.numbers.tolist(), strict=True)):
            if self._numbers[slot] != number:
                self._numbers[slot], self._images[slot] = number, EpisodeImages(self._settings.frames)
            self._images[slot].add(images[row, self._views])
        return {}

    def judge(self, slots: NDArray[np.int64], result: StepResult) -> tuple[StepResult, dict[str, NDArray[Any]]]:
        """See `Hook`: ask about the episodes that have ended; adds `answers [M, C]`, which are filled in later."""
        final = result.final_observation
        assert final.images is not None, "the config rules ask for cameras"
        for row in np.flatnonzero((result.terminated | result.truncated) & ~result.lost).tolist():
            slot = int(slots[row])
            shown = Shown(
                task_description=final.task_descriptions[row],
                frames=self._images[slot].end(final.images[row, self._views]),
                cameras=self._cameras,
            )
            self._asked[slot, int(self._numbers[slot])] = self._inquiries.ask(shown)
        return result, {"answers": np.zeros(result.success.shape, np.float32)}

    def complete(self, columns: dict[str, Tensor]) -> None:
        """See `Hook`: wait for the answers.

        Raises:
            RewardError: there is none to a question.
        """
        asked, self._asked = self._asked, {}
        longest_s = self._inquiries.longest_s(len(asked))
        for (slot, number), future in asked.items():
            try:
                answer = future.result(timeout=longest_s)
            except TooLateError:
                raise RewardError(f"a reward was asked for and not given within {longest_s:g} s") from None
            for column in range(slot, columns["episode"].shape[1], self._num_envs):
                rows = torch.nonzero((columns["episode"][:, column] == number) & columns["valid"][:, column])
                if len(rows):
                    row = int(rows[-1])
                    columns["answers"][row, column, int(columns["steps"][row, column]) - 1] = answer.value


# ---- a vision-language model


def vlm_reward(seat: Seat) -> AskedReward:
    """Return the hook of reward `vlm`."""
    settings = seat.config.algorithm.parts()["reward"]
    assert isinstance(settings, VLMRewardConfig) and seat.folder is not None, "its registration and rules say so"
    return asked_reward(seat, settings, VisionLanguageModel(settings), seat.folder)


def asked_reward(seat: Seat, settings: AskedRewardConfig, respondent: Respondent[Shown], folder: Path) -> AskedReward:
    """Return the hook of a reward that somebody is asked for, with this process's share of the budget."""
    others = [] if settings.answers_from is None else [Path(settings.answers_from)]
    kept = Kept(folder, f"envs-{seat.slots.start:05d}", others)
    inquiries = Inquiries(respondent, kept, settings, len(seat.slots) / seat.config.env.num_envs)
    return AskedReward(inquiries, settings, len(seat.slots), seat.cameras)


class VisionLanguageModel:
    """Says of an episode whether it was a success, or how far it came.

    Args:
        settings: the server, the rubric, and what an answer says.
    """

    def __init__(self, settings: VLMRewardConfig) -> None:
        assert settings.url is not None and settings.model is not None, "the config rules ask for them"
        self._settings = settings
        form, what = FORMS[settings.gives]
        self._rubric = f"{settings.rubric}\n\nSay {what}. Answer with a JSON object alone: {form}."
        body = {"temperature": settings.temperature, "max_tokens": settings.max_answer_tokens}
        self._server = ChatServer(
            url=settings.url,
            model=settings.model,
            key_variable=settings.key_variable,
            deadline_s=settings.deadline_s,
            body={name: value for name, value in body.items() if value is not None},
        )

    @property
    def name(self) -> str:
        """See `Respondent`."""
        return f"{self._server.model} at {self._server.url}"

    def digest(self, question: Shown) -> str:
        """See `Respondent`."""
        return self._server.digest(self._question(question))

    def ask(self, question: Shown) -> Answer:
        """See `Respondent`."""
        reply = self._server.ask(self._question(question))
        spent = self._spent(reply)
        try:
            value = value_of(reply.text, self._settings.gives)
        except ValueError as error:
            said = without_controls(reply.text)[:MOST_SHOWN]
            raise NoAnswerError(ChatError(f"{self.name} {error}: {said!r}", passes=True), spent) from None
        return Answer(value=value, said=without_controls(reply.text)[:MOST_SHOWN], spent=spent)

    def _spent(self, reply: Reply) -> Spent:
        settings, counts = self._settings, (reply.prompt_tokens, reply.completion_tokens)
        limited = settings.max_tokens is not None or settings.max_cost is not None
        if limited and None in counts:
            reason = "does not say how many tokens it took, which algorithm.reward.max_tokens and max_cost need"
            raise ChatError(f"{self.name} {reason}", passes=False)
        asked, answered = (count or 0 for count in counts)
        cost = (asked * settings.price_in + answered * settings.price_out) / 1e6
        return Spent(tokens=asked + answered, cost=cost)

    def _question(self, shown: Shown) -> Question:
        parts: list[str | NDArray[np.uint8]] = [f"Task: {shown.task_description}"]
        for number, views in enumerate(shown.frames, 1):
            place = {len(shown.frames): "the end", 1: "the beginning"}.get(number, "later")
            for camera, view in zip(shown.cameras, views, strict=True):
                parts += [f"Moment {number} of {len(shown.frames)} ({place}), camera {camera}:"]
                parts += [smaller(view, self._settings.pixels)]
        return Question(rubric=self._rubric, parts=parts)


def smaller(image: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """Return an image `[H, W, 3]` whose longer side is at most `longest`."""
    from PIL import Image

    height, width = image.shape[:2]
    if max(height, width) <= longest:
        return np.ascontiguousarray(image)
    factor = longest / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX))


def value_of(text: str, gives: Gives) -> float:
    """Return what an answer says, 0 .. 1: its last JSON object counts.

    Raises:
        ValueError: it says nothing of the kind.
    """
    for found in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            said = json.loads(found)
        except (ValueError, RecursionError):
            continue
        value = said.get(gives.value)
        if gives is Gives.success and isinstance(value, bool):
            return float(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if gives is Gives.progress and is_number and math.isfinite(value) and 0.0 <= value <= 1.0:
            return float(value)
    raise ValueError(f"answers without {FORMS[gives][0]}")
