"""Reports as a browser shows them: without a network, in light and in dark, and whatever names the files hold."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from reports import make_run

from embodyrl.runs.record import read_run
from embodyrl.tracking.report import write_report
from embodyrl.tracking.report.comparison import write_comparison

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--window-size=1100,1500"),
)


def open_in_browser(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'browser'}", *flags, page.as_uri()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=True)
    shutil.rmtree(folder / "browser")
    return done


def requested(log: Path) -> set[str]:
    """Return the addresses that were asked for, by Chromium's log of its network, without those of its own."""
    found = re.findall(r'"url":"((?:https?|wss?)://([^/"]*)[^"]*)"', log.read_text())
    return {address for address, host in found if not host.endswith((".google.com", ".googleapis.com"))}


def shot(page: Path, folder: Path, name: str, *flags: str) -> np.ndarray:
    open_in_browser(page, folder, f"--screenshot={folder / name}", *flags)
    return np.asarray(Image.open(folder / name).convert("RGB")).astype(int)


def test_every_chart_is_drawn_and_nothing_is_requested(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page, log = write_report(tmp_path / "run"), tmp_path / "net.json"
    charts = page.read_text().count('<div class="chart"')
    done = open_in_browser(page, tmp_path, "--dump-dom", f"--log-net-log={log}")
    assert done.stdout.count('data-drawn=""') == charts == 6
    assert "<html" in done.stdout and 'data-hacked="1"' not in done.stdout
    for complaint in ("Uncaught", "Content Security Policy", "ERROR:CONSOLE"):
        assert complaint not in done.stderr
    assert "clients2" in log.read_text() and not requested(log)


@pytest.mark.slow
def test_light_and_dark_are_what_the_reader_prefers(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        make_run(tmp_path / name, seed=seed, successes=9 * seed)
    page = write_comparison([read_run(tmp_path / name) for name in "ab"], tmp_path / "comparison.html")
    light = shot(page, tmp_path, "light.png")
    dark = shot(page, tmp_path, "dark.png", "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    narrow = shot(page, tmp_path, "narrow.png", "--window-size=420,1500")
    assert light[0, 0].tolist() == [255, 255, 255] and dark[0, 0].tolist() == [16, 21, 31]
    for pixels in (light, dark, narrow):
        blue = np.abs(pixels - [59, 130, 246]).sum(2) < 12  # the colour of the first line
        assert blue.sum() > 200
