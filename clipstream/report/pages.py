"""Parts that HTML pages share, templates and thumbnails, and the page of a data set. Imports no torch.

The latter (`clipstream check --all --html`) is one HTML file of figures, charts and images that needs no network; texts
are escaped, and thumbnails are left out once they take as much as on a gallery.
"""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from clipstream import __version__
from clipstream.data.decode.images import converted, loaded, opaque, opened, orientation_of, turned
from clipstream.errors import Dropped
from clipstream.report.charts import Bars
from clipstream.text import percent

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # which no page has, though names of runs may
MOST = 4_700_000  # bytes of thumbnails of a gallery
SIDE, SMALL = 288, 160  # pixels of a thumbnail's longer side; SMALL where there are more than MANY cards


@cache
def _template(name: str) -> Any:
    """A page's template; a process that writes several pages compiles it once."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("clipstream.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["hash_of"] = lambda script: f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    return environment.get_template(name)


def fill(name: str, *values: Any, **more: Any) -> str:
    """A page from its template. Its content security policy, in `head.html`, allows the template's script by its hash,
    styles, and images in data: URLs: a browser loads nothing else. Raises as jinja2 does.
    """
    page: str = _template(name).render(*values, version=__version__, **more)
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", page)


class Thumbnails:
    """Thumbnails of a page, until they take MOST bytes."""

    left = MOST

    def __call__(self, data: bytes | None, side: int) -> tuple[str, int, int]:
        """As `thumbnail`. Once one does not fit, no more are computed."""
        src, width, height = thumbnail(data if self.left else None, side)
        src, self.left = (src, self.left - len(src)) if len(src) <= self.left else ("", 0)
        return src, width, height


def thumbnail(data: bytes | None, side: int) -> tuple[str, int, int]:
    """A data URL with a JPEG, its width and its height; '' and a square if there is no image."""
    jpeg, width, height = small_jpeg(data, side)
    return f"data:image/jpeg;base64,{b64encode(jpeg).decode()}" if jpeg else "", width, height


def small_jpeg(data: bytes | None, side: int) -> tuple[bytes, int, int]:
    """A JPEG of an image file, its width and its height, `side` at most; empty and a square if there is no image."""
    try:
        image = opened(data or b"")
        orientation = orientation_of(image)
        image.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded at a fraction of its size
        image = converted(turned(opaque(loaded(image), (255, 255, 255)), orientation))
    except Dropped:
        return b"", side, side
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return file.getvalue(), *image.size


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
