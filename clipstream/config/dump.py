"""Settings as YAML that `--config` reads back: a run's config.yaml, and the output of `--print-config`.

A run's lines before its first step and after its last one are printed here, too.

config.yaml repeats the run from any folder: paths are made absolute, and the model's JSON config is included. Commands
(`pipe:`, `evals.NAME.fetch`) and settings of plug-ins stay as they are. `--print-config` prints settings
as they were given, and writes no file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import braceexpand

from clipstream.checkpoint import store
from clipstream.config.config_sources import to_yaml
from clipstream.config.settings import SHIPPED, Settings, by_key, changed, open_sources, shown, with_own_split
from clipstream.data.settings import SPLIT_FILE, SourceSettings
from clipstream.data.text_settings import PathTokenizer
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.settings import FrozenSettings
from clipstream.models.model_config import LOCAL, ModelConfig
from clipstream.models.settings import ModelSettings
from clipstream.storage.shard_url import PATH_SCHEMES, ShardURL, has_secret, parts_of, redact, redact_tree, redact_value
from clipstream.text import counted
from clipstream.utils import atomic_write
from clipstream.utils.logs import announce, logger
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import Section, Tree, names_path

if TYPE_CHECKING:
    from clipstream.models.towers import Towers

S = TypeVar("S", bound=Section)
FLAG, ALL = "--print-config", "all"
_ANCHORED = ("/", "~", "$")  # absolute, in the home folder, or from the environment
# Keys whose values may be names as well.
_NAMES = ("name", "pretrained", "image_pretrained", "model", "classes", "templates", "probability", "resume")
_PATTERN = re.compile(r"[{}\[\]*?$]|::")  # characters with a meaning in a specification of shards


TRAINS = re.compile(r"(model|tokenizer|data|loss|distill|optim|schedule|train)\.|run\.(seed|deterministic)$")
BESIDES = re.compile(
    r"model\.cache_dir|data\.(cache|cache_gib|workers|trace|\w+_timeout|max_\w+_failures)"
    r"|data\.sources\..*\.(shards|folder)"
)


def dump(settings: Settings) -> str:
    """The settings as YAML that, given as `--config` in any folder, repeats the run.

    `checkpoint.resume` and `resume_approximate` are left out, as they belong to this process and not to the run, and so
    is an epoch's length that the data determined. `${NAME}` references stay.
    """
    exclude = {"checkpoint": {"resume", "resume_approximate"}}
    tree = portable(with_own_split(settings)).model_dump(mode="json", exclude=exclude)
    if settings._epoch_from_data:
        tree["train"]["epoch_samples"] = None
    return to_yaml(tree)


def secrets(settings: Settings) -> list[str]:
    """The keys whose values contain a credential; references to the environment do not count."""
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in by_key(settings).items()}
    return [key for key, text in texts.items() if has_secret(text)]


def write_config(settings: Settings) -> None:
    """Write config.yaml; with mode 0600 and a warning if it holds a credential."""
    keys, copied = secrets(settings), settings.checkpoint.remote_sync
    if keys:
        synced = "" if copied is None else f", and --remote-sync copies it to {redact(copied)}"
        logger.warning(
            f"{', '.join(keys)} has a password or key, which is written to config.yaml (mode 0600{synced}): use an "
            f"environment variable, ${{NAME}}, instead"
        )
    if settings._split is not None and settings._split != (own := settings.run_folder / SPLIT_FILE):
        atomic_write.replace(own, settings._split.read_bytes())
    atomic_write.replace(settings.run_folder / "config.yaml", dump(settings).encode(), private=bool(keys))


def redacted(settings: Settings) -> Tree:
    """The settings as nested mappings without credentials, for the files and services that show a run."""
    tree: Tree = redact_tree(settings.model_dump(mode="json"))
    return tree


def portable(section: S) -> S:
    """A copy of the settings with absolute paths and the content of the model's JSON config.

    Raises SettingsError: the model's config cannot be read.
    """
    changed: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            changed[key] = portable(value)
        elif isinstance(value, dict):
            changed[key] = {k: portable(v) if isinstance(v, Section) else v for k, v in value.items()}
        elif value is not None and (made := _absolute(section, key, value)) != value:
            changed[key] = made
    if isinstance(section, ModelSettings) and section.config is None and _is_file(section.name, ".json"):
        changed["config"] = asdict(ModelConfig.read(Path(section.name)))
        text = changed["config"]["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text.get(key) and Path(text[key]).is_dir():
                text[key] = _path(text[key])
    return section.model_copy(update=changed)


def _path(text: str) -> str:
    return text if text.startswith(_ANCHORED) or ShardURL(text).scheme is not None else os.path.abspath(text)


def _absolute(section: Section, key: str, value: Any) -> Any:
    """The value of a setting, with absolute paths where it names shards, files or folders."""
    if isinstance(section, SourceSettings) and key == "shards" and is_plugin(section.type):
        found = [_path(item) if _is_file(item) else item for item in ([value] if isinstance(value, str) else value)]
        return found[0] if isinstance(value, str) else found
    if isinstance(section, SourceSettings | FrozenSettings) and key in ("shards", "train_shards"):
        return _shards(value)
    if not names_path(type(section).model_fields[key]):
        return value
    if key in _NAMES and not isinstance(section, PathTokenizer):
        return _named(value)
    return [_path(item) for item in value] if isinstance(value, list) else _path(value)


def _named(text: str | list[str]) -> str | list[str]:
    """The absolute path of an existing file or a model's folder; lists and other texts stay."""
    if isinstance(text, str) and text.startswith(LOCAL):
        return LOCAL + _path(text[len(LOCAL) :])
    return _path(text) if isinstance(text, str) and _is_file(text, ".json") else text


