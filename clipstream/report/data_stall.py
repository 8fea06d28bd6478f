"""The warning that training waits for data: a sink that names the slow data stage, the cost and what helps."""

from __future__ import annotations

from clipstream.report.sinks import Record, Sink
from clipstream.text import counted, duration, milliseconds
from clipstream.utils.logs import logger

SHARE = 0.2  # of the time, that may be spent waiting
PATIENCE = 3  # training lines in a row that wait too long
MOMENT = 30.0  # s of waiting in these lines before a warning
_ADVICE = {
    "open": "shards arrive slowly: keep them on a local disk (--data.cache FOLDER), use larger shards or a smaller "
    "--data.shuffle.shards, or more --workers",
    "order": "computing the order takes long: use fewer, larger shards",
    "read": "the disk is slow: use a local disk, or more --workers",
    "transform": "your transform (data.sources.NAME.transform) is slow: make it faster, or use more --workers",
    "decode": "decoding is slow: use more --workers, or smaller images in the shards",
    "tokenize": "the tokenizer is slow: use one of the Hub with a tokenizer.json, or more --workers",
}


class DataStallWarning(Sink):
    """Warns once when several training lines in a row wait for data, and reports when that is over.

    Args:
        ranks: of the run; while one waits, all do.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lost = 0.0  # s, of the run
        self._lines, self._streak = 0, 0.0  # lines in a row that wait too long, and their waiting in s
        self._warned = False

    def write(self, record: Record) -> None:
        """Take a training line with its stages."""
        if "stages" not in record:
            return
        waited = record["data_wait"] * record["seconds"]
        self._lost += waited
        if record["data_wait"] <= SHARE:
            if self._warned:
                logger.info(f"training no longer waits for data (step {record['step']}); {self._cost()}")
            self._lines, self._streak, self._warned = 0, 0.0, False
            return
        self._lines += 1
        self._streak += waited
        if self._lines < PATIENCE or self._streak < MOMENT or self._warned:
            return
        self._warned = True
        # Not record["bottleneck"]: below its own threshold for waiting, that is 'training'.
        stage = next(stage for stage in record["stages"] if stage in _ADVICE)
        took = record["stages"][stage]
        times = f"{milliseconds(took['p50'])} at p50, {milliseconds(took['p99'])} at p99"
        logger.warning(
            f"training waits for data {record['data_wait']:.0%} of its time (step {record['step']}): most of the "
            f"workers' time goes into {stage!r}, {times}; {self._cost()}. {_ADVICE[stage]}"
        )

    def close(self) -> None:
        """Report the cost, if training still waits."""
        if self._warned:
            logger.info(f"training waited for data to the end; {self._cost()}")

    def _cost(self) -> str:
        return f"{duration(self._lost * self._ranks)} of {counted(self._ranks, 'rank')} lost so far"
