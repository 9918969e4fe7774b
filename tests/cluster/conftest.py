from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent / "inside"), str(Path(__file__).parents[1] / "runner")]

# What is inside needs a network of its own, which `test_cluster.py` makes.
collect_ignore_glob = [] if "EMBODYRL_IN_NETWORK" in os.environ else ["inside/*"]
