"""Loaders that copy to a GPU: from memory that forked workers fill, and is registered with CUDA."""

from __future__ import annotations

import os
import signal
from itertools import islice
from typing import Any

import pytest
import torch

from clipstream.data.loader.loader import Loader
from clipstream.errors import DataError
from tests.support.loaders import data, digest, loader

SLEEP = 20_000_000  # clock cycles: about 10 ms, longer than a batch takes


def loader_on(device: str, shards: list[str], workers: int = 2, **changes: Any) -> Loader:
    """A loader of batches on the device."""
    return loader(data(shards, workers=workers, **changes), device=device)


def digests(stream: Loader, count: int) -> list[str]:
    return [digest([batch.to("cpu")]) for batch in islice(stream, count)]


@pytest.fixture
def expected(shards: list[str]) -> list[str]:
    """The digests of 12 batches without workers on the CPU."""
    with loader_on("cpu", shards, 0) as plain:
        return digests(plain, 12)


def test_batches_of_forked_workers_are_those_of_the_cpu(device: str, shards: list[str], expected: list[str]) -> None:
    for _ in range(3):  # one after the other
        with loader_on(device, shards) as stream:
            assert digests(stream, 12) == expected
            if device != "cpu":
                assert torch.from_numpy(stream._ring.bytes()).is_pinned()
    with loader_on(device, shards) as one, loader_on(device, shards) as two:
        for number in range(8):
            assert digests(one, 1) == digests(two, 1) == [expected[number]]


def test_no_buffer_is_filled_again_while_its_copy_is_delayed(cuda: str, shards: list[str], expected: list[str]) -> None:
    with loader_on(cuda, shards, prefetch=1) as stream:
        copies: Any = stream._prefetch
        found = []
        for _ in range(12):
            with torch.cuda.stream(copies.stream):
                torch.cuda._sleep(SLEEP)  # before the copy of the next batch
            batch = next(stream)
            torch.cuda._sleep(SLEEP)  # the step runs while later batches are copied
            found.append(digest([batch.to("cpu")]))
        assert found == expected


def test_memory_that_cannot_be_registered_is_copied_as_it_is(
    cuda: str, shards: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = torch.cuda.cudart()
    register = runtime.cudaHostRegister
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda address, size, flags: register(0, size, flags))  # no memory
    with loader_on(cuda, shards) as stream:
        assert digests(stream, 12) == expected
        assert not torch.from_numpy(stream._ring.bytes()).is_pinned()


def test_a_killed_worker_leaves_cuda_as_it_was(device: str, shards: list[str]) -> None:
    with loader_on(device, shards) as stream:
        next(stream)
        os.kill(stream.worker_pids()[0], signal.SIGKILL)
        with pytest.raises(DataError, match="worker"):
            digests(stream, 40)
    assert float(torch.ones(1000, device=device).sum()) == 1000
    with loader_on(device, shards) as stream:
        assert len(digests(stream, 3)) == 3
