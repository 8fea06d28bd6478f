"""Property tests with examples that are drawn anew, for some minutes: `python -m tests.support.fuzz MINUTES [SEED]`.

Each pass over the property tests has a seed of its own, which is printed with the command that repeats the pass; a
given seed is one pass. The order of sets follows the seed, too. The exit status is 1 if a pass has failed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

from tests.support.commands import ROOT


def main(minutes: float, seed: int | None = None) -> int:
    end, failed = time.monotonic() + 60 * minutes, 0
    while (left := end - time.monotonic()) > 0:
        drawn = secrets.randbelow(1 << 32) if seed is None else seed
        print(f"seed {drawn}; again: make fuzz SEED={drawn}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not slow and not ci"]
        command += ["--hypothesis-profile=fuzz", f"--hypothesis-seed={drawn}"]
        env = {**os.environ, "PYTHONHASHSEED": str(drawn)}
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
        try:
            failed |= process.wait(left if seed is None else None)
        except subprocess.TimeoutExpired:
            print(f"\n{minutes:g} minutes are over")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        if seed is not None:
            break
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:3])))
