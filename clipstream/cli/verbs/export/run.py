"""What `clipstream export RUN --to TARGET` does: the model is loaded, written, checked from outside, and described."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import transformers
from huggingface_hub import HfApi
from rich.console import Console

from clipstream.api.model import load_model
from clipstream.checkpoint.store import locate, model_at, named, with_own_config
from clipstream.cli.verbs.export.card import Exported, script, shown
from clipstream.cli.verbs.export.proof import Samples, drawn, prove, read
from clipstream.config.settings import Settings, load
from clipstream.data.decode.captions import image_bytes
from clipstream.data.decode.images import eight_bits, opened
from clipstream.data.order_plan import stable_names
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import ClipstreamError, Dropped, SettingsError
from clipstream.evals.settings import sources_of
from clipstream.features.tables import Column, FeatureStore, export, positions
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.storage.download import ShardError
from clipstream.storage.shard_cache import ShardCache
from clipstream.utils.logs import logger

WRITERS = {
    "transformers": "files",
    "open_clip": "files",
    "onnx": "onnx_files",
    "sentence-transformers": "sentence_files",
}
SIDE = 256  # pixels of a thumbnail's longer side
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # as Hugging Face datasets have images in Parquet
EXTRAS = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "sentence-transformers": ("sentence_transformers",)}


def export_model(options: argparse.Namespace) -> None:
    """Export a model, and push it to the Hub where this is asked for.

    Raises ClipstreamError: there is no such model, it has no counterpart, or the exported files give other features.
    """
    if options.push_to_hub and not options.license:
        raise SettingsError("--push-to-hub: set the licence of the model with --license, such as mit or cc-by-4.0")
    if missing := [name for name in EXTRAS.get(options.to, ()) if find_spec(name) is None]:
        raise SettingsError(f"--to {options.to} needs {missing[0]}: pip install 'clipstream[{options.to}]'")
    if model_at(Path(options.model)) is None:
        given = {"name": options.model, "pretrained": options.pretrained}
        texts = with_own_config({key: None if value is None else named(value) for key, value in given.items()})
        preflight(chosen := ModelSettings(**texts))
        if chosen.is_fresh:
            raise SettingsError(f"{options.model} names a model without weights: set --pretrained TAG, or name a run")
    run, settings = _run_of(options.model)
    name = options.model.rstrip("/").rpartition("/")[2] if run is None else run.name
    out = Path(options.out or Path("exports", f"{name}-{options.to}"))
    _clear(out)
    model = load_model(options.model, options.pretrained, device="cpu", weights=options.weights)[0]
    samples = _samples_for(options.data, settings)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    module = import_module(f"{__package__}.{WRITERS[options.to]}")  # on use: it may import an extra
    note = getattr(module, f"write_{options.to.replace('-', '_')}")(model.towers, out, options)
    shutil.copy(script(options.to), out / "encoder.py")
    shutil.copy(Path(__file__).parent / "use" / "check.py", out)
    proof = prove(model, out, samples, options.to, ("int8",) if options.int8 else ())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{samples.origin}, in a process without clipstream:")
    console.print(shown(proof), markup=False)
    for why, count in samples.left_out.items():
        console.print(f"left out: {count} {why}", markup=False)
    if broken := [line for line in proof if not line.holds]:
        raise ClipstreamError(
            f"the files in {out} give other features than the model: {broken[0].what} is {broken[0].worst:.6g}, "
            f"{broken[0].bar} is wanted; do not use them"
        )
    exported = Exported(name, options.to, note, model, run, settings, samples, proof)
    (out / "README.md").write_text(exported.card(options.license), encoding="utf-8")
    print(out)
    if options.push_to_hub:
        _push(out, options.push_to_hub, options.private)


def export_features(options: argparse.Namespace) -> None:
    """Export the features of a store. Raises ClipstreamError: it cannot be read, or files cannot be written."""
    store, how = FeatureStore(options.store, options.cache), (options.format, options.dtype, options.captions)
    if options.format != "parquet" and (options.images or options.umap):
        raise SettingsError("--images and --umap are columns of Parquet files: use --format parquet")
    with contextlib.closing(ShardCache(None)) as cache:
        images = None if options.images is None else Thumbnails(store, options.images, cache)
        for part in options.part or store.manifest.feature_parts:
            more = positions(store, part) if options.umap else {}
            more |= {} if images is None else {"image": Column(IMAGE, images)}
            if options.captions and images is not None and not store.manifest.per_caption(part):
                more["caption"] = Column(pa.string(), lambda columns, _: [own[0] for own in columns["captions"]])
            for path in export(store, part, Path(options.out), *how, file_rows=options.rows, more=more):
                print(path)


class Thumbnails:
    """Images of the samples of a store, read from the data that it was computed of.

    Args:
        store: of features.
        data: what training reads.
        cache: of remote shards.

    Raises SettingsError: the data lack the shards of the store.
    """

    def __init__(self, store: FeatureStore, data: str, cache: ShardCache) -> None:
        self._sources: dict[str, tuple[Source, dict[str, str]]] = {}
        for name, info in store.manifest.sources.items():
            given: dict[str, Any] = {**load(["--train-data", data]).data.sources["train"].model_dump(), **info.settings}
            source = Source(SourceSettings.model_validate(given), SourceContext(cache))
            names = dict(zip(stable_names(source.names), source.names, strict=True))
            if missing := [shard.name for shard in info.shards if shard.name not in names]:
                raise SettingsError(f"--images {data}: there is no shard {missing[0]}, of which the store has features")
            self._sources[name] = source, names
        self._open: tuple[str, str] = ("", "")
        self._shard: Any = None
        self._refs: dict[str, Any] = {}

    def __call__(self, columns: Mapping[str, list[Any]], first: int) -> list[dict[str, Any] | None]:
        """A thumbnail of each row, None where its image cannot be read."""
        return [self._of(*row) for row in zip(columns["source"], columns["shard"], columns["key"], strict=True)]

    def _of(self, name: str, shard: str, key: str) -> dict[str, Any] | None:
        source, names = self._sources[name]
        try:
            if self._open != (name, shard):
                self._shard, self._open = source.open(names[shard]), (name, shard)
                self._refs = {ref.key: ref for ref in self._shard.index.samples}
            sample = {"__key__": key, "__url__": "", **self._shard.load(self._refs[key])}
            image = eight_bits(opened(image_bytes(sample, keys=source.settings.image_key)), "white")
        except (OSError, KeyError, ShardError, Dropped):
            return None
        image.thumbnail((SIDE, SIDE))
        file = BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=85)
        return {"bytes": file.getvalue(), "path": f"{shard}/{key}.jpg"}


def _run_of(name: str) -> tuple[Path | None, Settings]:
    """The folder of a model's run, and its settings; None and the defaults for a model without a run."""
    path = Path(name).expanduser()
    folder = model_at(path)
    run = None if folder is None else locate(str(folder)).run
    return run, Settings() if run is None else load(["--config", str(run / "config.yaml")])


