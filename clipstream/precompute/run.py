"""The work of `clipstream precompute`: features of frozen towers and teachers, computed once and stored.

Settings, a StoreOptions and teachers enter; a store of features is written (`features.manifest` has its layout). Each
model is a pass over the data: decoding costs little beside a tower, and so every model has its own image size,
tokenizer and batches. The ranks take the shards of a source in turn, or where there are few of them, their chunks.

Batches never cross a chunk, and a chunk's texts are encoded in batches of their own, so that a stored row depends on
its chunk alone: not on the number of ranks, nor on where an earlier call ended. Encoding runs ahead of the files: on a
GPU nothing is waited for before the end of a chunk, whose rows are copied and written by a thread while the next chunk
is encoded.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from clipstream.config.config_file import require_equal
from clipstream.config.plan import Survey
from clipstream.config.settings import Settings
from clipstream.data.batch import Batch
from clipstream.data.decode.tokenizers import Tokenizer, build_tokenizer
from clipstream.data.loader.health import BatchPart, FilledPart, SourceHealth
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.order.lanes import Cursor
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import auto_workers, stable_names, tokenizer_identity, views_of
from clipstream.data.sequential_loader import ChunkPlan, chunk_loader
from clipstream.data.settings import TokenizerSettings
from clipstream.data.source_settings import JsonCaption
from clipstream.data.sources import Source
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, DataError, Interrupted, SettingsError, Stopped, errors_as
from clipstream.features.manifest import (
    IDS,
    IMAGE,
    MODEL,
    SAMPLES,
    TEXT,
    TEXTS,
    Manifest,
    PartInfo,
    ShardInfo,
    SourceInfo,
    encode_rows,
    sample_dtype,
)
from clipstream.features.writer import Chunk, StoreWriter, Texts
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.build import build_towers
from clipstream.models.model_config import WEIGHT_FILES
from clipstream.models.precision import autocast, check_device, prepare, resolve_precision
from clipstream.models.settings import TOWERS, ModelSettings, Precision
from clipstream.models.towers import Towers
from clipstream.models.weights import read_weights, weights_digest
from clipstream.precompute import StoreOptions
from clipstream.storage.shard_url import redact
from clipstream.text import counted, duration, listed_lines, printable
from clipstream.training.stored_features import image_fingerprint, text_fingerprint, tower_state
from clipstream.utils import atomic_write
from clipstream.utils.console import ProgressBar
from clipstream.utils.content import file_state
from clipstream.utils.logs import announce, logger

FEW = 4  # shards a rank; where there are fewer, the ranks take chunks in turn
AHEAD = 2  # chunks that wait to be written; each holds its rows in memory
LINES_EVERY = 30.0  # s between lines of progress
SHOWN = 5  # shards in a message
Encode = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What is computed, on one rank."""

    settings: Settings
    sources: Mapping[str, Source]
    options: StoreOptions
    teachers: Mapping[str, ModelSettings]
    world: World
    watch: FailureWatch
    precision: Precision


@dataclass
class PrecomputeModel:
    """A model whose features are computed."""

    name: str  # of a teacher; '' for the model of the settings
    towers: Towers  # on the CPU, in the dtype they compute in
    tokenizer: Tokenizer
    parts: dict[str, str]  # 'image', 'text' or 'ids' -> name of the part in the store
    infos: dict[str, PartInfo]  # part -> what the store says of it


def precompute(
    found: Survey, options: StoreOptions, teachers: Mapping[str, ModelSettings], world: World, watch: FailureWatch
) -> None:
    """Compute what the store lacks, on this rank, until a signal stops it.

    Raises ClipstreamError: settings or data are wrong, the store was made with others, the disk is full, or `Stopped`.
    """
    settings = found.settings
    require_equal(settings, world)
    signals = StopSignals(
        deferring=False,
        broadcast=watch.broadcast_stop,
        on_exit=watch.run_cleanups,
        announce=world.is_main,
        ending="stopping; complete chunks are kept",
    )
    watch.on_stop(signals.receive)
    try:
        with signals:
            precision = resolve_precision(settings.train.precision, world)
            check_device(world.device, precision)
            _compute(Job(settings, found.sources, options, teachers, world, watch, precision))
    except Interrupted:
        raise Stopped(f"stopped by {signals.received}: rerun the same command to continue {options.folder}") from None


