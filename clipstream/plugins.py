"""Owns the way from 'package.module:Name' to the object it names; never keeps what it loaded."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any


def is_plugin(text: str) -> bool:
    """Whether a text has the form 'package.module:Name'."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text) is not None


def load_plugin(path: str) -> Any:
    """Import the object that `package.module:Name` names.

    The current folder is searched as well, so that a file of one's own beside the shards works without packaging.

    Raises:
        ValueError: the path has no colon, the module does not import, or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{path!r} is not of the form 'package.module:Name'")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ValueError(f"cannot import {module_name!r} for {path!r}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    return found


def load_function(path: str) -> Callable[..., Any]:
    """As `load_plugin`, for what is called as it is.

    Raises:
        ValueError: also where the object cannot be called.
    """
    found: Any = load_plugin(path)
    if not callable(found):
        raise ValueError(f"{path} is no function")
    function: Callable[..., Any] = found
    return function
