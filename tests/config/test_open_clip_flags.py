"""Every flag of open_clip's trainer is taken, taken with a notice, or refused with a reason."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from open_clip_train.params import get_default_params, parse_args

from clipstream.cli import main
from clipstream.config.settings import Settings, load, read
from clipstream.config.short_flags import BY_FLAG, DEFAULTS, UNNEEDED, notice, refusal
from clipstream.utils.section import leaves
from tests.support.settings_files import problems

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/open_clip_flags.md"


def installed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """The flags of the parser of the installed open_clip_train."""
    found: list[argparse.Action] = []
    parse = argparse.ArgumentParser.parse_args

    def spy(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
        found.extend(parser._actions)
        return parse(parser, args)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", spy)
    parse_args([])
    return [action for action in found if action.dest != "help"]


def page() -> dict[str, dict[str, str]]:
    """The tables of the page: title -> flag -> its line."""
    found: dict[str, dict[str, str]] = {}
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        rows = [line for line in text.splitlines() if line.startswith("| `--")]
        found[title] = {flag: row for row in rows for flag in re.findall(r"`(--[\w-]+)`", row.split(" | ")[0])}
    return found


def test_the_page_says_of_every_flag_what_becomes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {flag for action in installed(monkeypatch) for flag in action.option_strings}
    tables = page()
    flags = [flag for rows in tables.values() for flag in rows]
    assert theirs <= {*flags}, "a flag is new in open_clip: give it a place on the page, and in config.short_flags"
    assert len(set(flags)) == len(flags) == 145 and len(theirs) > 80
    known = {f"--{key.replace('_', '-').replace('sources.NAME', 'sources.train')}" for key, _ in leaves(Settings)}
    known = {flag.replace("evals.NAME", "evals.val") for flag in known} | set(BY_FLAG)
    for title, rows in tables.items():
        for flag, row in rows.items():
            fates = (flag in BY_FLAG, notice(flag) is not None, refusal(flag) is not None)
            assert fates == tuple(title == one for one in ("Taken with their meaning", "Not needed", "Refused")), flag
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", row.partition(" | ")[2]))
            assert named <= known, (flag, named - known)
            if flag in BY_FLAG:
                assert all(f"`{key}`" in row for key in BY_FLAG[flag].keys), flag


def test_flags_without_work_are_answered_by_one_line() -> None:
    words = "--local-loss --gather_with_grad --dist-url tcp://a:1 --local-loss --bucket-pool 7 --no-set-device-rank"
    settings, places = read(words.split())
    assert settings == load([])
    assert [line.partition(":")[0] for line in places.notices] == [
        "--local-loss", "--gather_with_grad", "--dist-url", "--bucket-pool", "--no-set-device-rank"
    ]  # fmt: skip
    for flag in (flag for flag in UNNEEDED if "*" not in flag):
        assert read([flag]).places.notices == [f"{flag}: not needed: see docs/from-open_clip.md"]


def test_notices_are_shown_on_rank_0_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["train", "--train-data=a.tar", "--local-loss", "--precision", "amp", "--print-config"]
    assert main.main(argv) == 0
    shown = capsys.readouterr()
    assert shown.err.count("notice: --local-loss: ") == shown.err.count("notice: --precision: amp is bfloat16") == 1
    assert "notice" not in shown.out
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(argv) == 0
    assert "notice" not in capsys.readouterr().err


def test_open_clips_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the installed parser, but for flags of main and for what has no default of its own there."""
    theirs = {flag: action.default for action in installed(monkeypatch) for flag in action.option_strings}
    for flag, text in DEFAULTS.items():
        if flag in theirs and not flag.startswith("--dataset-resampled"):
            assert str(theirs[flag]) == text, flag
    settings = load(["--open-clip-defaults", "--train-data=a.tar", "--train-num-samples=640"], ranks=2)
    assert (settings.model.name, settings.data.global_batch_size, settings.train.epochs) == ("RN50", 128, 32)
    assert (settings.schedule.warmup, settings.data.workers, settings.data.sampling.mode) == (10000, 4, "epoch")
    assert (settings.checkpoint.every_epochs, settings.log.tensorboard) == (1, False)
    words = "--open-clip-defaults --train-data=a.tar --steps 5 --model.name=ViT-B-32 --warmup 3 --val-data v"
    own = load(words.split())
    assert (own.train.steps, own.train.epochs, own.schedule.warmup) == (5, None, 3)
    assert own.model.name == "ViT-B-32" and own.evals["val"].every_epochs == 1
    assert load(["--open-clip-defaults", "--train.steps=5"]).train.epochs is None
    both = ["--open-clip-defaults", "--config", str(ROOT / "configs/quickstart.yaml")]
    assert "not supported with --config" in problems(both)[0]


def test_other_defaults_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag with open_clip's default for its value changes nothing, but for those of the page and these."""
    here = {"--csv-separator", "--csv-img-key", "--csv-caption-key", "--device"}  # found in the table; any device
    given = ["--train-data=a.tar", "--val-data=v.tar", "--batch-size=64"]
    plain, compared = load(given).model_dump(), 0
    for action in installed(monkeypatch):
        flag = next((flag for flag in action.option_strings if flag in BY_FLAG), None)
        if flag is None or flag in {*DEFAULTS, *here} or action.default in (None, False, {}):
            continue
        more = ["--lr-scheduler=const-cooldown", "--epochs-cooldown=1"] * flag.startswith("--lr-cooldown")
        expected = load([*given, *more]).model_dump() if more else plain
        assert load([*given, *more, flag, str(action.default)]).model_dump() == expected, flag
        compared += 1
    assert compared >= 10
    assert (load([]).optim.lr, load([]).optim.wd) == (get_default_params("ViT-B-32")["lr"], 0.2)


def test_the_page_has_the_defaults_of_both() -> None:
    page = (ROOT / "docs/from-open_clip.md").read_text(encoding="utf-8")
    section = page[page.index("## Defaults") : page.index("## A Slurm job")]
    rows = {flag: told for flag, *told in re.findall(r"^\| `(--[\w-]+)` \| (.*?) \| (.*?) \|$", section, re.M)}
    assert rows.keys() == {*DEFAULTS, "--precision"}
    own = load([])
    settings = {
        "--model": own.model.name, "--warmup": own.schedule.warmup, "--workers": own.data.workers,
        "--max-image-pixels": own.data.max_image_pixels, "--logs": own.run.logs, "--log-every-n-steps": own.log.every,
        "--save-frequency": own.checkpoint.every, "--train-loss-ema-samples": own.log.loss_ema_samples,
        "--precision": own.train.precision, "--log-metric-every-n-steps": own.log.every,
    }  # fmt: skip
    for flag, (theirs, ours) in rows.items():
        expected = DEFAULTS.get(flag, "amp_bf16") or "none"
        assert theirs.replace(",", "").split()[0] == expected, flag
        assert flag not in settings or re.split("[;: ]", ours.replace(",", ""))[0] == str(settings[flag]), flag
    assert own.data.global_batch_size == 512 and own.data.sampling.mode == "resampled" and own.log.tensorboard
