"""The payload header: what every compressed gradient starts with.

A *payload* is the uint8 vector that one worker sends for one tensor, or for a range of one. It is a header of
``HEADER_BYTES`` and a body whose layout belongs to the codec (``docs/payloads.md``). All integers are little-endian::

    offset  size  field
         0     2  magic       b"HQ"
         2     1  version     WIRE_VERSION
         3     1  flags       NONFINITE | FAILED
         4     4  codec       CRC-32 of the compressor's name; of "rows" where it holds the numbers of a sparse gradient's rows
         8     8  numel       entries encoded
        16     8  body bytes  a multiple of 8; padding is zero
        24     8  checksum    sum of word[j] * (2 j + 1) mod 2^64 over the payload's 32-bit words, this field taken as zero

The checksum finds every single flipped bit and every pair flipped at the same place of two words, costs one multiply-add
a word, and can be computed with array operations on any device. It is no protection against forgery.

``csrc/kernels/wire.h`` mirrors this file.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

MAGIC = b"HQ"
WIRE_VERSION = 1
HEADER_BYTES = 32
"""Of a payload, before its body."""

NONFINITE = 1
"""Flag: the gradient held a NaN, an infinity, or a value whose sum with the residual overflowed."""
FAILED = 2
"""Flag: the worker could not encode; the body holds its rank and the reason."""

_HEADER = struct.Struct("<2sBBIQQQ")
_FAILURE = struct.Struct("<II")
_CHECKSUM_WORDS = slice(6, 8)


class PayloadError(RuntimeError):
    """A payload is not what this worker expects: damaged, of another codec, size or version, or sent by a failed worker."""


class Header(NamedTuple):
    flags: int
    codec: int
    numel: int
    body_bytes: int
    checksum: int


@functools.cache
def codec_id(name: str) -> int:
    """The 32-bit number that stands for the compressor ``name`` in a header."""
    return zlib.crc32(name.encode())


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the multiple of 8 that a body occupies."""
    return -(-nbytes // 8) * 8


def pack_header(codec: str, numel: int, body_bytes: int, flags: int = 0) -> np.ndarray:
    """A header without its checksum, as a uint8 vector of ``HEADER_BYTES``."""
    raw = _HEADER.pack(MAGIC, WIRE_VERSION, flags, codec_id(codec), numel, body_bytes, 0)
    return np.frombuffer(raw, np.uint8).copy()


def checksum(payload: Any) -> Any:
    """The checksum of a whole payload (uint8, 4-byte aligned, of any framework and device), as a 0-d int64."""
    xp = array_namespace(payload)
    words = xp.astype(payload.view(xp.int32), xp.int64) & 0xFFFFFFFF
    words[_CHECKSUM_WORDS] = 0
    weights = 2 * xp.arange(words.shape[0], dtype=xp.int64, device=device(payload)) + 1
    return xp.sum(words * weights)  # int64 wraps: the sum mod 2^64


def parse_header(head: bytes, nbytes: int, codec: str, numel: int) -> Header:
    """Check every field of a header against what this worker expects.

    Arguments:
        head: the payload's first ``HEADER_BYTES`` bytes, or all there are.
        nbytes: the length of the whole payload in bytes.
        codec: the name of the compressor that decodes.
        numel: the number of entries expected.

    Raises:
        PayloadError: naming the first field that differs, what it holds and what was expected.
    """
    if nbytes < HEADER_BYTES:
        raise PayloadError(f"payload of {nbytes} bytes is shorter than the header of {HEADER_BYTES}")
    magic, version, flags, codec_found, numel_found, body_bytes, check = _HEADER.unpack(head[:HEADER_BYTES])
    if magic != MAGIC:
        raise PayloadError(f"payload starts with {magic.hex()}, expected {MAGIC.hex()}: it is damaged or not a payload")
    if version != WIRE_VERSION:
        raise PayloadError(f"payload has wire version {version}, this worker reads {WIRE_VERSION}: "
                           "install the same hvd_quant on all workers")
    if flags & ~(NONFINITE | FAILED):
        raise PayloadError(f"payload has unknown flags {flags:#04x}")
    if codec_found != codec_id(codec):
        raise PayloadError(f"payload is of codec {codec_found:#010x}, expected {codec_id(codec):#010x} ({codec}): "
                           "use the same compression on all workers")
    if numel_found != numel:
        raise PayloadError(f"payload holds {numel_found} entries, expected {numel}")
    if body_bytes != nbytes - HEADER_BYTES or body_bytes % 8:
        raise PayloadError(f"payload says its body has {body_bytes} bytes, it has {nbytes - HEADER_BYTES}")
    return Header(flags, codec_found, numel_found, body_bytes, check)


def check(payload: Any, codec: str, numel: int, body_bytes: int) -> int:
    """Check a whole payload and return its flags.

    Arguments:
        payload: uint8, 1-D, of any framework and device.
        codec, numel: as for :func:`parse_header`.
        body_bytes: the body length that the codec expects for ``numel`` entries.

    Raises:
        PayloadError: for a field, length or checksum that is off, and for a worker's failure, which it quotes.
    """
    header = parse_header(host_bytes(payload[:HEADER_BYTES]), payload.shape[0], codec, numel)
    found = int(checksum(payload)) % 2**64
    if found != header.checksum:
        raise PayloadError(f"payload has checksum {header.checksum:#018x}, its bytes give {found:#018x}: it is damaged")
    if header.flags & FAILED:
        raise PayloadError(failure_message(host_bytes(payload)))
    if header.body_bytes != body_bytes:
        raise PayloadError(f"payload has a body of {header.body_bytes} bytes, expected {body_bytes} for {numel} entries: "
                           "use the same compression settings on all workers")
    return header.flags


def host_bytes(array: Any) -> bytes:
    """The bytes of a uint8 vector of any framework and device."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array).tobytes()


def seal(payload: np.ndarray) -> np.ndarray:
    """Write a payload's checksum into it and return it."""
    payload[24:32].view(np.int64)[0] = checksum(payload)
    return payload


def failure(codec: str, numel: int, rank: int, reason: str) -> np.ndarray:
    """What a worker that could not encode sends instead, so that the others do not wait for it: its rank and the reason."""
    text = reason.replace("\0", "?").encode()[:4096].decode(errors="ignore").encode()
    body = _FAILURE.pack(rank, len(text)) + text
    body += bytes(padded(len(body)) - len(body))
    return seal(np.concatenate([pack_header(codec, numel, len(body), FAILED), np.frombuffer(body, np.uint8)]))


def failure_message(payload: bytes) -> str:
    """The sentence that every worker raises for a payload made by :func:`failure`."""
    rank, reason = failure_of(payload)
    if rank < 0:
        return "a worker failed to encode its gradient and its reason is damaged"
    return f"worker {rank} failed to encode its gradient: {reason}"


def failure_of(payload: Any) -> tuple[int, str]:
    """The rank and the reason in a payload made by :func:`failure`."""
    body = (payload if isinstance(payload, bytes) else host_bytes(payload))[HEADER_BYTES:]
    if len(body) < _FAILURE.size:
        return -1, "its reason is damaged"
    rank, length = _FAILURE.unpack_from(body)
    reason = body[_FAILURE.size:_FAILURE.size + length].partition(b"\0")[0]  # as in C, a text ends at a zero
    return rank, reason.decode(errors="replace")


def split(payloads: Any, count: int, sizes: list[int] | None = None) -> list[Any]:
    """Cut what a collective returned into payloads, as their headers tell.

    Where the headers make no sense it is cut into the sizes that are expected, so that decoding can say what is wrong with
    which field.

    Arguments:
        payloads: uint8, 1-D, payloads one after another.
        count: how many there are.
        sizes: bytes of each that are expected; all alike where None.

    Raises:
        PayloadError: if it can't be cut into ``count`` payloads.
    """
    return [payload for payload, _ in split_with_heads(payloads, count, lambda: sizes)]


def split_with_heads(payloads: Any, count: int, sizes: Callable[[], list[int] | None]) -> list[tuple[Any, bytes]]:
    """:func:`split`, with each payload's header as :func:`parse_header` takes it, and ``sizes`` asked for only if needed."""
    total = payloads.shape[0]
    held = memoryview(np.asarray(payloads)) if not hasattr(payloads, "cpu") or payloads.device.type == "cpu" else None

    def head(start: int) -> bytes:
        return host_bytes(payloads[start:start + HEADER_BYTES]) if held is None else bytes(held[start:start + HEADER_BYTES])

    bounds: list[int] = [0]
    heads: list[bytes] = []
    while bounds[-1] + HEADER_BYTES <= total and len(heads) < count:
        heads.append(head(bounds[-1]))
        bounds.append(bounds[-1] + HEADER_BYTES + _HEADER.unpack(heads[-1])[5])
    if len(heads) != count or bounds[-1] != total:
        expected = sizes()
        if expected is None:
            expected = [total // count] * count if count and total % count == 0 and total >= count * HEADER_BYTES else []
        bounds = list(itertools.accumulate(expected, initial=0))
        if len(bounds) != count + 1 or bounds[-1] != total:
            raise PayloadError(f"{count} payloads came as {total} bytes whose headers tell other lengths: a payload is damaged, "
                               "or compression settings differ between workers")
        heads = [head(start) for start in bounds[:-1]]
    return [(payloads[start:stop], head) for start, stop, head in zip(bounds, bounds[1:], heads)]
