#!/usr/bin/env bash
# After one listing, s3fs says for the rest of the process that newer objects do not exist.
#
# Versions: s3fs 2026.9.0, fsspec 2026.9.0, moto 5.2.5. A process lists a folder of checkpoints, and another one writes
# `latest` into it. exists, info, open and cat of exactly that name then answer "no such file" without asking the server,
# and glob leaves it out; find sees it. An object that was overwritten keeps its old size in info, and opening it raises
# FileExpired. A new S3FileSystem(…) of the same arguments is the same instance with the same listings. invalidate_cache()
# before each question, or use_listings_cache=False, gives the true answers.
#
# Seen 2026-11-28:
#   after ls, another client writes latest: exists False, glob without it, find with it, new instance False
#   invalidate_cache(): exists True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet s3fs==2026.9.0 fsspec==2026.9.0 'moto[server]==5.2.5' boto3
env -u AWS_PROFILE AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=us-east-1 HOME="$work" \
    "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'EOF' || { tail -20 "$work/log"; exit 1; }
import boto3
import s3fs
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://{host}:{port}"
first, other = s3fs.S3FileSystem(endpoint_url=url), boto3.client("s3", endpoint_url=url)
folder, latest = "runs/checkpoints", "runs/checkpoints/latest"
first.mkdir("runs")
first.pipe_file(f"{folder}/step_1", b"one")
assert first.ls(folder) == [f"{folder}/step_1"]

other.put_object(Bucket="runs", Key="checkpoints/latest", Body=b"step_2")
seen = first.exists(latest), latest in first.glob(f"{folder}/*"), latest in first.find(folder)
again = s3fs.S3FileSystem(endpoint_url=url)
print("after ls, another client writes latest:", end=" ")
print("exists {}, glob {}, find {}, new instance {}".format(*seen, again.exists(latest)))
assert seen == (False, False, True) and again is first

other.put_object(Bucket="runs", Key="checkpoints/step_1", Body=b"longer than before")
assert first.info(f"{folder}/step_1")["size"] == 3
first.invalidate_cache()
print("invalidate_cache(): exists", first.exists(latest))
assert first.exists(latest) and first.info(f"{folder}/step_1")["size"] == 18
server.stop()
EOF
