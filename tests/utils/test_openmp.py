"""A notice, once, where torch's threads spin beside data workers because torch was imported first."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest
import torch

import clipstream
from clipstream.utils import torch_state

NOTICE = "notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores"


@pytest.mark.parametrize(
    ("first", "policy", "threads", "noticed"),
    [(True, None, 2, 1), (True, None, 1, 0), (False, None, 2, 0), (True, "active", 2, 0)],
)
def test_spinning_threads_are_noticed_once_beside_workers(
    first: bool, policy: str | None, threads: int, noticed: int, shards: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch_state, "_late", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv(torch_state.VARIABLE, raising=False)
    if policy is not None:
        monkeypatch.setenv(torch_state.VARIABLE, policy)
    with monkeypatch.context() as patch:
        if not first:
            patch.delitem(sys.modules, "torch")
        torch_state.wait_passively()
        assert os.environ[torch_state.VARIABLE] == (policy or "passive")
    for workers, wanted in ((0, 0), (1, noticed), (1, 0)):
        with clipstream.build_loader(shards, 8, device="cpu", batch_size=4, workers=workers) as loader:
            next(iter(loader))
        assert "".join(capsys.readouterr()).count(NOTICE) == wanted
    assert not multiprocessing.active_children()
