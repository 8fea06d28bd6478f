"""How OpenMP's threads wait for work, which is fixed when torch is imported.

Threads that wait by spinning take the cores of the data workers, and then the threads with work wait for a core: some
steps on a CPU take ten times as long.
"""

from __future__ import annotations

import os
import sys

from clipstream.utils.logs import logger

VARIABLE = "OMP_WAIT_POLICY"
_late = False


def wait_passively() -> None:
    """Let the threads sleep while they wait, unless the environment says how; call it before torch is imported."""
    global _late
    if VARIABLE not in os.environ:
        _late = "torch" in sys.modules
        os.environ[VARIABLE] = "passive"


def note_spinning(device: str, workers: int) -> None:
    """Log a notice, once, if torch's threads spin beside data workers where the model is on the CPU.

    That is so where torch was imported before `wait_passively` was called, and uses several threads.
    """
    global _late
    if _late and workers and not device.startswith("cuda") and sys.modules["torch"].get_num_threads() > 1:
        _late = False
        logger.info(
            f"notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores: "
            f"import clipstream first, or set {VARIABLE}=passive"
        )
