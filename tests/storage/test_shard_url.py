"""Specifications become lists of shards; credentials never appear in messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipstream.data.sources import expand
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import redact, stable_name


@pytest.mark.parametrize(
    ("spec", "shards"),
    [
        ("a/{00..02}.tar", ["a/00.tar", "a/01.tar", "a/02.tar"]),
        ("b.tar::a{x,y}.tar", ["b.tar", "ax.tar", "ay.tar"]),
        (["b.tar", "a.tar", "b.tar"], ["b.tar", "a.tar", "b.tar"]),
        ("https://h/{0..1}.tar::s3://b/c.tar", ["https://h/0.tar", "https://h/1.tar", "s3://b/c.tar"]),
        ("https://h/a.tar?x=[1]*", ["https://h/a.tar?x=[1]*"]),
        ("pipe:cat {0..1}.tar", ["pipe:cat 0.tar", "pipe:cat 1.tar"]),
        ("pipe:cat a::b.tar", ["pipe:cat a::b.tar"]),
        ("pipe:cat a.tar::pipe:cat b.tar", ["pipe:cat a.tar", "pipe:cat b.tar"]),
        ("pipe:echo a\\:b | awk '{print $1, $2}' ${HOME}", ["pipe:echo a\\:b | awk '{print $1, $2}' ${HOME}"]),
        ("pipe:cat '/d/{a,b}.tar' | x a::b", ["pipe:cat '/d/a.tar' | x a::b", "pipe:cat '/d/b.tar' | x a::b"]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("commands")
def test_names(spec: str | list[str], shards: list[str]) -> None:
    assert expand(spec) == shards


@pytest.mark.usefixtures("commands")
def test_simple_names_expand_as_in_webdataset() -> None:
    from webdataset.shardlists import expand_urls

    for spec in ("a/{000..012}.tar", "x{a,b}{0..2}.tar::y.tar", "gs://b/{1..3}.tar", "pipe:cat {0..3}{a,b}.tar"):
        assert expand(spec) == list(expand_urls(spec))


def test_globs_are_sorted_and_a_folder_is_answered_with_what_it_holds(tmp_path: Path) -> None:
    tars = "00002.tar", "00000.tar", "00001.tar", "data/a/0.tar", "data/b/0.tar"
    others = "classes/cat/0.jpg", "classes/dog/0.jpg", "classes/@eaDir/x", "data/c/x"
    for name in (*tars, *others, "sizes.json", "pictures/0.PNG", "saved/data.arrow", "empty/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert [Path(p).name for p in expand(f"{tmp_path}/*.tar")] == ["00000.tar", "00001.tar", "00002.tar"]
    for spec, told in {
        "": "holds 5 tars and 1 table and 3 images: name what is to be read",
        "/pictures": "pictures holds 1 image and no captions: name tars or a table of image paths and captions",
        "/empty": "empty holds no tar, no table and no image, but no files",
        "/{data,saved}": r"data is a folder: name its shards \(it holds no tar itself; its folders with tars: a, b, as",
        "/saved/*.tar": r"no file matches .*, e\.g\. '.*saved/\*\.arrow'",
        "/pictures/*.tar": "it holds images and no tar: name a table",
        "/empty/*.tar": r"\(it holds no tar\)",
        "/classes/*.tar": r"no tar; its folders: @eaDir, cat, dog\)",
        "/*.tgz": r"no file matches .*tgz, e\.g\. .*\*\.tar",
        "/gone/*.tar": "the folder .*gone does not exist",
    }.items():
        with pytest.raises(SettingsError, match=told):
            expand(f"{tmp_path}{spec}")
    (tmp_path / "[a].tar").touch()
    assert expand(f"{tmp_path}/[a].tar") == [f"{tmp_path}/[a].tar"]
    assert expand(f"{tmp_path}/missing.tar") == [f"{tmp_path}/missing.tar"]


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARD_ROOT", "https://u:p@h")
    monkeypatch.setenv("WDS_KIND", "train")
    assert expand("${SHARD_ROOT}/${KIND}/0.tar") == ["https://u:p@h/train/0.tar"]
    with pytest.raises(SettingsError, match="NOT_THERE"):
        expand("${NOT_THERE}/0.tar")
    with pytest.raises(SettingsError, match="matches no shard"):
        expand([])


def test_credentials_are_hidden() -> None:
    for url in (
        "https://user:HIDDEN@host/a.tar",
        "https://host/a.tar?X-Amz-Signature=HIDDEN&X-Amz-Credential=HIDDEN",
        "https://host/a.tar?sv=1&sig=HIDDEN",
        "https://host/a.tar?access_token=HIDDEN",
        "pipe:curl -H 'Authorization: Bearer HIDDEN' https://host/a.tar",
        'pipe:curl -H "authorization:HIDDEN" https://host/a.tar',
        "pipe:curl -u me:HIDDEN https://host/a.tar",
        "pipe:fetch --api-key HIDDEN a.tar",
        "pipe:AWS_SECRET_ACCESS_KEY=HIDDEN aws s3 cp s3://b/a.tar -",
    ):
        assert "HIDDEN" not in redact(url) and "a.tar" in redact(url)
    for url in ("/d/a.tar", "https://host/key/a.tar?part=3", "pipe:aws s3 cp s3://b/tokens/a.tar -"):
        assert redact(url) == url
    for said in (
        "The provided token has expired.",
        "The security token included in the request is invalid",
        "The AWS Access Key Id you provided does not exist in our records.",
    ):
        assert redact(said) == said


def test_commands_are_refused_where_webdataset_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "0", ""):
        monkeypatch.setenv("WDS_SECURE", value)
        assert expand("/d/a.tar::https://h/b.tar::s3://b/c.tar") == ["/d/a.tar", "https://h/b.tar", "s3://b/c.tar"]
        if value == "1":
            with pytest.raises(SettingsError, match="would run a command, which WDS_SECURE=1"):
                expand("/d/a.tar::pipe:cat b.tar")
        else:
            assert expand("pipe:cat b.tar") == ["pipe:cat b.tar"]


def test_stable_names() -> None:
    for url, name in {
        "a/00.tar": "00.tar",
        "https://h/a/00.tar?sig=abc": "00.tar",
        "s3://b/a/00.tar.gz": "00.tar",
        "a/00.tgz": "00.tar",
        "pipe:aws s3 cp s3://b/a/00.tar -": "00.tar",
        "pipe:curl -s 'https://h/a/00.tar.zst?sig=abc' | zstd -dc": "00.tar",
        "pipe:curl -s https://h/00.tar | sed s/a/b/": "00.tar",
        "a/my shard.v1.tar": "my shard.v1.tar",
        "a.tar/pairs.csv#0-999": "pairs.csv#0-999",
        "https://h/get?id=3": "get",
    }.items():
        assert stable_name(url) == name
