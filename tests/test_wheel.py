"""The wheel, built from a copy of the sources: what is in it, and a run from it in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.ci
PARTS = ("pyproject.toml", "README.md", "LICENSE", "clipstream", "configs")


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network; the environment has setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist")]
    run(sys.executable, *build, str(folder))
    (found,) = (folder / "dist").glob("clipstream-*.whl")
    return found


def test_it_has_types_configs_and_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "clipstream").rglob("*.py")}
    configs = {f"clipstream/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.*")}
    assert names >= modules | configs | {"clipstream/py.typed", "clipstream/report/page.html"}
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "configs/"))]


def test_quickstart_runs_from_it_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    folder = tmp_path / "empty"
    folder.mkdir()
    run(
        sys.executable, "-m", "clipstream.train", "--config", "configs/quickstart.yaml", "--steps", "1",
        "--warmup", "0", "--evals", "null", "--data.global-batch-size", "8", "--device", "cpu", "--precision", "fp32",
        "--name", "first", cwd=folder, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert (folder / "runs" / "first" / "checkpoints" / "step_00000001" / "open_clip_model.safetensors").is_file()
