"""The environment of tests: which variables they see, and their own home folder."""

from __future__ import annotations

import os
import site
import tempfile
from pathlib import Path

# What programs need to start, where temporary files go, which GPU is ours, and what the processor is to compute.
# Whatever else a shell holds (HF_…, proxies, XDG_…, credentials, a launcher's ranks, numbers of threads) would change
# what is tested.
KEPT = {
    "PATH", "PYTHONPATH", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CI",
    "PYTHONHASHSEED", "CLIPSTREAM_CAPABILITIES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
}  # fmt: skip
KEPT_PREFIXES = ("PYTEST_", "COVERAGE_", "COV_CORE_")
FIXED = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "OMP_NUM_THREADS": "1", "COLUMNS": "80", "LINES": "24"}


def hide() -> Path:
    """Make this process and those that it starts see only what is known of every machine; the home folder they get.

    To be called before torch, transformers and the like are imported, which read the environment then.
    """
    user_packages = site.getuserbase()  # where pip may have put what the tests import
    for name in set(os.environ) - KEPT:
        if not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="home-"))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # of the processes that start from here on
    os.environ.update(FIXED, HOME=str(home), PYTHONUSERBASE=user_packages)
    return home
