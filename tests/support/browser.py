"""Rendering a page in headless Chromium: its content and its console errors."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ranks import TIMEOUT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def look(page: Path, width: int, *, dark: bool = False) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what the console complains of.

    Args:
        page: an HTML file.
        width: of the window, in pixels.
        dark: whether the page is asked for its dark colours.
    """
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--window-size={width},2400", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={page.parent / 'browser'}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command += ["--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
