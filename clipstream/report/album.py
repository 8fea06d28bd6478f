"""Owns the pictures of a run: RUN/pictures/NAME.json, the newest examples of each evaluator and of the training data.

A file holds thumbnails (JPEG) and words, as the report shows them, and is replaced whole. It never reads a data set.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clipstream import durable
from clipstream.example import Example, Table

FOLDER = "pictures"
LARGEST = 160  # pixels of a thumbnail's longer side
QUALITY = 85
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Page:
    """Examples that were shown together.

    Attributes:
        name: of the evaluator, or 'train'.
        step: at which they were shown.
        pictures: of each: src (a data: URL), text, key, guesses, group, note.
        tables: of each: title, header, rows.
    """

    name: str
    step: int
    pictures: list[dict[str, Any]]
    tables: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> Page:
        """What an evaluator, or 'train', shows."""
        pictures = [
            {
                "src": _data_url(example),
                "text": example.text,
                "key": example.key,
                "guesses": [[text, round(float(score), 4)] for text, score in example.guesses],
                "group": example.group,
                "note": example.note,
            }
            for example in examples
        ]
        return cls(name, step, pictures, [asdict(table) for table in tables])

    @property
    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The pictures under their headings, in their order."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for picture in self.pictures:
            groups.setdefault(picture["group"], []).append(picture)
        return groups


class Album:
    """The pictures of one run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Keep these examples and tables in place of the name's earlier ones.

        Raises:
            OSError: they cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        page = Page.of(step, name, examples, tables)
        durable.replace(self.folder / f"{_file_name(name)}.json", json.dumps(asdict(page)).encode())

    def pages(self) -> list[Page]:
        """What is there, the training data first; a file that is no page of ours is left out."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(Page(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError):
                continue
        return sorted(found, key=lambda page: (page.name != "train", page.name))


class Shows(Protocol):
    """Where examples go: `Album` and TensorBoard."""

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Take the examples and tables of an evaluator, or of 'train'."""


def _data_url(example: Example) -> str:
    from PIL import Image

    picture = Image.fromarray(example.pixels.permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _file_name(name: str) -> str:
    """A name of the user's as a file's: others than letters, digits, '.', '-' and '_' as their code."""
    return "".join(c if _NAME.fullmatch(c) else f"%{ord(c):x}" for c in name)
