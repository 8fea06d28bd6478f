"""The page of a data set (`clipstream check --all --html`): figures, charts and images become one HTML file.

It needs no network; texts are escaped, and thumbnails are left out once they take as much as on a gallery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clipstream.report.charts import Bars
from clipstream.report.pages import SMALL, Thumbnails, fill
from clipstream.text import percent


class Sheet(NamedTuple):
    title: str
    says: str  # a sentence
    images: Sequence[tuple[bytes | None, str, str, str]]  # (file, SHARD/KEY, caption, note)


def render_data(
    figures: Mapping[str, Any], charts: Sequence[Bars], sheets: Sequence[Sheet], told: Mapping[str, Any]
) -> str:
    """The page.

    Args:
        figures: as `check_all` has them.
        charts: histograms and counts by name.
        sheets: images of problems, and examples.
        told: `yaml`, the settings that train, `command`, `quantiles` (name -> cells) and `needed` (rows of a table).
    """
    thumbnails, shown = Thumbnails(), []
    for sheet in sheets:
        images = []
        for data, name, caption, note in sheet.images:
            src, width, height = thumbnails(data, SMALL)
            images.append({"src": src, "width": width, "height": height, "key": name, "text": caption, "note": note})
        shown.append({"title": sheet.title, "says": sheet.says, "images": images})
    return fill("data.html", told, figures=figures, charts=charts, sheets=shown, percent=percent)
