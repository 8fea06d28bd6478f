"""The documentation: each page's commands and snippets run as they are written, its flags exist, and the site builds.

`tests.support.doc_pages` says how a block is run; here is what its pages need beyond that, and what they must show.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from clipstream.cli.main import VERBS, verb_of
from clipstream.cli.verbs import evaluate
from clipstream.config.help import default_note, spellings, value_form
from clipstream.config.settings import Settings
from clipstream.config.short_flags import ALIASES, BY_FLAG
from clipstream.config.value_tree import generic_key
from clipstream.utils.section import leaves
from tests.support import hubtree
from tests.support.doc_pages import OUTPUT, PAGES, Session, blocks, make_folder
from tests.support.forks import ROOT
from tests.support.pictures import picture
from tests.support.tars import write_tar

# Pages with tests of their own: below, tests/tools/test_own_parts.py and tests/api/test_docs_python.py.
ELSEWHERE = ("lit.md", "plugins.md", "python.md")
CODE = [path for path in PAGES if any(block.language not in OUTPUT for block in blocks(path))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, where we are."""
    for path in made.iterdir():
        if path.suffix in (".json", ".yaml", ".txt", ".csv"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        else:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_page(path: Path, session: Session | None = None) -> Session:
    session = session or Session()
    for block in blocks(path):
        session.run(block)
    return session


def metrics(run: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def check_tutorial() -> None:
    """The settings alone repeat the run, and each key of metrics.jsonl is described."""
    losses = [[line["loss"] for line in metrics(run) if "loss" in line] for run in ("first", "again")]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    keys = {key for line in metrics("first") for key in line}
    keys |= {key for line in metrics("first") for key in ("start", "end") for key in line.get(key, {})}  # type: ignore[attr-defined]
    described = {word for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"[\w@]+", code)}
    assert {key for key in keys if key not in described and not re.search("R@(5|10)$", key)} == set()
    files = {path.name for path in Path("runs/first").rglob("*") if path.parent.name != "pictures"}
    page = (ROOT / "docs/reference/run-folder.md").read_text(encoding="utf-8")
    assert {file for file in files if file.rstrip("/") not in page and not re.match(r"step_|events\.", file)} == set()


def check_features() -> None:
    assert Path("kept.txt").read_text() and list(Path("out").rglob("*.parquet"))


CHECKS: dict[str, Callable[[], None]] = {"tutorial.md": check_tutorial, "features.md": check_features}


@pytest.mark.ci
@pytest.mark.parametrize("path", [path for path in CODE if path.name not in ELSEWHERE], ids=name_of)
def test_the_blocks_of_a_page_run_in_their_order(path: Path, folder: Path) -> None:
    session = run_page(path)
    assert session.ran or all(block.reason or block.language != "bash" for block in blocks(path))
    CHECKS.get(path.name, lambda: None)()


def test_every_page_says_what_its_blocks_are() -> None:
    for path in PAGES:
        for block in blocks(path):
            known = {*OUTPUT, "bash", "python", "yaml"}
            assert block.language in known, f"{block}: write the language after ```, one of {', '.join(known)}"
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- not run:") == sum(block.reason is not None for block in blocks(path)), path


@pytest.fixture(scope="module")
def towers_and_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page on LiT calls DIR and MADE: small shards, and random towers, of which that of texts is small."""
    from transformers import BertConfig, BertModel

    made = tmp_path_factory.mktemp("made")
    texts = json.dumps({"caption": {"en": "a dog", "alt": ["a hound"]}, "texts": {"en": "a dog"}})
    for name, shards in (("emoji-train", 9), ("emoji-val", 5), ("stamps", 8)):
        for shard in range(shards):
            image = picture(shard, kind="PNG")
            sample = {"__key__": "0", "png": image, "json": texts, "cls": f"{shard % 3}", "txt": "a"}
            write_tar(made / name / f"{shard:05d}.tar", [sample])
    save_file(timm.create_model("tf_efficientnet_lite0").state_dict(), made / "lite0.safetensors")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=64, pad_token_id=1)).save_pretrained(made / "minilm")
    hubtree.write_tokenizer(made / "minilm")
    return made


@pytest.mark.ci
def test_the_page_on_lit(towers_and_data: Path, folder: Path) -> None:
    for name in ("DIR", "MADE"):
        (folder / name).symlink_to(towers_and_data)
    run_page(ROOT / "docs/lit.md", Session(rename={"step_00000150": "step_00000003"}))
    saved = [load_file(f"runs/{run}/checkpoints/step_00000003/open_clip_model.safetensors") for run in ("lit", "both")]
    start, image = load_file(towers_and_data / "lite0.safetensors"), "conv_stem.weight"
    assert torch.equal(saved[0][f"visual.trunk.{image}"], start[image])
    assert not torch.equal(saved[1][f"visual.trunk.{image}"], start[image])


def test_the_command_of_a_suite_says_what_it_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIPSTREAM_EVALS", "elsewhere")
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^clipstream evaluate (.* --suite .*)$", text, re.M)
    assert evaluate.main(command.split()) == 2 and "6 of 6 data sets are missing" in capsys.readouterr().err


OF_OTHERS = {
    "--config", "--help", "--version", "--print-config", "--out", "--output",  # of all parsers
    "--local-loss", "--gather-with-grad", "--lock-image-freeze-bn-stats",  # open_clip's
    "--dereference", "--hard-dereference",  # tar
    "--master-addr",  # torchrun
    "--alpha_ckd_loss", "--alpha_fd_loss",  # CLIP-KD
    "--vector", "--text", "--image",  # Embedding Atlas
    "--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--signal",
    "--requeue", "--open-mode", "--wait", "--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend",
    "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--shutdown-timeout", "--signals-to-handle",
    "--nodelist", "--exclude", "--overlap", "--address", "--working-dir", "--head", "--block", "--port", "--num-cpus",
    "--nworkers", "--nthreads",
    "--write", "--minutes", "--parts", "--caption", "--kept",  # of benchmarks/gpu.py and benchmarks/text_buckets.py
}  # fmt: skip
FOREIGN = {"from-open_clip.md", "open_clip_flags.md"}  # name open_clip's flags, which their own test takes one by one


def test_flags_that_pages_name_exist() -> None:
    keys = {key for key, _ in leaves(Settings)}
    verbs = [one for name in VERBS for one in (verb_of(name), *verb_of(name).topics)]
    of_verbs = {
        flag for verb in verbs for key, field in verb.own.model_fields.items() for flag in spellings(key, field)
    }
    for path in PAGES:
        if path.name in FOREIGN:
            continue
        text = path.read_text(encoding="utf-8")
        for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?:\.[\w-]+)*", text)):
            name = flag.removeprefix("--").replace("-", "_")
            if "." in flag:
                generic = re.sub(r"^(data\.sources|evals|log\.sinks|stages)\.\w+", r"\1.NAME", name)
                generic = generic.removeprefix("stages.NAME.set.")
                known = generic in keys or any(key.startswith(f"{generic}.") for key in keys)
            else:
                known = flag in {*BY_FLAG} | of_verbs | OF_OTHERS or name in Settings.model_fields
            assert known, f"{path.name}: there is no flag {flag}"


class Links(HTMLParser):
    """What a page of the site links to or loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        if tag in ("script", "img", "link", "iframe", "source"):
            loaded = found.get("src") or found.get("href", "")
            if loaded and found.get("rel") not in ("canonical", "next", "prev"):
                self.loaded.append(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning, as for a page or an anchor that does not exist, is an error."""
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed")
    home = tmp_path_factory.mktemp("site")
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    (home / "zensical.toml").write_text(config.replace('paths = ["."]', f'paths = ["{ROOT}"]'))
    generate = ["docs/generate.py", str(home / "build/docs")]
    for command in (generate, ["-m", "zensical", "build", "--strict", "--clean", "-f", str(home / "zensical.toml")]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return home / "build/site"


def test_links_of_the_site_lead_somewhere_and_it_loads_nothing_from_a_network(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 25
    for path, page in pages.items():
        for target in page.targets + page.loaded:
            url = urlsplit(target)
            if url.scheme in ("http", "https", "mailto", "data"):
                assert target not in page.loaded, f"{path.name} loads {target}"
                continue
            other = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert other.exists() or path.name == "404.html", f"{path.name}: {target}"
            if url.fragment and other in pages and not url.fragment.startswith("__"):
                assert unquote(url.fragment) in pages[other].anchors, f"{path.name}: {target}"


def test_the_navigation_has_every_page(site: Path) -> None:
    nav = set(re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    docs = site.parent / "docs"
    assert nav == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}


def described_settings(page: str) -> dict[str, str]:
    """Key or section -> the text below its heading, from the source of the settings reference."""
    parts = re.split(r"^###? .*?(?:(\w+)|\{ #(\S+) \})$", page, flags=re.M)[1:]
    return {
        head or anchor: re.sub(r"\\(.)", r"\1", text) for head, anchor, text in zip(*[iter(parts)] * 3, strict=True)
    }


def test_the_reference_describes_every_setting_with_type_default_and_flag(site: Path) -> None:
    page = (site.parent / "docs/reference/settings.md").read_text(encoding="utf-8")
    described, seen = described_settings(page), set()
    shared = re.compile(r"The keys are those of \[(\S+)\]\(#\1\)")
    for key, field in leaves(Settings):
        where = key
        while where not in described:  # the section is that of another key, which its text says
            above = max(
                (name for name in described if where.startswith(f"{name}.") and shared.search(described[name])),
                key=len,
                default=None,
            )
            assert above is not None, f"{key} is not in the reference"
            where = (shared.search(described[above]) or [""])[1] + where.removeprefix(above)
        text, default = described[where], default_note(field).strip(" []").split(" ", 1)
        seen.add(where)
        assert field.description and field.description.lower().rstrip(".") in text.lower(), key
        assert f"`{value_form(field.annotation)}`" in text, f"{key}: its type is missing"
        shown = {"": "", "required": "required"}.get(default[0], f"default `{default[-1]}`")
        assert shown in text and (shown or " · default " not in text), f"{key}: {shown or 'another default'}"
        flags = {f"--{where.replace('_', '-')}", *(one.flag for one in ALIASES if where in map(generic_key, one.keys))}
        assert flags == set(re.findall(r"`(--\S+)`", text.split("{ .setting }")[0].rpartition("\n\n")[2])), key
    sections = {name.rpartition(".")[0] for name in seen} | {name.split(".")[0] for name in seen}
    assert {name for name in described if name not in seen and not shared.search(described[name])} <= sections


def test_the_references_have_every_anchor_and_every_verb(site: Path) -> None:
    anchors = Links((site / "reference/settings.html").read_text(encoding="utf-8")).anchors
    page = (site.parent / "docs/reference/settings.md").read_text(encoding="utf-8")
    assert described_settings(page).keys() <= anchors
    line = Links((site / "reference/command-line.html").read_text(encoding="utf-8"))
    assert {f"clipstream-{verb}" for verb in VERBS} <= line.anchors
    assert {f"clipstream-search-{topic}" for topic in ("neighbours", "scores")} <= line.anchors
