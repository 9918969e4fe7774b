"""Options of rewards that somebody is asked for, an episode at a time, and checks of them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from embodyrl.chat import VARIABLE, is_readable_on_the_way, why_no_server
from embodyrl.config.issues import ConfigIssue, NeededToLearn
from embodyrl.config.schema import Config, PlacementBackend, RewardConfig, setting
from embodyrl.config.values import show
from embodyrl.errors import did_you_mean, listed

HERE = "algorithm.reward"


class Gives(StrEnum):
    """What an answer says of an episode."""

    success = "success"
    progress = "progress"


@dataclass(frozen=True, kw_only=True)
class AskedRewardConfig(RewardConfig):
    """Somebody is asked about every episode that has ended, while the others go on; the answer, 0 .. 1, is the reward
    of its last action."""

    frames: int = setting(2, low=1, high=64)
    """Moments of an episode that are shown: its beginning and its end, and others evenly spread between them. 1: its
    end."""
    cameras: list[str] = setting([])
    """Cameras of env.cameras whose images are shown. []: all of them."""
    pixels: int = setting(512, low=16, high=4096)
    """Longest side of an image that is shown; larger ones are made smaller [pixels]."""
    concurrency: int = setting(8, low=1, high=256, resumable=True)
    """Questions of a process that are under way at the same time."""
    deadline_s: float = setting(60.0, low=0.1, high=3600.0, resumable=True)
    """Seconds within which an answer must be there [s]."""
    retries: int = setting(5, low=0, high=100, resumable=True)
    """Further attempts for a question without an answer: nobody there, too slow, too busy, no answer in what is said.
    After them the run ends: an answer is never made up."""
    backoff_s: float = setting(1.0, low=0.0, high=60.0, resumable=True)
    """Pause before the second attempt, twice as long before each further one; longer if the server asks for it [s]."""
    max_calls: int | None = setting(None, low=1, resumable=True)
    """Most attempts in the whole run, resumed or not; null: any number. Several processes have equal shares."""
    answers_from: str | None = setting(None, resumable=True)
    """Run whose answers are taken where the questions are the same, so that it can be repeated without asking; null:
    only this run's own."""
    max_disagreement: float | None = setting(None, low=0.0, high=1.0, resumable=True)
    """End the run if answers (0.5 or more: solved) contradict the simulator's success in a larger share of an
    iteration's episodes; null: only show it, as env/disagreement."""
    disagreement_episodes: int = setting(32, low=1, only_with={"algorithm.reward.max_disagreement": ()}, resumable=True)
    """Fewest episodes of an iteration for which that is decided."""

    @property
    def limits(self) -> Mapping[str, float | None]:
        """Budget of the run, see `rollout.inquiries.Spent`; None: no limit."""
        return {"calls": self.max_calls}

    def fault_of(self, metrics: Mapping[str, float]) -> str | None:
        """See `RewardConfig`: the answers contradict the simulator too often."""
        share, episodes = metrics.get("env/disagreement", 0.0), metrics.get("env/episodes", 0.0)
        few = episodes < self.disagreement_episodes
        if few or self.max_disagreement is None or share <= self.max_disagreement:
            return None
        return (
            f"the answers about {share:.0%} of the {episodes:.0f} episodes of this iteration are not what the "
            f"simulator says of them, more than algorithm.reward.max_disagreement = {self.max_disagreement:g} "
            "allows: see what was said in the run's folder answers, and start a new run with another "
            "algorithm.reward.rubric, frames or model; with a higher limit this one can continue"
        )


RUBRIC = (
    "You see images of a robot in a simulator, in the order of time, from the beginning of an attempt to its end. "
    "Judge by what the images show, not by what is likely. If you cannot see it, it is not done."
)


@dataclass(frozen=True, kw_only=True)
class VLMRewardConfig(AskedRewardConfig):
    """A vision-language model is asked that a server holds which speaks OpenAI's chat completions: vLLM, Ollama, a
    cloud."""

    url: str | None = setting(None, resumable=True)
    """Where the server is: http://localhost:8000/v1, https://host/v1."""
    model: str | None = setting(None)
    """Name of the model there."""
    key_variable: str | None = setting(None, resumable=True)
    """Environment variable with the key of the server, as in OPENAI_API_KEY; the key itself is in no file. null: it
    wants none."""
    gives: Gives = setting(Gives.success)
    """success: whether the task is done at the end (1 or 0). progress: how much of it is, 0 .. 1."""
    rubric: str = setting(RUBRIC)
    """How it is to judge. The task description and the form of the answer are added."""
    temperature: float | None = setting(0.0, low=0.0, high=2.0)
    """Of the model; null: it is not sent."""
    max_answer_tokens: int | None = setting(300, low=1)
    """Most tokens of an answer (max_tokens); null: it is not sent, as some models want."""
    max_tokens: int | None = setting(None, low=1, resumable=True)
    """Most tokens of questions and answers in the whole run, as the server counts them; null: any number."""
    max_cost: float | None = setting(None, above=0.0, resumable=True)
    """Most money for the whole run, in the unit of the prices; null: any."""
    price_in: float = setting(0.0, low=0.0, resumable=True)
    """Price of a million tokens of questions."""
    price_out: float = setting(0.0, low=0.0, resumable=True)
    """Price of a million tokens of answers."""

    @property
    def limits(self) -> Mapping[str, float | None]:
        """See `AskedRewardConfig`."""
        return {**super().limits, "tokens": self.max_tokens, "cost": self.max_cost}


