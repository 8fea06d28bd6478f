"""A table of wrong inputs: each is refused before torch is imported, with an error that names place and cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipstream.config.settings import Settings, load, with_known_epoch
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight
from tests.support.ranks import TIMEOUT

EVAL = "--evals.e={type: zero_shot, classes: [a, b], data: {shards: a.tar}}"
INDEXED = "--train-data=synthetic: --data.sampling.mode=indexed"
# (flags, what stands in the error)
TABLE = [
    ("--run.seed=x", "--run.seed: expected a whole number, not 'x'"),
    ("--seed=-1", "--seed: run.seed: expected at least 0, not -1"),
    ("--seed=1.5", "expected a whole number, not 1.5"),
    ("--device=tpu", "--device: run.device: 'tpu' is no device that clipstream trains on: give auto, cpu, cuda"),
    ("--device=cuda:x", "'cuda:x' is no device"),
    ("--run.threads=0", "--run.threads: expected at least 1, not 0"),
    ("--run.deterministic=maybe", "--run.deterministic: expected true or false, not 'maybe'"),
    ("--name=..", "'..' is no name for a folder"),
    ("--name=a/b", "leave out slashes, and set the folder of runs by --logs"),
    ("--logs=", "--logs: run.logs: expected text that is not empty"),
    ("--model=ViT-B-33", "open_clip has no model 'ViT-B-33'"),
    ("--model=ViT-B-33", "did you mean 'ViT-B-32'"),
    ("--model=no/such.json", "there is no model configuration no/such.json"),
    ("--model=coca_ViT-B-32", "CoCa models are not supported"),
    ("--model=", "open_clip has no model ''"),
    ("--model=hf-hub:", "is not a repository of the Hugging Face Hub"),
    ("--model=local-dir:/no/such", "there is no model configuration /no/such/open_clip_config.json"),
    ("--pretrained=openia", "neither a tag nor a file; tags of ViT-B-32: openai"),
    ("--pretrained=openia", "did you mean 'openai'?"),
    ("--pretrained=./no.pt", "'./no.pt' is neither a tag nor a file"),
    ("--model.image-size=0", "--model.image-size: expected at least 1"),
    ("--model.lock-image=perhaps", "expected true or false, not 'perhaps'"),
    ("--model=ViT-B-16-SigLIP --loss.type=clip", "was made for the 'siglip' loss, but loss.type 'clip' was asked for"),
    ("--tokenizer.type=hub", "tokenizer.name: missing"),
    ("--tokenizer.context-length=0", "--tokenizer.context-length: expected at least 1"),
    ("--tokenizer=no.such:Thing", "cannot import 'no.such'"),
    ("--tokenizer=./no/such", "holds no tokenizer"),
    ("--data.global-batch-size=1", "--data.global-batch-size: expected at least 2"),
    ("--data.global-batch-size=2 --data.lanes=3", "3 lanes, but a global batch has 2 samples"),
    ("--data.lanes=0", "expected 'auto' or at least 1, not 0"),
    ("--data.lanes=many", "expected 'auto' or a whole number, not 'many'"),
    ("--workers=-1", "--workers: data.workers: expected 'auto' or at least 0, not -1"),
    ("--data.prefetch=0", "--data.prefetch: expected at least 1"),
    ("--train-data=no/such/*.tar", "--train-data: data.sources.train.shards: no file matches no/such/*.tar"),
    ("--train-data=/usr", "--train-data: data.sources.train.shards: /usr is a folder: name its shards"),
    ("--val-data=folder:/no/such", "folder:/no/such: the folder /no/such does not exist"),
    ("--data.sources=[a]", "--data.sources: expected a mapping of names, not ['a']"),
    ("--data.sources.train.weight=0", "expected a number above 0, not 0"),
    ("--data.sources.train.weight=nan", "expected a finite number, not 'nan'"),
    ("--data.sources.train.shrds=a", "there is no such key; did you mean 'shards'?"),
    ("--data.sources.more.weight=2", "data.sources.more.shards: missing"),
    ("--train-data=", "name at least one shard"),
    ("--image-key=", "data.sources.train.image_key: expected text that is not empty"),
    ("--data.sources.train.caption.type=csv", "type 'csv' is not one of json, text"),
    ("--data.sources.train.caption.path=a", "a key of type json only: set the type as well"),
    ("--caption-json=a..b", "malformed at position 3"),
    ("--data.sources.train.caption={type: json, path: [a, b], weights: [-1, 2]}", "weights must be 0 or more"),
    ("--data.sources.train.caption={type: json, path: [a, b], weights: [1]}", "1 weights for 2 paths"),
    ("--data.sources.train.transform=nocolon", "'nocolon' is not of the form 'package.module:Name'"),
    ("--data.sources.train.transform=no.such:fn", "cannot import 'no.such'"),
    ("--data.sources.train.transform=os:sep", "os:sep is no function"),
    ("--data.sources.train.background=notacolour", "'notacolour' is no colour: use a name such as white"),
    ("--data.sampling.mode=random", "'random' is not one of resampled, epoch, indexed"),
    ("--dataset-resampled=perhaps", "'perhaps' is not one of resampled, epoch, indexed"),
    ("--data.sampling.shards=own", "'own' is not one of shared, split"),
    ("--data.sampling.remainder=fill", "'fill' is not one of drop, pad, wrap"),
    ("--data.sampling.mode=indexed", "data.sources.train.shards: 1 of 1 shards are not there, e.g. a.tar"),
    (
        "--data.sampling.mode=indexed --train-data=http://me:word@host/{0..9}.tar",
        "Make them by\n  clipstream index 'http://***@host/{0..9}.tar' --into FOLDER, and name that folder "
        "by --data.sources.train.index",
    ),
    (f"{INDEXED} --data.batch-schedule=[[5, 9]]", "the mode 'indexed' needs batches of one size"),
    (f"{INDEXED} --train-num-samples=9", "--train-num-samples: train.epoch_samples: in mode indexed the data"),
    (f"{INDEXED} --data.global-batch-size=100001", "an epoch has 100,000 samples, less than one batch of 100001"),
    ("--data.sampling.mode=indexed --data.sources.train.index=/no/such.json", "/no/such.json is no wids index"),
    ("--data.shuffle.window=0", "--data.shuffle.window: expected at least 1"),
    ("--data.shuffle.shards=0", "--data.shuffle.shards: expected 'auto' or at least 1, not 0"),
    ("--data.augment.scale=[0.9, 0.5]", "min and max must be positive and in order"),
    ("--data.augment.scale=[0.5, 1.5]", "a crop takes a share of the image: max is at most 1"),
    ("--data.augment.scale=[0.5]", "expected 2 values, not 1"),
    ("--data.augment.interpolation=nearest", "'nearest' is not one of random, bilinear, bicubic"),
    ("--data.augment.flip=2", "expected at most 1, not 2"),
    ("--data.max-shard-failures=1.5", "expected at most 1, not 1.5"),
    ("--data.stall-timeout=0", "expected a number above 0, not 0"),
    ("--loss.type=softmax", "type 'softmax' is not one of auto, clip, siglip"),
    ("--loss.max-logit-scale=3", "a key of type clip or siglip only: set the type as well"),
    ("--loss={type: siglip, max_logit_scale: -1}", "loss.max_logit_scale: expected a number above 0"),
    ("--optim.type=sgd", "--optim.type: type 'sgd' is not one of adamw, nadamw, timm, nor a 'package.module:Name'"),
    ("--lr=-1", "--lr: optim.lr: expected at least 0, not -1"),
    ("--lr=nan", "--lr: optim.lr: expected a finite number, not 'nan'"),
    ("--lr=inf", "--lr: optim.lr: expected a finite number"),
    ("--seed=99999999999999999999", "run.seed: "),
    ("--model.image-mean=[128,128,128]", "model.image_mean"),
    ("--model.image-std=[0,0,0]", "model.image_std"),
    ("--lr=fast", "--lr: optim.lr: expected a number, not 'fast'"),
    ("--wd=-1", "--wd: optim.wd: expected at least 0"),
    ("--optim.betas=[0.9]", "expected 2 values, not 1"),
    ("--optim.betas=[0.9, 1.0]", "each beta must be at least 0 and below 1"),
    ("--optim.eps=0", "expected a number above 0"),
    ("--grad-clip-norm=0", "--grad-clip-norm: optim.grad_clip_norm: expected a number above 0"),
    ("--schedule.type=step", "type 'step' is not one of const-cooldown, constant, cosine, linear"),
    ("--warmup=-1", "--warmup: schedule.warmup: expected at least 0"),
    ("--warmup=11", "11 steps of warm-up, but the run has 10: lower --warmup"),
    ("--schedule.min-lr=1", "--schedule.min-lr: 1 is above the peak, optim.lr 0.0005"),
    ("--steps=-1", "--steps: train.steps: expected at least 0"),
    ("--train.samples=0", "--train.samples: expected at least 1"),
    ("--epochs=0", "--epochs: train.epochs: expected a number above 0"),
    ("--epochs=3", "steps and epochs are all given: keep the one that is meant"),
    ("--train.parallel=fsdp --precision=fp16", "train.parallel: fsdp has no scaler for fp16"),
    ("--train.parallel=fsdp --train.micro-batch-size=auto", "name it"),
    ("--precision=fp8", "'fp8' is not one of auto, fp32, bf16, fp16, pure_bf16, fp64"),
    ("--train.micro-batch-size=0", "--train.micro-batch-size: expected 'auto' or at least 1, not 0"),
    ("--train.micro-batch-size=most", "expected 'auto' or a whole number, not 'most'"),
    ("--data.batch-schedule=[[5, 9], [5, 8]]", "its steps must rise"),
    ("--data.batch-schedule=[[0, 9]]", "expected at least 1, not 0"),
    ("--data.batch-schedule=[[5, 1]]", "expected at least 2, not 1"),
    ("--data.batch-schedule=[[5, 9]] --steps=5", "step 5 is never reached: the run has 5"),
    ("--data.batch-schedule=[[5, 9]] --train.micro-batch-size=600", "more than the largest global batch"),
    ("--data.batch-schedule=[[5, 8]] --data.lanes=9", "9 lanes, but a global batch has 8 samples"),
    (
        "--data.batch-schedule=[[5, 8]] --train-num-samples=99 --checkpoint.every-epochs=1",
        "no fixed number of steps under data.batch_schedule",
    ),
    ("--loss.duplicates=same", "--loss.duplicates: 'same' is not one of negatives, mask, positives"),
    ("--loss.duplicates-by=pictures", "loss.duplicates_by requires loss.duplicates mask or positives"),
    ("--accum-freq=2", "--accum-freq requires --batch-size"),
    ("--batch-size=x", "--batch-size: expected a whole number, at least 1, not 'x'"),
    ("--train.compile=9", "--train.compile"),
    ("--torchcompile=9", "--torchcompile: expected true or false, not '9'"),
    ("--torchcompile --torchcompile-strategy=graph", "'graph' is not one of off, blocks, towers, step"),
    ("--torchcompile --torchcompile-mode=max", "'max' is not one of default, reduce-overhead"),
    (
        "--torchcompile --torchcompile-mode=default --torchcompile-backend=eager",
        "modes are those of the backend inductor",
    ),
    ("--train.compile=towers --train.parallel=fsdp", "fsdp gathers parameters block by block"),
    ("--checkpoint.every=-1", "--checkpoint.every: expected at least 0"),
    ("--checkpoint.keep-last=0", "--checkpoint.keep-last: expected at least 1"),
    ("--checkpoint.keep-every=0", "--checkpoint.keep-every: expected at least 1"),
    ("--checkpoint.keep-best=top1", "write EVALUATOR/METRIC as in metrics.jsonl"),
    ("--checkpoint.keep-best=val/", "write EVALUATOR/METRIC as in metrics.jsonl"),
    ("--checkpoint.keep-best=val/top1", "--checkpoint.keep-best: there is no evaluator 'val' (there is none)"),
    (f"{EVAL} --checkpoint.keep-best=val/top1", "there is no evaluator 'val' (there is e)"),
    ("--checkpoint.keep-best-by=most", "'most' is not one of auto, max, min"),
    ("--remote-sync=nosuch://bucket/runs", "the backend of nosuch:// is not installed"),
    ("--remote-sync=s3://${NO_SUCH_BUCKET}/runs", "${NO_SUCH_BUCKET} is named, and neither NO_SUCH_BUCKET nor"),
    (
        "--resume=nosuch://bucket/runs/a",
        "--resume: checkpoint.resume: nosuch://bucket/runs/a: the backend of nosuch://",
    ),
    ("--resume-approximate=perhaps", "expected true or false, not 'perhaps'"),
    ("--resume=/no/such", "--resume: checkpoint.resume: there is no /no/such"),
    ("--resume=latest", "latest requires --name"),
    ("--evals.e.type=zeroshot", "did you mean 'zero_shot'?"),
    ("--evals.e={type: retrieval}", "the evaluator has no data: give --evals.e.data.shards"),
    ("--evals.e={type: zero_shot, data: {shards: a.tar}}", "evals.e.classes: missing"),
    (f"{EVAL} --evals.e.classes=no.txt", "--evals.e.classes: cannot read the file 'no.txt'"),
    (f"{EVAL} --evals.e.classes=[a]", "1 given, classification takes at least 2"),
    (f"{EVAL} --evals.e.templates=[x]", "'x' has no {c} or {} where the class name goes"),
    (f"{EVAL} --evals.e.every=-1", "--evals.e.every: expected at least 0"),
    (f"{EVAL} --evals.e.batch-size=0", "--evals.e.batch-size: expected at least 1"),
    (f"{EVAL} --evals.e.label=", "evals.e.label: expected text that is not empty"),
    (f"{EVAL} --evals.e.labels=many", "'many' is not one of one, list, multi_hot"),
    (f"{EVAL} --evals.e.on-error=ignore", "'ignore' is not one of report, raise"),
    ("--val-data=benchmark:/usr", "test/nshards.txt is not there; CLIP_benchmark's layout is ROOT/test"),
    ("--val-data=benchmark:", "names no data set: write benchmark:ROOT"),
    ("--evals.e={type: zero_shot, data: {shards: 'benchmark:/usr'}}", "evals.e.classes: missing: the class names"),
    (
        "--evals.e={type: zero_shot, data: {shards: 'benchmark:/no/such'}}",
        "evals.e.classes: there is no folder /no/such",
    ),
    ("--evals.e={type: retrieval, data: {shards: a.tar}, captions: two}", "'two' is not one of one, all"),
    ("--evals.e={type: retrieval, data: {shards: a.tar}, max_captions: 0}", "expected at least 1, not 0"),
    ("--evals.e={type: loss, data: {shards: a.tar}, global_batch_size: 1}", "expected at least 2, not 1"),
    ("--evals.e={type: loss}", "the evaluator has no data: give --evals.e.data.shards"),
    ("--evals.e={type: knn, data: {shards: a.tar}}", "evals.e.train_shards: missing"),
    ("--evals.e={type: knn, data: {shards: a.tar}, train_shards: no/such/*.tar}", "no file matches no/such/*.tar"),
    ("--evals.e={type: knn, data: {shards: a.tar}, train_shards: a.tar, k: 0}", "expected at least 1, not 0"),
    ("--evals.e={type: linear_probe, data: {shards: a.tar}, train_shards: a.tar, c: 0}", "a number above 0, not 0"),
    (
        "--evals.e={type: linear_probe, data: {shards: a.tar}, train_shards: a.tar, classes: no.txt}",
        "evals.e.classes: cannot read the file 'no.txt'",
    ),
    ("--log.every=0", "--log.every: expected at least 1"),
    ("--log.progress=fancy", "'fancy' is not one of auto, bar, lines, none"),
    ("--log.tensorboard=2", "expected true or false, not 2"),
    ("--resume=ftp://127.0.0.1:1/x", "--resume: checkpoint.resume: ftp://127.0.0.1:1/x cannot be reached: "),
    ("--remote-sync=ftp://127.0.0.1:1/x", "--remote-sync: checkpoint.remote_sync: ftp://127.0.0.1:1/x cannot be"),
    ("--lrr=1", "--lrr: unknown flag; did you mean '--lr'?"),
    ("--optimizer.lr=1", "there is no such key; did you mean 'optim'?"),
]


def start(line: str) -> Settings:
    """What a run with these flags does before it imports torch, less its look at the network."""
    flags = [f"--{flag}" for flag in f" {line}".split(" --")[1:]]
    settings = load(["--train-data=a.tar", "--steps=10", *flags], ranks=1)
    settings = with_known_epoch(settings)
    validate_run(settings, World())
    preflight(settings.model, settings.tokenizer, loss_type=chosen_loss_type(settings.loss), ask=False)
    return settings


def error_of(line: str) -> str:
    """What it says."""
    with pytest.raises(SettingsError) as caught:
        start(line)
    return str(caught.value)


@pytest.mark.parametrize(("line", "told"), TABLE)
def test_a_wrong_input_is_told(line: str, told: str) -> None:
    assert told in error_of(line)


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
