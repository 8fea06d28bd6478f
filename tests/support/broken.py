"""One broken shard of each kind, with the message expected for it."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.support.tars import tar_bytes

Sample = Mapping[str, Any]
COUNT = 6  # samples that a shard of these was made of
BLOCK = 512


class Broken(NamedTuple):
    """A shard that is broken.

    Attributes:
        data: its bytes; None where there is no such file.
        reason: what it is to be counted under.
        whole: places of the samples that can be used.
    """

    data: bytes | None
    reason: str
    whole: Sequence[int] = ()


def broken_shards(samples: Sequence[Sample]) -> dict[str, Broken]:
    """Kind -> a shard of these six samples, each with the members jpg and txt in this order.

    What breaks hits sample 3, and the one before it is whole only where a header of sample 3 can still be read.
    """
    assert len(samples) == COUNT
    data = tar_bytes(samples, tarfile.GNU_FORMAT)
    at = _offsets(data)
    third, second_member = at[f"{samples[3]['__key__']}.jpg"], at[f"{samples[3]['__key__']}.txt"]
    end = _end(data)
    every, before, shown = range(COUNT), [0, 1], [0, 1, 2]
    noise = random.Random(0).randbytes(3 * BLOCK)
    twice = [*samples[:3], {**samples[3], "JPG": b"another"}, *samples[4:]]
    return {
        "cut in a header": Broken(data[: third + 100], "truncated_header", before),
        "cut in a member": Broken(data[: third + BLOCK + 88], "truncated_member", shown),
        "cut between members": Broken(data[:second_member], "missing_end", shown),
        "cut between samples": Broken(data[:third], "missing_end", before),
        "no end blocks": Broken(data[:end], "missing_end", every[:-1]),
        "one end block": Broken(data[: end + BLOCK], "missing_end", every),
        "garbage in the middle": Broken(data[:third] + noise + data[third + len(noise) :], "bad_checksum", before),
        "a flipped bit in a header": Broken(_with(data, third, bytes([data[third] ^ 1])), "bad_checksum", before),
        "a size that is none": Broken(_with_field(data, third, 124, b"no number!!\0"), "bad_header", before),
        "a sparse member": Broken(_with_field(data, third, 156, b"S"), "unsupported_member", shown),
        "a damaged PAX record": Broken(data[:third] + _damaged_pax() + data[third:], "bad_header", before),
        "a member twice": Broken(tar_bytes(twice), "duplicate_member", [0, 1, 2, 4, 5]),
        "a second archive": Broken(data + tar_bytes(samples[:2]), "trailing_archive", every),
        "an empty file": Broken(b"", "empty"),
        "no sample in it": Broken(tar_bytes([]), "empty"),
        "zeros only": Broken(bytes(20 * BLOCK), "empty"),
        "a web page": Broken(b"<!DOCTYPE html><title>Access denied</title>" * 99, "not_a_tar"),
        "noise": Broken(noise, "not_a_tar"),
        "not there": Broken(None, "missing"),
        **_packed(data),
    }


def _packed(data: bytes) -> dict[str, Broken]:
    packed = gzip.compress(data)
    wrong_sum = packed[:-8] + struct.pack("<I", 1 + struct.unpack("<I", packed[-8:-4])[0] % 2**31) + packed[-4:]
    kinds = {
        "a cut gzip": Broken(packed[: len(packed) // 2], "bad_gzip"),
        "a gzip without its sum": Broken(packed[:-8], "bad_gzip"),
        "a gzip with another sum": Broken(wrong_sum, "bad_gzip"),
    }
    try:
        import zstandard
    except ImportError:
        return kinds
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    flipped = frame[: len(frame) // 2] + bytes([frame[len(frame) // 2] ^ 1]) + frame[len(frame) // 2 + 1 :]
    return {
        **kinds,
        "a cut zstd": Broken(frame[: len(frame) // 2], "bad_zstd"),
        "a damaged zstd": Broken(flipped, "bad_zstd"),
    }


def _offsets(data: bytes) -> dict[str, int]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member.offset for member in tar.getmembers()}


def _end(data: bytes) -> int:
    """Where the end-of-archive blocks begin."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + (last.size + BLOCK - 1) // BLOCK * BLOCK


def _with(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def _with_field(data: bytes, header: int, offset: int, value: bytes) -> bytes:
    """The tar with a field of a header replaced, and the header's checksum made right again."""
    block = bytearray(data[header : header + BLOCK])
    block[offset : offset + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return _with(data, header, bytes(block))


def _damaged_pax() -> bytes:
    """An extended header whose record claims another length than it has."""
    record = b"99 path=somewhere\n"
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    return info.tobuf(tarfile.GNU_FORMAT) + record.ljust(BLOCK, b"\0")
