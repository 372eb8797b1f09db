"""The random numbers of all codes, as docs/payloads.md has them, in integers and in arrays of int64. Nothing here comes from
hvd_quant."""

import hashlib

WORD = 2**32 - 1


def stream_of(seed, name):
    return int.from_bytes(hashlib.blake2b(repr((seed, 0, name)).encode(), digest_size=8).digest(), "little")


def number(stream, place, step, rank, phase):
    """That of an entry, or of many."""
    key = stream & 2**64 - 1
    for word in (step, rank, phase):
        key = (key ^ word) + 0x9E3779B97F4A7C15 & 2**64 - 1
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        key = (key ^ key >> 27) * 0x94D049BB133111EB & 2**64 - 1
        key ^= key >> 31
    x = place & WORD ^ key & WORD
    x = (x ^ x >> 17) * 0xED5AD4BB & WORD
    x = (x ^ x >> 11) + (key >> 32) + (place >> 32) * 0x9E3779B1 & WORD
    x = x * 0xAC4C1B51 & WORD
    x = (x ^ x >> 15) * 0x31848BAB & WORD
    return x ^ x >> 14
