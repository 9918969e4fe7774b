"""A robot that does not wait for its policy: it asks for the next chunk while it executes the last one.

The policy is served, here by `embodyrl serve`; the robot is a simulator that is stepped in real time.

    embodyrl serve RUN model.rtc=5
    python examples/async_client.py ws://127.0.0.1:8000 metaworld/faucets

A robot of yours takes the place of `envs`, and `openpi_client.WebsocketClientPolicy.infer` that of `policy.act`, with
"executed" and "delay" beside the observation.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

import embodyrl

if len(sys.argv) < 3:
    sys.exit("usage: python examples/async_client.py ws://host:port ENV [STEPS]")
url, simulator = sys.argv[1:3]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 200
late = deque([1], maxlen=10)
"""Control steps that the last answers took."""

with (
    embodyrl.make_envs(simulator, num_envs=1) as envs,
    embodyrl.RemotePolicy(url) as policy,
    ThreadPoolExecutor(1) as pool,
):
    observation, period = envs.reset(), 1.0 / envs.spec.control_frequency
    chunk, begun = policy.act(observation)[0], 0  # the first chunk is waited for; it begins at control step `begun`
    answer: Future[np.ndarray] | None = None
    asked, solved, waited, next_step = 0, False, 0, time.monotonic()
    for step in range(steps):
        if answer is None and step - asked >= max(1, len(chunk) // 2):  # half of the chunk is left
            told = {"executed": step - asked, "delay": max(late)}
            answer, asked = pool.submit(policy.act, observation, **told), step
        # Nothing is left to be done without the answer: now even this robot has to wait.
        starved = step - begun >= len(chunk)
        waited += starved
        if answer is not None and (answer.done() or starved):
            chunk, begun = answer.result()[0], asked
            late.append(step - asked)
            answer = None
        result = envs.step(chunk[step - begun][None, None])
        observation, solved = result.observation, solved or bool(result.success.any())
        if result.ended[0]:
            break
        next_step = max(next_step + period, time.monotonic())
        time.sleep(next_step - time.monotonic() if next_step > time.monotonic() else 0.0)
print(f"{step + 1} control steps, {'solved' if solved else 'not solved'}")
print(f"answers took {np.mean(late):.1f} control steps, {max(late)} at most; the robot waited {waited} times")
