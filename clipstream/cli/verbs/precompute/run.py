"""What the verb `precompute` does: features of frozen towers and teachers, computed once and stored.

Settings, a StoreOptions and teachers enter; a store of features is written (`features.manifest` has its layout). Each
model is a pass over the data: decoding costs little beside a tower, and so every model has its own picture size,
tokenizer and batches. The ranks take the shards of a source in turn, or where there are few of them, their chunks.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from clipstream.cli.verbs.precompute.compute import ChunkComputer, Pass
from clipstream.cli.verbs.precompute.options import StoreOptions
from clipstream.config.settings import Settings, open_sources, require_equal
from clipstream.data.build import chunk_loader
from clipstream.data.decode.captions import CaptionExtractor, build_caption, candidates
from clipstream.data.decode.tokenizers import Tokenizer, build_tokenizer
from clipstream.data.loader.health import SourceHealth
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.pipeline import ModelInputs, SampleBatches
from clipstream.data.loader.sampler import ChunkPlan
from clipstream.data.loader.workers import auto_workers
from clipstream.data.order.rng import mix
from clipstream.data.order_plan import reading_of, stable_names, tokenizer_identity, views_of
from clipstream.data.settings import JsonCaption, TokenizerSettings
from clipstream.data.sources import SourceContext
from clipstream.data.sources.registry import Source
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.signals import StopSignals
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, DataError, Dropped, Interrupted, SettingsError, Stopped
from clipstream.features.manifest import MODEL, SAMPLES, TEXTS, Manifest, PartInfo, ShardInfo, SourceInfo, part_folder
from clipstream.features.writer import StoreWriter
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.build import build_towers
from clipstream.models.fingerprint import image_fingerprint, text_fingerprint, tower_state, weights_digest
from clipstream.models.frozen import TOWERS
from clipstream.models.model_config import WEIGHT_FILES
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from clipstream.models.weights import read_weights
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import redact
from clipstream.storage.transfer import ShardError
from clipstream.text import counted, duration, printable, printable_lines
from clipstream.training.precision import Precision, autocast, check_device, prepare, resolve_precision
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger

FEW = 4  # shards a rank; where there are fewer, the ranks take chunks in turn
LOOKED_AT, LOOKED = 4, 16  # shards that the estimate opens, and samples of each whose captions it counts
LINES_EVERY, REFRESH = 30.0, 0.5  # s between lines of progress, and between two redraws of a bar
SHOWN = 5  # shards in a message


@dataclass(frozen=True)
class Job:
    """What is computed, on one rank."""

    settings: Settings
    options: StoreOptions
    teachers: Mapping[str, ModelSettings]
    world: World
    watch: FailureWatch
    precision: Precision


@dataclass
class Model:
    """A model whose features are computed."""

    name: str  # of a teacher; '' for the model of the settings
    towers: Towers  # on the CPU, in the dtype they compute in
    tokenizer: Tokenizer
    parts: dict[str, str]  # 'image', 'text' or 'ids' -> name of the part in the store
    infos: dict[str, PartInfo]  # part -> what the store says of it


def precompute(
    settings: Settings,
    options: StoreOptions,
    teachers: Mapping[str, ModelSettings],
    world: World,
    watch: FailureWatch,
) -> None:
    """Compute what the store lacks, on this rank, until a signal stops it.

    Raises ClipstreamError: settings or data are wrong, the store was made with others, the disk is full, or `Stopped`.
    """
    require_equal(settings, world)
    signals = StopSignals(
        deferring=False,
        broadcast=watch.broadcast_stop,
        on_exit=watch.run_cleanups,
        announce=world.is_main,
        ending="ending; chunks that are whole stay",
    )
    watch.on_stop(signals.receive)
    try:
        with signals:
            precision = resolve_precision(settings.train.precision, world)
            check_device(world.device, precision)
            _compute(Job(settings, options, teachers, world, watch, precision))
    except Interrupted:
        text = f"stopped by {signals.received}: rerun the same command to continue {options.folder}"
        raise Stopped(text) from None


def _compute(job: Job) -> None:
    """Models and store; then, for each model, a pass over each source."""
    world, folder = job.world, job.options.folder
    models = [_build(job, name) for name in (*([""] if job.options.towers else []), *job.teachers)]
    sources = open_sources(job.settings)
    draft = _manifest(job, models, sources)
    writer = StoreWriter(folder, draft) if world.is_main else None
    world.barrier()
    writer = writer or StoreWriter(folder, draft, rank=world.rank)
    try:
        guess = None
        if world.is_main:
            if job.options.towers:
                _save_model(models[0].towers, folder / MODEL, writer.manifest)
            guess = estimate(job.settings, writer.manifest, sources)
            guess.announce(folder)
        progress, counts = Progress(guess, len(models), world), Counts()
        for model in models:
            prepare(model.towers, job.precision)
            model.towers.to(world.device).eval()
            for name in sources:
                _pass(job, model, name, writer, progress, counts)
            model.towers.to("cpu")
            if world.device.startswith("cuda"):
                torch.cuda.empty_cache()
        progress.close()
        world.arrive("precomputed")  # the shares of ranks may take hours more or less
        counts = Counts.merged(world.gather_objects(counts))
        counts.check()
        if world.is_main:
            _conclude(folder, writer.finish(), counts, time.monotonic() - progress.began)
        world.barrier()
    finally:
        writer.close()


def _build(job: Job, name: str) -> Model:
    """The model of the settings (name ''), or a teacher. Collective: missing files are downloaded.

    Raises SettingsError: the model cannot be built, or the tokenizer has more tokens than it.
    """
    settings, options, seed = job.settings, job.options, job.settings.run.seed
    model = (job.teachers[name] if name else settings.model).not_trained()
    chosen = TokenizerSettings.model_validate({"type": "model"}) if name else settings.tokenizer
    try:
        loss_type = None if name else chosen_loss_type(settings.loss)
        towers = build_towers(model, seed=seed, loss_type=loss_type, tokenizer=chosen, world=job.world)
        tokenizer = build_tokenizer(
            chosen, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
        )
    except SettingsError as error:
        raise SettingsError(f"--teacher {name}: {error}" if name else str(error)) from error
    if (size := tokenizer.vocab_size) > towers.vocab_size:
        raise SettingsError(f"tokenizer: its ids go up to {size - 1}, but the model knows {towers.vocab_size} tokens")
    if model.is_fresh and not model.image_pretrained and job.world.is_main:
        logger.warning(f"{model.name} starts without pretrained weights: its features are those of a random tower")
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
    return Model(name, towers, tokenizer, parts, infos)


def _manifest(job: Job, models: Sequence[Model], sources: Mapping[str, Source]) -> Manifest:
    """What the store will hold."""
    found = {}
    for name, source in sources.items():
        section = job.settings.data.sources[name]
        caption = section.caption
        paths, weights = (len(caption.paths), caption.weights) if isinstance(caption, JsonCaption) else (1, None)
        found[name] = SourceInfo(
            shards=tuple(ShardInfo(shard) for shard in stable_names(source.names)),
            weights=None if weights is None else tuple(weights),
            settings=reading_of(section),
            paths=paths,
        )
    infos = {part: info for model in models for part, info in model.infos.items()}
    options = job.options
    return Manifest(found, infos, chunk_rows=options.chunk_rows, views=options.views)


def _save_model(towers: Towers, folder: Path, manifest: Manifest) -> None:
    """Write the model of the parts `image` and `text`, unless it is there and whole.

    Raises SettingsError: the store has features of another one, or it cannot be written.
    """
    for part in TOWERS:
        own = weights_digest(tower_state(towers, part).items())
        if part in manifest.parts and manifest.parts[part].fingerprint.get("weights") != own:
            raise SettingsError(
                f"the {part} features in {folder.parent} are of a model with other weights: compute these features "
                "into another store"
            )
    with suppress(SettingsError):  # a damaged file is written again
        stored = read_weights(folder / WEIGHT_FILES[0])
        if weights_digest(stored.items()) == weights_digest(towers.clip.state_dict().items()):
            return
    draft = folder.with_name(f"{MODEL}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        towers.save_pretrained(draft)
        for path in draft.rglob("*"):
            atomic_write.flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
        atomic_write.flush(folder.parent)
    except Exception as error:  # OSError, or an error that safetensors has for a full disk
        shutil.rmtree(draft, ignore_errors=True)
        raise SettingsError(
            f"{folder} cannot be written ({getattr(error, 'strerror', None) or error}): free space on its disk and "
            "start the same command again"
        ) from error


def _pass(job: Job, model: Model, name: str, writer: StoreWriter, progress: Progress, counts: Counts) -> None:
    """Compute what the store lacks of one model's features of one source, as far as it is this rank's share.

    Raises DataError: a shard could be opened before and not now, or more samples fail than the settings allow.
    """
    settings, options, towers, world = job.settings, job.options, model.towers, job.world

    def encoder(encode: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def encoded(rows: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), autocast(world.device, job.precision):
                return encode(rows)

        return encoded

    made = Pass(
        parts=model.parts,
        encode_image=encoder(towers.encode_image) if "image" in model.parts else None,
        encode_text=encoder(towers.encode_text) if "text" in model.parts else None,
        context_length=model.tokenizer.context_length,
        batch_size=options.batch_size,
        device=world.device,
    )
    share = Share.of(writer, name, made.names, world)
    progress.skip(share.samples)
    if not share.todo:
        return
    data = settings.data
    if data.workers == "auto":
        data = data.model_copy(update={"workers": auto_workers(world)})
    batch_size = max(1, options.batch_size // max(1, options.views))
    seed = mix(settings.run.seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))

    def key(shard: int) -> int:
        return mix(shard, state=seed)

    plan = ChunkPlan(
        shards=share.todo,
        wanted=share.wanted,
        chunk_rows=options.chunk_rows,
        batch_size=batch_size,
        lanes=max(1, min(int(data.workers), batch_size)),
        depth=data.prefetch,
        key=key if options.views else None,
    )
    inputs = ModelInputs(model.tokenizer, towers.image)
    loader = chunk_loader(data, name, plan, inputs, views=options.views, done=share.done, device=world.device)
    job.watch.on_exit(loader.close)
    with loader, ChunkComputer(writer, name, made, key=plan.key) as computer:
        try:
            for batch in loader:
                computer.add(batch, loader.parts)
                progress.add(len(batch))
        except torch.OutOfMemoryError as error:
            raise ClipstreamError(f"the GPU's memory is full: use a smaller --batch-size ({error})") from error
    health = loader.health.sources[name]
    for number in filter(lambda number: share.owns(number, 0), sorted(health.unopened)):
        assert isinstance(loader.source, SampleBatches)
        shard = loader.source.sources[0].names[number]
        fault = health.faults.get(redact(shard), "it could not be opened")
        if writer.shard_samples(name, number) is not None:
            raise DataError(f"source {name!r}: {redact(shard)} was read before, and now: {fault}")
        writer.write_empty(name, number, fault)
    counts.add(model.name, name, loader)


@dataclass
class Share:
    """The share of a rank in the chunks of a source, and what is there of it."""

    rank: int
    ranks: int
    by_chunk: bool  # whether ranks take the chunks of a shard in turn, and not shards
    present: set[tuple[int, int]] = field(default_factory=set)  # (shard, chunk) of the share that need not be computed
    todo: list[int] = field(default_factory=list)  # shards that may lack a chunk
    done: list[int] = field(default_factory=list)  # the other shards of the share
    samples: int = 0  # in the chunks that are present

    def owns(self, shard: int, chunk: int) -> bool:
        """Whether a chunk is in the share."""
        return (shard + chunk * self.by_chunk) % self.ranks == self.rank

    def wanted(self, shard: int, chunk: int) -> bool:
        """Whether the rank has to compute a chunk."""
        return self.owns(shard, chunk) and (shard, chunk) not in self.present

    @classmethod
    def of(cls, writer: StoreWriter, source: str, parts: Sequence[str], world: World) -> Share:
        """The share of this rank, after checking the chunks that are there."""
        manifest = writer.manifest
        shards, rows = len(manifest.sources[source].shards), manifest.chunk_rows
        share = cls(world.rank, world.size, by_chunk=shards < FEW * world.size)
        names = re.compile(r"([0-9]+)-([0-9]+)\.safetensors")
        listed: dict[int, list[int]] = {}
        for path in (writer.path / part_folder(TEXTS, source)).glob("*-*.safetensors*"):
            if found := names.match(path.name):
                listed.setdefault(int(found[1]), []).append(int(found[2]))
        for shard in range(shards):
            if not share.by_chunk and not share.owns(shard, 0):
                continue
            size = writer.shard_samples(source, shard)
            chunks = listed.get(shard, []) if size is None else list(range(-(-size // rows)))
            mine = [chunk for chunk in chunks if share.owns(shard, chunk)]
            here = [chunk for chunk in mine if not any(writer.missing(source, shard, chunk, part) for part in parts)]
            share.present.update((shard, chunk) for chunk in here)
            share.samples += sum(min(rows, (size or rows) - chunk * rows) for chunk in here if size is not None)
            (share.todo if size is None or len(here) < len(mine) else share.done).append(shard)
        return share


@dataclass(frozen=True)
class Estimate:
    """What will be computed, from looking at some shards."""

    samples: int | None  # None if that takes opening remote shards
    shards: int
    exact: bool
    captions: float  # of a sample
    parts: dict[str, int]  # part -> bytes of all samples, or of one where their number is unknown

    def announce(self, folder: Path) -> None:
        """Print the estimate, and warn if the disk has less space."""
        about = "" if self.exact else "about "
        total, free = sum(self.parts.values()), shutil.disk_usage(folder).free
        sizes = ", ".join(f"{part} {decimal(size)}" for part, size in self.parts.items())
        shards = counted(self.shards, "shard", ",")
        if self.samples is None:
            announce(f"samples  unknown, in {shards}")
            announce(f"size     {total:,} bytes a sample ({sizes}); {decimal(free)} are free in {folder}")
            return
        announce(f"samples  {about}{self.samples:,} in {shards}; captions {self.captions:.3g} a sample")
        announce(f"size     about {decimal(total)} ({sizes}); {decimal(free)} are free in {folder}")
        if total > free:
            logger.warning(f"the disk of {folder} has {decimal(free)} free, and the store may need {decimal(total)}")


def estimate(settings: Settings, manifest: Manifest, sources: Mapping[str, Source]) -> Estimate:
    """Samples and bytes of the store; opens a few local shards, and no remote one."""
    total: int | None = 0
    exact, looks = True, _Looks()
    with closing(ShardCache(None)) as store:
        for name, source in sources.items():
            section = settings.data.sources[name]
            opening = Source(section, SourceContext(store, settings.data.cache, f"data.sources.{name}"))
            counts = looks.add(opening, build_caption(section.caption))
            if source.samples is not None:
                held: int | None = source.samples
            else:
                held = sum(counts) * len(source.names) // len(counts) if counts else None
                exact = exact and len(counts) == len(source.names)
            total = None if total is None or held is None else total + held
    each = sum(looks.captions) / len(looks.captions) if looks.captions else 1.0
    rows = {"sample": 1.0, "view": float(max(1, manifest.views)), "caption": each}
    one = {part: info.row_bytes * rows[info.rows_per] for part, info in manifest.parts.items()}
    one[SAMPLES] = max(manifest.row_bytes(SAMPLES, name) for name in manifest.sources)
    one[TEXTS] = sum(looks.sizes) / len(looks.sizes) if looks.sizes else 64.0
    parts = {part: round(size * (1 if total is None else total)) for part, size in one.items()}
    return Estimate(total, sum(len(source.names) for source in sources.values()), exact, each, parts)


@dataclass
class _Looks:
    """What some samples hold."""

    captions: list[int] = field(default_factory=list)  # number of captions of each
    sizes: list[int] = field(default_factory=list)  # bytes in the part `texts` of each

    def add(self, source: Source, extract: CaptionExtractor) -> list[int]:
        """Look into some local shards of a source; the number of samples of each."""
        local = [shard for shard in source.names if not source.types[shard].is_remote(shard)]
        counts = []
        for shard in local[:: max(1, -(-len(local) // LOOKED_AT))]:
            try:
                opened = source.open(shard)
            except (ShardError, OSError):
                continue
            samples = opened.index.samples
            counts.append(len(samples))
            for number in range(0, len(samples), max(1, -(-len(samples) // LOOKED))):
                ref = samples[number]
                with suppress(Dropped):
                    sample = {"__key__": ref.key, "__url__": "", **opened.load(ref)}
                    texts = [text for path in candidates(extract, sample) for text in path]
                    self.captions.append(len(texts))
                    self.sizes.append(sum(len(text.encode()) + 8 for text in texts) + len(ref.key) + 24)
            opened.close()
            source.types[shard].release(shard)
        return counts


class Progress:
    """The progress of rank 0, speed and time left included: a bar on a terminal, lines elsewhere.

    Args:
        guess: on rank 0; other ranks show nothing.
        passes: number of models.
    """

    def __init__(self, guess: Estimate | None, passes: int, world: World) -> None:
        self.began = self._said = time.monotonic()
        self._shown, self._where = guess is not None, " on rank 0" * (world.size > 1)
        samples = None if guess is None or guess.samples is None else guess.samples * passes
        # Without a refreshing thread, as data workers are forked while the bar is shown.
        self._bar = RichProgress(
            TextColumn("precompute"), BarColumn(), TextColumn("{task.description}"),
            console=Console(force_terminal=True), auto_refresh=False, disable=not (self._shown and sys.stdout.isatty()),
        )  # fmt: skip
        self._bar.add_task("", total=None if samples is None else -(-samples // world.size))
        self._task = self._bar.tasks[0]
        self._bar.start()

    def skip(self, samples: int) -> None:
        """Leave out samples whose features are there."""
        if samples and self._task.total is not None:
            self._bar.update(self._task.id, total=max(self._task.total - samples, 0))

    def add(self, samples: int) -> None:
        """Count a batch that was encoded, or is being encoded by a GPU."""
        self._bar.advance(self._task.id, samples)
        now = time.monotonic()
        if self._shown and now - self._said >= (LINES_EVERY if self._bar.disable else REFRESH):
            self._said = now
            self._draw()

    def close(self) -> None:
        """Draw the bar for the last time."""
        if not self._bar.disable:
            self._draw()
            self._bar.stop()

    def _draw(self) -> None:
        task = self._task
        of = "" if task.total is None else f" of about {task.total:,.0f}"
        parts = [f"{task.completed:,.0f}{of} samples{self._where}"]
        if task.speed:
            parts.append(f"{task.speed:,.0f} samples/s")
        if task.time_remaining is not None:
            parts.append(f"{duration(task.time_remaining)} left")
        if self._bar.disable:
            announce("  ".join(parts))
        else:
            self._bar.update(task.id, description="  ".join(parts), refresh=True)


@dataclass
class Counts:
    """What was read and dropped now, of all passes of a rank, or of all ranks."""

    # (name of a teacher or '', source) -> counts
    health: dict[tuple[str, str], SourceHealth] = field(default_factory=dict)
    complaints: dict[tuple[str, str], str] = field(default_factory=dict)  # why no sample was usable

    def add(self, model: str, source: str, loader: Loader) -> None:
        """Add a pass that has ended."""
        health = loader.health.sources[source]
        health.listed = []
        self.health[model, source] = health
        if complaint := loader.complaint():
            self.complaints[model, source] = complaint

    @classmethod
    def merged(cls, ranks: Sequence[Counts]) -> Counts:
        """Those of all ranks together."""
        found = cls()
        for one in ranks:
            for key, health in one.health.items():
                if key in found.health:
                    found.health[key].merge(health)
                else:
                    found.health[key] = health
            found.complaints |= one.complaints
        return found

    def check(self) -> None:
        """Raise DataError if no sample of a source was usable."""
        for key, health in self.health.items():
            if health.read and not health.used:
                raise DataError(self.complaints.get(key, f"source {key[1]!r}: no sample is usable"))

    def lines(self) -> Iterator[str]:
        """Lines for the terminal."""
        first: dict[str, SourceHealth] = {}
        for (model, source), health in self.health.items():
            if first.setdefault(source, health) is health:
                yield f"source {source}: {health.read:,} samples read now, {health.used:,} used"
                for reason, count in health.dropped.most_common():
                    yield f"  {count:,} ({count / health.read:.1%}) dropped: {reason}, e.g. {health.examples[reason]}"
                for shard, fault in list(health.faults.items())[:SHOWN]:
                    yield f"  {printable(shard)}: {printable(fault, 500)}"
                if len(health.faults) > SHOWN:
                    yield f"  … and {len(health.faults) - SHOWN:,} more shards"
            elif health.dropped != first[source].dropped and health.read == first[source].read:
                lost = health.dropped.total() - first[source].dropped.total()
                yield f"  {lost:+,} dropped for {model}: their features are zeros"


def _conclude(folder: Path, manifest: Manifest, counts: Counts, seconds: float) -> None:
    """Print what was dropped, and what the store holds."""
    for line in counts.lines():
        announce(printable_lines(line))
    shards = [shard for source in manifest.sources.values() for shard in source.shards]
    lost = sum(bool(shard.reason) for shard in shards)
    missing = f", without {lost:,} that could not be opened" if lost else ""
    samples = sum(shard.samples for shard in shards)
    announce(
        f"{folder} is complete: {', '.join(manifest.parts)} of {samples:,} samples in "
        f"{counted(len(shards), 'shard', ',')}{missing}; {duration(seconds)}"
    )
