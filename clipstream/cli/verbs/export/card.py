"""The model card of an exported model: README.md with the Hub's metadata, from the run and the proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clipstream.api.model import Model
from clipstream.checkpoint.store import Subject
from clipstream.cli.verbs.export.proof import Line, Samples
from clipstream.cli.verbs.export.shipped import EXAMPLE
from clipstream.config.settings import Settings
from clipstream.report.eval_results import FIGURES_FILE, table_lines
from clipstream.report.sinks import lines, markdown_table
from clipstream.storage.shard_url import redact_tree
from clipstream.text import MESSAGE, printable

LIBRARIES = {"transformers": "transformers", "open_clip": "open_clip", "sentence-transformers": "sentence-transformers"}
RECIPE = ("model", "data", "tokenizer", "loss", "optim", "schedule", "train", "distill")


def changed(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The values of a tree of settings that are not the defaults."""
    found = {}
    for key, value in tree.items():
        usual = defaults.get(key)
        inner = changed(value, usual) if isinstance(value, dict) and isinstance(usual, dict) else value
        if inner != ({} if inner is not value else usual):
            found[key] = inner
    return found


def shown(table: Sequence[Line]) -> str:
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
    samples: Samples
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
            "## Check of these files": f"{self.samples.origin}, without clipstream:\n\n{shown(self.proof)}",
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
        tree = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        own = changed({key: tree[key] for key in RECIPE if key in tree}, Settings().model_dump(mode="json"))
        wanted = {key: {k: v for k, v in part.items() if k not in ("name", "sources")} for key, part in own.items()}
        wanted["model"] = {"name": Path(tree["model"]["name"] or "").name} | wanted.get("model", {})
        text = yaml.safe_dump(redact_tree(wanted), sort_keys=False, allow_unicode=True)
        return f"Trained with clipstream:\n\n```yaml\n{text}```"

    def _evaluations(self) -> str:
        subject = self.subject
        if subject is None or subject.checkpoint is None:
            return "None is recorded."
        mixed = subject.checkpoint / "frontier.md"
        if mixed.is_file():  # the chosen mixture of weights, among the others
            return mixed.read_text(encoding="utf-8").strip()
        path = None if subject.run is None else subject.run / FIGURES_FILE
        if path is None or not path.is_file():
            return "None is recorded."
        found = [record for _, record in lines(path) if "error" not in record and record.get("step", 0) <= subject.step]
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
