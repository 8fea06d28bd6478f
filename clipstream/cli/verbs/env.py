"""The verb env: print versions and hardware, for a bug report."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from clipstream.config.command_line import CommandLine, Verb, switch
from clipstream.distributed.run_record import hardware, versions
from clipstream.utils.section import Section

EXTRAS = (
    "simplejpeg", "torchvision", "torchcodec", "pydantic", "pyarrow", "fsspec", "s3fs", "gcsfs", "adlfs",
    "nvidia-ml-py", "tensorboard", "wandb", "trackio",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "MKL_NUM_THREADS",
    "NCCL_DEBUG", "OMP_NUM_THREADS", "SLURM_JOB_NUM_NODES", "WDS_SECURE", "WORLD_SIZE",
)  # fmt: skip


class EnvFlags(Section):
    """Print versions, hardware and relevant environment variables for a bug report, without host names, user names and
    paths.
    """

    json_: bool = switch("print JSON")


def run(command: CommandLine[EnvFlags]) -> None:
    found = environment()
    if command.own.json_:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for key, value in found.items():
        print(f"{key + ':':<{width + 1}} {value}")


def environment() -> dict[str, str]:
    """Name -> version, or description, of what may explain how a run behaves. Absent packages are left out."""
    import torch

    found = versions()
    for package in EXTRAS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = hardware()
    gpus = [str(gpu) for gpu in machine["gpus"]] if isinstance(machine["gpus"], list) else []
    found |= {
        "system": platform.platform(),
        "cpu": f"{machine['cpu']}, {machine['cores']} cores",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{machine['memory_gib']} GiB",
        "gpu": ", ".join(gpus) or "none",
        "cuda": str(torch.version.cuda or "none"),
        "compiler": next((name for name in ("g++", "clang++") if shutil.which(name)), "none"),
    }
    if os.path.isdir("/dev/shm"):
        found["/dev/shm"] = f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB"
    return found | {f"${name}": os.environ[name] for name in VARIABLES if name in os.environ}


main = Verb("env", EnvFlags, run)