def _compute(job: Job) -> None:
    """Models and store; then, for each model, a pass over each source."""
    world, folder, began = job.world, job.options.folder, time.monotonic()
    models = [_build(job, name) for name in (*([""] if job.options.towers else []), *job.teachers)]
    draft = _manifest(job, models)
    writer = StoreWriter(folder, draft) if world.is_main else None
    world.barrier()
    with writer or StoreWriter(folder, draft, rank=world.rank) as writer:
        if world.is_main and job.options.towers and job.options.with_model:
            _save_model(models[0].towers, folder / MODEL, writer.manifest)
        found: dict[str, SourceHealth] = {}
        for model in models:
            prepare(model.towers, job.precision)
            model.towers.to(world.device).eval()
            for name, source in job.sources.items():
                if (health := _pass(job, model, name, source, writer)) is not None:
                    found.setdefault(name, health)
            model.towers.to("cpu")
            if world.device.startswith("cuda"):
                torch.cuda.empty_cache()
        world.arrive("precomputed")  # the shares of ranks may take hours more or less
        merged = _merge_counts(world.gather_objects(found))
        if world.is_main:
            _conclude(job.options, writer.finish(), merged, time.monotonic() - began)
        world.barrier()


def _build(job: Job, name: str) -> PrecomputeModel:
    """The model of the settings (name ''), or a teacher. Collective: missing files are downloaded.

    Raises SettingsError: the model cannot be built, or the tokenizer has more tokens than it.
    """
    settings, options, seed = job.settings, job.options, job.settings.run.seed
    model = (job.teachers[name] if name else settings.model).without_training()
    chosen = TokenizerSettings.model_validate({"type": "model"}) if name else settings.tokenizer
    with errors_as(SettingsError, f"--teacher {name}" * bool(name), SettingsError):
        loss_type = None if name else chosen_loss_type(settings.loss)
        towers = build_towers(model, seed=seed, loss_type=loss_type, tokenizer=chosen, world=job.world)
        tokenizer = build_tokenizer(
            chosen, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
        )
    if (size := tokenizer.vocab_size) > towers.vocab_size:
        raise SettingsError(
            f"tokenizer: ids up to {size - 1} exceed the model's vocabulary of {towers.vocab_size} tokens"
        )
    if model.is_fresh and not model.image_pretrained and job.world.is_main:
        logger.warning(f"{model.name} has no pretrained weights: its features are random")
    width, scale = int(towers.config.model_cfg["embed_dim"]), float(towers.scalars()[0].detach())
    parts: dict[str, str] = {}
    infos: dict[str, PartInfo] = {}
    for tower in ("image", "text") if name else options.towers:
        parts[tower] = f"{name}.{tower}" if name else tower
        if tower == "image":
            transform = views_of(settings.data, options.views, seed)
            fingerprint = image_fingerprint(towers, precision=job.precision, transform=transform)
        else:
            fingerprint = text_fingerprint(towers, precision=job.precision, tokenizer=tokenizer_identity(tokenizer))
        rows: Literal["view", "caption"] = "view" if tower == "image" else "caption"
        infos[parts[tower]] = PartInfo(width, options.dtype, rows, fingerprint, scale, options.zstd)
    if not name:
        parts["ids"], kind = "ids", "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
        identity: dict[str, object] = {"tokenizer": tokenizer_identity(tokenizer)}
        infos["ids"] = PartInfo(tokenizer.context_length, kind, "caption", identity, None, options.zstd)
    return PrecomputeModel(name, towers, tokenizer, parts, infos)


def _manifest(job: Job, models: Sequence[PrecomputeModel]) -> Manifest:
    """What the store will hold."""
    found = {}
    for name, source in job.sources.items():
        section = job.settings.data.sources[name]
        caption = section.caption
        paths, weights = (len(caption.paths), caption.weights) if isinstance(caption, JsonCaption) else (1, None)
        found[name] = SourceInfo(
            shards=tuple(ShardInfo(shard) for shard in stable_names(source.names)),
            weights=None if weights is None else tuple(weights),
            settings=section.reading,
            paths=paths,
        )
    infos = {part: info for model in models for part, info in model.infos.items()}
    options = job.options
    return Manifest(found, infos, chunk_rows=options.chunk_rows, views=options.views)


