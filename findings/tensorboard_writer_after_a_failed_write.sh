#!/usr/bin/env bash
# TensorBoard's writer of event files does not get over one failed write: each later event is lost, also when the disk
# takes bytes again, and each later add_event() or flush() raises the error of then.
#
# Version: tensorboard 2.21.0 (the writer that torch.utils.tensorboard.SummaryWriter uses). Its thread ends at the first
# write that fails, after it has emptied its queue; the writer keeps the error, and raises it at each call. A guess
# would be that one event is lost, or that the writer opens its file again. Here a limit on the size of files stands
# for a full disk: it is lifted after the first failure.
#
# Seen 2026-11-28:
#   with room for 4,096 bytes: OSError 27 (File too large)
#   with room again: 5 of 5 calls raise OSError 27; 0 of 5 events are in the file
#   a new writer in the same folder: 5 of 5 events are in its file
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorboard==2.21.0 'setuptools<81'
cd "$work"
TF_CPP_MIN_LOG_LEVEL=3 "$work/venv/bin/python" - <<'EOF'
import resource
import signal
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails with EFBIG


def event(step, text=""):
    found = Event(wall_time=1.0, step=step)
    value = found.summary.value.add(tag="loss", simple_value=1.0)
    value.metadata.summary_description = text
    return found


def steps(writer_folder):
    files = sorted(Path(writer_folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for raw in RawEventFileLoader(str(files[-1])).Load():
        one = Event()
        one.ParseFromString(raw)
        found.append(one.step)
    return found


def errors(writer, numbers):
    """The errno of each call that raises."""
    found = []
    for number in numbers:
        try:
            writer.add_event(event(number))
            writer.flush()
        except OSError as error:
            found.append(error.errno)
    return found


writer = EventFileWriter("events", flush_secs=1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
first = None
for number in range(20):
    try:
        writer.add_event(event(number, "x" * 2000))
        writer.flush()
    except OSError as error:
        first = error
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(f"with room for 4,096 bytes: OSError {first.errno} ({first.strerror})")
later = errors(writer, range(100, 105))
kept = [step for step in steps("events") if step >= 100]
print(f"with room again: {len(later)} of 5 calls raise OSError {later[0]}; {len(kept)} of 5 events are in the file")
time.sleep(1.1)  # the name of a file has the second
anew = EventFileWriter("events")
assert errors(anew, range(200, 205)) == []
kept_anew = [step for step in steps("events") if step >= 200]
print(f"a new writer in the same folder: {len(kept_anew)} of 5 events are in its file")
assert (first.errno, later, kept, len(kept_anew)) == (27, [27] * 5, [], 5), (first, later, kept, kept_anew)
EOF