def _is_file(text: str, ending: str = "\0") -> bool:
    return ShardURL(text).scheme is None and (text.endswith(ending) or Path(text).is_file())


def _shards(spec: str | list[str]) -> str | list[str]:
    """A specification of shards, with the working folder before its relative paths."""
    if isinstance(spec, list):
        return [str(_shards(item)) for item in spec]
    here, parts = os.getcwd(), parts_of(spec)
    for number, part in enumerate(parts) if not _PATTERN.search(here) else ():
        scheme = ShardURL(part).scheme
        prefix = f"{scheme}:" if scheme in PATH_SCHEMES else ""
        rest = part[len(prefix) :]
        if (scheme is not None and not prefix) or not rest or ShardURL(rest).scheme is not None:
            continue
        try:
            paths = [rest, *braceexpand.braceexpand(rest)]
        except ValueError:  # reported where the shards are listed
            paths = [rest]
        if not any(path.startswith(_ANCHORED) for path in paths):
            parts[number] = f"{prefix}{here.rstrip('/')}/{rest}"
    return "::".join(parts)


def take_flag(argv: Sequence[str]) -> tuple[bool | None, list[str]]:
    """(True for `--print-config all`, False for `--print-config`, None without it; the rest of the command line).

    Raises SettingsError: the flag has another value than `all`.
    """
    rest = list(argv)
    places = [place for place, token in enumerate(rest) if token.partition("=")[0] == FLAG]
    if not places:
        return None, rest
    value = rest.pop(places[0]).partition("=")[2]
    if len(places) > 1 or value not in ("", ALL):
        raise SettingsError(f"{FLAG}: expected once, alone or as {FLAG} {ALL}")
    if rest[places[0] : places[0] + 1] == [ALL]:
        value = rest.pop(places[0])
    return value == ALL, rest


def print_config(settings: Settings, verb: str, every: bool, comments: Sequence[str] = ()) -> int:
    """Print the settings on rank 0, and return the exit code, 0. A password is printed too, with a warning on stderr.

    Args:
        every: print all settings, and not only those that differ from the defaults.
        comments: lines that stand before them.
    """
    world = World.from_env()
    if not world.is_main:
        return 0
    if keys := secrets(settings):
        logger.warning(
            f"{', '.join(keys)} has a password or key, which is in this output: use an environment variable, "
            f"${{NAME}}, instead"
        )
    what = "all settings" if every else f"settings that differ from the defaults ({FLAG} {ALL} prints all)"
    print(f"# clipstream {verb}: {what}")
    if settings.places.place_of(("data", "global_batch_size")) == "--batch-size":
        print(f"# data.global_batch_size is --batch-size x --accum-freq x {counted(world.size, 'rank')}")
    tree = settings.model_dump(mode="json") if every else changed(settings)
    print("".join(f"# {line}\n" for line in comments) + to_yaml(tree), end="")
    return 0


def noted(settings: Settings) -> dict[str, object]:
    """The settings that determine the weights, by dotted key, for a checkpoint's state."""
    return {
        key: redact_value(value) if isinstance(value, str) else value
        for key, value in by_key(portable(with_own_split(settings))).items()
        if TRAINS.match(key) and not BESIDES.fullmatch(key)
    }


def changes(settings: Settings, before: Mapping[str, object]) -> list[str]:
    """Differences between `noted(settings)` and a checkpoint's: 'KEY OLD -> NEW'; keys that it lacks are left out."""
    return [
        f"{key} {shown(before[key])} -> {shown(value)}"
        for key, value in noted(settings).items()
        if key in before and before[key] != value
    ]


