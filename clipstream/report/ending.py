"""The end of a process of a run, after an error too: the last line of metrics.jsonl, and report.html."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipstream.distributed.run_record import end_record
from clipstream.report.html_report import REPORT_FILE, write_report
from clipstream.report.sinks import METRICS_FILE, Record, json_line, lines
from clipstream.utils.logs import logger


class Ending:
    """Writes the end of this process, on rank 0.

    Args:
        folder: of the run.
        report: whether to write report.html.

    Attributes:
        step: returns the steps done; None until there is a trainer, and the last step in metrics.jsonl counts.
    """

    def __init__(self, folder: Path, *, report: bool) -> None:
        self.folder, self._report = folder, report
        self.step: Callable[[], int] | None = None
        self._began = time.monotonic()

    def stamped(self, record: Record) -> Record:
        """The record; if it is an end, with the seconds that this process took."""
        return {**record, "seconds": round(time.monotonic() - self._began, 1)} if "end" in record else record

    def __call__(self, code: int, error: str) -> None:
        """Write that the process ends with an error. A failed start leaves the end of a finished run unchanged."""
        path = self.folder / METRICS_FILE
        try:
            last: dict[str, Any] = {}
            for _, last in lines(path) if path.is_file() else ():  # noqa: B007, the last one is wanted
                pass
            if self.step is None and last.get("end", {}).get("status") == "done":
                return
            step = int(last.get("step", 0)) if self.step is None else self.step()
            with path.open("ab+") as file:
                torn = file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n"
                line = json_line(self.stamped(end_record(step, code, error)))
                file.write(("\n" * bool(torn) + line).encode())
            if self._report:
                write_report(self.folder, self.folder / REPORT_FILE)
        except Exception as failure:  # the process ends with the first error
            logger.warning(f"the end could not be written to {self.folder}: {failure}")
