"""What `clipstream export RUN --to TARGET` does: the model is loaded, written, checked from outside, and described."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import transformers
import yaml
from huggingface_hub import HfApi
from rich.console import Console

from clipstream.api.model import Model, load_model
from clipstream.checkpoint.store import Subject, locate, model_at, resolve_model_name, with_own_config
from clipstream.config.config_file import non_defaults
from clipstream.config.settings import Settings, load
from clipstream.config.value_tree import to_yaml
from clipstream.data.decode.images import transparency_note
from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.evals.settings import sources_of
from clipstream.export.files import EXAMPLE, write_use
from clipstream.export.proof import Line, ProofSamples, draw_samples, prove, read
from clipstream.export.tables import Column, export
from clipstream.features.store import FeatureStore
from clipstream.models.model_config import LOCAL
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.precompute.images import StoredImages
from clipstream.report.pages import small_jpeg
from clipstream.report.records import markdown_table, read_evaluations, table_lines
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import redact_tree
from clipstream.text import MESSAGE, file_name, printable
from clipstream.utils.atomic_write import claim_output, note_input
from clipstream.utils.logs import logger

WRITERS = {
    "transformers": "files",
    "open_clip": "files",
    "onnx": "onnx_files",
    "sentence-transformers": "sentence_files",
}
LIBRARIES = {"transformers": "transformers", "open_clip": "open_clip", "sentence-transformers": "sentence-transformers"}
RECIPE = ("model", "data", "tokenizer", "loss", "optim", "schedule", "train", "distill")
SIDE = 256  # pixels of a thumbnail's longer side
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # as Hugging Face datasets have images in Parquet
EXTRAS = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "sentence-transformers": ("sentence_transformers",)}


def export_model(options: Any) -> None:
    """Export a model, and push it to the Hub where this is asked for.

    Raises ClipstreamError: there is no such model, it has no counterpart, or the exported files give other features.
    """
    if options.push_to_hub and not options.license:
        raise SettingsError("--push-to-hub: set the licence of the model with --license, such as mit or cc-by-4.0")
    if options.private and not options.push_to_hub:
        raise SettingsError("--private requires --push-to-hub ORG/NAME")
    for flag, given in (("--int8", options.int8), ("--preprocess", options.preprocess != "none")):
        if given and options.to != "onnx":
            raise SettingsError(f"{flag} is of ONNX graphs: use --to onnx, or remove it")
    if missing := [name for name in EXTRAS.get(options.to, ()) if find_spec(name) is None]:
        raise SettingsError(f"--to {options.to} requires {missing[0]}: pip install 'clipstream[{options.to}]'")
    if model_at(Path(options.model)) is None:
        given = {"name": options.model, "pretrained": options.pretrained}
        texts = with_own_config({key: None if one is None else resolve_model_name(one) for key, one in given.items()})
        preflight(chosen := ModelSettings(**texts))
        if chosen.is_fresh:
            raise SettingsError(f"{options.model} names a model without weights: set --pretrained TAG, or name a run")
    subject, settings = _run_of(options.model, options.config)
    name = options.model.rstrip("/").rpartition("/")[2]
    if subject is not None and subject.run is not None:
        name = subject.run.name + (f"-{subject.label}" if _is_beside(subject) else "")
    out = Path(options.out or Path("exports", f"{name}-{options.to}"))
    _check_free(out, options)
    how = {"weights": options.weights, "config": options.config}
    model = load_model(options.model, options.pretrained, device="cpu", **how)[0]
    samples = _samples_for(options.data, settings)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    module = import_module(f"{__package__}.{WRITERS[options.to]}")  # on use: it may import an extra
    with _replacing(out) as draft:
        graph = (options.preprocess, options.int8) if options.to == "onnx" else ()
        about = getattr(module, f"write_{options.to.replace('-', '_')}")(model.towers, draft, *graph)
        write_use(model.towers, draft, options.to)
        proof = prove(model, draft, samples, options.to, ("int8",) if options.int8 else ())
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{samples.origin}, in a process without clipstream:", markup=False)
        console.print(render_proof(proof), markup=False)
        if note := transparency_note(samples.transparent, samples.looked_at, "white"):
            console.print(f"{note} by pixels.py", markup=False)
        for why, count in samples.left_out.items():
            console.print(f"left out: {count} {why}", markup=False)
        if broken := [line for line in proof if not line.holds]:
            raise ClipstreamError(
                f"the exported files give other features than the model: {broken[0].what} is {broken[0].worst:.6g}, "
                f"{broken[0].bar} is wanted; {out} is left as it was"
            )
        exported = Exported(name, options.to, about, model, subject, settings, samples, proof)
        (draft / "README.md").write_text(exported.card(options.license), encoding="utf-8")
    print(out)
    if options.push_to_hub:
        _push(out, options.push_to_hub, options.private)


def export_features(options: Any) -> None:
    """Export the features of a store. Raises ClipstreamError: it cannot be read, or files cannot be written."""
    note_input(options.store)
    claim_output(options.out, "OUT")
    store, how = FeatureStore(options.store, options.cache), (options.format, options.dtype, options.captions)
    if options.format != "parquet" and options.images:
        raise SettingsError("--images is a column of Parquet files: use --format parquet")
    parts = options.part or store.manifest.feature_parts
    for path in () if options.part else Path(options.out).glob("*/*.parquet"):
        if path.parent.name not in map(file_name, parts):
            raise SettingsError(f"{path} is of another export, with a part that this store lacks: name another folder")
    with contextlib.closing(ShardCache(None)) as cache:
        images = None if options.images is None else partial(_thumbnails, StoredImages(store, options.images, cache))
        for part in parts:
            more = {} if images is None else {"image": Column(IMAGE, images)}
            if options.captions and images is not None and not store.manifest.per_caption(part):
                more["caption"] = Column(pa.string(), lambda columns: [own[0] for own in columns["captions"]])
            for path in export(store, part, Path(options.out), *how, file_rows=options.rows, more=more):
                print(path)


def _thumbnails(images: StoredImages, columns: Mapping[str, list[Any]]) -> list[dict[str, Any] | None]:
    """A thumbnail of each row, None where its image cannot be read."""
    rows = zip(*(columns[name] for name in ("source", "stored", "key", "shard")), strict=True)
    found = [(small_jpeg(images.read(*row[:3]), SIDE)[0], f"{row[3]}/{row[2]}.jpg") for row in rows]
    return [{"bytes": jpeg, "path": path} if jpeg else None for jpeg, path in found]


def _run_of(name: str, config: str | None = None) -> tuple[Subject | None, Settings]:
    """A model in a folder, and the settings of its run; None for other models, defaults for those without a run."""
    folder = model_at(Path(name).expanduser())
    subject = None if folder is None else locate(str(folder))
    if subject is not None and subject.run is None:
        parent = _parent(subject)
        if (parent / "config.yaml").is_file() and (parent / "checkpoints").is_dir():
            subject = replace(subject, run=parent)
    run = None if subject is None else subject.run
    return subject, Settings() if run is None else load(["--config", config] if config else [], run=run)


def _parent(subject: Subject) -> Path:
    assert subject.checkpoint is not None
    return subject.checkpoint.resolve().parent


def _is_beside(subject: Subject) -> bool:
    """Whether a model is in its run's folder, as RUN/interpolated is, and not among the checkpoints."""
    return _parent(subject) == subject.run


