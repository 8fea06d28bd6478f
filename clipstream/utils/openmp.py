"""How OpenMP's threads wait for work, which is fixed when torch is imported.

Threads that wait by spinning take the cores of the data workers, and then the threads with work wait for a core: some
steps on a CPU take ten times as long. The package is imported by way of this module before signals are handled, so it
imports nothing that takes time.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "OMP_WAIT_POLICY"
_late = False


def wait_passively() -> None:
    """Let the threads sleep while they wait, unless the environment says how; call it before torch is imported."""
    global _late
    if VARIABLE not in os.environ:
        _late = "torch" in sys.modules
        os.environ[VARIABLE] = "passive"


def spinning_notice(device: str, workers: int) -> str | None:
    """A notice, once, if torch's threads spin beside data workers where the model is on the CPU; else None.

    That is so where torch was imported before `wait_passively` was called, and uses several threads.
    """
    global _late
    if not _late or not workers or device.startswith("cuda") or sys.modules["torch"].get_num_threads() == 1:
        return None
    _late = False
    return (
        f"notice: torch was imported before clipstream, so that its waiting threads take the data workers' cores: "
        f"import clipstream first, or set {VARIABLE}=passive"
    )
