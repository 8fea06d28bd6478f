"""The commands of open_clip's README: each is read as typed, and trains on small data, or is refused with a reason."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clipstream.cli.verbs import evaluate, train
from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support import model_files
from tests.support.open_clip_epochs import write_epoch
from tests.support.pictures import make_shards, picture

SINGLE = """
python -m open_clip_train.main \\
    --save-frequency 1 \\
    --zeroshot-frequency 1 \\
    --report-to tensorboard \\
    --train-data="/path/to/train_data.csv"  \\
    --val-data="/path/to/validation_data.csv"  \\
    --csv-img-key filepath \\
    --csv-caption-key title \\
    --imagenet-val=/path/to/imagenet/root/val/ \\
    --warmup 10000 \\
    --batch-size=128 \\
    --lr=1e-3 \\
    --wd=0.1 \\
    --epochs=30 \\
    --workers=8 \\
    --model RN50
"""
# The flags of its other commands.
TORCHRUN = (
    "--train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' --train-num-samples 10968539 --dataset-type webdataset "
    "--batch-size 320 --precision amp --workers 4 --imagenet-val /data/imagenet/validation/"
)
SLURM = (
    '--save-frequency 1 --report-to tensorboard --train-data="/data/LAION-400M/{00000..41455}.tar" --warmup 2000 '
    '--batch-size=256 --epochs=32 --workers=8 --model ViT-B-32 --name "ViT-B-32-Vanilla" --seed 0 --local-loss '
    "--gather-with-grad"
)
RESUME = (
    '--train-data="/path/to/train_data.csv" --val-data="/path/to/validation_data.csv" '
    "--resume /path/to/checkpoints/epoch_K.pt"
)
SOURCES = (
    '--train-data "/data/cc12m/cc12m-train-{0000..2175}.tar::/data/LAION-400M/{00000..41455}.tar" '
    "--train-num-samples 135646078 --dataset-resampled --train-data-upsampling-factors=1::2"
)
ROBERTA = (
    '--train-data="pipe:aws s3 cp s3://s-mas/cc3m/{00000..00329}.tar -" --train-num-samples 3000000 '
    '--val-data="pipe:aws s3 cp s3://s-mas/cc3m/{00330..00331}.tar -" --val-num-samples 10000 '
    "--dataset-type webdataset --batch-size 256 --warmup 2000 --epochs 10 --lr 5e-4 --precision amp --workers 6 "
    '--model "roberta-ViT-B-32" --lock-text --lock-text-unlocked-layers 10 --name "10_unfrozen" '
    '--report-to "tensorboard"'
)
LOCAL_CHECKPOINT = (
    '--val-data="/path/to/validation_data.csv" --model RN101 --pretrained /path/to/checkpoints/epoch_K.pt'
)
HOSTED_CHECKPOINT = "--imagenet-val /path/to/imagenet/validation --model ViT-B-32-quickgelu --pretrained laion400m_e32"
COCA = (
    '--dataset-type "csv" --train-data "path/to/data/dir/train2014.csv" --warmup 1000 --batch-size 128 --lr 1e-5 '
    '--wd 0.1 --epochs 1 --workers 3 --model "coca_ViT-L-14" --report-to "wandb" --coca-contrastive-loss-weight 0 '
    "--coca-caption-loss-weight 1 --log-every-n-steps 100"
)
CLAP = (
    "--model CLAP-HTSAT-tiny-Roberta-base-fused --pretrained laion --audio-zeroshot-dataset mteb/urbansound8K "
    "--audio-zeroshot-split train --audio-zeroshot-target-key classID --audio-zeroshot-class-key class "
    "--batch-size 64 --workers 4 --device cuda --zeroshot-frequency 1"
)
# Flags that the README explains without a whole command.
LIT = "--lock-image --lock-image-unlocked-groups 1 --lock-image-freeze-bn-stats"
SIGLIP = "--siglip --accum-freq 2 --grad-checkpointing --local-loss --gather-with-grad --force-patch-dropout 0."
REMOTE = (
    "--logs /scratch --remote-sync s3://<path-to-bucket> --remote-sync-frequency 60 --remote-sync-protocol fsspec "
    "--delete-previous-checkpoint"
)
DISTILL = "--distill-model ViT-L-14 --distill-pretrained openai"
INT8 = "--use-bnb-linear SwitchBackLinearGlobal"
LATEST = "--resume latest --save-most-recent"


def arguments(command: str, **changed: str) -> list[str]:
    """The command's words behind its program, with other words in the place of those that cannot be had here.

    Args:
        changed: flag, with _ for -, -> its value, which the command has already, or ends with.
    """
    words = shlex.split(command.replace("\\\n", " "))
    if "-m" in words:
        words = words[words.index("open_clip_train.main") + 1 :]
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in changed.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in split:
            split[split.index(flag) + 1] = value
        else:
            split += [flag, value]
    return split


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of all commands, a small model and a checkpoint of open_clip's trainer."""
    folder: Path = tmp_path_factory.mktemp("open_clip")
    for name, count in (("train_data", 24), ("validation_data", 8)):
        rows = ["filepath\ttitle"]
        for number in range(count):
            (folder / f"{name}{number}.jpg").write_bytes(picture(number))
            rows.append(f"{name}{number}.jpg\tpicture, number {number}")
        (folder / f"{name}.csv").write_text("\n".join(rows))
    for number, synset in enumerate(("n01440764", "n03417042", "n15075141")):
        (folder / "imagenet" / synset).mkdir(parents=True)
        (folder / "imagenet" / synset / "a.JPEG").write_bytes(picture(number))
    make_shards(folder / "LAION-400M", [20, 20, 8])
    sizes = {"00000.tar": 20, "00001.tar": 20, "00002.tar": 8}
    (folder / "LAION-400M" / "sizes.json").write_text(json.dumps(sizes))
    shutil.move(model_files.write(folder), folder / "model.json")
    write_epoch(folder, json.loads((folder / "model.json").read_text()))
    return folder