def _check_free(out: Path, options: Any) -> None:
    """Raises SettingsError: OUT is or holds the model, or holds other files than an export's, or cannot be made."""
    for name in filter(None, (options.model, options.pretrained)):
        note_input(Path(name.removeprefix(LOCAL)).expanduser())
    claim_output(out, "OUT", holds=True)
    if out.exists() and not _is_replaceable(out):
        raise SettingsError(f"{out} holds files that are not of an export: name another folder")
    with errors_as(SettingsError, f"{out} cannot be made", OSError):
        out.resolve().parent.mkdir(parents=True, exist_ok=True)


def _is_replaceable(out: Path) -> bool:
    """Whether a path is a folder with nothing but the files that an export lists in its check.json."""
    if not out.is_dir():
        return False
    there = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir() or path.is_symlink()}
    there = {name for name in there if "__pycache__" not in Path(name).parts}
    try:
        own = json.loads((out / "check.json").read_text("utf-8")) if there else {"files": []}
        known = not there or "Called by `clipstream export`" in (out / "check.py").read_text("utf-8")
        return known and there <= {*own["files"], "check.json", "README.md"}
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which takes its place at the end, or goes if there is an error."""
    final = out.resolve()
    with errors_as(SettingsError, f"{out} cannot be made", OSError):
        scratch = TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent)
    with scratch as name:
        draft = Path(name, "new")
        draft.mkdir()
        yield draft
        with errors_as(SettingsError, f"{out} cannot be replaced", OSError, advice="name another folder"):
            if final.exists():
                final.rename(Path(name, "old"))
            draft.rename(final)


def _samples_for(data: str | None, settings: Settings) -> ProofSamples:
    """The samples of the proof: of `data`, else of the run's evaluation or training data, else drawn.

    Raises ClipstreamError: `data` cannot be read.
    """
    if data is not None:
        return read(load(["--train-data", data]).data.sources["train"])
    sections = [source for one in settings.evals.values() for source in sources_of(one).values()]
    for section in (*sections, *settings.data.sources.values()):
        try:
            return read(section)
        except ClipstreamError as error:
            logger.warning(f"the run's own data cannot be read for the check: {error}")
    return draw_samples()


def _push(out: Path, repo: str, private: bool) -> None:
    """Upload the folder. Raises ClipstreamError: the Hub refuses, or cannot be reached."""
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        print(api.upload_folder(repo_id=repo, folder_path=out, commit_message="Export by clipstream"))
    except Exception as error:  # the client's network errors have no common base
        why = " ".join(str(error).split()) or type(error).__name__
        raise ClipstreamError(f"--push-to-hub {repo}: {why}; the files are in {out}") from error


def render_proof(table: Sequence[Line]) -> str:
    """The proof as a table in Markdown."""
    rows = [[line.what, f"{line.worst:.6g}", line.bar, "yes" if line.holds else "NO"] for line in table]
    return markdown_table(("compared", "worst", "bar", "holds"), rows)


@dataclass(frozen=True)
class Exported:
    """What a card describes: the model, where it is, its run's settings, the files, and how they were checked."""

    name: str
    target: str
    note: str
    model: Model
    subject: Subject | None
    settings: Settings
    samples: ProofSamples
    proof: Sequence[Line]

    @property
    def run(self) -> Path | None:
        return None if self.subject is None else self.subject.run

    def card(self, licence: str | None) -> str:
        """The text of README.md. `licence` is an identifier of the Hub, such as 'mit'."""
        meta = {
            **({"library_name": LIBRARIES[self.target]} if self.target in LIBRARIES else {}),
            **({"license": licence} if licence else {}),
            "pipeline_tag": "zero-shot-image-classification",
            "tags": ["clip", "clipstream", self.target],
        }
        code = EXAMPLE.read_text(encoding="utf-8").replace("  # type: ignore[import-not-found]", "")
        sections = {
            f"# {printable(self.name)}": f"{self.note} It gives images and texts features of {self.model.embed_dim} "
            "numbers, whose cosine says how well they match.",
            "## Use": f"Images of the folder `images`, with this folder as working directory or on `PYTHONPATH`:\n\n"
            f"```python\n{code}```\n\n`encoder.py` calls {self.target.replace('-', ' ')} on images that `pixels.py` "
            "prepares as in training: transparent pixels are laid on white, 16 bits scaled. Code that does not use it "
            'has to do so itself: `convert("RGB")` shows what lies under transparent pixels.',
            "## Data": self._data(),
            "## Recipe": self._recipe(),
            "## Evaluation": self._evaluations(),
            "## Limits": self._limits(),
            "## Check of these files": f"{self.samples.origin}, without clipstream:\n\n{render_proof(self.proof)}",
        }
        body = "\n\n".join(f"{head}\n\n{text}" for head, text in sections.items() if text)
        return f"---\n{yaml.safe_dump(meta, sort_keys=False)}---\n\n{body}\n"

    def _data(self) -> str:
        if self.run is None:
            return "Trained elsewhere: see the card of the weights."
        sources = redact_tree({name: str(one.shards) for name, one in self.settings.data.sources.items()})
        return "\n".join(f"- `{printable(name)}`: `{printable(shards, MESSAGE)}`" for name, shards in sources.items())

    def _recipe(self) -> str:
        if self.run is None:
            return ""
        tree: dict[str, Any] = {key: part for key, part in non_defaults(self.settings).items() if key in RECIPE}
        wanted = {key: {k: v for k, v in part.items() if k not in ("name", "sources")} for key, part in tree.items()}
        model = {"name": Path(self.settings.model.name or "").name} | wanted.pop("model", {})
        wanted = {"model": model, **wanted}
        return f"Trained with clipstream:\n\n```yaml\n{to_yaml(redact_tree(wanted))}```"

    def _evaluations(self) -> str:
        subject = self.subject
        if subject is None or subject.checkpoint is None:
            return "None is recorded."
        mixed = subject.checkpoint / "frontier.md"
        if mixed.is_file():  # the chosen mixture of weights, among the others
            return mixed.read_text(encoding="utf-8").strip()
        records = [] if subject.run is None else read_evaluations(subject.run)
        found = [record for record in records if "error" not in record and record.get("step", 0) <= subject.step]
        last = {record["eval"]: record for record in sorted(found, key=lambda record: record.get("step", 0))}
        return table_lines(*last.values(), head=True, markdown=True).strip() if last else "None is recorded."

    def _limits(self) -> str:
        height, width = self.model.preprocess.size
        length, mode = self.model.tokenizer.context_length, self.model.preprocess.image.resize_mode
        return (
            f"- A text is cut after {length} tokens, an image is reduced to {height} x {width} pixels ({mode}).\n"
            "- Features reflect what the training data show and say, with their gaps and biases: evaluate the model on "
            "your own task before you rely on it. Texts in languages that the captions lack are not understood.\n"
            "- Texts in a wrong encoding (mojibake) and rare HTML entities are repaired in training, not by exported "
            "tokenizers."
        )