def _save_model(towers: Towers, folder: Path, manifest: Manifest) -> None:
    """Write the model of the parts `image` and `text`, unless it is there and whole."""
    for part in TOWERS:
        own = weights_digest(tower_state(towers, part).items())
        if part in manifest.parts and manifest.parts[part].fingerprint.get("weights") != own:
            raise SettingsError(
                f"the {part} features in {folder.parent} were computed with other weights: use another store"
            )
    with suppress(SettingsError):  # a damaged file is written again
        stored = read_weights(folder / WEIGHT_FILES[0])
        if weights_digest(stored.items()) == weights_digest(towers.clip.state_dict().items()):
            return
    atomic_write.claim_output(folder, "STORE", holds=True)
    draft = folder.with_name(f"{MODEL}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    advice = "free some space and rerun the same command to continue"
    # OSError, or an error that safetensors has for a full disk
    with errors_as(SettingsError, f"{folder} cannot be written", Exception, advice=advice):
        try:
            towers.save_pretrained(draft)
            for path in draft.rglob("*"):
                atomic_write.flush(path)
            shutil.rmtree(folder, ignore_errors=True)
            draft.replace(folder)
            atomic_write.flush(folder.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _pass(job: Job, model: PrecomputeModel, name: str, source: Source, writer: StoreWriter) -> SourceHealth | None:
    """Compute what the store lacks of one model's features of one source, as far as it is this rank's share.

    Returns what was read, None if nothing was missing.

    Raises DataError: a shard could be opened before and not now, or more samples fail than the settings allow.
    """
    settings, options, towers, world = job.settings, job.options, model.towers, job.world

    def encode_rows(encode: Encode, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), autocast(world.device, job.precision):
            return encode(rows)

    made = Pass(
        parts=model.parts,
        encode_image=partial(encode_rows, towers.encode_image) if IMAGE in model.parts else None,
        encode_text=partial(encode_rows, towers.encode_text) if TEXT in model.parts else None,
        context_length=model.tokenizer.context_length,
        batch_size=options.batch_size,
        device=world.device,
    )
    share = Share.of(writer, name, source, [SAMPLES, TEXTS, *model.parts.values()], world)
    if not share.todo:
        return None
    data = settings.data
    if data.workers == "auto":
        data = data.model_copy(update={"workers": auto_workers(world)})
    batch_size = max(1, options.batch_size // max(1, options.views))
    seed = mix(settings.run.seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    plan = ChunkPlan(
        shards=share.todo,
        wanted=share.is_wanted,
        chunk_rows=options.chunk_rows,
        batch_size=batch_size,
        lanes=max(1, min(int(data.workers), batch_size)),
        depth=data.prefetch,
        key=(lambda shard: mix(shard, state=seed)) if options.views else None,
    )
    inputs = ModelInputs(model.tokenizer, towers.image)
    label = options.label or f"features of {name}" + f" by {model.name}" * bool(model.name)
    began, samples = time.monotonic(), 0
    bar = ProgressBar(label, shown=world.is_main, lines_every=LINES_EVERY, say=announce)
    places, total = {shard: place for place, shard in enumerate(share.todo)}, len(share.todo)
    sizes = [source.num_samples(source.names[shard]) for shard in share.todo] if world.size == 1 else [None]
    expected = None if None in sizes or share.done else sum(size or 0 for size in sizes)  # samples; of tars unknown
    loader = chunk_loader(data, name, source, plan, inputs, views=options.views, done=share.done, device=world.device)
    job.watch.on_exit(loader.close)
    with loader, bar, ChunkComputer(writer, name, made, key=plan.key) as computer:
        try:
            for batch in loader:
                place = places[computer.add(batch, loader.parts)]
                samples, took = samples + len(batch), time.monotonic() - began
                part = f"shard {place + 1:,} of {total:,}  {samples:,}"
                part = part if expected is None else f"{samples:,} of {expected:,}"
                text = f"{part} samples  {samples / took:,.0f} samples/s"
                done, of = (place, total) if expected is None else (min(samples, expected), expected)
                bar.update(done, of, text + (f"  {duration(took * (of - done) / done)} left" if done else ""))
        except torch.OutOfMemoryError as error:
            raise ClipstreamError(f"the GPU's memory is full: use a smaller --batch-size ({error})") from error
    health = loader.health.sources[name]
    for number in filter(lambda number: share.owns(number, 0), sorted(health.unopened)):
        shard = source.names[number]
        fault = health.faults.get(redact(shard), "it could not be opened")
        if writer.shard_samples(name, number) is not None:
            raise DataError(f"source {name!r}: {redact(shard)} was readable before, but now: {fault}")
        writer.write_empty(name, number, fault)
    health.listed = []
    return health


@dataclass
class Share:
    """The share of a rank in the chunks of a source, and what is there of it."""

    rank: int
    ranks: int
    by_chunk: bool  # whether ranks take the chunks of a shard in turn, and not shards
    present: set[tuple[int, int]] = field(default_factory=set)  # (shard, chunk) of the share that need not be computed
    todo: list[int] = field(default_factory=list)  # shards that may lack a chunk
    done: list[int] = field(default_factory=list)  # the other shards of the share

    def owns(self, shard: int, chunk: int) -> bool:
        return (shard + chunk * self.by_chunk) % self.ranks == self.rank

    def is_wanted(self, shard: int, chunk: int) -> bool:
        return self.owns(shard, chunk) and (shard, chunk) not in self.present

    @classmethod
    def of(cls, writer: StoreWriter, name: str, source: Source, parts: Sequence[str], world: World) -> Share:
        """The share of this rank, after checking the chunks that are there; those with dropped samples that may have
        been mended since are removed.
        """
        manifest = writer.manifest
        shards, rows = len(manifest.sources[name].shards), manifest.chunk_rows
        share = cls(world.rank, world.size, by_chunk=shards < FEW * world.size)
        for shard in range(shards):
            if not share.by_chunk and not share.owns(shard, 0):
                continue
            size = writer.shard_samples(name, shard)
            mine = [chunk for chunk in range(-(-(size or 0) // rows)) if share.owns(shard, chunk)]
            for chunk in mine:
                if not any(writer.missing(name, shard, chunk, part) for part in (SAMPLES, TEXTS)):
                    dropped, written = writer.read_dropped(name, shard, chunk)
                    if has_changed_since(written, source, source.names[shard], [chunk * rows + n for n in dropped]):
                        writer.remove(name, shard, chunk)
            here = [chunk for chunk in mine if not any(writer.missing(name, shard, chunk, part) for part in parts)]
            share.present.update((shard, chunk) for chunk in here)
            (share.todo if size is None or len(here) < len(mine) else share.done).append(shard)
        return share


def has_changed_since(time: int, source: Source, shard: str, samples: Sequence[int]) -> bool:
    """Whether the file of a shard, or files of some of its samples, have changed since a time in ns."""
    if not samples or source.types[shard].is_remote(shard):
        return False
    files = [source.types[shard].title(shard)]
    if source.types[shard].has_files:
        opened = source.open(shard)
        files += [file for n in samples for ref in opened.index.samples[n : n + 1] for file in opened.files(ref)]
    return any(max(file_state(file)[1:], default=0) > time for file in files)


def _merge_counts(ranks: Sequence[Mapping[str, SourceHealth]]) -> dict[str, SourceHealth]:
    """The counts of all ranks by source. Raises DataError: no sample of a source was usable."""
    found: dict[str, SourceHealth] = {}
    for name, health in ((name, health) for one in ranks for name, health in one.items()):
        found.setdefault(name, SourceHealth()).merge(health)
    for name, health in found.items():
        if health.read and not health.used:
            raise DataError(f"source {name!r}: no sample is usable: {health.funnel()}")
    return found


def _conclude(options: StoreOptions, manifest: Manifest, found: Mapping[str, SourceHealth], seconds: float) -> None:
    """Print what was dropped, and what the store holds."""
    for source, health in found.items():
        lines = [] if options.label else [f"source {source}: {health.read:,} samples read now, {health.used:,} used"]
        for reason, count in health.dropped.most_common():
            lines.append(f"  {count:,} ({count / health.read:.1%}) dropped: {reason}, e.g. {health.examples[reason]}")
        faults = [f"  {printable(shard)}: {printable(fault, 500)}" for shard, fault in health.faults.items()]
        lines += listed_lines(faults, SHOWN, " shards")
        for line in lines:
            announce(line)
    if options.label:
        return
    shards = [shard for source in manifest.sources.values() for shard in source.shards]
    lost = sum(bool(shard.reason) for shard in shards)
    missing = f", without {lost:,} that could not be opened" if lost else ""
    samples = sum(shard.samples for shard in shards)
    announce(
        f"{options.folder} is complete: {', '.join(manifest.parts)} of {samples:,} samples in "
        f"{counted(len(shards), 'shard', ',')}{missing}; {duration(seconds)}"
    )


@dataclass(frozen=True)
class Pass:
    """What a pass over the data makes."""

    parts: Mapping[str, str]  # any of IMAGE, TEXT and IDS -> name of the part in the store
    encode_image: Encode | None  # uint8 [n, 3, H, W] -> L2-normalised [n, D]; both on the device
    encode_text: Encode | None  # int [c, T] -> L2-normalised [c, D]
    context_length: int  # T
    batch_size: int  # texts of a forward pass
    device: str  # torch's name of it


@dataclass
class _Batches:
    """The batches of a chunk while they come."""

    shard: int
    number: int  # of the chunk
    shard_samples: int  # of the whole shard
    checksums: list[torch.Tensor] = field(default_factory=list)  # of the images, of each batch
    weights: list[torch.Tensor] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # encoded rows of the part `image`
    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    texts: list[list[list[str]]] = field(default_factory=list)  # of each sample, by path
    reasons: list[str] = field(default_factory=list)  # '' for a sample that is used


class ChunkComputer:
    """Encodes the batches of a source and writes its chunks; a context manager that waits for the last one.

    Args:
        key: key of the random numbers of a shard's samples, as ChunkPlan has it; None without augmented views.
    """

    def __init__(self, writer: StoreWriter, source: str, made: Pass, *, key: Callable[[int], int] | None) -> None:
        self.writer, self.source, self.made, self.manifest = writer, source, made, writer.manifest
        self._key = key
        self._chunk: _Batches | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunks")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> ChunkComputer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._pending.popleft().result()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def add(self, batch: Batch, filled: Sequence[FilledPart]) -> int:
        """Encode the next batch, and write its chunk if it is the last one of it; return the number of its shard.

        Args:
            filled: `Loader.parts` of the batch.

        Raises:
            DataError: data workers read different samples.
            OSError: an earlier chunk could not be written.
        """
        parts = [part for part in filled if isinstance(part, BatchPart)]
        cursor, rows = _position_of(parts), self.manifest.chunk_rows
        chunk = self._chunk
        if chunk is None:
            samples = max(part.candidates.shard_samples for part in parts if part.candidates is not None)
            chunk = self._chunk = _Batches(cursor.group, cursor.window // rows, samples)
        self._collect(chunk, batch, parts)
        if chunk.number * rows + len(chunk.keys) == min(chunk.shard_samples, (chunk.number + 1) * rows):
            self._chunk = None
            on_host = _to_host(self._rows(chunk))
            while len(self._pending) >= AHEAD:
                self._pending.popleft().result()
            self._pending.append(self._thread.submit(self._write, chunk, on_host))
        return chunk.shard

    def _collect(self, chunk: _Batches, batch: Batch, parts: Sequence[BatchPart]) -> None:
        """Add a batch to its chunk; on a GPU without waiting for it."""
        own = [part.candidates for part in parts if part.candidates is not None]
        keys = {slot: key for one in own for slot, key in one.keys.items()}
        texts = {slot: found for one in own for slot, found in one.texts.items()}
        reasons = {slot: reason for one in own for slot, reason in one.dropped.items()}
        for slot in range(len(batch)):
            chunk.keys.append(keys[slot])
            chunk.texts.append(texts.get(slot, []))
            chunk.reasons.append("" if slot in texts else reasons[slot])
        # Workers fill consecutive slots, so that their ids follow each other in the order of the slots.
        for one in sorted((one for one in own if one.texts), key=lambda one: min(one.texts)):
            chunk.ids.append(one.ids)
        assert batch.checksums is not None
        chunk.checksums.append(batch.checksums.clone())  # on the CPU the loader fills its memory again
        chunk.weights.append(batch.weights.clone())
        if self.made.encode_image is not None:
            assert batch.pixels is not None
            features = self.made.encode_image(batch.pixels)
            used = (batch.weights > 0).repeat_interleave(max(self.manifest.views, 1))
            features = torch.where(used[:, None], features, 0.0)
            chunk.rows.append(encode_rows(features, self.manifest.parts[self.made.parts[IMAGE]].dtype))

    def _rows(self, chunk: _Batches) -> dict[str, torch.Tensor]:
        """The rows of a whole chunk by part, and its checksums and weights."""
        made, infos = self.made, self.manifest.parts
        rows = {"checksums": torch.cat(chunk.checksums), "weights": torch.cat(chunk.weights)}
        ids = np.concatenate(chunk.ids) if chunk.ids else np.empty((0, made.context_length), np.int32)
        if IMAGE in made.parts:
            rows[made.parts[IMAGE]] = torch.cat(chunk.rows)
            chunk.rows.clear()
        if TEXT in made.parts:
            assert made.encode_text is not None
            info = infos[made.parts[TEXT]]
            found = [encode_rows(torch.empty(0, info.width, device=made.device), info.dtype)]
            for start in range(0, len(ids), made.batch_size):
                some = torch.from_numpy(np.ascontiguousarray(ids[start : start + made.batch_size]))
                if made.device.startswith("cuda"):
                    some = some.pin_memory().to(made.device, non_blocking=True)
                found.append(encode_rows(made.encode_text(some), info.dtype))
            rows[made.parts[TEXT]] = torch.cat(found)
        if IDS in made.parts:
            rows[made.parts[IDS]] = torch.from_numpy(ids.astype(infos[made.parts[IDS]].dtype))
        return rows

    def _write(self, chunk: _Batches, on_host: Callable[[], dict[str, torch.Tensor]]) -> None:
        """In the thread: the files of a chunk. Those that exist stay."""
        rows: dict[str, Any] = on_host()
        manifest, count = self.manifest, len(chunk.keys)
        samples = np.zeros(count, sample_dtype(manifest.views, manifest.sources[self.source].paths))
        samples["used"], samples["pictures"] = rows.pop("weights").numpy() > 0, rows.pop("checksums").numpy()
        for number, texts in enumerate(chunk.texts):
            if texts:
                samples["counts"][number] = [len(path) for path in texts]
        counts = samples["counts"].sum(axis=1)
        samples["start"] = np.cumsum(counts) - counts
        if self._key is not None:
            state, first = self._key(chunk.shard), chunk.number * manifest.chunk_rows
            keys = [mix(first + number, state=state) for number in range(count)]
            samples["views"] = [[mix(view, state=key) for view in range(manifest.views)] for key in keys]
        captions = [[text for path in paths for text in path] for paths in chunk.texts]
        where = Chunk(self.source, chunk.shard, chunk.number, chunk.shard_samples)
        self.writer.write(where, {**rows, SAMPLES: samples}, Texts(chunk.keys, captions, chunk.reasons))


def _position_of(parts: Sequence[BatchPart]) -> Cursor:
    """The cursor of all lanes after a batch (see ChunkSampler)."""
    cursors = [lane.cursors[0] for part in parts for lane in part.lanes.values()]
    if any(cursor != cursors[0] for cursor in cursors):
        raise DataError("a shard could not be opened by every data worker: rerun the same command to continue")
    return cursors[0]


def _to_host(tensors: dict[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that returns the tensors on the CPU; those of a GPU are copied in the background."""
    gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if gpu is None:
        return lambda: tensors
    copies = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
    done: Any = torch.cuda.current_stream(gpu).record_event()

    def wait() -> dict[str, torch.Tensor]:
        with torch.cuda.device(gpu):  # else a thread takes memory of GPU 0
            done.synchronize()
        return copies

    return wait
