"""A notice, once, where torch's threads spin beside data workers because torch was imported first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clipstream.utils import torch_state
from tests.support.pictures import make_shards
from tests.support.ranks import run_python

NOTICE = "notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores"
LOAD = """
import sys; sys.stderr = sys.stdout
import torch, clipstream
for threads, workers in (2, 0), (1, 1), (2, 1), (2, 1):
    print("with", threads, workers)
    torch.set_num_threads(threads)
    with clipstream.build_loader({shards!r}, 8, device="cpu", batch_size=4, workers=workers) as loader:
        next(iter(loader))
"""


def test_spinning_threads_are_noticed_once_beside_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(torch_state.VARIABLE, raising=False)
    told = run_python("-c", LOAD.format(shards=make_shards(tmp_path, [9]))).splitlines()
    lines = [line.partition(":")[0] if line.startswith(NOTICE) else line for line in told]
    begun = ["with 2 0", "with 1 1", "with 2 1", "notice", "with 2 1"]
    assert [line for line in lines if line in begun] == begun, told


@pytest.mark.parametrize(("first", "policy", "noticed"), [(True, None, 1), (False, None, 0), (True, "active", 0)])
def test_threads_spin_where_torch_came_first_and_nobody_said_how(
    first: bool, policy: str | None, noticed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch_state, "_late", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv(torch_state.VARIABLE, raising=False)
    if policy is not None:
        monkeypatch.setenv(torch_state.VARIABLE, policy)
    with monkeypatch.context() as patch:
        if not first:
            patch.delitem(sys.modules, "torch")
        torch_state.wait_passively()
        assert os.environ[torch_state.VARIABLE] == (policy or "passive")
    assert [torch_state.spinning_notice("cpu", 1) for _ in range(2)].count(None) == 2 - noticed
