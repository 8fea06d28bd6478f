"""The package's logger: what a verb shows of it, on which stream, and that an import alone shows nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from clipstream.utils.logs import TerminalHandler, announce, logger, on_terminal, set_level
from tests.support.forks import Fork


def say_all() -> None:
    logger.debug("small")
    logger.info("reading")
    logger.warning("slow")
    logger.error("lost")
    announce("model    ViT")


def test_messages_have_their_level_and_stream(capsys: pytest.CaptureFixture[str]) -> None:
    say_all()
    assert capsys.readouterr() == ("model    ViT\n", "reading\nwarning: slow\nerror: lost\n")


@pytest.mark.parametrize(
    ("level", "out", "err"),
    [
        ("debug", "model    ViT\n", "small\nreading\nwarning: slow\nerror: lost\n"),
        ("warning", "", "warning: slow\nerror: lost\n"),
        ("error", "", "error: lost\n"),
    ],
)
def test_the_level(level: str, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    with on_terminal():
        set_level(level)
        say_all()
    assert capsys.readouterr() == (out, err)
    say_all()  # the level ends with the context
    assert "reading" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        (None, ["reading", "warning: slow"]),
        (0, ["reading", "[rank 0] warning: slow"]),
        (1, ["[rank 1] reading", "[rank 1] warning: slow"]),
    ],
)
def test_the_rank_stands_before_the_line(rank: int | None, lines: list[str]) -> None:
    handler = TerminalHandler(rank)
    records = [
        logging.LogRecord("clipstream", level, "", 0, text, None, None)
        for level, text in ((logging.INFO, "reading"), (logging.WARNING, "slow"))
    ]
    assert [handler.format(record) for record in records] == lines


SAYS = """
import logging, clipstream.report.outputs, clipstream.train, clipstream.data.sequential_loader
from clipstream.utils.logs import logger, announce
assert logging.getLogger("clipstream").handlers == [] == logging.getLogger().handlers
logger.info("reading")
announce("model")
"""


def test_an_import_installs_no_handler(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    process = Fork([str(tmp_path / "says.py")], merged=True)
    assert (process.communicate()[0], process.wait()) == (b"", 0)
