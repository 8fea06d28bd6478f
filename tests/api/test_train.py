"""`clipstream.train` in scripts, threads and several times in a process, and the `Run` that it returns."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import clipstream
from clipstream.checkpoint.store import is_locked
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.train import print_end
from tests.support.commands import run_code
from tests.support.forks import ROOT, TIMEOUT, Fork, run_fork
from tests.support.ranks import end_ranks
from tests.support.runs import wait_for_step


def settings(place: Path, name: str, steps: int = 3) -> dict[str, Any]:
    """A small run's settings."""
    return {
        "run": {"logs": place / "runs", "name": name, "device": "cpu", "threads": 1},
        "model.name": place / "model.json",
        "data": {"global_batch_size": 24, "workers": 1, "sources": {"train": {"shards": f"{place}/pairs/*.tar"}}},
        "optim.lr": 1e-3,
        "train": {"steps": steps, "precision": "fp32"},
        "log": {"every": 1, "tensorboard": False},
    }


def train_twice(world: World, place: Path) -> int:
    """Runs in a process of which nothing else uses threads and files."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)

    def state() -> list[object]:
        gc.collect()  # processes that have ended
        log = logging.getLogger("clipstream")
        of_torch = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist()
        files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        own = [*map(signal.getsignal, numbers), [*log.handlers], log.level, log.propagate, sys.stdout, files]
        return [*own, *of_torch, threading.active_count(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")]

    def train(name: str) -> clipstream.Run:
        return clipstream.train(settings(place, name), {"run.deterministic": True})

    torch.set_num_threads(2)  # the runs have one
    train("warm")  # what is imported by the first run stays
    others, before = set(threading.enumerate()), state()
    run = train("first")
    with pytest.raises(DataError):
        clipstream.train(settings(place, "broken"), {"data.sources.train.caption": {"type": "text", "key": "none"}})
    for thread in set(threading.enumerate()) - others:
        thread.join(TIMEOUT)  # one that was told to end may take a moment
    after = state()
    assert {k: (a, b) for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b} == {}
    second = clipstream.train(run.settings, name="second")
    assert [line["loss"] for line in second.metrics] == [line["loss"] for line in run.metrics]
    broken = clipstream.Run.open(place / "runs/broken")
    assert broken.status == "failed" and not is_locked(broken.folder)
    return 0


def test_it_leaves_the_process_as_it_was(place: Path) -> None:
    (end,) = end_ranks(1, train_twice, place)
    assert end.code == 0, end.stderr


def test_what_a_run_knows(place: Path) -> None:
    val = {"evals.val.data.shards": f"{place}/val/*.tar", "checkpoint.keep_best": "val/image_to_text_R@1"}
    run = clipstream.train(settings(place, "known"), val, steps=4)
    assert run == clipstream.Run.open(run.folder) and run.name == "known"
    assert (run.status, run.step, run.settings.optim.lr) == ("done", 4, 1e-3)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert [line["eval"] for line in run.evaluations] == ["val"] and run.evaluations[0]["n"] == 20
    assert [path.name for path in run.checkpoints] == ["step_00000004"]
    assert run.latest == run.best == run.checkpoints[0] and run == clipstream.Run.open(run.checkpoints[0])
    assert run.report.read_text() in (page := run._repr_html_()) or "srcdoc=" in page
    assert page.startswith("<iframe") and "&lt;html" in page and page.count("<") == 2
    if importlib.util.find_spec("pandas"):
        frame = run.to_pandas()
        assert frame["step"].tolist() == [1, 2, 3, 4] and frame["loss"].notna().all()
    with pytest.raises(SettingsError, match="is not a run folder"):
        clipstream.Run.open(place)
    with pytest.raises(SettingsError, match="~no-such-user/run is not a run folder"):
        clipstream.Run.open("~no-such-user/run")


def test_settings_come_from_files_mappings_and_keywords(place: Path, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("optim: {lr: 1, wd: 1}\ntrain: {steps: 1}\n")
    (tmp_path / "two.yaml").write_text("optim: {wd: 2}\n")
    files = [tmp_path / "one.yaml", str(tmp_path / "two.yaml")]
    found = clipstream.load_settings(files, {"optim": {"lr": 2.0}, "run.name": "00001"}, steps=5, lock_image=True)
    assert (found.optim.lr, found.optim.wd, found.train.steps) == (2.0, 2.0, 5)
    assert found.run.name == "00001" and found.model.lock_image
    again = clipstream.load_settings(found, train_data=["a.tar", "b.tar"], pretrained=None, batch_size=7)
    assert again.data.sources["train"].shards == "a.tar::b.tar" and again.data.global_batch_size == 7
    assert again.optim.lr == 2.0 and clipstream.load_settings(found) is found
    built = clipstream.Settings.model_validate({"optim": {"wd": 0.5}})
    assert clipstream.load_settings(built, lr=3e-4).optim.wd == 0.5
    own = clipstream.load_settings({"loss": {"type": Own}})
    assert own.loss.type == f"{__name__}:Own"


class Own:
    """A loss of one's own, by its class."""

    max_logit_scale = None


