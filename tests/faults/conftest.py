import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # where `begun` is
sys.path.append(str(Path(__file__).parents[1] / "envs" / "manager"))  # where the plug-in `toy_simulator` is
