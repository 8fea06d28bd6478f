"""The page of a search: queries with the images that they found, and those near them.

Queries with their hits enter, and a function that gives the card of a row; an HTML page leaves, see `report.pages`.
Cards have thumbnails as long as the page stays below 5 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clipstream.report.pages import SIDE, SMALL, Thumbnails, fill, thumbnail
from clipstream.text import shortened

MANY = 150  # cards of a gallery
LONGEST = 500  # characters of a caption
Hits = Sequence[tuple[int, float]]  # (row, score), best first


@dataclass(frozen=True)
class Card:
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
        about: the data and the model, in words.
    """
    shown = dict.fromkeys(row for _, hits in queries for row, _ in hits)
    order = dict.fromkeys([*shown, *(row for row in shown for row, _ in near.get(row, ()))])
    side, thumbnails, cards = SIDE if len(order) <= MANY else SMALL, Thumbnails(), {}
    for row in order:
        own = card(row)
        src, width, height = thumbnails(own.image, side)
        others = [(other, round(score, 4)) for other, score in near.get(row, ()) if other != row]
        told = {"name": own.name, "caption": shortened(own.caption, LONGEST), "link": own.link, "near": others}
        cards[row] = {**told, "src": src, "width": width, "height": height}
    return fill(
        "search",
        f"{queries[0][0][0] if len(queries) == 1 else f'{len(queries)} queries'} · search",
        queries=[(shortened(text, LONGEST), *thumbnail(image, SMALL), hits) for (text, image), hits in queries],
        cards=cards,
        about=about,
        others=[row for row in order if row not in shown],
        near={row: card["near"] for row, card in cards.items() if card["near"]},
    )
