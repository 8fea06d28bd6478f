"""RUN/pictures/NAME.json: the newest pictures and tables of each evaluator, and of the training data ('train').

Examples enter; files with JPEG thumbnails and texts leave, which the report shows. Files are replaced atomically.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clipstream.evals.example import Example, Table
from clipstream.report.sinks import Sink
from clipstream.utils import atomic_write

FOLDER = "pictures"
LARGEST = 160  # pixels of a thumbnail's longer side
QUALITY = 85


@dataclass(frozen=True)
class Page:
    """Pictures and tables of an evaluator, or of 'train', at one step.

    Attributes:
        pictures: each with src (a data: URL), text, key, guesses, group, note.
        tables: each with title, header, rows.
    """

    name: str
    step: int
    pictures: list[dict[str, Any]]
    tables: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> Page:
        """The page for examples and tables."""
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
        """The pictures by heading, in their order."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for picture in self.pictures:
            groups.setdefault(picture["group"], []).append(picture)
        return groups


class PictureFiles(Sink):
    """The pictures in a run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Replace the pictures and tables of `name`.

        Raises:
            OSError: they cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        page = Page.of(step, name, examples, tables)
        file = re.sub(r"[^\w.-]", lambda character: f"%{ord(character[0]):x}", name)
        atomic_write.replace(self.folder / f"{file}.json", json.dumps(asdict(page)).encode())

    def pages(self) -> list[Page]:
        """All pages, the training data first; other files are skipped."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(Page(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError):
                continue
        return sorted(found, key=lambda page: (page.name != "train", page.name))


def _data_url(example: Example) -> str:
    from PIL import Image

    picture = Image.fromarray(example.pixels.permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
