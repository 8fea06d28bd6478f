"""One pass over a source: batches of a chunk loader and the encoders of a model enter, chunks of a store leave.

Batches never cross a chunk, and a chunk's texts are encoded in batches of their own, so that a stored row depends on
its chunk alone: not on the number of ranks, nor on where an earlier call ended. Encoding runs ahead of the files: on a
GPU nothing is waited for before the end of a chunk, whose rows are copied and written by a thread while the next chunk
is encoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.loader.pipeline import BatchPart, FilledPart
from clipstream.data.order.lanes import Cursor
from clipstream.data.order.rng import mix
from clipstream.errors import DataError
from clipstream.features.codec import encode_rows
from clipstream.features.manifest import IDS, IMAGE, SAMPLES, TEXT, TEXTS, Manifest, sample_dtype
from clipstream.features.writer import StoreWriter

Encode = Callable[[torch.Tensor], torch.Tensor]
AHEAD = 2  # chunks that wait to be written; each holds its rows in memory


@dataclass(frozen=True)
class Pass:
    """What a pass over the data makes."""

    parts: Mapping[str, str]  # any of IMAGE, TEXT and IDS -> name of the part in the store
    encode_image: Encode | None  # uint8 [n, 3, H, W] -> L2-normalised [n, D]; both on the device
    encode_text: Encode | None  # int [c, T] -> L2-normalised [c, D]
    context_length: int  # T
    batch_size: int  # texts of a forward pass
    device: str  # torch's name of it

    @property
    def names(self) -> list[str]:
        """All parts that a chunk needs, `samples` and `texts` included."""
        return [SAMPLES, TEXTS, *self.parts.values()]


@dataclass
class _Chunk:
    """A chunk while its batches come."""

    shard: int  # number of the shard
    number: int  # of the chunk
    shard_samples: int  # of the whole shard
    pictures: list[torch.Tensor] = field(default_factory=list)  # checksums, of each batch
    weights: list[torch.Tensor] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # encoded rows of the part `image`
    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    texts: list[list[list[str]]] = field(default_factory=list)  # of each sample, by path
    reasons: list[str] = field(default_factory=list)  # '' for a sample that is used

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return len(self.keys)


class ChunkComputer:
    """Encodes the batches of a source and writes its chunks; a context manager that waits for the last one.

    Args:
        key: key of the random numbers of a shard's samples, as ChunkPlan has it; None without augmented views.
    """

    def __init__(self, writer: StoreWriter, source: str, made: Pass, *, key: Callable[[int], int] | None) -> None:
        self.writer, self.source, self.made = writer, source, made
        self.written = 0  # chunks
        self._key = key
        self._chunk: _Chunk | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunks")
        self._pending: deque[Future[None]] = deque()

    @property
    def manifest(self) -> Manifest:
        """Of the store that is written."""
        return self.writer.manifest

    def __enter__(self) -> ChunkComputer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._pending.popleft().result()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def add(self, batch: Batch, filled: Sequence[FilledPart]) -> None:
        """Encode the next batch, and write its chunk if it is the last one of it.

        Args:
            filled: `Loader.parts` of the batch.

        Raises:
            DataError: data workers read different samples.
            OSError: an earlier chunk could not be written.
        """
        parts = [part for part in filled if isinstance(part, BatchPart)]
        cursor, rows = position_of(parts), self.manifest.chunk_rows
        chunk = self._chunk
        if chunk is None:
            samples = max(part.candidates.shard_samples for part in parts if part.candidates is not None)
            chunk = self._chunk = _Chunk(cursor.group, cursor.window // rows, samples)
        self._collect(chunk, batch, parts)
        if chunk.number * rows + chunk.samples == min(chunk.shard_samples, (chunk.number + 1) * rows):
            self._chunk = None
            self._finish(chunk)

    def _collect(self, chunk: _Chunk, batch: Batch, parts: Sequence[BatchPart]) -> None:
        """Add a batch to its chunk; on a GPU without waiting for it."""
        keys = {slot: key for part in parts for slot, key in part.keys.items()}
        own = [part.candidates for part in parts if part.candidates is not None]
        texts = {slot: found for one in own for slot, found in one.texts.items()}
        reasons = {slot: reason for one in own for slot, reason in one.dropped.items()}
        for slot in range(len(batch)):
            chunk.keys.append(keys[slot].partition("/")[2])
            chunk.texts.append(texts.get(slot, []))
            chunk.reasons.append("" if slot in texts else reasons[slot])
        # Workers fill consecutive slots, so that their ids follow each other in the order of the slots.
        for one in sorted((one for one in own if one.texts), key=lambda one: min(one.texts)):
            chunk.ids.append(one.ids)
        assert batch.pictures is not None
        chunk.pictures.append(batch.pictures.clone())  # on the CPU the loader fills its memory again
        chunk.weights.append(batch.weights.clone())
        if self.made.encode_image is not None:
            assert batch.pixels is not None
            features = self.made.encode_image(batch.pixels)
            used = (batch.weights > 0).repeat_interleave(max(self.manifest.views, 1))
            features = torch.where(used[:, None], features, 0.0)
            chunk.rows.append(encode_rows(features, self.manifest.parts[self.made.parts[IMAGE]].dtype))

    def _finish(self, chunk: _Chunk) -> None:
        """Encode the texts of a whole chunk, and have the thread write it."""
        made, rows = self.made, {}
        ids = np.concatenate(chunk.ids) if chunk.ids else np.empty((0, made.context_length), np.int32)
        if IMAGE in made.parts:
            rows[made.parts[IMAGE]] = torch.cat(chunk.rows)
        if TEXT in made.parts:
            rows[made.parts[TEXT]] = self._text_rows(ids, self.manifest.parts[made.parts[TEXT]])
        if IDS in made.parts:
            kind = self.manifest.parts[made.parts[IDS]].dtype
            rows[made.parts[IDS]] = torch.from_numpy(ids.astype(kind))
        rows["pictures"], rows["weights"] = torch.cat(chunk.pictures), torch.cat(chunk.weights)
        chunk.rows.clear()
        on_host = _to_host(rows)
        while len(self._pending) >= AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, chunk, on_host))

    def _text_rows(self, ids: np.ndarray[Any, Any], part: Any) -> torch.Tensor:
        made = self.made
        assert made.encode_text is not None
        found = []
        for start in range(0, len(ids), made.batch_size):
            some = torch.from_numpy(np.ascontiguousarray(ids[start : start + made.batch_size]))
            if made.device.startswith("cuda"):
                some = some.pin_memory().to(made.device, non_blocking=True)
            found.append(encode_rows(made.encode_text(some), part.dtype))
        return torch.cat(found) if found else encode_rows(torch.empty(0, part.width), part.dtype)

    def _write(self, chunk: _Chunk, on_host: Callable[[], dict[str, torch.Tensor]]) -> None:
        """In the thread: the files of a chunk. Those that exist stay."""
        rows = on_host()
        where = (self.source, chunk.shard, chunk.number)
        self.writer.check_keys(*where, chunk.keys, shard_samples=chunk.shard_samples)
        samples = self._samples(chunk, rows.pop("weights"), rows.pop("pictures"))
        for part, values in rows.items():
            if self.writer.missing(*where, part):
                self.writer.write(part, *where, values, shard_samples=chunk.shard_samples)
        if self.writer.missing(*where, TEXTS):
            captions = [[text for path in paths for text in path] for paths in chunk.texts]
            self.writer.write_texts(*where, chunk.keys, captions, chunk.reasons, shard_samples=chunk.shard_samples)
        if self.writer.missing(*where, SAMPLES):
            self.writer.write(SAMPLES, *where, samples, shard_samples=chunk.shard_samples)
        self.written += 1

    def _samples(self, chunk: _Chunk, weights: torch.Tensor, pictures: torch.Tensor) -> np.ndarray[Any, Any]:
        """The rows of the part `samples`."""
        views, paths = self.manifest.views, self.manifest.sources[self.source].paths
        found = np.zeros(chunk.samples, sample_dtype(views, paths))
        found["used"], found["pictures"] = weights.numpy() > 0, pictures.numpy()
        for number, texts in enumerate(chunk.texts):
            if texts:
                found["counts"][number] = [len(path) for path in texts]
        counts = found["counts"].sum(axis=1)
        found["start"] = np.cumsum(counts) - counts
        if self._key is not None:
            state, first = self._key(chunk.shard), chunk.number * self.manifest.chunk_rows
            found["views"] = [
                [mix(view, state=mix(first + number, state=state)) for view in range(views)]
                for number in range(chunk.samples)
            ]
        return found


def position_of(parts: Sequence[BatchPart]) -> Cursor:
    """The cursor of all lanes after a batch (see ChunkSampler).

    Raises DataError: lanes are at different samples, as a shard could be read by one worker and not by another.
    """
    cursors = [lane.cursors[0] for part in parts for lane in part.lanes.values()]
    if any(cursor != cursors[0] for cursor in cursors):
        raise DataError(
            "data workers read different samples at the same time: a shard could be opened by one of them and not by "
            "another; start the same command again, which makes what is missing"
        )
    return cursors[0]


def _to_host(tensors: dict[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that returns the tensors on the CPU; those of a GPU are copied in the background."""
    gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if gpu is None:
        return lambda: tensors
    copies = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
        else:
            copies[name] = tensor
    done: Any = torch.cuda.current_stream(gpu).record_event()

    def wait() -> dict[str, torch.Tensor]:
        with torch.cuda.device(gpu):  # else a thread takes memory of GPU 0
            done.synchronize()
        return copies

    return wait
