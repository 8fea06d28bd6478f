"""Writing small tars."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_tar(path: str | Path, samples: Iterable[Mapping[str, Any]], format: int = tarfile.PAX_FORMAT) -> Path:
    """Write samples as a WebDataset tar: `__key__` and suffix -> bytes (a str is encoded as UTF-8)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(tar_bytes(samples, format))
    return target


def tar_bytes(samples: Iterable[Mapping[str, Any]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """The bytes of such a tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for sample in samples:
            for suffix, value in sample.items():
                if suffix.startswith("__"):
                    continue
                data = value.encode() if isinstance(value, str) else bytes(value)
                member = tarfile.TarInfo(f"{sample['__key__']}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
