import os
import subprocess
import sys

import pytest

CODE = """
import sys
sys.argv[1:] = []
from embodyrl.cli.main import main
try:
    main()
finally:
    sys.stderr.write(" ".join(name for name in ("torch", "omegaconf", "hydra", "numpy") if name in sys.modules))
"""


def complete(words):
    """Return what bash would offer for a line that ends in its last word."""
    env = {
        **os.environ,
        "_EMBODYRL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env, timeout=240)
    return done.stdout.split(), done.stderr.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run gym_pend", ["gym_pendulum", "gym_pendulum_sac"]),
        ("run my.yaml env=gym/p", ["env=gym/pendulum", "env=gym/pendulum_rgb"]),
        ("run engine.dev", ["engine.device="]),
        ("run engine.device=", ["engine.device=auto", "engine.device=cpu", "engine.device=cuda"]),
        ("run run.save_async=", ["run.save_async=true", "run.save_async=false"]),
        ("eval DIR eval.epi", ["eval.episodes="]),
        ("list si", ["simulators", "sinks"]),
        ("run nothing.like.it", []),
    ],
)
def test_what_is_completed_without_heavy_libraries(line, expected):
    offered, imported = complete(["embodyrl", *line.split()])
    assert offered == expected
    assert imported == []