@pytest.fixture
def small(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Values of flags for a run of a moment, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    more = {"workers": "0", "batch_size": "8", "warmup": "1", "device": "cpu", "run.threads": "1"}
    return {"model": f"{place}/model.json", **more}


def metrics(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def trained(run: str | Path) -> list[int]:
    """Steps of the run's checkpoints; its last training line is of the last one."""
    steps = sorted(int(path.name[-8:]) for path in (Path(run) / "checkpoints").glob("step_*"))
    assert steps[-1] == [line["step"] for line in metrics(run) if "loss" in line][-1]
    return steps


# Each command as it stands: (settings by dotted key, flags that are answered by a notice).
READ: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        SINGLE,
        {
            "data.global_batch_size": 256, "schedule.warmup": 10000, "optim.lr": 1e-3, "optim.wd": 0.1,
            "train.epochs": 30, "data.workers": 8, "model.name": "RN50", "checkpoint.every_epochs": 1,
            "log.tensorboard": True, "data.sources.train.caption.key": "title", "evals.val.data.caption.key": "title",
            "data.sources.train.image_key": "filepath", "evals.imagenet.every_epochs": 1,
            "evals.imagenet.data.shards": "imagenet:/path/to/imagenet/root/val/",
        },
        [],
    ),
    (
        TORCHRUN,
        {
            "data.global_batch_size": 640, "train.epoch_samples": 10968539, "train.precision": "auto",
            "data.sources.train.shards": "/data/cc12m/cc12m-train-{0000..2175}.tar",
        },
        ["--precision"],
    ),
    (
        SLURM,
        {"data.global_batch_size": 512, "train.epochs": 32, "run.name": "ViT-B-32-Vanilla", "run.seed": 0},
        ["--local-loss", "--gather-with-grad"],
    ),
    (
        RESUME,
        {"checkpoint.resume": "/path/to/checkpoints/epoch_K.pt", "data.sources.train.caption.key": "title;txt"},
        [],
    ),
    (
        SOURCES,
        {
            "data.sources.train.upsampling_factors": [1, 2],
            "data.sampling.mode": "resampled", "train.epoch_samples": 135646078,
        },
        [],
    ),
    (
        ROBERTA,
        {
            "data.sources.train.shards": "pipe:aws s3 cp s3://s-mas/cc3m/{00000..00329}.tar -",
            "model.lock_text": True, "model.unlocked_layers": 10, "train.epochs": 10,
        },
        ["--val-num-samples", "--precision"],
    ),
    (LIT, {"model.lock_image": True, "model.unlocked_groups": 1}, ["--lock-image-freeze-bn-stats"]),
    (
        f"--batch-size 8 {SIGLIP}",
        {
            "loss.type": "siglip", "data.global_batch_size": 32, "train.micro_batch_size": 8,
            "model.grad_checkpointing": "all", "model.patch_dropout": 0.0,
        },
        ["--local-loss", "--gather-with-grad"],
    ),
    (
        REMOTE,
        {"run.logs": "/scratch", "checkpoint.remote_sync": "s3://<path-to-bucket>", "checkpoint.keep_last": 1},
        ["--remote-sync-frequency", "--remote-sync-protocol"],
    ),
    (DISTILL, {"distill.model": "ViT-L-14", "distill.pretrained": "openai"}, []),
    (LATEST, {"checkpoint.resume": "latest"}, ["--save-most-recent"]),
    (HOSTED_CHECKPOINT, {"model.name": "ViT-B-32-quickgelu", "model.pretrained": "laion400m_e32"}, []),
]  # fmt: skip


