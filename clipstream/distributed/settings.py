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

    logs: PathText = Field("runs", min_length=1, description="folder of runs")
    name: str | None = Field(None, description="name of the run's folder; dated, with model and batch, unless set")
    seed: int = Field(0, ge=0, lt=2**63, description="fixes the order of samples, augmentation, weights and dropout")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of a rank's arithmetic; its share of the cores, on a GPU at most 4, unless set",
    )
    deterministic: bool = Field(False, description="torch's deterministic algorithms; slower, equal bits")
    timeout: float = Field(1800.0, gt=0, description="seconds that a rank waits for the others before the run ends")
    debug: bool = Field(False, description="show tracebacks with errors")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """The rules for a run's name, which is also the name of its folder."""
        name = self.name
        if name is None:
            return
        length, why = len(name.encode(errors="surrogatepass")), ""
        if name in (".", "..") or re.search(r"[/\\]", name) or not name.strip():
            why = "leave out slashes, and set the folder of runs by --logs"
        elif not name.isprintable():
            why = "leave out line ends and other characters that cannot be printed"
        elif length > LONGEST_NAME:
            why = f"it has {length} bytes, and file systems allow {LONGEST_NAME}"
        if why:
            yield "name", f"{printable(name, 60)!r} is no name for a folder: {why}"

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"{value!r} is no device that clipstream trains on: give auto, cpu, cuda or cuda:N")
        return value
