"""The verb env: what a bug report needs, and nothing that identifies a person."""

from __future__ import annotations

import json
import platform
import socket

import torch

from clipstream import __version__
from tests.support.commands import python


def test_versions_and_hardware_are_printed() -> None:
    done = python("-m", "clipstream", "env", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    expected = {"clipstream": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    assert found.items() >= expected.items()
    assert found.keys() >= {"webdataset", "open_clip_torch", "system", "cpu", "memory", "gpu", "cuda"}
    assert socket.gethostname() not in found.values()