# ---- checks


def check_vlm(config: Config) -> Iterator[ConfigIssue]:
    """Check that there is a server, a model, a key if one is named, and something to be shown."""
    settings = config.algorithm.parts()["reward"]
    assert isinstance(settings, VLMRewardConfig), "its registration says so"
    yield from check_asked(config, settings)
    where = f"{HERE}.url"
    if settings.url is None:
        yield ConfigIssue((where, f"{HERE}.name"), f"{where} is null", "name a server: http://localhost:8000/v1")
    elif (reason := why_no_server(settings.url)) is not None:
        yield ConfigIssue(where, f"{where} is no address of a server of chat completions", reason)
    if not settings.model:
        yield ConfigIssue(f"{HERE}.model", f"{HERE}.model is {show(settings.model)}", "name the server's model")
    name, where = settings.key_variable, f"{HERE}.key_variable"
    if name is not None and VARIABLE.fullmatch(name) is None:
        # What stands there may be the key.
        yield ConfigIssue(
            where, f"{where} is no name of an environment variable", "want capitals, digits and _, as in VLM_API_KEY"
        )
    elif name is not None and not os.environ.get(name, "").strip():
        yield NeededToLearn(
            where,
            f"the environment variable {name} is not set",
            f"set it to the key of the server (export {name}=...), or {where} to null if it wants none",
        )
    if settings.max_cost is not None and not (settings.price_in or settings.price_out):
        yield ConfigIssue(
            (f"{HERE}.max_cost", f"{HERE}.price_in", f"{HERE}.price_out"),
            f"{HERE}.max_cost = {settings.max_cost:g}, but nothing has a price",
            f"set {HERE}.price_in and {HERE}.price_out, or {HERE}.max_cost to null",
        )


def check_asked(config: Config, settings: AskedRewardConfig) -> Iterator[ConfigIssue]:
    """Check that there is something to be shown about whole episodes, and a place for answers."""
    env, what = config.env, f"algorithm.reward {settings.name!r}"
    if not env.cameras:
        yield ConfigIssue(
            (f"{HERE}.name", "env.cameras"),
            f"{what} shows images of episodes, and there are none",
            "name cameras in env.cameras, or take a simulator that has some",
        )
    for number, camera in enumerate(settings.cameras):
        if env.cameras and camera not in env.cameras:
            yield ConfigIssue(
                (f"{HERE}.cameras.{number}", "env.cameras"),
                f"{HERE}.cameras names {camera!r}, which env.cameras does not",
                did_you_mean(camera, env.cameras, otherwise=f"name some of {listed(env.cameras)}"),
            )
    if config.placement.backend is not PlacementBackend.local:
        yield ConfigIssue(
            (f"{HERE}.name", "placement.backend"),
            f"{what} keeps answers in the run's folder, which processes on other machines do not have",
            "set placement.backend to local",
        )
    if settings.answers_from is not None and not Path(settings.answers_from).is_dir():
        yield NeededToLearn(
            f"{HERE}.answers_from",
            f"{HERE}.answers_from = {settings.answers_from!r:.80} is no folder",
            "name a run, or set it to null",
        )
    episodes = env.num_envs * config.rollout.episodes_per_slot
    if settings.max_disagreement is not None and settings.disagreement_episodes > episodes:
        yield ConfigIssue(
            (f"{HERE}.disagreement_episodes", "env.num_envs"),
            f"{HERE}.disagreement_episodes = {settings.disagreement_episodes}, and an iteration has {episodes} "
            "episodes, so that it would never be decided",
            f"set it to {episodes} or less",
        )


def vlm_notes(config: Config) -> Iterator[str]:
    """Yield a note if others could read the key on its way."""
    settings = config.algorithm.parts()["reward"]
    assert isinstance(settings, VLMRewardConfig), "its registration says so"
    if settings.url is not None and settings.key_variable is not None and is_readable_on_the_way(settings.url):
        yield (
            f"{HERE}.url = {settings.url} is not encrypted: whoever is between can read the key of "
            f"{settings.key_variable} and the images; use https, or a tunnel to localhost"
        )
