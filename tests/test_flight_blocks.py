"""Blocks of a flight record: what goes in comes out, and what is no block is refused."""

from __future__ import annotations

import random
import struct
import zlib
from typing import TYPE_CHECKING

import pytest

from backend.wire.flight import DICTIONARY, FAILED, HEAD, MAGIC, Block, FlightError, encode_block

if TYPE_CHECKING:
    from backend.wire.flight import Row, Value

START = 1_796_308_674.3


def kept(rows: list[Row]) -> list[Row]:
    """Return rows as a reader gets them: what was not recorded is left out."""
    return [(at, {name: value for name, value in values.items() if value is not None}) for at, values in rows]


def made_up(rng: random.Random) -> list[Row]:
    """Make rows of every kind of column, with gaps of every kind."""
    columns: list[list[Value]] = []
    count = rng.randint(1, 61)
    for _ in range(rng.randint(1, 30)):
        large = 10 ** rng.randint(0, 15)
        digits = rng.choice((0, 0, 1, 2, 3))
        whole = [rng.choice((rng.randint(-large, large), large)) for _ in range(count)]
        column: list[Value] = [number if not digits else round(number / 10**digits, digits) for number in whole]
        for _ in range(rng.choice((0, 0, 1, count // 2, count * 9))):
            column[rng.randrange(count)] = rng.choice((None, FAILED, "unsupported"))
        columns.append(column)
    return [(round(START + at, 1), {f"c{n}": column[at] for n, column in enumerate(columns)}) for at in range(count)]


@pytest.mark.parametrize("seed", range(60))
def test_what_goes_in_comes_out(seed: int) -> None:
    rows = made_up(random.Random(seed))
    block = Block(encode_block(10, seed, rows))
    assert block.rows() == kept(rows)
    assert (block.head.step_s, block.head.serial, block.head.rows) == (10, seed, len(rows))
    assert (block.head.first, block.head.last) == (rows[0][0], rows[-1][0])


def test_a_failed_reading_is_never_a_number() -> None:
    rows: list[Row] = [(START, {"power_w": FAILED, "fan": "unsupported", "later": None}), (START + 1, {"power_w": 0})]
    block = Block(encode_block(1, 1, rows))
    assert block.column("power_w") == [FAILED, 0]
    assert block.column("fan") == ["unsupported", None]
    assert block.column("later") == [None, None]
    assert block.column("never heard of") == [None, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1 << 80, -(1 << 70), "a word"])
def test_what_no_column_can_hold_has_failed(value: Value) -> None:
    block = Block(encode_block(1, 1, [(START, {"x": 5}), (START + 1, {"x": value}), (START + 2, {"x": 7})]))
    assert block.column("x") == [5, FAILED, 7]


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    good = encode_block(1, 3, [(START + n, {"gpu0.power_w": 400.5 + n % 7, "x": n * n}) for n in range(60)])
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        with pytest.raises(FlightError):
            Block(bytes(data))


@pytest.mark.parametrize("cut", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + 5, -1])
def test_a_block_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(FlightError):
        Block(encode_block(1, 1, [(START, {"x": 1})])[:cut])


def hostile(body: bytes, rows: int = 60) -> bytes:
    """Wrap a body in a head whose checksum is right."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    packed = packer.compress(body) + packer.flush()
    rest = HEAD.pack(MAGIC, len(packed), 0, 1, 1, rows, 0.0, 59.0)[12:] + packed
    return struct.pack("<4sII", MAGIC, len(packed), zlib.crc32(rest)) + rest


COLUMN = b"0\0\0" + struct.pack("<q", 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<II", 0, 1 << 31),
        struct.pack("<II", 1 << 31, 1) + COLUMN,
        struct.pack("<II", 1, 2) + b"\xff" + COLUMN,
        struct.pack("<II", 0, 1) + b"z\0\0" + struct.pack("<q", 0),
        struct.pack("<II", 0, 1) + b"q\0\0" + struct.pack("<q", 0),
        struct.pack("<II", 0, 1) + b"0\xff\0" + struct.pack("<q", 0),
        struct.pack("<II", 0, 1) + b"0\0\xff" + struct.pack("<q", 0),
        struct.pack("<II", 0, 1) + COLUMN + b"more",
        b"\0" * (40 << 20),
    ],
    ids=range(11),
)
def test_a_hostile_body_is_refused(body: bytes) -> None:
    with pytest.raises(FlightError):
        Block(hostile(body)).rows()
