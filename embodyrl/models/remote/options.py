"""Options of a policy that a server holds. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from embodyrl.config.infos import ModelInfo
from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.schema import Config, ModelConfig, setting
from embodyrl.errors import did_you_mean, listed
from embodyrl.servers import PROMPT, STATE, why_no_url


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(ModelConfig):
    """A policy that a server holds, which speaks openpi's protocol: `embodyrl serve`, openpi's own, or another one. A
    token that it wants is read from the environment variable EMBODYRL_TOKEN, so that no file holds it."""

    url: str | None = setting(None)
    """Where the server is: ws://host:port."""
    keys: dict[str, str] = setting({})
    """Keys of its messages, `{name: key}`: the name is that of a camera of env.cameras, `state` or `prompt`. Those that
    are not listed here are what the server names, else those of openpi's LIBERO clients."""
    deadline_s: float = setting(60.0, low=0.1, high=86400.0)
    """Seconds within which an answer must be there, lost connections included [s]."""


class RemoteInfo(ModelInfo):
    """A policy that a server holds."""

    def untrainable(self) -> tuple[str, str]:
        """See `ModelInfo`."""
        return (
            "its weights are those of a server, and nothing here can change them",
            "evaluate it (embodyrl eval ws://host:port --config CONFIG), record it (embodyrl collect CONFIG --policy "
            "ws://host:port --out DIR --episodes N) and train a model here on that, or set model.name to another one",
        )

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Check that a server is named, and nothing that only weights here could do."""
        settings = config.model
        assert isinstance(settings, RemoteConfig)
        reason = "it is null: want ws://host:port" if settings.url is None else why_no_url(settings.url)
        if reason is not None:
            found = "" if settings.url is None else f" = {settings.url!r:.80}"
            yield ConfigIssue("model.url", f"model.url{found} is no URL of a policy server", reason)
        if settings.checkpoint is not None:
            yield ConfigIssue(
                ("model.checkpoint", "model.name"),
                f"model.checkpoint = {settings.checkpoint!r:.80}, but model {self.name!r} has no weights here: those "
                "of the server act",
                "set model.checkpoint to null, or model.name to the model that these weights are of",
                fix={"model.checkpoint": LEAVE_OUT},
            )
        if config.eval.sample:
            yield ConfigIssue(
                ("eval.sample", "model.name"),
                f"eval.sample is true, but model {self.name!r} draws nothing: the server chooses its actions, and "
                "does not say how",
                "set eval.sample to false",
                fix={"eval.sample": LEAVE_OUT},
            )
        names = [*config.env.cameras, STATE, PROMPT]
        for name in settings.keys:
            if name not in names:
                near, there = did_you_mean(name, names), f"it may name {listed(names)}"
                yield ConfigIssue(
                    (("model", "keys", name), ("env", "cameras")),
                    f"model.keys names {name!r}, which is no camera of env.cameras, nor state or prompt",
                    f"{near} ({there})" if near else there,
                )


def model_at(url: str) -> dict[str, Any]:
    """Return the options of the model that a server at a URL holds."""
    return {"name": "remote", "url": url}
