"""Parts of one class each, as CONTRIBUTING says: help lists them, and a run trains and evaluates with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import Field

from clipstream.config.config_file import dump
from clipstream.config.settings import load
from clipstream.data.decode.captions import RawSample
from clipstream.data.order.rng import SampleRNG
from clipstream.data.source_settings import CaptionSettings, SourceSettings
from clipstream.data.sources import Source, SourceContext, expand
from clipstream.data.sources.tars import TarSource
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.settings import EvalSettings
from clipstream.training.optim import OptimSettings, ScheduleSettings, parameter_groups
from clipstream.utils import section
from tests.support.runs import flags, furnish, go, lines


class Lion:
    class Settings(OptimSettings):
        """Signs of averaged gradients."""

        type: Literal["lion"] = "lion"
        momentum: float = Field(0.9, description="decay of the average")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, towers: torch.nn.Module, model: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameter_groups(towers, 0.0), lr=self.settings.lr, momentum=self.settings.momentum)


class Halved:
    class Settings(ScheduleSettings):
        """Half of the peak."""

        type: Literal["halved"] = "halved"

    def __init__(self, settings: Settings) -> None:
        pass

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        return peak / 2


class Reversed(TarSource):
    """The tars of a folder, the last one first."""

    class Settings(SourceSettings):
        type: Literal["reversed"] = "reversed"
        most: int = Field(99, description="number of tars")

    def __init__(self, settings: Settings, context: SourceContext) -> None:
        super().__init__(settings, context)
        self.own, self.most = settings, settings.most

    def list_shards(self, spec: str) -> Sequence[str]:
        tars = sorted(Path(spec.partition(":")[2]).glob("*.tar"), reverse=True)[: self.most]
        return [shard for path in tars for shard in TarSource.list_shards(self, str(path))]


class Few(TarSource):
    """The first two tars of a folder."""

    def list_shards(self, spec: str) -> Sequence[str]:
        found = sorted(Path(spec.partition(":")[2]).glob("*.tar"))
        return [shard for path in found[:2] for shard in super(Few, self).list_shards(str(path))]


class Capitals:
    class Settings(CaptionSettings):
        """A text member in capitals."""

        type: Literal["capitals"] = "capitals"
        member: str = Field("txt", description="suffix of the member")

    def __init__(self, settings: Settings) -> None:
        self.members = (settings.member,)

    def __call__(self, sample: RawSample, rng: SampleRNG | None) -> str:
        return sample[self.members[0]].decode().upper()


class Rows:
    class Settings(EvalSettings):
        """The number of samples."""

        type: Literal["rows"] = "rows"
        times: int = Field(1, ge=1, description="factor of the number")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        assert self.settings.data is not None
        count = sum(len(batch) for batch in context.batches(self.settings.data, self.settings.batch_size))
        yield "rows", self.settings.times * count


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    families: dict[Any, dict[str, type]] = {
        OptimSettings: {"lion": Lion},
        ScheduleSettings: {"halved": Halved},
        SourceSettings: {"few": Few, "reversed": Reversed},
        CaptionSettings: {"capitals": Capitals},
        EvalSettings: {"rows": Rows},
    }
    for family, parts in families.items():
        monkeypatch.setitem(section._PARTS, family, dict(section.builtin_parts(family)))
        monkeypatch.setattr(family.model_fields["type"], "description", "")
        for name, cls in parts.items():
            section.part(family, name)(cls)


def test_a_run_trains_and_evaluates_with_registered_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    furnish(tmp_path)
    more = (
        "--opt=lion --momentum=0.8 --schedule.type=halved --data.sources.train.type=reversed "
        f"--data.sources.train.most=3 --data.sources.train.shards={tmp_path}/pairs "
        "--data.sources.train.caption.type=capitals --data.sources.train.caption.member=txt "
        f"--evals.held.type=rows --evals.held.times=2 "
        f"--evals.held.data.shards={tmp_path}/val/*.tar"
    )
    go([*flags(tmp_path, "one", *more.split(), steps=2)[2:]])
    assert [line["lr"] for line in lines(tmp_path, "one")] == [5e-4, 5e-4]
    assert "train: 3 shards" in caplog.text
    assert f"clipstream search {tmp_path}/runs/one reversed:{tmp_path}/pairs" in capsys.readouterr().out
    assert "momentum: 0.8" in (tmp_path / "runs" / "one" / "config.yaml").read_text()
    assert [line["rows"] for line in lines(tmp_path, "one", "rows")] == [40]


def test_entries_name_a_registered_source_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = load(["--train-data", "few:pairs", "--steps", "1"])
    assert expand(settings.data.sources["train"].shards) == sorted(map(str, Path("pairs").glob("*.tar")))[:2]
    assert f"shards: few:{tmp_path}/pairs\n" in dump(settings)


def test_a_source_named_before_a_path_has_the_defaults_of_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(tmp_path)
    spec = f"reversed:{tmp_path}/pairs"
    source = Source(load(["--train-data", spec, "--image-key", "png", "--steps", "1"]).data.sources["train"])
    kind = next(iter(source.types.values()))
    assert isinstance(kind, Reversed) and source.names == sorted(source.names, reverse=True) and len(source.names) > 1
    assert (kind.own.image_key, kind.own.type, source.settings.type) == ("png", "reversed", "auto")

    class Settings(Reversed.Settings):
        first: str

    monkeypatch.setattr(Reversed, "Settings", Settings)
    for lists in (lambda: Source(SourceSettings(shards=spec)), lambda: expand(spec)):
        with pytest.raises(SettingsError, match=f"data.sources: {spec} requires first: set type reversed as well"):
            lists()
    own = Settings(shards=spec, first="a")
    assert expand(spec, own) == Source(own).names == source.names


def test_help_and_messages_know_registered_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for place, name in (("optim", "lion"), ("schedule", "halved"), ("data.sources", "reversed"), ("evals", "rows")):
        go(["--help", place])
        assert f"{name}, or package.module:Name" in " ".join(capsys.readouterr().out.split())
    for place, told in (
        ("data.sources", "--data.sources.NAME.most INT"),
        ("data.sources.reversed", "data.sources.NAME with --data.sources.NAME.type reversed"),
        ("data.sources.NAME.caption.capitals", "member TEXT"),
        ("data.sources.train", "--data.sources.NAME.most INT"),
        ("data.sources.train.caption.capitals", "member TEXT"),
        ("evals.val.rows", "--evals.NAME.times INT"),
    ):
        go(["--help", place])
        assert told in capsys.readouterr().out
    names = ", ".join(name for name in section.builtin_parts(OptimSettings) if name != "timm")
    assert "adamw" in names and "lion" in names
    for argv, said in (
        ("--optim.type=lino --optim.lr=1", "did you mean 'lion'"),
        ("--opt=lino", f"expected {names}, timm/NAME or module:Name, not 'lino'"),
        ("--evals.e.type=rows --evals.e.tims=1 --evals.e.data.shards=a", "did you mean 'times'"),
        ("--evals.e.times=2 --evals.e.data.shards=a", "a key of type rows only"),
    ):
        with pytest.raises(SettingsError, match=said):
            load(argv.split())


def test_the_order_of_parts_is_that_of_their_modules() -> None:
    """Not that of imports: the first type that knows an entry of `shards` lists it."""
    code = """
{}
from clipstream.data.settings import SourceSettings
from clipstream.utils.section import builtin_parts
print(*builtin_parts(SourceSettings))
print(SourceSettings.model_fields["type"].description)
"""
    imports = ("", "import clipstream.data.sources.toy_data, clipstream.data.sources.tars")
    found = [subprocess.check_output([sys.executable, "-c", code.format(one)], text=True) for one in imports]
    assert found[0] == found[1]
    names, description = found[0].splitlines()
    assert description.startswith(", ".join(names.split()))
    of_modules = ["auto", "folder", "imagenet", "table", "tar", "benchmark", "toy", "synthetic"]
    assert [name for name in names.split() if name in of_modules] == of_modules