def print_summary(
    settings: Settings,
    world: World,
    towers: Towers,
    checkpoint: Path | None = None,
    done: int = 0,
    before: Mapping[str, object] | None = None,
) -> None:
    """Print sources, model, optimizer, batch, evaluators and length of the run.

    Args:
        settings: with every `auto` resolved.
        checkpoint: the one that the run is resumed from, at step `done` with the settings `before`.
    """
    data, optim, stop, distill = settings.data, settings.optim, settings.train.early_stop, settings.distill
    for name, source in open_sources(settings).items():
        factors = "::".join(f"{factor:g}" for factor in data.sources[name].upsampling_factors or ())
        drawn = f", shards drawn {factors}" if factors else ""
        announce(f"source   {name}: {source.summary()}, weight {data.sources[name].weight:g}{drawn}")
    if settings.epochs is not None:
        announce(f"epoch    {settings.epochs.summary()}")
    trained = sum(parameter.numel() for parameter in towers.parameters() if parameter.requires_grad)
    count = f"{towers.n_parameters:,} parameters"
    count += "" if trained == towers.n_parameters else f", {trained:,} of them trained"
    for tower, until in (("image", settings.model.unlock_image_at), ("text", settings.model.unlock_text_at)):
        count += "" if until is None else f", the {tower} tower from step {until}"
    model = settings.model.name
    model = Path(model).stem if model.startswith(SHIPPED) else model
    announce(f"model    {model}, {count}, {towers.loss_type} loss")
    for tower, folder in data.stored_towers.items():
        announce(f"features {redact(folder)}, instead of the {tower} tower")
    teachers = [redact(folder) for folder in data.teacher_features]
    if distill.model is not None:
        teachers.append(f"{distill.model}{f', {distill.pretrained}' if distill.pretrained else ''}")
    if teachers:
        weights = f"contrastive {distill.contrastive:g}, {distill.type} {distill.weight:g}"
        weights += f", features {distill.features:g}" * bool(distill.features)
        announce(f"teacher  {'; '.join(teachers)}: {weights}")
    announce(f"optim    {optim.type}, lr {optim.lr:g}, wd {optim.wd:g}{optim.summary(settings.model.name)}")
    sizes = "".join(f", {size} from step {step}" for step, size in data.batch_schedule)
    announce(
        f"batch    {data.global_batch_size}{sizes} on {world.size} x {world.device}"
        f"{', fsdp' if settings.train.parallel == 'fsdp' and world.size > 1 else ''}, "
        f"{counted(int(data.workers), 'worker')} a rank, {data.lanes} lanes, {data.sampling.mode}, "
        f"{settings.train.precision}"
    )
    for name, section in settings.evals.items():
        when = f"every {section.every} steps" if section.every else "at the end"
        announce(f"evals    {name}: {section.type}, {when}, {' and '.join(section.kinds)} weights")
    announce(f"steps    {settings.total_steps}" + ("" if checkpoint is None else f", continuing from {checkpoint}"))
    if checkpoint is not None and done >= settings.total_steps:
        announce(f"         which is at step {done}: nothing left to train (raise --steps), only to evaluate")
    for number, change in enumerate(changes(settings, before or {})):
        announce(f"{'changed' if number == 0 else '':8} {change}")
    if stop.metric is not None:
        by = f" by more than {stop.min_delta:g}" * (stop.min_delta > 0)
        announce(f"         or until {stop.metric} is no better{by} in {stop.patience} evaluations in a row")
    announce(f"folder   {settings.run_folder}")


def print_end(settings: Settings, report: str, failures: Mapping[str, str]) -> None:
    """Print the best checkpoint, if the settings name a metric for it, the file `report`, what to do next, and which
    outputs failed, by name with the reason.
    """
    if settings.log.report:
        announce(f"report   {settings.run_folder / report}")
    sources = (source for _, source in sorted(settings.data.sources.items()))
    if data := "::".join(redact(part) for source in sources for part in source.parts):
        command = f"clipstream search {shlex.quote(str(settings.run_folder))} {shlex.quote(data)}"
        announce(f'next     {command} "a text of your own"', whole=True)
    best = store.best_of(settings.run_folder / "checkpoints")
    if best is not None and best.metric == settings.checkpoint.keep_best:
        path = settings.run_folder / "checkpoints" / best.name
        announce(f"best at step {int(best.name[5:])}: {best.metric} {best.value:.4g}, {path}", whole=True)
    if any(evaluator.role == "guard" for evaluator in settings.evals.values()):
        announce(f"then     clipstream interpolate {shlex.quote(str(settings.run_folder))}", whole=True)
    if failures:
        told = "; ".join(f"{name} ({why})" for name, why in failures.items())
        logger.warning(f"failed at times, and may be incomplete: {told}")
