import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # where `placement_services` is
