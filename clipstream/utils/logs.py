"""The logger `clipstream` and its handler for the terminal.

Messages of the whole package enter; lines on standard error leave: `warning: ...`, `error: ...`, and progress without a
prefix. Where several ranks run, the rank stands before the line. The verbs install the handler while they run. A
process that only imports the package has no handler: a notebook shows no progress. `loading` is the last line of a
terminal until the first step.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import Any, TextIO

from clipstream.text import message


def _escape(record: logging.LogRecord) -> bool:
    """Make the text of a record a `message`."""
    record.msg, record.args = message(record.getMessage() if record.args else record.msg), None
    return True


logger = logging.getLogger("clipstream")
logger.addFilter(_escape)
displayed = logging.getLogger("clipstream.displayed")  # lines that the terminal already shows: for files only
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")


class TerminalHandler(logging.Handler):
    """Writes messages to standard error, and those of `announce` to standard output. The rank, if there are several,
    stands before warnings and errors, and before progress of ranks other than 0.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(logging.INFO)
        self.rank = rank
        self.addFilter(lambda record: record.name != displayed.name)

    def format(self, record: logging.LogRecord) -> str:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        rank = f"[rank {self.rank}] " if self.rank or (self.rank is not None and kind) else ""
        return f"{rank}{kind}{record.getMessage()}"

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; errors of the stream are raised, as print does."""
        stream = sys.stdout if getattr(record, "announced", False) else sys.stderr
        loading.erase()
        text = self.format(record)
        print(text if getattr(record, "whole", False) else wrap(text, stream), file=below(stream), flush=True)


class Loading:
    """A line at the end of the terminal with what a verb loads, and for how long, drawn anew each second. A context,
    which ends it.

    It is drawn by a thread, which writes to the file descriptor: a fork of data workers meets no lock of it.
    """

    def __init__(self) -> None:
        self._text, self._began = "", 0.0  # the phase, and when it began
        self.paused = False  # while another line, such as a bar, is the last one
        self._ended = threading.Event()
        self._ended.set()

    def begin(self, text: str) -> None:
        """Show the line from now on; without effect off a terminal."""
        if all(os.isatty(number) for number in (1, 2)):
            self._ended.clear()
            self.show(text)
            threading.Thread(target=self._redraw, name="loading", daemon=True).start()

    def show(self, text: str) -> None:
        """What is loaded now; without effect where the line is not shown."""
        if text != self._text:
            self._text, self._began = text, time.monotonic()
        # The cursor goes back to the start of the line: what is printed by others replaces it.
        self._write(f"\r\x1b[K{text} … {time.monotonic() - self._began:.0f} s\r")

    def erase(self) -> None:
        """Clear the line, before another one is printed."""
        self._write("\r\x1b[K")

    def end(self) -> None:
        self.erase()
        self._ended.set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def _redraw(self) -> None:
        while not self._ended.wait(1.0):
            self.show(self._text)

    def _write(self, text: str) -> None:
        if not self._ended.is_set() and not self.paused:
            with suppress(OSError):
                os.write(1, text.encode(errors="replace"))


loading = Loading()
os.register_at_fork(after_in_child=loading._ended.set)  # data workers have no such line


def announce(text: str, *, whole: bool = False) -> None:
    """Log a line of a verb's own output, which the terminal shows on standard output; `whole` as a command to copy."""
    logger.info(text, extra={"announced": True, "whole": whole})


def wrap(text: str, stream: TextIO) -> str:
    """The text with its lines wrapped between words, if the stream is a terminal."""
    if not stream.isatty():
        return text
    wrapper = TextWrapper(get_terminal_size().columns, subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def set_level(level: str) -> None:
    """Show messages of this level and above on the terminal; files get 'info' and above in any case."""
    number: int = getattr(logging, level.upper())
    logger.setLevel(min(number, logging.INFO))
    for handler in logger.handlers:
        if isinstance(handler, TerminalHandler):
            handler.setLevel(number)


@contextmanager
def on_terminal(rank: int | None = None) -> Iterator[None]:
    """Show messages on the terminal within the context; within another such context, only the level is put back."""
    found = [handler for handler in logger.handlers if isinstance(handler, TerminalHandler)]
    handler = found[0] if found else TerminalHandler(rank)
    before = logger.level, logger.propagate, handler.level
    if not found:
        logger.addHandler(handler)
    logger.setLevel(min(before[0] or logging.INFO, logging.INFO))
    logger.propagate = False  # other handlers of the process would show the lines a second time
    try:
        yield
    finally:
        level, logger.propagate, shown = before
        logger.setLevel(level)
        handler.setLevel(shown)
        if not found:
            logger.removeHandler(handler)


def drop_output(stream: TextIO) -> None:
    """Let what is buffered for a stream, and all that follows, go nowhere; its reader has gone."""
    with suppress(OSError, ValueError):  # no file, as in a notebook
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LossyStream:
    """A text stream that warns and loses text where it cannot be written: the reader of a pipe has gone, a terminal was
    closed, a disk is full.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream: Any = stream
        self._name, self._broken = name, False

    def write(self, text: str) -> int:
        self._try(partial(self._stream.write, text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            function()
        except OSError as error:
            self._broken = True  # first: the warning may come here as well
            drop_output(self._stream)
            logger.warning(f"{self._name} cannot be written ({error.strerror}): the run continues without it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output() -> Iterator[None]:
    """A context in which standard output and standard error are `LossyStream`s."""
    out: Any = LossyStream(sys.stdout, "standard output")
    error: Any = LossyStream(sys.stderr, "standard error")
    with redirect_stdout(out), redirect_stderr(error):
        yield


class Tee:
    """A text stream that passes everything to another one, `terminal`, and whole lines to the logger
    `clipstream.displayed`. Progress bars draw on the other one and leave no lines in the log.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal: Any = terminal
        self._line = ""

    def write(self, text: str) -> int:
        """Pass the text on, and log the lines that are complete now."""
        written: int = self.terminal.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            log_displayed(line)
        return written

    def flush(self) -> None:
        self.terminal.flush()

    def finish(self) -> None:
        """Log a last line that has no line end."""
        log_displayed(self._line)
        self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def below(stream: TextIO) -> TextIO:
    """The stream below a `Tee`; any other stream itself."""
    found: TextIO = stream.terminal if isinstance(stream, Tee) else stream
    return found


def log_displayed(line: str) -> None:
    """Log a line as the terminal shows it, for files: of a line that is redrawn, the last state."""
    text = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
    if text:
        level = {"error": logging.ERROR, "warning": logging.WARNING}.get(text.partition(":")[0], logging.INFO)
        displayed.log(level, "%s", text)