def value(settings: Settings, key: str) -> Any:
    tree: Any = settings.model_dump()
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(("command", "expected", "notices"), READ)
def test_commands_are_read_as_they_stand(command: str, expected: dict[str, Any], notices: list[str]) -> None:
    settings, places = read(arguments(command), ranks=2)
    assert {key: value(settings, key) for key in expected} == expected
    assert sorted(line.partition(":")[0] for line in places.notices) == sorted(notices)
    assert all("\n" not in line for line in places.notices)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (COCA, ["--coca-contrastive-loss-weight", "--coca-caption-loss-weight"]),
        (CLAP, ["--audio-zeroshot-"] * 4),
        (INT8, ["--use-bnb-linear"]),
    ],
)
def test_commands_without_an_equivalent_are_refused_with_the_page(command: str, flags: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        load(arguments(command))
    lines = str(raised.value).splitlines()
    assert len(lines) == len(flags) and all("see docs/from-open_clip.md" in line for line in lines)
    assert all(flag in line for line, flag in zip(lines, flags, strict=True))
    if command is COCA:  # without its own flags, the model is refused
        with pytest.raises(SettingsError, match="CoCa models are not supported; train them with open_clip_train"):
            model_files.build("coca_ViT-L-14")


def test_the_first_command_trains_and_evaluates(place: Path, small: dict[str, str]) -> None:
    small |= {"train_data": f"{place}/train_data.csv", "val_data": f"{place}/validation_data.csv"}
    small |= {"imagenet_val": f"{place}/imagenet", "epochs": "2", "name": "first", "workers": "2"}
    argv = arguments(SINGLE, **small, **{"evals.imagenet.templates": "plain"})
    assert train.main(argv) == 0
    assert trained("runs/first") == [3, 6] and list(Path("runs/first/tensorboard").iterdir())
    evaluations = [(line["eval"], line["step"], line["n"]) for line in metrics("runs/first") if "eval" in line]
    assert sorted(evaluations) == [("imagenet", 3, 3), ("imagenet", 6, 3), ("val", 6, 8)]


def test_an_epoch_of_open_clip_is_resumed_and_the_run_after_it(
    place: Path, small: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    small |= {"train_data": f"{place}/train_data.csv", "val_data": f"{place}/validation_data.csv"}
    argv = arguments(RESUME, **{**small, "resume": f"{place}/epoch_2.pt", "epochs": "3", "name": "on"})
    assert train.main(argv) == 0
    assert "epoch 2, step 6; the data and the moments of the optimizer start anew" in capsys.readouterr().out
    assert trained("runs/on") == [6, 9]  # 24 samples are 3 steps; it begins after epoch 2
    argv = arguments(f"{shlex.join(argv)} {LATEST}", epochs="4")
    del argv[argv.index("--resume") : argv.index("--resume") + 2]
    assert train.main(argv) == 0
    assert [line["step"] for line in metrics("runs/on") if "start" in line] == [6, 9] and trained("runs/on")[-1] == 12


def test_an_epoch_of_open_clip_is_evaluated_and_trained_on(
    place: Path, small: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    small |= {"pretrained": f"{place}/epoch_2.pt", "val_data": f"{place}/validation_data.csv"}
    argv = arguments(LOCAL_CHECKPOINT, **{key: text for key, text in small.items() if key != "warmup"})
    with pytest.raises(SettingsError, match=r"^data.sources: no training data.*clipstream evaluate[^\n]*$"):
        validate_run(read(argv), World())
    assert evaluate.main(argv) == 0
    assert "image_to_text_R@1" in capsys.readouterr().out
    hosted = load(arguments(HOSTED_CHECKPOINT, cache_dir=str(place / "empty")), trains=False).model
    with pytest.raises(SettingsError, match="requires files of the Hugging Face Hub"):
        model_files.build(hosted.name, pretrained=hosted.pretrained, cache_dir=hosted.cache_dir)
    data = {"train_data": f"{place}/LAION-400M/{{00000..00001}}.tar", "train_num_samples": "16", "epochs": "1"}
    assert train.main(arguments("", **{**small, **data, "lr": "0", "name": "from"})) == 0
    saved = load_file("runs/from/checkpoints/step_00000002/open_clip_model.safetensors")
    theirs = torch.load(place / "epoch_2.pt", weights_only=True)["state_dict"]
    assert saved.keys() == {name.removeprefix("module.") for name in theirs}
    assert all(torch.equal(saved[name.removeprefix("module.")], tensor) for name, tensor in theirs.items())
