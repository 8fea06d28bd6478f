"""Plug-ins: imports the object that 'package.module:Name' names, and describes the errors it raises."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from clipstream.errors import ClipstreamError, Dropped, SettingsError, errors_as
from clipstream.text import Lines, lines
from clipstream.utils.logs import logger

# Folders, with the separator: a user's folder beside ours may begin with the same name.
OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
_printed = mmap.mmap(-1, 1)  # shared with forked workers: whether a traceback was printed


def describe_error(part: str, error: BaseException) -> str:
    """A plug-in's exception with file and line. The first traceback of a process and its workers is also printed."""
    if not _printed[0]:
        _printed[0] = 1
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        logger.warning(lines(f"{part} raised, for the first time:", Lines(trace)))
    if isinstance(error, SyntaxError):  # it has no frame of its own
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {error}" if isinstance(error, OSError) and error.filename else repr(error)
    theirs = [frame for frame in frames if not is_library(frame.filename)]
    if not theirs:
        return what
    folder = os.path.dirname(theirs[0].filename)  # the last frames may be those of an installed package
    last = [frame for frame in theirs if os.path.dirname(frame.filename) == folder][-1]
    return f"{what} at {os.path.basename(last.filename)}:{last.lineno}"


def call_plugin(reason: str, part: str, function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a plug-in's function that is called for a sample.

    Raises Dropped: as the function raised it, or under `reason` if it raised anything else.
    """
    try:
        return function(*arguments)
    except Dropped:
        raise
    except Exception as error:
        raise Dropped(reason, describe_error(part, error)) from error


def is_library(file: str, *, installed: bool = False) -> bool:
    """Whether a file is clipstream's, Python's own, or (`installed`) an installed package's, as plug-ins may be."""
    packaged = "site-packages" in file
    return file.startswith((OURS, "<frozen ")) or (installed if packaged else file.startswith(_PYTHON))


def is_plugin(text: str) -> bool:
    """Whether a text has the form 'package.module:Name'."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text) is not None


def load_plugin(path: str) -> Any:
    """Import the object that `package.module:Name` names, also from the current folder.

    Raises ValueError: the path has no colon, the module does not import, or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{path!r} is not of the form 'package.module:Name'")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the import of the module raises
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        what = f"no module {absent!r} in the current folder, in PYTHONPATH, or installed"
        if absent is None or not f"{module_name}.".startswith(f"{absent}."):
            what = describe_error(f"the import of {module_name}", error)
        raise ValueError(f"cannot import {module_name!r} for {path!r}: {what}") from error
    try:
        return attrgetter(name)(found)
    except AttributeError as error:
        raise ValueError(f"module {module_name!r} has no {name!r}") from error


def make_plugin(key: str, settings: Any, *more: Any) -> Any:
    """Construct the class that `settings.type` names as `package.module:Name` with the settings and further arguments.

    Raises SettingsError: there is no such class, or it raised; the message begins with `key`.
    """
    path: str = settings.type
    with errors_as(SettingsError, key, ClipstreamError, ValueError):
        make = load_plugin(path)
        try:
            return make(settings, *more)
        except ClipstreamError:
            raise
        except Exception as error:
            raise ValueError(f"{path} cannot be made of its settings: {describe_error(path, error)}") from error


def untrusted_code_message(folder: object, error: Exception) -> str | None:
    """The message where transformers refuses to run the code in a tokenizer's folder; None for other errors."""
    if "trust_remote_code" not in str(error):
        return None
    return (
        f"the tokenizer in {folder} is Python code of its own (auto_map), and none of it was run: read it, and if you "
        "trust it, set --tokenizer.trust-remote-code true"
    )


def load_function(path: str) -> Callable[..., Any]:
    """As `load_plugin`, for a function. Raises ValueError: also where the object is not callable."""
    if not callable(found := load_plugin(path)):
        raise ValueError(f"{path} is not a function")
    return cast(Callable[..., Any], found)
