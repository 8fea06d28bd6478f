"""The package's logger: what a verb shows of it, on which stream, and that an import alone shows nothing."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from clipstream.utils.logs import TerminalHandler, announce, logger, on_terminal, set_level


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


def test_an_import_installs_no_handler() -> None:
    code = (
        "import logging, clipstream.report.outputs, clipstream.train, clipstream.data.build\n"
        "from clipstream.utils.logs import logger, announce\n"
        "assert logging.getLogger('clipstream').handlers == [] == logging.getLogger().handlers\n"
        "logger.info('reading'); announce('model')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
