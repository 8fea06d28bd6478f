#!/usr/bin/env bash
# webdataset's cache_dir keeps one file for all remote shards of one file name: two data sets are trained as one, twice.
#
# Version: webdataset 1.0.2. url_to_cache_name(url, ndir=0) (cache.py) is the last part of the URL's path. Most data sets number
# their shards 00000.tar, 00001.tar, …; of a mixture of two of them under one cache_dir (or $WDS_CACHE), or of a second run on
# another data set, the later one finds the other's file and reads that, as a tar it is in order. No name, size or date is
# compared. `__url__` of the samples has the URL that was asked for, so that logs show nothing, and the count of samples is
# as expected where shards have one size. Give each data set a cache_dir of its own.
#
# Seen 2026-11-29 (one shard each of two data sets; caption and `__url__` of their samples):
#   one cache_dir: ('a cat', 'cats/00000.tar'), ('a cat', 'dogs/00000.tar'); 1 file cached
#   a cache_dir of its own: ('a dog', 'dogs/00000.tar')
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet webdataset==1.0.2 numpy==2.4.1
env -u http_proxy -u HTTP_PROXY -u all_proxy -u ALL_PROXY \
    "$work/venv/bin/python" -W ignore - "$work" 2> "$work/log" <<'EOF' || { tail -20 "$work/log"; exit 1; }
import http.server
import io
import sys
import tarfile
import threading
from functools import partial
from pathlib import Path

import webdataset as wds

work = Path(sys.argv[1])
for animal in ("cat", "dog"):
    (work / "served" / f"{animal}s").mkdir(parents=True)
    with tarfile.open(work / "served" / f"{animal}s" / "00000.tar", "w") as tar:
        for number in range(3):
            caption = f"a {animal}".encode()
            info = tarfile.TarInfo(f"{animal}{number}.txt")
            info.size = len(caption)
            tar.addfile(info, io.BytesIO(caption))
handler = partial(http.server.SimpleHTTPRequestHandler, directory=work / "served")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
site = f"http://127.0.0.1:{server.server_port}"


def read(name, cache):
    (work / cache).mkdir(exist_ok=True)
    data = wds.WebDataset(f"{site}/{name}", cache_dir=str(work / cache), shardshuffle=False)
    samples = [(sample["txt"].decode(), sample["__url__"].removeprefix(f"{site}/")) for sample in data]
    assert len(samples) == 3 and len(set(samples)) == 1, samples
    return samples[0]


cats, dogs, alone = read("cats/00000.tar", "one"), read("dogs/00000.tar", "one"), read("dogs/00000.tar", "two")
cached = len(list((work / "one").iterdir()))
print(f"one cache_dir: {cats}, {dogs}; {cached} file cached")
print(f"a cache_dir of its own: {alone}")
assert cats == ("a cat", "cats/00000.tar") and dogs == ("a cat", "dogs/00000.tar") and cached == 1
assert alone == ("a dog", "dogs/00000.tar")
server.shutdown()
EOF
