"""Ranks whose hosts have other software, models, files or shards end at the start, with the file and the hosts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from clipstream.config.config_file import require_equal
from clipstream.config.settings import load
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import PROBED, Source, SourceContext
from clipstream.distributed import run_record
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.build import build_towers
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks, run_ranks
from tests.support.runs import flags, furnish, train_on

HELPER = "def fits(sample):\n    return sample\n"
PLUGIN = "import helper\n\n\ndef keep(sample):\n    return helper.fits(sample)\n"


def host(folder: Path) -> Path:
    """The files of a host, by names that are the same on all hosts."""
    furnish(folder)
    (folder / "helper.py").write_text(HELPER)
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "names.txt").write_text("one\ntwo\nthree\n")
    torch.manual_seed(1)
    towers = build_towers(load(["--model", str(folder / "model.json")]).model, seed=1)
    torch.save(towers.clip.state_dict(), folder / "weights.pt")
    return folder


def train_in(world: World, root: str, name: str) -> int:
    """A run of a rank that has the folder of its host."""
    os.chdir(Path(root, str(world.rank)))
    argv = flags(Path(), name, *CLASSES, steps=1)
    return train_on(world, [*argv, "--pretrained", "weights.pt", "--data.sources.train.transform", "mine:keep"])


CLASSES = ["--evals.zoo.type", "zero_shot", "--evals.zoo.data.shards", "val/{00000..00001}.tar", "--evals.zoo.label",
           "cls", "--evals.zoo.classes", "names.txt"]  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hosts")
    for rank in range(2):
        host(root / str(rank))
        (root / str(rank) / "runs").symlink_to(root / "runs")
    (root / "runs").mkdir()
    return root


@pytest.mark.parametrize("file", ["pairs/00002.tar", "val/00001.tar", "helper.py", "names.txt", "weights.pt"])
def test_a_host_with_another_file_of_the_same_name_ends_the_run(hosts: Path, file: str) -> None:
    """The file has as many bytes as on the other host."""
    path = hosts / "1" / file
    kept = path.read_bytes()
    middle = len(kept) // 2
    other = kept.replace(b"sample", b"simple") if path.suffix == ".py" else None
    path.write_bytes(other or kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :])
    try:
        ends = end_ranks(2, train_in, str(hosts), path.name)
    finally:
        path.write_bytes(kept)
    assert [end.code for end in ends] == [2, 2]
    said, name = ends[0].stderr, socket.gethostname()
    assert "Traceback" not in said and f"rank 0 is on {name}, rank 1 on {name}" in said
    line = next(line for line in said.splitlines() if "ranks have different" in line)
    assert Path(file).name in line.replace("weights weights.pt", "weights.pt") and line.count("crc32:") == 2
    assert not list(hosts.glob("runs/*/checkpoints/step_*"))


def test_hosts_with_equal_files_train(hosts: Path) -> None:
    ends = end_ranks(2, train_in, str(hosts), "equal")
    assert [end.code for end in ends] == [0, 0], ends[0].stderr


def compared(world: World, root: str, version: str) -> str:
    """The error of ranks of which the last has another version, or another source of clipstream."""
    if world.rank:
        patch = pytest.MonkeyPatch()
        if version:
            patch.setattr("clipstream.distributed.run_record.__version__", version)
        else:
            patch.setattr(run_record, "OURS", os.path.join(root, ""))
    try:
        require_equal(load([]), world)
    except SettingsError as error:
        return str(error)
    return ""


def test_other_versions_and_other_code_are_refused(tmp_path: Path) -> None:
    source = Path(run_record.OURS)
    for file in source.rglob("*.py"):
        copy = tmp_path / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    assert run_ranks(2, compared, str(tmp_path), "") == ["", ""]
    with open(tmp_path / "losses/tiled.py", "a", encoding="utf-8") as file:
        file.write("\n")
    for said in run_ranks(2, compared, str(tmp_path), ""):
        assert "ranks have different settings or software: the source clipstream/losses/tiled.py is crc32:" in said
        assert said.count("crc32:") == 2
    for said in run_ranks(2, compared, str(tmp_path), "9.9"):
        assert "the version of clipstream is" in said and "and 9.9 on rank 1" in said


def test_the_names_of_a_shard_stand_in_the_order_of_the_source(tmp_path: Path) -> None:
    make_shards(tmp_path, [1] * 5)
    context = SourceContext(key="data.sources.train")
    found = Source(SourceSettings(shards=f"{tmp_path}/*.tar"), context).contents()
    assert [*found] == [f"data.sources.train {n} {n:05d}.tar" for n in range(5)]
    assert all(value.startswith(f"{(tmp_path / '00000.tar').stat().st_size:,} bytes") for value in found.values())
    assert PROBED >= 5 and all(" in the middle" in value for value in found.values())
