"""Owns how the ranks of one attempt of a run find each other in a store that may hold what an earlier attempt left.

torchrun keeps one store for all the times that it starts the ranks (torch 2.15), so an address or an error in it may be
a dead rank's. Here the ranks agree on a word that no earlier attempt can have known, to put before all of their keys:
each rank leaves a new number of its own, rank 0 answers every number that it finds with its word, and a rank believes
the answer to its own number alone. It starts no process group.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

SHORTEST, LONGEST = 0.02, 0.5  # s between two looks into the store


class Store(Protocol):
    """A store of torch's, as far as it is used here."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its value then."""


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """The word of this attempt, the same on all ranks; every rank calls this.

    Raises:
        TimeoutError: some ranks did not come.
    """
    return _gather(store, size, timeout) if rank == 0 else _join(store, rank, timeout)


def _join(store: Store, rank: int, timeout: timedelta) -> str:
    mine = secrets.token_hex(8)
    store.set(_number(rank), mine)
    for _ in _looks(timeout):
        if store.check([_answer(rank)]):
            number, _, word = store.get(_answer(rank)).decode().partition(" ")
            if number == mine:
                store.add(_heard(word), 1)
                return word
    raise TimeoutError("rank 0 did not answer")


def _gather(store: Store, size: int, timeout: timedelta) -> str:
    word = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    for _ in _looks(timeout):
        for rank in range(1, size):
            if store.check([_number(rank)]) and (number := store.get(_number(rank))) != answered.get(rank):
                answered[rank] = number
                store.set(_answer(rank), f"{number.decode()} {word}")
        if store.add(_heard(word), 0) == size - 1:
            return word
    came = store.add(_heard(word), 0)
    raise TimeoutError(f"{size - 1 - came} of {size - 1} other ranks did not come")


def _looks(timeout: timedelta) -> Iterator[None]:
    """A look, and then one after each wait, which grow longer, until the time is over."""
    end, wait = time.monotonic() + timeout.total_seconds(), SHORTEST
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(wait)
        wait = min(2 * wait, LONGEST)


def _number(rank: int) -> str:
    return f"clipstream/number/{rank}"


def _answer(rank: int) -> str:
    return f"clipstream/answer/{rank}"


def _heard(word: str) -> str:
    return f"clipstream/heard/{word}"
