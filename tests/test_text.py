"""Untrusted text is safe to print: no control characters, bounded length; counts with their nouns, texts cut."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clipstream.errors import DataError, Dropped, errors_as
from clipstream.text import MESSAGE, VALUE, counted, lines, printable, printable_lines, shortened
from tests.support.hostile_text import HOSTILE, obeyed


@example(HOSTILE)
@given(st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert obeyed(printable(text)) == []
    assert set(obeyed(printable_lines(text))) <= {"\n", "\t"}
    assert printable(printable(text, 10**6), 10**6) == printable(text, 10**6)
    printable(text).encode()


@example("a photo of a \U0001f469‍\U0001f4bb")
@example("ein Käfer: 100 % \\ 'a' [b]")
@example("سگ می‌دود")
@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=VALUE))
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_long_text_is_cut_and_its_length_is_told() -> None:
    text = printable("x" * 10_000_000)
    assert len(text) < VALUE + 40 and text.endswith("x… (10,000,000 characters)")
    assert len(printable("\x1b" * 10_000_000, 50)) < 50 * 4 + 40


def test_errors_and_drops_are_safe_to_print_and_keep_the_lines_that_are_meant() -> None:
    assert str(DataError(f"first: {HOSTILE}\n\tsecond")) == printable(f"first: {HOSTILE}\n\tsecond")
    several = lines("first", f"  {HOSTILE}\n")
    assert several == f"first\n  {printable(HOSTILE)}\\n"
    error = DataError(several)
    assert str(error) == str(DataError(str(error))) == str(pickle.loads(pickle.dumps(error))) == several
    with pytest.raises(DataError) as caught, errors_as(DataError, "no\ndata", ValueError, DataError, advice="wait"):
        raise DataError(several)
    assert str(caught.value) == f"no\\ndata: {several}; wait"
    assert len(str(DataError("y" * 10**6))) < MESSAGE + 40
    drop = Dropped("mine\x1b[2J", HOSTILE + "\n" + "z" * 1000)
    assert obeyed(drop.reason + drop.detail + str(drop)) == [] and len(drop.detail) < 2 * VALUE


def test_a_noun_follows_its_count_and_a_long_text_is_cut_to_a_line() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2000)] == ["0 ranks", "1 rank", "2000 ranks"]
    assert counted(2000, "rank", ",") == "2,000 ranks" and counted(0.5, "rank", "g") == "0.5 ranks"
    texts = {"a\n  b ": "a b", "abcde": "abcde", "abcdef": "abcd…", "ab cd ef": "ab c…", "": ""}
    assert [shortened(text, 5) for text in texts] == [*texts.values()]
