"""A notice, once, where torch's threads spin beside data workers because torch was imported first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pictures import make_shards
from tests.support.ranks import run_python

NOTICE = "notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores"
LOAD = """
for threads, workers in (2, 0), (1, 1), (2, 1), (2, 1):
    print("with", threads, workers)
    torch.set_num_threads(threads)
    with clipstream.build_loader({shards!r}, 8, device="cpu", batch_size=4, workers=workers) as loader:
        next(iter(loader))
"""


@pytest.mark.parametrize(
    ("imports", "policy", "noticed"),
    [
        ("import torch, clipstream", None, True),
        ("import clipstream, torch", None, False),
        ("import torch, clipstream", "active", False),
    ],
)
def test_spinning_threads_are_noticed_once_beside_workers(
    imports: str, policy: str | None, noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = f"import sys; sys.stderr = sys.stdout\n{imports}\n{LOAD.format(shards=make_shards(tmp_path, [9]))}"
    told = run_python("-c", code, **({} if policy is None else {"OMP_WAIT_POLICY": policy})).splitlines()
    lines = [line.partition(":")[0] if line.startswith(NOTICE) else line for line in told]
    begun = ["with 2 0", "with 1 1", "with 2 1", *["notice"] * noticed, "with 2 1"]
    assert [line for line in lines if line in begun or line == "notice"] == begun, told
