"""What `clipstream export RUN --to TARGET` does: the model is loaded, written, checked from outside, and described."""

from __future__ import annotations

import argparse
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import transformers
from huggingface_hub import HfApi
from rich.console import Console

from clipstream.api.model import load_model
from clipstream.checkpoint.store import locate, model_at, named, with_own_config
from clipstream.cli.verbs.export.card import Exported, script, shown
from clipstream.cli.verbs.export.proof import Samples, drawn, prove, read
from clipstream.config.settings import Settings, load
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.evals.settings import sources_of
from clipstream.features.tables import FeatureStore, export
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.utils.logs import logger

WRITERS = {
    "transformers": "files",
    "open_clip": "files",
    "onnx": "onnx_files",
    "sentence-transformers": "sentence_files",
}
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
    for part in options.part or store.manifest.feature_parts:
        for path in export(store, part, Path(options.out), *how, file_rows=options.rows):
            print(path)


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
