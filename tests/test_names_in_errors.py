"""Names that come from data do not break the lines of errors and of the log, whatever characters they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipstream.config.settings import load
from clipstream.data.decode.class_names import class_names
from clipstream.data.source_settings import SourceSettings
from clipstream.errors import ClipstreamError, DataError, errors_as
from clipstream.features.store import FeatureStore
from clipstream.models.model_config import ModelConfig, check_config
from clipstream.text import lines, printable
from clipstream.utils.logs import logger
from tests.support.features import Content
from tests.support.hostile_text import HOSTILE, obeyed
from tests.support.loaders import evaluation_of
from tests.support.tars import write_tar

PLAIN = "plain"
NAMES = st.text(st.sampled_from("\n\r\t\x0b\x1b\x7f\x85\u2028\u2029\u202eab [m"), min_size=1, max_size=12)


def of_manifest(name: str, folder: Path) -> object:
    Content(sizes={"train": [4]}).make(folder)
    found = json.loads((folder / "store.json").read_bytes())
    (folder / "store.json").write_text(json.dumps({**found, "sources": {name: 1}}))
    return FeatureStore(folder)


def of_a_table(name: str, folder: Path) -> object:
    parquet.write_table(pa.table({name: ["a"], f"{name} 2": ["b"]}), folder / "a.parquet")
    return read(SourceSettings(shards=str(folder / "a.parquet")))


def of_a_tar(name: str, folder: Path) -> object:
    samples = [
        {"__key__": f"{number}{name}", f"{name}x": b"7", "json": json.dumps({name: number})} for number in range(9)
    ]
    write_tar(folder / "a.tar", samples)
    return read(SourceSettings(shards=str(folder / "a.tar")))


def of_a_file(name: str, folder: Path) -> object:
    return read(SourceSettings(shards=str(folder / f"{name}.tar")))


def of_settings(name: str, folder: Path) -> object:
    (folder / "a.yaml").write_text(
        yaml.safe_dump({name: 1, "data": {"sources": {name: {name: 1}}}, "model": {name: 2}})
    )
    return load(["--config", str(folder / "a.yaml")])


def of_a_flag(name: str, folder: Path) -> object:
    return load([f"--{name}", f"--evals.{name}.x=1", f"--data.{name}", "2"])


def of_class_names(name: str, folder: Path) -> object:
    (folder / "a.json").write_text(json.dumps({name: "a", f"{name}0": ["b"]}))
    return class_names(str(folder / "a.json"))


def of_a_path(name: str, folder: Path) -> object:
    return load(["--train-data=a.tar", f"--caption-json=a[{name}"])


def of_a_model(name: str, folder: Path) -> object:
    (folder / "a.json").write_text(json.dumps({"embed_dim": name, "vision_cfg": name, "text_cfg": {name: name}}))
    config = ModelConfig.read(folder / "a.json")
    return check_config(str(folder / "a.json"), config.model_cfg, None)


def of_another_library(name: str, folder: Path) -> object:
    with errors_as(ClipstreamError, f"{name}:", ValueError):
        raise ValueError(f"not a {name}")


def read(source: SourceSettings) -> object:
    with evaluation_of(source) as stream:
        list(stream)
        raise DataError(stream.complaint())


def said(about: Callable[[str, Path], object], name: str, folder: Path) -> str:
    folder.mkdir()
    try:
        about(name, folder)
    except ClipstreamError as error:
        return str(error).replace(str(folder), "FOLDER")
    return ""


ABOUT = [value for key, value in list(globals().items()) if key.startswith("of_")]


@pytest.mark.parametrize("about", ABOUT)
@given(name=NAMES)
@settings(max_examples=25)
@example(name=HOSTILE[:-1])
@example(name="\n")
def test_an_error_has_the_lines_that_it_has_for_a_plain_name(
    about: Any, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.mktemp("named")
    found, wanted = said(about, name, folder / "0"), said(about, PLAIN, folder / "1")
    assert wanted, "the error that the test is about"
    assert set(obeyed(found)) <= {"\n"}, found
    assert not found or found.count("\n") == wanted.count("\n")


@pytest.mark.parametrize("name", [HOSTILE, "a\nb", "\u2028"])
def test_a_line_of_the_log_is_one_line_and_lines_are_several(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger.warning(f"{name} is gone")
    logger.warning("%s is gone", name)
    assert capsys.readouterr().err == f"warning: {printable(name)} is gone\n" * 2
    logger.warning(lines(f"{name} is gone:", DataError(name), DataError(lines("x", name))))
    assert capsys.readouterr().err == f"warning: {printable(name)} is gone:\n{printable(name)}\nx\n{printable(name)}\n"
