"""A plug-in for `async_rollouts.py`: a stage that sleeps, as a slow reward does, or learning on a GPU."""

from __future__ import annotations

import os
import time

from embodyrl.pipelines.pipeline import Iteration
from embodyrl.registry import STAGES


def sleep_a_while(iteration: Iteration) -> None:
    """Sleep for `SLEEP_S` seconds."""
    time.sleep(float(os.environ["SLEEP_S"]))


STAGES.register("sleep_a_while", target=sleep_a_while, summary="sleeps as long as SLEEP_S says")
