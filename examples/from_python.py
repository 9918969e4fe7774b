"""Training from Python: a run with a callback, its evaluation, and its policy in simulators that the script steps.

python examples/from_python.py [KEY=VALUE]...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import embodyrl


class StopWhenGood(embodyrl.Callback):
    """Prints the return of every fifth iteration, and stops the run when half of the episodes succeed."""

    def on_iteration(self, metrics: Mapping[str, float]) -> None:
        if metrics["iteration"] % 5 == 0:
            print(f"iteration {metrics['iteration']}  return {metrics.get('env/return', float('nan')):.1f}")

    def on_evaluation(self, result: embodyrl.Evaluation) -> bool:
        print(result.line())
        return result.success_once < 0.5


overrides = ["run.iterations=30", "run.eval_every=10", "eval.episodes=50", "run.dir=pendulum", *sys.argv[1:]]
run = embodyrl.train("gym_pendulum", overrides, callbacks=[StopWhenGood()])
print(f"{run.summary['env_steps']} env steps, stopped by {run.stopped_by}")

result = embodyrl.evaluate(run.path, episodes=20)
low, high = result.interval
print(f"success {result.success_once:.2f} [{low:.2f}, {high:.2f}]")

policy = embodyrl.load_policy(run.path / "last")
with embodyrl.make_envs("gym/pendulum", num_envs=4) as envs:
    observation = envs.reset()
    total = 0.0
    for _ in range(envs.spec.max_episode_steps):
        step = envs.step(policy.act(observation))
        observation, total = step.observation, total + step.rewards.sum()
print(f"stepped: return {total / envs.num_envs:.1f}")
