"""pyright knows the type of everything public, as a checker of a user's program sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clipstream
from tests.support.forks import ROOT

DOCUMENTED = ("errors", "losses")  # modules whose names are public beside `__all__`
TIMEOUT = 600


def verified() -> dict[str, Any]:
    """`pyright --verifytypes`: the symbols of the package, by name."""
    pytest.importorskip("pyright")
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "clipstream", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **where}, capture_output=True, text=True, timeout=TIMEOUT
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run: {done.stderr[-200:]}")
    return {symbol["name"]: symbol for symbol in json.loads(done.stdout)["typeCompleteness"]["symbols"]}


@pytest.mark.ci
def test_every_public_type_is_known() -> None:
    """Also of what the public names lead to: a class is known where all its members and base classes are."""
    symbols = verified()
    names = {f"clipstream.{name}" for name in clipstream.__all__ if name != "__version__"}
    modules = {f"clipstream.{module}" for module in DOCUMENTED}
    pattern = re.compile(rf"clipstream\.({'|'.join(DOCUMENTED)})\.\w+")
    public = {name for name in symbols if name in names | modules or pattern.match(name)}
    assert names <= public and len(public) > 200
    wrong = {
        name: [line["message"] for line in symbols[name]["diagnostics"]]
        for name in public
        if symbols[name]["isTypeAmbiguous"] or not symbols[name]["isTypeKnown"]
    }
    assert not wrong
