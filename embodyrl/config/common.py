"""The settings of a config that people change most, as a comment that its text can begin with."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from embodyrl.config.build import inline
from embodyrl.config.fields import docs_of
from embodyrl.config.rules import is_supervised
from embodyrl.config.schema import Config

EVERY = (
    *("seed", "run.iterations", "run.eval_every", "run.save_every", "eval.episodes"),
    *("env.tasks", "env.num_envs", "env.max_episode_steps", "model.checkpoint", "engine.optimizer.lr"),
)
ROLLOUTS = ("rollout.num_chunks", "rollout.chunk_size", "algorithm.gamma")
DEMONSTRATED = ("data.path", "data.batch_size", "data.steps")
WIDTH, WIDEST = 118, 60
"""Of a line and of a setting in it [characters]."""
INTRODUCTION = """\
# The settings that are changed most. These lines change nothing: edit the setting where it stands below, or write it on
# the command line as it is here. Every setting follows, with its meaning and its limits.
"""


def common_settings(config: Config) -> str:
    """Return the lines of a comment: about twenty settings as on the command line, with their meaning; of the groups
    that the algorithm does not use, none."""
    names = [*EVERY, *(() if is_supervised(config) else ROLLOUTS)]
    names += config.algorithm.common(config)
    if config.data.path is not None:
        names += DEMONSTRATED
    rows = [row for name in names if (row := _row(config, name)) is not None]
    wide = max(len(setting) for setting, _ in rows)
    texts = (textwrap.shorten(text, WIDTH - wide - 5, placeholder=" ...") for _, text in rows)
    lines = (f"#   {setting:<{wide}} {text}\n" for (setting, _), text in zip(rows, texts, strict=True))
    return INTRODUCTION + "".join(lines)


def _row(config: Config, name: str) -> tuple[str, str] | None:
    """Return a setting as on the command line and the first sentence about it; None if the config has no such
    setting."""
    *sections, last = name.split(".")
    section: Any = config
    for key in sections:
        section = getattr(section, key, None)
    if not hasattr(section, last):
        return None
    schema: type = type(section)
    setting = f"{name}={inline(getattr(section, last)).replace(', ', ',')}"
    sentence = re.split(r"\.(?: |$)", docs_of(schema).get(last, ""))[0]
    return setting if len(setting) <= WIDEST else f"{name}=...", sentence
