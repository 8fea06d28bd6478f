"""The verb stage: a run from copies equals the run from the server, and no partial copy counts as a shard."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clipstream.cli.verbs.stage import main
from clipstream.config.settings import load
from clipstream.data.sources import expand, indexes
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.tar import scan
from clipstream.utils.atomic_write import lock_folder
from tests.support.commands import start_verb
from tests.support.forks import TIMEOUT, wait_until
from tests.support.loaders import data, digests, loader
from tests.support.pictures import make_shards
from tests.support.ranks import command_ends, command_runs
from tests.support.savers import small_disk
from tests.support.sites import Site
from tests.support.tars import write_tar


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed transfers are tried again at once."""
    drawn = SimpleNamespace(uniform=lambda *_: 0.0)
    monkeypatch.setattr("clipstream.storage.download.random", SimpleNamespace(SystemRandom=lambda: drawn))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20, 3, 16, 9])


@pytest.fixture
def site(shards: list[str]) -> Iterator[Site]:
    running = Site()
    running.bodies = {Path(shard).name: Path(shard).read_bytes() for shard in shards}
    yield running
    running.close()


def tars(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.tar"))}


def copies(site: Site) -> dict[str, bytes]:
    """What the folder holds when all of the site is there."""
    return {f"sources/train/{name}": body for name, body in sorted(site.bodies.items())}


def gets(site: Site) -> Counter[str]:
    """How often each body was asked for, since the last call."""
    found = Counter({name[4:]: count for name, count in site.asked.items() if name.startswith("GET ")})
    site.asked.clear()
    return found


def command(out: str) -> list[str]:
    """The flags of the command that a call ends with."""
    found = re.findall(r"^train on them with: python -m clipstream.train (.*)$", out, re.MULTILINE)
    assert len(found) == 1
    return shlex.split(found[0])


def test_a_run_on_the_copies_is_the_run_without_the_server(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = f"{site.root}/{{00000..00005}}.tar"
    flags = ["--train-data", urls, "--val-data", f"{site.root}/00003.tar", "--caption-json", "caption.en"]
    first = loader(data(urls))
    for _ in range(4):
        next(first)
    state = first.state()
    first.close()
    expected = digests(data(urls), 1, 20)
    assert main([str(tmp_path / "fast"), *flags, "--seed", "7"]) == 0
    site.close()
    assert tars(tmp_path / "fast") == {**copies(site), "evals/val/00003.tar": site.bodies["00003.tar"]}
    settings = load(command(capsys.readouterr().out))
    source, val = settings.data.sources["train"], settings.evals["val"].data
    assert settings.run.seed == 7 and val is not None and val.caption == source.caption != data("x").sources["train"]
    assert digests(data(source.shards), 1, 20) == expected
    assert digests(data(source.shards), 2, 16, state) == expected[4:], "a run may go on with the copies"


def test_settings_of_files_and_flags(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "my.yaml", tmp_path / "fast"
    (tmp_path / "pairs.csv").write_text("image,title\n")
    file.write_text(f"""
data:
  sources:
    web: {{shards: ['{site.root}/00000.tar', '{site.root}/00002.tar'], weight: 3}}
    list: {{shards: {tmp_path}/pairs.csv}}
    mixed: {{shards: 'toy:train::{site.root}/{{00004..00005}}.tar', upsampling_factors: [1, 3]}}
evals:
  animals: {{type: zero_shot, classes: [a, b], data: {{shards: {site.root}/00001.tar}}}}
""")
    flags = ["--config", str(file), "--data.sources.more.shards", f"{site.root}/00003.tar", "--steps=5"]
    assert main([str(folder), *flags, "--data.sources.more.image-key", "jpg"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sources\.list: not copied.*pairs\.csv", out) and "toy:train" in out and "note" not in out
    settings = load(command(out))
    before = load([*flags, "--data.sources.more.image-key", "jpg"])
    places = {"web": ["00000.tar", "00002.tar"], "mixed": ["{00004..00005}.tar"], "more": ["00003.tar"]}
    for name, source in settings.data.sources.items():
        wanted = [f"{folder}/sources/{name}/{file}" for file in places.get(name, [])]
        wanted = ["toy:train", *wanted] if name == "mixed" else wanted or source.shards  # type: ignore[assignment]
        assert source == before.data.sources[name].model_copy(update={"shards": wanted})
    assert settings.evals["animals"].data.shards == [f"{folder}/evals/animals/00001.tar"]  # type: ignore[union-attr]
    assert settings.train.steps == 5 and not (folder / "sources/list").exists()
    sizes = json.loads((folder / "sources/mixed/sizes.json").read_text())
    assert sizes == {"00004.tar": 16, "00005.tar": 9}
    # A flag that sets more than the shards would go before any file.
    assert main([str(folder), "--data.sources.web", f"{{shards: {site.root}/00000.tar, weight: 2}}"]) == 0
    assert "--data.sources.web overrides staged.yaml" in capsys.readouterr().out


def test_a_second_call_copies_what_is_missing_damaged_or_changed(site: Site, tmp_path: Path) -> None:
    argv = [str(tmp_path), "--train-data", f"{site.root}/{{00000..00005}}.tar"]
    train = tmp_path / "sources/train"
    assert main(argv) == 0
    assert gets(site) == dict.fromkeys(site.bodies, 1)
    assert main(argv) == 0
    assert not gets(site)
    (train / "00000.tar").unlink()
    os.utime(train / "00001.tar", (7, 7))  # written by another program
    (train / "00002.tar").write_bytes(site.bodies["00002.tar"][:-1])
    site.bodies["00003.tar"] = site.bodies["00004.tar"]
    assert main(argv) == 0
    assert gets(site) == {f"0000{n}.tar": 1 for n in range(4)}
    assert tars(tmp_path) == copies(site)
    site.close()
    assert main(argv) == 0, "intact copies need no server"
    (train / "00000.tar.index").unlink()
    assert main(argv) == 3, "a file that was not staged is never overwritten"


def test_a_killed_call_leaves_whole_shards_alone(site: Site, tmp_path: Path) -> None:
    argv = [str(tmp_path), "--train-data", f"{site.root}/{{00000..00005}}.tar", "--executor", "local:2"]
    gates = [site.hold(name) for name in ("00002.tar", "00004.tar")]
    killed = start_verb("stage", *argv)
    wait_until(lambda: site.asked["GET 00004.tar"] > 0 and len(list((tmp_path / ".parts").glob("*"))) == 2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    done = tars(tmp_path)
    assert done == {name: body for name, body in copies(site).items() if name in done} and 2 <= len(done) < 6
    assert list((tmp_path / ".parts").iterdir()) and not (tmp_path / "staged.yaml").exists()
    for gate in gates:
        gate.set()
    gets(site)
    assert main(argv) == 0
    assert gets(site) == {name: 1 for name in site.bodies if f"sources/train/{name}" not in done}
    assert tars(tmp_path) == copies(site) and not (tmp_path / ".parts").exists()


def test_an_interrupted_call_says_how_to_go_on(site: Site, tmp_path: Path) -> None:
    site.hold("00002.tar")
    mark = f"sleep 987{os.getpid()}"
    stopped = start_verb(
        "stage", str(tmp_path), "--train-data", f"{site.root}/{{00000..00005}}.tar::pipe:{mark}; cat x.tar"
    )
    wait_until(lambda: len(tars(tmp_path)) == 5 and command_runs(mark))
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=TIMEOUT)
    assert stopped.returncode == 75, err
    assert re.search(r"\d of 7 shards are done: rerun the same command", err) and "Traceback" not in err
    command_ends(mark)
    assert not (tmp_path / ".parts").exists()


def test_names_that_collide(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.bodies = {f"{folder}/0.tar": site.bodies[f"0000{n}.tar"] for n, folder in enumerate("abc")}
    site.bodies["0.tgz"] = site.bodies["a/0.tar"]
    argv = [str(tmp_path), "--train-data", f"{site.root}/{{a,b,c,b}}/0.tar::{site.root}/0.tgz"]
    for _ in range(2):
        assert main(argv) == 0
        shards = load(command(capsys.readouterr().out)).data.sources["train"].shards
        assert isinstance(shards, list) and len(set(shards)) == 4 and shards[1] == shards[3]
        names = ["a/0.tar", "b/0.tar", "c/0.tar", "b/0.tar", "0.tgz"]
        assert [Path(shard).read_bytes() for shard in shards] == [site.bodies[name] for name in names]


def test_credentials_are_never_shown(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", "HIDDEN0")
    root = site.root.replace("http://", "http://me:${PASSWORD}@")
    signed = f"{root}/00000.tar?X-Amz-Signature="
    shards = [f"{signed}HIDDEN1&Expires=2", f"{root}/9.tar?token=HIDDEN2", "pipe:false --token HIDDEN3"]
    argv = [str(tmp_path), "--train-data", "::".join(shards), "--val-data", f"{root}/9.csv?token=HIDDEN4"]
    assert main(argv) == 3
    captured = capsys.readouterr()
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("HIDDEN" in text for text in (captured.out, captured.err, *written))
    assert "token=***" in captured.err
    # Another signature is the same shard.
    gets(site)
    assert main([str(tmp_path), "--train-data", f"{signed}HIDDEN5&Expires=3"]) == 0
    assert not gets(site)


def test_what_cannot_be_had_is_told_and_the_rest_is_staged(
    site: Site, shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = f"pipe:head -c 9000 '{shards[0]}'; exit 3"
    whole = f"pipe:cat '{shards[1]}' -"
    parts = [f"{site.root}/0000{n}.tar" for n in (2, 7)] + [shards[3], f"{tmp_path}/none.tar", half, whole]
    argv = [str(tmp_path / "fast"), "--train-data", "::".join(parts)]
    assert main(argv) == 3
    captured = capsys.readouterr()
    for told in ("3 of 6 shards", "00007.tar: Not Found", "exit status 3", "none.tar does not exist", "same command"):
        assert told in captured.err
    assert tars(tmp_path / "fast") == {
        f"sources/train/0000{n}.tar": Path(shards[n]).read_bytes() for n in (1, 2, 3)
    }  # fmt: skip
    named = load(command(captured.out)).data.sources["train"].shards
    assert [Path(name).stem for name in expand(named)] == ["00002", "00007", "00003", "none", "00000", "00001"]
    site.bodies["00007.tar"] = site.bodies["00005.tar"]
    assert main([*argv[:2], "::".join([*parts[:2], whole])]) == 0


def test_a_broken_shard_is_fetched_again_and_then_taken_as_it_is(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.bodies["00002.tar"] = site.bodies["00002.tar"][:9000]
    site.damaged["00001.tar"] = 1
    argv = [str(tmp_path), "--train-data", f"{site.root}/{{00000..00002}}.tar"]
    assert main(argv) == 0
    assert gets(site) == {"00000.tar": 1, "00001.tar": 2, "00002.tar": 2}
    out = capsys.readouterr().out
    assert (
        re.search(r"damaged shards, which are copied as they are: 1\n  .*00002\.tar: truncated_member", out)
        and "00001.tar" not in out
    )
    assert tars(tmp_path)["sources/train/00002.tar"] == site.bodies["00002.tar"]


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        write_tar(tmp_path / f"{number}.tar", [{"__key__": "0", "jpg": bytes(30_000), "txt": "x"}])
    (disk := tmp_path / "disk").mkdir()
    with small_disk(disk, "100k"):
        assert main([str(disk), "--train-data", f"{tmp_path}/{{0..3}}.tar", "--executor", "local:1"]) == 3
        err = capsys.readouterr().err
        assert f"the disk of {disk} is full" in err and "2 of 4 shards are done" in err
        assert [*tars(disk).values()] == [(tmp_path / "0.tar").read_bytes()] * 2
        assert not (disk / "staged.yaml").exists() and not (disk / ".parts").exists()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "missing FOLDER"),
        (["{tmp}", "--train-data", "0.tar", "--size", "8"], "--size"),
        (["{tmp}"], "nothing to stage"),
        (["{tmp}/busy", "--train-data", "0.tar"], "process"),
        (["{tmp}", "--train-data", "synthetic:"], "nothing to stage"),
        (["{tmp}", "--train-data", "{tmp}/0.tar"], "is inside"),
        (["{tmp}/a{b,c}", "--train-data", "0.tar"], "cannot contain"),
    ],
)
def test_wrong_usage(argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_folder(tmp_path / "busy", "the folder", "wait"):
        assert main([word.replace("{tmp}", str(tmp_path)) for word in argv]) == 2
    assert told in capsys.readouterr().err


def test_copies_are_plain_have_an_index_and_follow_the_umask(site: Site, shards: list[str], tmp_path: Path) -> None:
    packed = tmp_path / "9.tar.gz"
    packed.write_bytes(gzip.compress(Path(shards[0]).read_bytes()))
    parts = [f"{site.root}/00000.tar", shards[1], str(packed), f"pipe:cat '{shards[2]}'"]
    before = os.umask(0o027)
    try:
        assert main([str(tmp_path / "fast"), "--train-data", "::".join(parts)]) == 0
        cached = ShardCache(str(tmp_path / "shards")).local(parts[0])
    finally:
        os.umask(before)
    found = [*(tmp_path / "fast").rglob("*.tar")]
    assert {path.stat().st_mode & 0o777 for path in [*found, cached]} == {0o640} and len(found) == 4
    assert all(indexes.open_index(str(path), None) == scan(path) for path in found), "the mode indexed finds it"
    assert (tmp_path / "fast/sources/train/9.tar").read_bytes() == Path(shards[0]).read_bytes()
