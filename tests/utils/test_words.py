"""Counts with their nouns, and texts cut to a line."""

from __future__ import annotations

import pytest

from clipstream.utils.words import counted, shortened


@pytest.mark.parametrize(
    ("count", "form", "text"),
    [
        (0, "", "0 ranks"),
        (1, "", "1 rank"),
        (2000, "", "2000 ranks"),
        (2000, ",", "2,000 ranks"),
        (0.5, "g", "0.5 ranks"),
    ],
)
def test_a_noun_follows_its_count(count: float, form: str, text: str) -> None:
    assert counted(count, "rank", form) == text


@pytest.mark.parametrize(
    ("text", "shown"), [("a\n  b ", "a b"), ("abcde", "abcde"), ("abcdef", "abcd…"), ("ab cd ef", "ab c…"), ("", "")]
)
def test_a_long_text_is_cut_to_a_line(text: str, shown: str) -> None:
    assert shortened(text, 5) == shown
