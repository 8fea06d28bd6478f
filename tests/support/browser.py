"""Rendering a page in headless Chromium: its content and its console errors."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def look_in_frames(path: Path, shown: Iterable[tuple[int, str]], script: str, *, dark: bool = False) -> list[Any]:
    """What a script in each page, in a frame of that width, tells of it by `tell(value)`; narrow frames first.

    Chromium's own window is never narrower than 500 pixels. The pages' content security policy would refuse the script.
    """
    policy = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
    tell = "const tell = value => { parent.document.title += JSON.stringify([innerWidth, value]) + '|'; };"
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="'
        f'{html.escape(policy.sub("", page).replace("</body>", f"<script>{tell}{script}</script></body>"))}"></iframe>'
        for width, page in shown
    )
    path.write_text(f"<title></title>{frames}")
    dom, complaints = look(path, 2600, dark=dark)
    assert complaints == []
    found = re.search(r"<title>(.*?)\|</title>", dom)
    assert found is not None
    return [value for _, value in sorted(map(json.loads, html.unescape(found[1]).split("|")), key=lambda one: one[0])]
