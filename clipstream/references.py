"""Owns `${NAME}` references to environment variables in settings; never stores what they stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from clipstream.errors import SettingsError

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand_env(text: str, env: Mapping[str, str] | None = None) -> str:
    """`text` with every `${NAME}` replaced by that environment variable, for use and never for writing down.

    Settings keep the reference, so that a secret in a URL does not reach the run's folder. `$NAME` without braces
    stays as it is.

    Raises:
        SettingsError: a variable that `text` names is not set.
    """
    env = os.environ if env is None else env
    missing = sorted({name for name in _REFERENCE.findall(text) if name not in env})
    if missing:
        raise SettingsError(f"{text!r} refers to ${{{missing[0]}}}, which the environment does not have: export it")
    return _REFERENCE.sub(lambda match: env[match[1]], text)