def _clear(out: Path) -> None:
    """Make the folder, empty. Raises SettingsError: it holds other files than those of an export, or cannot be made."""
    if out.is_dir() and any(out.iterdir()) and not (out / "check.py").is_file():
        raise SettingsError(f"{out} holds files that are not of an export: name another folder")
    try:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be made: {error.strerror}") from error


def _samples_for(data: str | None, settings: Settings) -> Samples:
    """The samples of the proof: of `data`, else of the run's evaluation or training data, else drawn.

    Raises ClipstreamError: `data` cannot be read.
    """
    if data is not None:
        return read(load(["--train-data", data]).data.sources["train"], data)
    sections = [source for one in settings.evals.values() for source in sources_of(one).values()]
    for section in (*sections, *settings.data.sources.values()):
        try:
            return read(section, str(section.shards))
        except ClipstreamError as error:
            logger.warning(f"the run's own data cannot be read for the check: {error}")
    return drawn()


def _push(out: Path, repo: str, private: bool) -> None:
    """Upload the folder. Raises ClipstreamError: the Hub refuses, or cannot be reached."""
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        print(api.upload_folder(repo_id=repo, folder_path=out, commit_message="Export by clipstream"))
    except Exception as error:  # the client's network errors have no common base
        why = " ".join(str(error).split()) or type(error).__name__
        raise ClipstreamError(f"--push-to-hub {repo}: {why}; the files are in {out}") from error
