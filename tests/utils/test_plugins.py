"""User classes that raise on import or construction: file and line, and the first traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest

from clipstream.config.settings import load
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.captions import build_caption
from clipstream.data.decode.images import OwnImageTransform
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.data.settings import TokenizerSettings
from clipstream.data.source_settings import CaptionSettings, ImageTransformSettings
from clipstream.errors import SettingsError
from clipstream.evals.runner import build_evaluators
from clipstream.evals.settings import EvalSettings
from clipstream.losses.contrastive import build_loss
from clipstream.losses.settings import LossSettings
from clipstream.utils import plugins

OWN = """\
from clipstream.errors import SettingsError

class Divides:
    def __init__(self, settings):
        self.share = 1 / 0

class Refuses:
    def __init__(self, settings):
        raise SettingsError("no such language")

class Misuses:
    def __init__(self, settings):
        from clipstream.data.json_path import parse_path

        parse_path(None)

class Opens:
    def __init__(self, settings):
        from pathlib import Path

        Path("absent.txt").read_bytes()
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user's own in the current folder, and no traceback printed yet."""
    made = {
        "own_made": OWN,
        "own_raises": "\nvalue = {}['a']\n",
        "own_typo": "def f(:\n",
        "own_needs": "import absent\n",
    }
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_printed", bytearray(1))


PARTS: dict[str, Callable[[str], object]] = {
    "loss": lambda kind: build_loss(LossSettings(type=kind), "clip"),
    "evals.mine": lambda kind: build_evaluators({"mine": EvalSettings(type=kind)}),
    "caption": lambda kind: build_caption(CaptionSettings(type=kind)),
    "image_transform": lambda kind: OwnImageTransform(
        ImageTransformSettings(type=kind), ImageSpec((8, 8)), "white", upright=True
    ),
    "tokenizer": lambda kind: build_tokenizer(TokenizerSettings(type=kind), open_clip.get_tokenizer("ViT-B-32"), 8),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_class_that_cannot_be_made(part: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=rf"^{part}.*ZeroDivisionError.* at own_made\.py:5"):
        PARTS[part]("own_made:Divides")
    said = capfd.readouterr().err
    assert "Traceback" in said and 'own_made.py", line 5, in __init__' in said
    with pytest.raises(SettingsError, match=rf"^{part}.* at own_made\.py:15$"):  # not the package's own line
        PARTS[part]("own_made:Misuses")
    assert capfd.readouterr().err == ""
    with pytest.raises(SettingsError, match=rf"^{part}.* No such file .*: 'absent\.txt' at own_made\.py:21$"):
        PARTS[part]("own_made:Opens")  # not a line of pathlib
    with pytest.raises(SettingsError, match=rf"^{part}[^:]*: no such language$"):
        PARTS[part]("own_made:Refuses")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("module", "message", "line"),
    [
        ("own_raises", r"KeyError\('a'\) at own_raises\.py:2", 'own_raises.py", line 2, in <module>'),
        ("own_typo", r"SyntaxError: invalid syntax \(own_typo\.py, line 1\)", 'own_typo.py", line 1'),
        ("own_needs", r"ModuleNotFoundError.*'absent'.* at own_needs\.py:1", 'own_needs.py", line 1, in <module>'),
    ],
)
@pytest.mark.parametrize("flag", ["--loss.type", "--data.sources.train.transform", "--tokenizer"])
def test_a_module_that_fails_on_import(
    flag: str, module: str, message: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--train-data", "a.tar", "--model", "ViT-B-32", "--steps", "1", flag, f"{module}:Name"]
    with pytest.raises(SettingsError, match=rf"cannot import '{module}'.*{message}"):
        load(arguments)
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and line in said, said


def test_a_module_that_is_not_there_needs_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"cannot import 'own_lost\.part' .*: no module 'own_lost' in the current"):
        plugins.load_plugin("own_lost.part:Name")
    assert capfd.readouterr().err == ""


def test_a_folder_beside_the_package_whose_name_begins_alike_is_the_users_own() -> None:
    file = f"{Path(plugins.__file__).parents[1]}_mine/part.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n1 / 0", file, "exec"))
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    assert plugins.describe_error("part:Name", error).endswith(" at part.py:2")
