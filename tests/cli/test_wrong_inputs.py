"""A table of wrong inputs: each is refused before torch is imported, with an error that names place and cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipstream.config.settings import read
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support.ranks import TIMEOUT
from tests.support.settings_files import error_of, start

EVAL = "--evals.e={type: zero_shot, classes: [a, b], data: {shards: a.tar}}"
INDEXED = "--train-data=synthetic: --data.sampling.mode=indexed"
DROPS = f"{INDEXED} --data.sampling.remainder=drop --data.global-batch-size=100001"
PARTS = "--train-data=x/{0..2}.tar::y.tar --train-data-upsampling-factors"
COOLDOWN = "--lr-scheduler=const-cooldown --epochs-cooldown=1"
# (flags, or the words of a command line; what stands in the error)
TABLE: list[tuple[str | list[str], str]] = [
    ("--run.seed=x", "--run.seed: expected a whole number, not 'x'"),
    ("--seed=-1", "--seed: run.seed: expected at least 0, not -1"),
    ("--device=tpu", "--device: run.device: invalid device 'tpu': use auto, cpu, cuda"),
    ("--run.deterministic=maybe", "--run.deterministic: expected true or false, not 'maybe'"),
    ("--name=..", "invalid folder name '..'"),
    ("--name=a/b", "remove slashes, and set the parent folder with --logs"),
    ("--logs=", "--logs: run.logs: expected text that is not empty"),
    ("--model=ViT-B-33", "did you mean 'ViT-B-32'"),
    ("--model=coca_ViT-B-32", "CoCa models are not supported"),
    ("--model=hf-hub:", "is not a repository of the Hugging Face Hub"),
    ("--model=local-dir:/no/such", "there is no model configuration /no/such/open_clip_config.json"),
    ("--pretrained=openia", "did you mean 'openai'?"),
    ("--pretrained=./no.pt", "'./no.pt' is neither a tag nor a file"),
    ("--model=ViT-B-16-SigLIP --loss.type=clip", "was made for the 'siglip' loss, but loss.type is 'clip'"),
    ("--tokenizer.type=hub", "tokenizer.name: missing"),
    ("--tokenizer=./no/such", "no tokenizer in no/such"),
    ("--data.lanes=0", "expected 'auto' or at least 1, not 0"),
    ("--train-data=no/such/*.tar", "--train-data: data.sources.train.shards: no file matches no/such/*.tar"),
    ("--train-data=/bin", "--train-data: data.sources.train.shards: /bin holds no tar, no table and no image, but "),
    ("--val-data=folder:/no/such", "folder:/no/such: the folder /no/such does not exist"),
    ("--data.sources=[a]", "--data.sources: a section of settings: set its keys, --data.sources.KEY"),
    ("--data=shop", "--data: a section of settings: set its keys, --data.KEY; short flags of it are --train-data, "),
    ("--loss=siglip", "--loss: a section of settings: set its keys, --loss.KEY; short flags of it are --siglip"),
    ("--data.sampling=epoch", "--data.sampling: a section of settings: set its keys, --data.sampling.KEY"),
    ("--data.sources.train.weight=0", "expected a number above 0, not 0"),
    ("--data.sources.more.weight=2", "data.sources.more.shards: missing"),
    ("--train-data=", "name at least one shard"),
    ("--image-key=", "data.sources.train.image_key: expected text that is not empty"),
    ("--data.sources.train.caption.type=csv", "type 'csv' is not one of json, label, text"),
    ("--data.sources.train.caption.path=a", "a key of type json only: set the type"),
    ("--caption-json=a..b", "malformed at position 3"),
    ("--data.sources.train.caption={type: json, path: [a, b], weights: [-1, 2]}", "weights must be non-negative"),
    ("--data.sources.train.caption={type: json, path: [a, b], weights: [1]}", "1 weights for 2 paths"),
    ("--data.sources.train.transform=no.such:fn", "cannot import 'no.such'"),
    ("--data.sources.train.transform=os:sep", "os:sep is not a function"),
    ("--data.sources.train.background=notacolour", "invalid color 'notacolour': use a name such as white"),
    ("--data.sampling.mode=random", "'random' is not one of resampled, epoch, indexed"),
    ("--data.sampling.mode=indexed", "data.sources.train.shards: 1 of 1 shards do not exist, e.g. a.tar"),
    (
        "--data.sampling.mode=indexed --train-data=http://me:word@host/{0..9}.tar",
        "Create them with\n  clipstream index 'http://***@host/{0..9}.tar' --into FOLDER, and name that folder "
        "by --data.sources.train.index",
    ),
    (DROPS, "an epoch of 100,000 samples is smaller than a batch of 100001"),
    ("--data.sampling.mode=indexed --data.sources.train.index=/no/such.json", "is not a valid wids index"),
    ("--data.augment.scale=[0.9, 0.5]", "min and max must be positive, and min <= max"),
    ("--data.augment.scale=[0.5, 1.5]", "max must be at most 1"),
    ("--data.max-shard-failures=1.5", "expected at most 1, not 1.5"),
    ("--loss.max-logit-scale=3", "a key of type clip or siglip only: set the type"),
    ("--lr=nan", "--lr: optim.lr: expected a finite number, not 'nan'"),
    ("--model.image-mean=[128,128,128]", "model.image_mean"),
    ("--model.image-std=[0,0,0]", "model.image_std"),
    ("--optim.betas=[0.9, 1.0]", "each beta must be at least 0 and below 1"),
    ("--epochs=3", "steps and epochs are mutually exclusive: set one of them"),
    ("--train.parallel=fsdp --train.micro-batch-size=auto", "auto is not supported with fsdp"),
    ("--data.batch-schedule=[[5, 9], [5, 8]]", "steps must be strictly increasing"),
    ("--accum-freq=2", "--accum-freq requires --batch-size"),
    ("--checkpoint.keep-best=top1", "expected EVALUATOR/METRIC as in metrics.jsonl"),
    ("--checkpoint.keep-best=val/top1", "--checkpoint.keep-best: unknown evaluator 'val': use NAME/METRIC with one of"),
    (f"{EVAL} --checkpoint.keep-best=val/top1", "unknown evaluator 'val': use NAME/METRIC with one of: e"),
    ("--remote-sync=nosuch://bucket/runs", "the backend of nosuch:// is not installed"),
    ("--remote-sync=s3://${NO_SUCH_BUCKET}/runs", "${NO_SUCH_BUCKET}: neither NO_SUCH_BUCKET nor"),
    (
        "--resume=nosuch://bucket/runs/a",
        "--resume: checkpoint.resume: nosuch://bucket/runs/a: the backend of nosuch://",
    ),
    ("--resume=/no/such", "--resume: checkpoint.resume: /no/such does not exist"),
    ("--resume=latest", "latest requires --name"),
    ("--evals.e={type: retrieval}", "the evaluator has no data: set --evals.e.data.shards"),
    ("--evals.e={type: zero_shot, data: {shards: a.tar}}", "evals.e.classes: missing"),
    (f"{EVAL} --evals.e.classes=no.txt", "--evals.e.classes: cannot read the file 'no.txt'"),
    (f"{EVAL} --evals.e.classes=[a]", "classes: expected at least 2, not 1"),
    (f"{EVAL} --evals.e.templates=[x]", "'x' has no {c} or {} where the class name goes"),
    ("--val-data=benchmark:/usr", "test/nshards.txt is not there; CLIP_benchmark's layout is ROOT/test"),
    ("--val-data=benchmark:", "expected benchmark:ROOT"),
    ("--evals.e={type: zero_shot, data: {shards: 'benchmark:/usr'}}", "evals.e.classes: missing: class names"),
    ("--evals.e={type: zero_shot, data: {shards: 'benchmark:/no/such'}}", "evals.e.classes: /no/such does not exist"),
    ("--evals.e={type: knn, data: {shards: a.tar}}", "evals.e.train_shards: missing"),
    ("--evals.e={type: knn, data: {shards: a.tar}, train_shards: no/such/*.tar}", "no file matches no/such/*.tar"),
    ("--evals.e={type: linear_probe, data: {shards: a.tar}, train_shards: a.tar, c: 0}", "a number above 0, not 0"),
    ("--resume=ftp://127.0.0.1:1/x", "--resume: checkpoint.resume: cannot reach ftp://127.0.0.1:1/x: "),
    ("--remote-sync=ftp://127.0.0.1:1/x", "--remote-sync: checkpoint.remote_sync: cannot reach ftp://127.0.0.1:1/x"),
    # what cannot be read as flags at all
    (["--run.seed"], "--run.seed: requires a value"),
    (["a.tar", "b.tar"], "unexpected argument 'a.tar': quote patterns"),
    ("--train.steps=4", "--steps and --train.steps both set train.steps"),
    ("--evals.e.k.x=3", "--evals.e.k.x: evals.e.k: "),
    ("--lock-imgae=1", "did you mean '--lock-image'?"),
    ("--zeroshot=1", "did you mean '--zeroshot-frequency'?"),
    ("--warmup-steps=1", "did you mean '--warmup'?"),
    ("--global-batchsize=1", "did you mean '--data.global-batch-size'?"),
    ("--every=1", "'--checkpoint.every' or '--log.every'"),
    ("--learning-rate=1", "--learning-rate: unknown flag; did you mean '--lr'"),
    ("--xyzzy=1", "see --help all"),
    # names, folders and numbers that fail late or take all memory
    (f"--name={'n' * 300}", "it has 300 bytes, more than 255"),
    (f"--name={'é' * 140}", "it has 280 bytes"),
    ("--name=a\nb", "remove line ends and other unprintable characters"),
    ("--name=\udcff", "remove line ends"),
    (f"--logs={'n' * 300}", "--logs: run.logs: invalid folder nnn"),
    (f"--logs={'a/' * 3000}", ": File name too long"),
    (f"--logs={__file__}/runs", "test_wrong_inputs.py is not a folder"),
    ("--train-data={0..999999999999}.tar", "name more than 1,000,000 shards"),
    (f"--batch-size={'9' * 5000}", "--batch-size: expected a whole number"),
    # flags of open_clip
    ("--beta2=1", "at least 0 and below 1"),
    ("--optim.betas=[0.9,0.95] --beta1=0.9", "--optim.betas"),
    ("--report-to=comet", "--report-to: expected tensorboard, wandb, trackio, none, all or module:Name, not "),
    ("--report-to=tensorboard,csv", "pandas.read_json(path, lines=True)"),
    ("--save-frequency=1", "--save-frequency: checkpoint.every_epochs: requires the length of an epoch"),
    ("--checkpoint.every=5 --save-frequency=1 --train-num-samples=9", "every and every_epochs are mutually exclusive"),
    ("--val-data=v.tar --val-frequency=1", "--val-frequency: evals.val.every_epochs: requires the length"),
    ("--lr-scheduler=const-cooldown", "requires --epochs-cooldown"),
    (f"{COOLDOWN} --schedule.cooldown=5", "mutually exclusive"),
    ("--epochs-cooldown=1", "a key of type const-cooldown only"),
    (COOLDOWN, "requires the length of an epoch"),
    (f"{COOLDOWN} --train-num-samples=9 --data.batch-schedule=[[5, 9]]", "set --schedule.cooldown, in steps"),
    ("--csv-caption-key=b --caption-key=c", "name different members"),
    ("--dataset-type=csv --train-data=pairs.txt", "the name of pairs.txt says otherwise"),
    (["--aug-cfg", "use_timm=True"], "--aug-cfg: unknown key 'use_timm'"),
    (["--aug-cfg", "scale=wide"], "--aug-cfg: expected scale=VALUE"),
    (["--image-mean", "1", "2"], "--image-mean: model.image_mean"),
    ("--opt=sgd", "expected adamw, nadamw, timm/NAME"),
    ("--opt=timm/lamb --beta1=0.9", "give both --beta1 and --beta2"),
    ("--opt-fallback-list=x", "as --opt timm/nadamuon"),
    ("--opt-kwargs=x", "expected NAME=VALUE"),
    (["--json-text-key", "a", "--json-text-key-probs", "1", "2"], "2 numbers for 1 fields"),
    ("--json-text-key-probs=1", "requires --json-text-key"),
    ("--json-text-key=a --caption-json=b", "give one of them"),
    (f"{PARTS}=1", "1 factors for 2 parts"),
    (f"{PARTS}=1::0", "must be positive"),
    (f"{PARTS}=1::2 --dataset-resampled=false", "require data.sampling mode resampled"),
    (["--force-image-size", "64", "32"], "images are square"),
    ("--precision=pure_fp16", "use fp16"),
    ("--logs=None", "a run requires a folder"),
    (["--naflex-patch-sizes", "16", "32", "--audio-ext", "flac"], "--audio-ext: not supported: see docs/from-open_"),
]


@pytest.mark.parametrize(("line", "told"), TABLE, ids=[ascii(line)[1:50] for line, _ in TABLE])
def test_a_wrong_input_is_told(line: str | list[str], told: str) -> None:
    said = error_of(line)
    assert told in said and len(said) < 7000 and "\x1b" not in said


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--steps=3", "data.sources: no training data"),
        ("--train-data=pipe:a", "train: the length of the run is not set"),
        ("--train-data=a --epochs=3", "--epochs: train.epochs: the length of an epoch is unknown"),
        ("--steps=3 --caption-key=cap", "data.sources.train.shards: missing: short flags"),
    ],
)
def test_what_a_run_needs(line: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        validate_run(read(line.split()), World())


@pytest.mark.parametrize(
    "line", [EVAL, f"{EVAL} --evals.e.templates=openai", "--device=cuda:1", "--data.sources.train.transform=os:getcwd"]
)
def test_a_right_input_passes(line: str) -> None:
    assert start(line).total_steps == 10


def test_no_wrong_input_takes_an_import_of_torch() -> None:
    code = (
        "import sys\n"
        "from tests.cli.test_wrong_inputs import TABLE, error_of\n"
        "for line, _ in TABLE: error_of(line)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=root, timeout=TIMEOUT).returncode == 0
