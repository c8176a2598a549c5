"""Stored pages whose payload follows from their key, and XXH64 by its specification."""

from __future__ import annotations

import random
from functools import cache

from turbomind import _C
from turbomind.engine.pages import PAGE_TOKENS, Page, PageStore, root_key

FINGERPRINT = "a model"
NUMERICS = "cpu/test/1"


@cache
def payload(key: bytes, group: int, size: int) -> bytes:
    return random.Random(key + bytes([group])).randbytes(size)


def page(
    parent: bytes, token_ids: list[int], size: int = 3000, group: int = 0, priority: float = 0.0
) -> Page:
    key = _C.page_key(parent, token_ids)
    return Page(
        key=key,
        parent=parent,
        token_ids=token_ids,
        payload=payload(key, group, size),
        group=group,
        fingerprint=FINGERPRINT,
        numerics=NUMERICS,
        first_head=0,
        heads=2,
        retention_priority=priority,
    )


def chain(salt: str, pages: int, size: int = 3000, tail: int = 0, groups: int = 1) -> list[Page]:
    """Returns a chain of full pages in each of `groups`, then a page of `tail` tokens."""
    made = []
    parent = root_key(FINGERPRINT, salt)
    for i in range(pages):
        tokens = [(7 * i + j) % 1000 for j in range(PAGE_TOKENS)]
        made += [page(parent, tokens, size, group) for group in range(groups)]
        parent = made[-1].key
    if tail:
        made.append(page(parent, list(range(tail)), size // 2))
    return made


def same(a: Page, b: Page) -> bool:
    """Returns whether two pages have equal identities and payloads."""
    names = ("key", "parent", "token_ids", "payload", "group", "fingerprint", "numerics")
    return all(getattr(a, name) == getattr(b, name) for name in (*names, "first_head", "heads"))


def check(store: PageStore, pages: list[Page]) -> list[bool]:
    """Returns for each page whether it is stored. Asserts that each stored page is unchanged."""
    there = []
    for want in pages:
        got = [p for p in store.read(want.key) if p.group == want.group]
        assert len(got) <= 1, f"page {want.key.hex()} of group {want.group} came {len(got)} times"
        assert not got or same(got[0], want), f"page {want.key.hex()} is not what was written"
        there.append(bool(got))
    return there


_MASK = (1 << 64) - 1
_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def xxh64(data: bytes, seed: int = 0) -> int:
    """Returns the XXH64 checksum of `data`, slowly."""
    p1, p2, p3, p4, p5 = _PRIMES

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & _MASK

    def mix(lane: int, word: int) -> int:
        return rotate((lane + word * p2) & _MASK, 31) * p1 & _MASK

    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) - 7, 8)]
    hashed, at = (seed + p5) & _MASK, 0
    if len(data) >= 32:
        lanes = [(seed + p1 + p2) & _MASK, (seed + p2) & _MASK, seed, (seed - p1) & _MASK]
        while at + 4 <= len(words):
            lanes = [mix(lane, words[at + i]) for i, lane in enumerate(lanes)]
            at += 4
        bits = (1, 7, 12, 18)
        hashed = sum(rotate(lane, b) for lane, b in zip(lanes, bits, strict=True)) & _MASK
        for lane in lanes:
            hashed = ((hashed ^ mix(0, lane)) * p1 + p4) & _MASK
    hashed = (hashed + len(data)) & _MASK
    for word in words[at:]:
        hashed = (rotate(hashed ^ mix(0, word), 27) * p1 + p4) & _MASK
    rest = data[8 * len(words) :]
    if len(rest) >= 4:
        word = int.from_bytes(rest[:4], "little")
        hashed = (rotate(hashed ^ (word * p1 & _MASK), 23) * p2 + p3) & _MASK
        rest = rest[4:]
    for byte in rest:
        hashed = rotate(hashed ^ (byte * p5 & _MASK), 11) * p1 & _MASK
    hashed = (hashed ^ (hashed >> 33)) * p2 & _MASK
    hashed = (hashed ^ (hashed >> 29)) * p3 & _MASK
    return hashed ^ (hashed >> 32)
