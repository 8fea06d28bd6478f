"""Settings of a run: its folder, seed, device, threads and time limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field, field_validator

from clipstream.text import printable
from clipstream.utils.section import PathText, Section

LONGEST_NAME = 255  # bytes of a file's or folder's name


class RunSettings(Section):
    """Who and where a run is."""

    logs: PathText = Field("runs", min_length=1, description="parent folder of run folders")
    name: str | None = Field(None, description="name of the run's folder; default: date, model and batch size")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of data order, augmentation, initial weights and dropout")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads per rank; default: its share of the cores, at most 4 on a GPU",
    )
    deterministic: bool = Field(
        False, description="use torch's deterministic algorithms: bit-identical results, slower"
    )
    timeout: float = Field(1800.0, gt=0, description="seconds to wait for other ranks before the run ends")
    debug: bool = Field(False, description="show tracebacks with errors")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """The rules for a run's name, which is also the name of its folder."""
        name = self.name
        if name is None:
            return
        length, why = len(name.encode(errors="surrogatepass")), ""
        if name in (".", "..") or re.search(r"[/\\]", name) or not name.strip():
            why = "remove slashes, and set the parent folder with --logs"
        elif not name.isprintable():
            why = "remove line ends and other unprintable characters"
        elif length > LONGEST_NAME:
            why = f"it has {length} bytes, more than {LONGEST_NAME}"
        if why:
            yield "name", f"invalid folder name {printable(name, 60)!r}: {why}"

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"invalid device {value!r}: use auto, cpu, cuda or cuda:N")
        return value
