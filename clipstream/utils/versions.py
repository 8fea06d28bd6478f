"""Versions of this package, Python, and the packages that results depend on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from clipstream import __version__

PACKAGES = ("open_clip_torch", "timm", "transformers", "webdataset", "huggingface_hub", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Package -> version; torch's with its build. Packages that are not installed are left out."""
    import torch

    own = {"clipstream": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | _installed()


@cache
def _installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
