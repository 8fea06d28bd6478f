"""Every flag of open_clip's trainer is taken, taken with a notice, or refused with a reason."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from open_clip_train.params import get_default_params, parse_args

from clipstream.cli import main
from clipstream.config.settings import Settings, load
from clipstream.data.settings import JsonCaption, TextCaption
from clipstream.errors import SettingsError
from clipstream.open_clip.aliases import BY_FLAG, MAIN, NOTICES, RELEASED, fate, notice, refusal, table
from clipstream.open_clip.translate import DEFAULTS
from clipstream.training.optim import AdamW, Timm
from clipstream.utils.section import leaves

ROOT = Path(__file__).parents[2]


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


def _words(line: str) -> list[str]:
    return line.split()


def error_of(*argv: str) -> str:
    with pytest.raises(SettingsError) as raised:
        load(argv)
    return str(raised.value)


def test_every_flag_of_the_installed_open_clip_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = installed(monkeypatch)
    assert len(actions) > 80
    for action in actions:
        for flag in action.option_strings:
            assert fate(flag) is not None, f"{flag} is new in open_clip: give it a place in open_clip.aliases"
            assert flag in (*MAIN, *RELEASED), flag


def test_every_flag_of_main_has_one_fate() -> None:
    assert len(set(MAIN)) == len(MAIN) == 142 and len(RELEASED) == 3
    for flag in (*MAIN, *RELEASED):
        told = [flag in BY_FLAG, notice(flag) is not None, refusal(flag) is not None]
        assert told.count(True) == 1, (flag, told)


def test_what_is_said_names_flags_that_exist() -> None:
    known = {f"--{key.replace('_', '-').replace('sources.NAME', 'sources.train')}" for key, _ in leaves(Settings)}
    known = {flag.replace("evals.NAME", "evals.val") for flag in known} | set(BY_FLAG)
    for flag in (*MAIN, *RELEASED):
        found = fate(flag)
        assert found is not None
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", found[1])) - {flag, "--local-loss"}
        assert named <= known, (flag, named - known)


def test_the_page_of_the_flags_is_current() -> None:
    page = ROOT / "docs/open_clip_flags.md"
    assert page.read_text(encoding="utf-8") == table(), "python -m clipstream.open_clip.aliases > the page"
    assert sum(line.split(" | ")[0].count("`--") for line in table().splitlines() if line.startswith("| `")) == 145


def test_flags_without_work_are_answered_by_one_line() -> None:
    words = "--local-loss --gather_with_grad --dist-url tcp://a:1 --local-loss --bucket-pool 7 --no-set-device-rank"
    settings = load(words.split())
    assert settings == load([])
    assert [line.partition(":")[0] for line in settings.places.notices] == [
        "--local-loss", "--gather_with_grad", "--dist-url", "--bucket-pool", "--no-set-device-rank"
    ]  # fmt: skip
    for flag in (flag for patterns in NOTICES for flag in patterns.split() if "*" not in flag):
        (line,) = load([flag]).places.notices
        assert line.startswith(f"{flag}: not needed: ")


def test_notices_are_shown_on_rank_0_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["train", "--train-data=a.tar", "--local-loss", "--precision", "amp", "--print-config"]
    assert main.main(argv) == 0
    shown = capsys.readouterr()
    assert shown.err.count("notice: --local-loss: ") == shown.err.count("notice: --precision: amp is bfloat16") == 1
    assert "notice" not in shown.out
    for key, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(key, value)
    assert main.main(argv) == 0
    assert "notice" not in capsys.readouterr().err


def test_refused_flags_take_their_values_with_them() -> None:
    lines = error_of("--naflex-patch-sizes", "16", "32", "--audio-ext", "flac", "--train-data=a.tar").splitlines()
    assert len(lines) == 2 and all("is not supported" in line for line in lines)


def test_optimizers() -> None:
    optim = load(
        [
            "--opt",
            "timm/lamb",
            "--momentum",
            "0.8",
            "--beta1",
            "0.9",
            "--beta2",
            "0.95",
            "--opt-kwargs",
            "trust_clip=True",
            "most=1.5",
            "a=b",
        ]
    ).optim
    assert isinstance(optim, Timm.Settings)
    assert (optim.name, optim.momentum, optim.betas) == ("lamb", 0.8, (0.9, 0.95))
    assert optim.kwargs == {"trust_clip": True, "most": 1.5, "a": "b"}
    muon = load(["--opt=timm/nadamuon", "--opt-fallback-list", "token*", "*.proj"]).optim
    assert isinstance(muon, Timm.Settings) and muon.fallback == ["token*", "*.proj"]
    assert load(["--opt", "NAdamW"]).optim.type == "nadamw"
    plain = load(
        [
            "--opt",
            "adamw",
            "--opt-kwargs",
            "--momentum",
            "0.9",
            "--wd-exclude",
            "*.bias",
            "visual.proj*",
            "--text-layer-decay",
            "0.65",
        ]
    )
    assert isinstance(plain.optim, AdamW.Settings)
    assert (plain.optim.wd_exclude, plain.optim.text_layer_decay) == (["*.bias", "visual.proj*"], 0.65)
    assert plain.places.notices[0].startswith("--momentum: has no effect")
    assert load(["--visual-layer-decay=0.5"]).optim.model_dump()["image_layer_decay"] == 0.5
    for words, said in (
        ("--opt sgd", "expected adamw, nadamw, timm/NAME"),
        ("--opt timm/lamb --beta1 0.9", "give both --beta1 and --beta2"),
        ("--opt-fallback-list x", "as --opt timm/nadamuon"),
        ("--opt-kwargs x", "expected NAME=VALUE"),
    ):
        assert said in error_of(*words.split())


def test_captions_by_open_clips_flags() -> None:
    def caption(words: str) -> object:
        return load(["--train-data=a.tar", *words.split()]).data.sources["train"].caption

    assert caption("--text-key txt;caption") == TextCaption(key="txt;caption")
    expected = JsonCaption(path=["a-b", "c.d", "e"], weights=[0.2, 0.8, 0])
    assert caption("--json-text-key a-b;c.d;e --json-text-key-probs 0.2 0.8") == expected
    assert caption("--json-text-key a --text-key txt") == JsonCaption(path="a")
    settings = load(["--json-text-key=a", "--text-key=txt", "--train-data=a.tar", "--val-data=v.tar"])
    assert settings.places.notices[0].startswith("--text-key: has no effect")
    assert settings.evals["val"].data is not None and settings.evals["val"].data.caption == JsonCaption(path="a")
    for words, said in (
        ("--json-text-key a --json-text-key-probs 1 2", "2 numbers for 1 fields"),
        ("--json-text-key-probs 1", "requires --json-text-key"),
        ("--json-text-key a --json-text-key-probs x", "expected numbers"),
        ("--json-text-key a --caption-json b", "give one of them"),
    ):
        assert said.lower() in error_of("--train-data=a.tar", *words.split()).lower()


def test_upsampling_factors_belong_to_the_parts_of_the_source() -> None:
    data, factors = "--train-data=x/{0..2}.tar::y.tar", "--train-data-upsampling-factors"
    (source,) = load([data, f"{factors}=2::1", "--caption-json=en"]).data.sources.values()
    assert (source.parts, source.upsampling_factors, source.weight) == (["x/{0..2}.tar", "y.tar"], [2.0, 1.0], 1.0)
    for text, said in (("1", "1 factors for 2 parts"), ("1::x", "expected numbers"), ("1::0", "must be positive")):
        assert said in error_of(data, f"{factors}={text}")
    for flags in (["--dataset-resampled", "false"], ["--data.sampling.shards=split"], ["--data.sampling.mode=indexed"]):
        assert "require data.sampling mode resampled" in error_of(data, f"{factors}=1::2", *flags)
    assert "shards" in error_of(f"{factors}=1::2")


def test_trackers() -> None:
    log = load(["--report-to", "wandb,tensorboard", "--wandb-notes", "n", "--wandb-project-name", "p"]).log
    assert log.tensorboard and {name: sink.model_dump()["type"] for name, sink in log.sinks.items()} == {
        "wandb": "wandb"
    }
    sink = log.sinks["wandb"].model_dump()
    assert (sink["project"], sink["notes"]) == ("p", "n")
    log = load(["--report-to", "trackio", "--wandb-project-name", "p"]).log
    assert not log.tensorboard and log.sinks["trackio"].model_dump()["project"] == "p"
    log = load(["--report-to=all"]).log
    assert log.tensorboard and list(log.sinks) == ["wandb"]
    assert load(["--report-to", ""]).log.tensorboard is False
    alone = load(["--wandb-notes=n"])
    assert alone.log.sinks == {} and alone.places.notices == ["--wandb-notes: has no effect without --report-to wandb"]


def test_switches_and_intervals() -> None:
    settings = load(
        _words("--skip-scheduler --warmup 100 --lr-scheduler cosine --debug --fsdp --fsdp-no-reshard-after-forward")
    )
    assert (settings.schedule.type, settings.schedule.warmup) == ("constant", 0)
    assert [line.partition(":")[0] for line in settings.places.notices] == ["--warmup", "--lr-scheduler"]
    assert (settings.log.level, settings.run.debug) == ("debug", True)
    assert (settings.train.parallel, settings.train.reshard_after_forward) == ("fsdp", False)
    settings = load(["--delete-previous-checkpoint", "--log-every-n-steps", "100", "--log-metric-every-n-steps", "10"])
    assert settings.checkpoint.keep_last == 1
    assert (settings.log.every, settings.log.terminal_every) == (10, 100)
    assert load(["--log-every-n-steps=7"]).log.every == 7
    settings = load(_words("--force-context-length 20 --force-quick-gelu --force-custom-text --max-image-pixels 99"))
    assert (settings.tokenizer.context_length, settings.data.max_image_pixels) == (20, 99)
    assert settings.model.quick_gelu and settings.model.custom_text
    assert load(["--max-image-pixels=0"]).data.max_image_pixels == load([]).data.max_image_pixels
    assert load(["--force-image-size", "64", "64"]).model.image_size == 64
    assert "images are square" in error_of("--force-image-size", "64", "32")
    assert "use fp16" in error_of("--precision", "pure_fp16")
    assert "a run needs a folder" in error_of("--logs", "None")


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
    own = load(
        _words("--open-clip-defaults --train-data=a.tar --steps 5 --model.name=ViT-B-32 --warmup 3 --val-data v")
    )
    assert (own.train.steps, own.train.epochs, own.schedule.warmup) == (5, None, 3)
    assert own.model.name == "ViT-B-32" and own.evals["val"].every_epochs == 1
    assert load(["--open-clip-defaults", "--train.steps=5"]).train.epochs is None
    config = str(ROOT / "configs/quickstart.yaml")
    assert "cannot be combined with --config" in error_of("--open-clip-defaults", "--config", config)


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


@pytest.mark.parametrize("flag", ["--val-retrieval-chunk-size 128", "--val-retrieval-precision model"])
def test_flags_of_retrieval_take_their_values_with_them(flag: str) -> None:
    settings = load([*_words(flag), "--lr=0.1"])
    assert settings.optim.lr == 0.1 and len(settings.places.notices) == 1 and "in float32" in settings.places.notices[0]


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
