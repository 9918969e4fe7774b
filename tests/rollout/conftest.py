import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # where `known_numbers` and the plug-in `counter_simulator` are
