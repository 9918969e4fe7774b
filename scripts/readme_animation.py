"""Writes the README's animation, docs/images/tiny_vla.webp, from the video of a run: docs/results/tiny_vla.mp4, the
first six held-out episodes of tiny_oft_grpo after reinforcement (docs/results/tiny_vla.md says how to repeat it)."""

from __future__ import annotations

from pathlib import Path

import av
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
VIDEO = ROOT / "docs" / "results" / "tiny_vla.mp4"
TARGET = ROOT / "docs" / "images" / "tiny_vla.webp"
WIDTH = 576
STEP_MS, LAST_MS = 90, 2000
"""Time that a frame is shown, and the last one [ms]."""


def main() -> None:
    """Write the file."""
    with av.open(str(VIDEO)) as video:
        frames = [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in video.decode(video=0)]
    height = round(frames[0].height * WIDTH / frames[0].width)
    frames = [frame.resize((WIDTH, height)) for frame in frames]
    times = [STEP_MS] * (len(frames) - 1) + [LAST_MS]
    TARGET.parent.mkdir(exist_ok=True)
    frames[0].save(TARGET, save_all=True, append_images=frames[1:], duration=times, loop=0, quality=70, method=6)
    print(f"{TARGET.relative_to(ROOT)}: {len(frames)} frames, {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
