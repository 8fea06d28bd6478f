"""Batches are copied to the device ahead of use, and no buffer is overwritten while it is read."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest

from clipstream.data.loader import batch_buffers
from clipstream.data.loader.batch_buffers import BufferRing, BufferShape, HostBatches, device_prefetch_for
from clipstream.data.loader.loader import Loader
from clipstream.data.order.lanes import DataState
from clipstream.data.pipeline import training_loader
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.utils import torch_state
from tests.support.fake_cuda import SECONDS, FakeCuda, SlowCopies
from tests.support.forks import wait_until
from tests.support.loaders import INPUTS, data, digest, is_filled


def loader(settings: DataSettings, **more: Any) -> Loader:
    return training_loader(settings, INPUTS, world=World(), seed=3, **more)


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (2, 1), (1, 3)])
def test_batches_are_the_same_when_they_are_copied_ahead(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, workers: int, prefetch: int
) -> None:
    with loader(data(shards)) as plain:
        expected = [digest([next(plain)]) for _ in range(24)]
    copies = SlowCopies()
    monkeypatch.setattr("clipstream.data.loader.loader.device_prefetch_for", lambda device, ring, zero_copy: copies)
    settings = data(shards, workers=workers, prefetch=prefetch)
    found = []
    with loader(settings) as stream:
        for step in range(12):
            batch = next(stream)
            wait_until(lambda: is_filled(stream))
            time.sleep(SECONDS * (step % 3))  # a step that may be shorter than the copy
            copies.copies[step].join()
            found.append(digest([batch]))
        state = DataState.merge([stream.state()])
    assert state.step == 12, "what was copied ahead is not counted as trained on"
    assert copies.early > 3 or workers == 0
    monkeypatch.undo()
    with loader(settings, start=state) as stream:
        found += [digest([next(stream)]) for _ in range(12)]
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("code", [0, 801])
def test_memory_is_page_locked_after_the_fork_where_cuda_can(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, workers: int, code: int
) -> None:
    """And else batches are copied all the same, from buffers that are not filled again before."""
    with loader(data(shards)) as plain:
        expected = [digest([next(plain)]) for _ in range(8)]
    batch_buffers._warn_once.cache_clear()
    cuda = FakeCuda(monkeypatch, code)
    cuda.stuck.set()
    settings = data(shards, workers=workers, prefetch=1)
    for _ in range(2):
        cuda.copies = SlowCopies()
        with training_loader(settings, INPUTS, world=World(device="cuda:1"), seed=3) as stream:
            assert list(cuda.registered.values()) == ([] if code else [1])  # cudaHostRegisterPortable
            assert cuda.error == 0, "the next kernel raises what the registration left"
            batches = list(islice(stream, 8))
            cuda.synchronize()
            assert [digest([batch]) for batch in batches] == expected
        assert not cuda.registered and not torch_state._locked
    ours = [("register", "cuda:1", workers), *([] if code else [("unregister", "cuda:1", 0)])]
    assert cuda.calls == 2 * ours
    told = [record.message for record in caplog.records if "cannot be pinned" in record.message]
    assert len(told) == (code != 0) and all("(operation not supported)" in text for text in told)


def test_a_loader_closes_while_a_kernel_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays mapped, as CUDA still has its pages."""
    monkeypatch.setattr(batch_buffers, "UNLOCK_SECONDS", 0.1)
    cuda = FakeCuda(monkeypatch)
    device_prefetch_for("cuda:0", BufferRing(BufferShape(2, 4, 4, 3), 1)).close()
    assert torch_state._locked.keys() == cuda.registered.keys() != set()
    cuda.stuck.set()
    wait_until(lambda: not torch_state._locked)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_kept_stay_what_they_were_and_views_are_not_copied(shards: list[str], workers: int) -> None:
    settings = data(shards, workers=workers, prefetch=1)
    with loader(settings) as stream:
        kept = list(islice(stream, 4))
    assert isinstance(device_prefetch_for("cpu", BufferRing(BufferShape(2, 4, 4, 3), 1)), HostBatches)
    with loader(settings, zero_copy=True) as stream:
        assert [digest([batch]) for batch in islice(stream, 4)] == [digest([batch]) for batch in kept]
        batch, memory = next(stream), stream._ring.bytes()
        assert batch.pixels is not None
        assert 0 <= batch.pixels.data_ptr() - memory.ctypes.data < memory.nbytes
