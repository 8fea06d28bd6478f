"""The gallery of a search: one HTML file that needs no network, with the images found and those near them.

Queries with their hits enter, and a function that gives the card of a row; the page leaves. Cards have thumbnails as
long as the page stays below 5 MB. Texts are escaped, and the page's content security policy allows its own style and
script by their hash, images of its own, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clipstream import __version__
from clipstream.data.decode.images import converted, loaded, opaque, opened, orientation_of, turned
from clipstream.errors import Dropped
from clipstream.report.html_report import CONTROLS, template
from clipstream.text import shortened

MOST = 4_700_000  # bytes of thumbnails on a page
SIDE, SMALL = 288, 160  # pixels of a thumbnail's longer side; SMALL where there are more than MANY cards
MANY = 150
LONGEST = 500  # characters of a caption
Hits = Sequence[tuple[int, float]]  # (row, score), best first


@dataclass(frozen=True)
class Card:
    """An image on the page."""

    name: str
    caption: str
    link: str  # URL of its file; '' for none
    image: bytes | None = None  # the image file; None if it cannot be read


def render_gallery(
    queries: Sequence[tuple[tuple[str, bytes | None], Hits]],
    near: Mapping[int, Hits],
    card: Callable[[int], Card],
    about: str = "",
) -> str:
    """The page.

    Args:
        queries: ((text, image file of a query that is one), what it found).
        near: of rows that were found, the rows near them, themselves included.
        card: gives the card of a row; called once for each.
        about: the model and the data, in words.
    """
    shown = dict.fromkeys(row for _, hits in queries for row, _ in hits)
    order = dict.fromkeys([*shown, *(row for row in shown for row, _ in near.get(row, ()))])
    side, left, cards = SIDE if len(order) <= MANY else SMALL, MOST, {}
    for row in order:
        own = card(row)
        src, width, height = _thumbnail(own.image if left else None, side)
        # Once a thumbnail does not fit, no more are computed.
        src, left = (src, left - len(src)) if len(src) <= left else ("", 0)
        others = [(other, round(score, 4)) for other, score in near.get(row, ()) if other != row]
        told = {"name": own.name, "caption": shortened(own.caption, LONGEST), "link": own.link, "near": others}
        cards[row] = {**told, "src": src, "width": width, "height": height}
    page: str = template("gallery.html").render(
        queries=[(shortened(text, LONGEST), *_thumbnail(image, SMALL), hits) for (text, image), hits in queries],
        cards=cards,
        about=about,
        data={row: {**cards[row], **({"src": ""} if row in shown else {})} for row in cards},  # the page has its image
        version=__version__,
        allow=lambda text: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'",
    )
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", page)


def _thumbnail(data: bytes | None, side: int) -> tuple[str, int, int]:
    """A data URL with a JPEG, its width and its height; '' and a square if there is no image."""
    try:
        image = opened(data or b"")
        orientation = orientation_of(image)
        image.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded at a fraction of its size
        image = converted(turned(opaque(loaded(image), (255, 255, 255)), orientation))
    except Dropped:
        return "", side, side
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}", *image.size