def test_mistakes_are_named_all_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        clipstream.train({"optim": {"lrr": 1}}, {"train.steps": "x"}, stepz=4, batch_size=0)
    for text in ("optim.lrr: unknown key; did you mean 'lr'?", "train.steps: expected", "'--steps'?"):
        assert text in str(raised.value)
    for told, given, flags in (
        ("type object", (), {"name": object()}),
        ("expected a key such as", ({3: 1},), {}),
        (r"none\.yaml does not exist", ("none.yaml",), {}),
        ("overrides is a positional argument", ("my.yaml",), {"overrides": {"optim.lr": 1}}),
    ):
        with pytest.raises(SettingsError, match=told):
            clipstream.train(*given, **flags)


def test_another_thread_trains_as_well(place: Path) -> None:
    found: list[clipstream.Run] = []
    thread = threading.Thread(target=lambda: found.append(clipstream.train(settings(place, "thread"))))
    thread.start()
    thread.join()
    assert found[0].status == "done"


def script(place: Path, name: str, body: str) -> str:
    """A script, which has no `if __name__ == "__main__"`."""
    given = {**settings(place, name), "run.logs": f"{place}/runs", "model.name": f"{place}/model.json"}
    given["run"] = {key: value for key, value in given["run"].items() if key != "logs"}
    file = place / f"{name}.py"
    file.write_text(f"import clipstream, json\nSETTINGS = json.loads({json.dumps(given)!r})\n{textwrap.dedent(body)}")
    return str(file)


def test_a_script_needs_no_guard_and_closes_no_loader(place: Path) -> None:
    body = f"""
        print("begins", flush=True)
        print(clipstream.train(SETTINGS, {{"data.workers": 2}}).status)
        loader = clipstream.build_loader("{place}/val/*.tar", 16, batch_size=5, workers=2, device="cpu")
        print(sum(len(texts) for images, texts in loader), *loader._loader.worker_pids())
    """
    out = run_fork(script(place, "script", body), env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert out.count("begins") == 1 and "step 3/3" in out
    *_, done, last = out.splitlines()
    count, *pids = last.split()
    assert (done, count, len(pids)) == ("done", "20", 2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ctrl_c_saves_and_raises_keyboard_interrupt(place: Path) -> None:
    body = """
        try:
            clipstream.train(SETTINGS, {"train.steps": 100_000})
        except KeyboardInterrupt as stopped:
            print(stopped)
        print(clipstream.train(SETTINGS, resume="latest", steps=len(clipstream.Run.open("RUN").metrics)).status)
    """
    file = script(place, "stopped", body.replace("RUN", f"{place}/runs/stopped"))
    process = Fork([file], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for_step(place, "stopped", 2, process)
    process.send_signal(signal.SIGINT)
    out, errors = (text.decode() for text in process.communicate())
    assert process.returncode == 0, errors
    assert 'is saved; the same call with resume="latest" goes on' in out
    assert "stopped by SIGINT, step" in out and out.splitlines()[-1] == "done" and "Traceback" not in errors


def test_the_command_at_the_end_of_a_run_names_one_shard(capsys: pytest.CaptureFixture[str]) -> None:
    shards = "::".join(f"my shards/{number}.tar" for number in range(50))
    print_end(clipstream.load_settings(train_data=shards, logs="runs", name="a"), "report.html", {})
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next ")]
    assert command.split(None, 1)[1] == "clipstream search runs/a 'my shards/0.tar' \"a text of your own\""


def test_the_module_of_the_recipe_is_the_function(tmp_path: Path) -> None:
    """However it is imported: in forks of a process that has the libraries alone."""
    code = """
import os, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("clipstream", "tests")]:
    del sys.modules[name]
for first in "import clipstream.train", "import clipstream; clipstream.train", "pass":
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, first
        continue
    exec(first)
    import clipstream, inspect
    from clipstream import train
    assert clipstream.train is train is sys.modules["clipstream.train"] and callable(train)
    print(inspect.signature(train))
    try: train(stepz=3)
    except clipstream.errors.SettingsError as error: print(error)
    break
"""
    (tmp_path / "imports.py").write_text(code)
    out = run_fork(str(tmp_path / "imports.py"), env={**os.environ, "PYTHONPATH": str(ROOT)})
    signature = "(config: 'Config' = None, overrides: 'Overrides' = None, /, **flags: 'Any') -> 'Run'"
    assert out.count(signature) == out.count("'--steps'?") == 3, out
    assert inspect.getdoc(clipstream.train).startswith("Train a model")  # type: ignore[union-attr]


def test_the_import_takes_no_time() -> None:
    """The package waits for no other import."""
    code = "import sys; before = set(sys.modules); import clipstream; print(*sorted(set(sys.modules) - before))"
    found = run_code(code).split()
    quick = {"clipstream", "clipstream.utils", "clipstream.utils.torch_state"}
    assert {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names} == quick
    assert not {"logging", "asyncio", "inspect", "dataclasses", "email", "multiprocessing", "subprocess"} & set(found)
