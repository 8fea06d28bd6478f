"""The pages that are written load nothing: whatever a run, a caption or a name says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from clipstream.cli.main import main
from clipstream.report.html_report import read_run, render
from tests.support.runs import flags, furnish

ADDRESS = "http://192.0.2.1/seen"
HOSTILE = f"""</script><img src={ADDRESS}> "><img src='{ADDRESS}'> url({ADDRESS}) <style>@import '{ADDRESS}'</style>"""
LOADING = ("src", "href", "srcset", "poster", "data", "action", "formaction", "xlink:href", "background", "style")


class Page(HTMLParser):
    """What a page loads or leads to, its policy, and its scripts that are run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses, self.policies, self.scripts, self.styles = list[str](), list[str](), list[str](), list[str]()
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            assert not self.addresses and not self.scripts, "it is before all that it governs"
            self.policies.append(given["content"] or "")
        assert given.get("http-equiv") in (None, "Content-Security-Policy")
        self.addresses += [value or "" for name, value in attrs if name in LOADING and name != "style"]
        self.styles += [given.get("style") or ""]
        self._inside = tag if tag == "style" or (tag == "script" and given.get("type") is None) else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, text: str) -> None:
        if self._inside:
            (self.scripts if self._inside == "script" else self.styles).append(text)


def check(text: str) -> None:
    """Only data: URLs and places in the page itself, and a policy that allows nothing else."""
    page = Page(text)
    assert [one for one in page.addresses if not one.startswith(("data:", "#", "file://"))] == []
    assert not re.search(r"url\(|@import", "".join(page.styles))
    allowed = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    script = " ".join(f"'sha256-{one}'" for one in allowed) or "'none'"
    assert page.policies == [
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {script}; base-uri 'none'; "
        "form-action 'none'"
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = furnish(tmp_path_factory.mktemp("pages"))
    assert main(["train", *flags(place, "run", "--val-data", f"{place}/val/*.tar", steps=2)]) == 0
    return place / "runs" / "run"


def test_the_report_of_a_run(run: Path) -> None:
    text = (run / "report.html").read_text()
    check(text)
    assert text.count('src="data:image/jpeg;base64,') > 8, "the images are there"


@pytest.mark.parametrize(
    "src", [ADDRESS, "//192.0.2.1/x", " " + ADDRESS, "data:text/html,x", f"data:image/jpeg;base64,\n{ADDRESS}", "x.jpg"]
)
def test_a_foreign_run(run: Path, tmp_path: Path, src: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its texts, names and images, in `compare` and a report that is made anew."""
    foreign = tmp_path / "foreign"
    shutil.copytree(run, foreign)
    for file in (foreign / "pictures").glob("*.json"):
        page = json.loads(file.read_bytes())
        for image in page["pictures"]:
            image |= {"src": src, "text": HOSTILE, "key": HOSTILE, "note": HOSTILE, "group": HOSTILE}
        page["tables"].append({"title": HOSTILE, "header": [HOSTILE], "rows": [[HOSTILE]]})
        file.write_text(json.dumps({**page, "name": HOSTILE}))
    tree = yaml.safe_load((foreign / "config.yaml").read_text())
    tree["run"]["name"] = tree["evals"][HOSTILE] = HOSTILE
    (foreign / "config.yaml").write_text(yaml.safe_dump(tree))
    with (foreign / "metrics.jsonl").open("a") as lines:
        for record in ({"loss_" + HOSTILE: 1.0}, {"eval": HOSTILE, HOSTILE: 0.5}, {"eval": "val", "error": HOSTILE}):
            lines.write(json.dumps({"step": 2, **record}) + "\n")
    assert main(["compare", str(run), str(foreign), "--out", str(tmp_path / "page.html")]) == 0
    for text in ((tmp_path / "page.html").read_text(), render([read_run(foreign)])):
        check(text)
        assert "&lt;img src=" in text


def test_the_pages_of_data_and_of_searches(run: Path, tmp_path: Path) -> None:
    data = f"{run.parent.parent}/val/*.tar"
    assert main(["check", "--all", data, "--html", str(tmp_path / "data.html")]) == 0
    assert main(["search", str(run), data, HOSTILE, "--html", str(tmp_path / "search.html")]) == 0
    for name in ("data", "search"):
        check((tmp_path / f"{name}.html").read_text())
