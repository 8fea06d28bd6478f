"""Owns looking at a page in headless Chromium: its pictures and its complaints; never used by the package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import TIMEOUT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def look(page: Path, width: int, picture: Path | None = None, *, dark: bool = False) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what the console complains of.

    Args:
        page: an HTML file.
        width: of the window, in pixels.
        picture: gets a screenshot.
        dark: whether the page is asked for its dark colours.
    """
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += [f"--window-size={width},2400", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=3000"]
    flags += [f"--user-data-dir={page.parent / 'browser'}"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    if picture is not None:
        _run([*flags, f"--screenshot={picture}", page.as_uri()])
    done = _run([*flags, "--dump-dom", page.as_uri()])
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def _run(flags: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(CHROMIUM), *flags], capture_output=True, text=True, timeout=TIMEOUT, check=True)
