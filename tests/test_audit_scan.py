"""What a deep look computes: checksums out of parts, and bad values with numpy and without."""

from __future__ import annotations

import random
import struct
import zlib
from typing import TYPE_CHECKING

import numpy
import pytest

from backend.agent.shards.audit.look import look
from backend.agent.shards.audit.scan import file_crc32
from backend.agent.shards.audit.values import first_bad
from backend.agent.shards.source import Source
from backend.agent.shards.values import withnumpy
from backend.agent.shards.values.numbers import FLOATS
from backend.shardfmt import crc
from tests import auditing

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (5, 7), (300, 1 << 20), (1 << 20, 3)])
def test_the_checksum_of_two_runs(sizes: tuple[int, int]) -> None:
    first, second = (random.Random(size).randbytes(size) for size in sizes)
    assert crc.joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_the_checksum_of_a_run_beyond_4_gib() -> None:
    zeros, size = zlib.crc32(bytes(1 << 20)), 1 << 20
    for _ in range(13):  # doubled to 8 GiB
        zeros, size = crc.joined(zeros, zeros, size), 2 * size
    once = zlib.crc32(b"x")
    apart = crc.joined(once, zeros, size)
    both = crc.joined(crc.joined(once, crc.joined(zeros, zeros, size), 2 * size), 0, 0)
    assert crc.joined(apart, zeros, size) == both


def test_a_file_is_summed_once(tmp_path: Path) -> None:
    path, data = tmp_path / "file", random.Random(8).randbytes(200_000)
    path.write_bytes(data)
    parts = [(at, size, zlib.crc32(data[at : at + size])) for at, size in ((100_000, 90_000), (20_000, 70_000))]
    source = Source(str(path))
    before = source.read_bytes
    assert file_crc32(source, [*parts, (30_000, 5, 0)]) == zlib.crc32(data)
    assert source.read_bytes - before <= 40_000
    source.close()


def test_a_deep_look_sums_the_whole_file_whatever_was_summed_on_the_way(tmp_path: Path) -> None:
    for index, how in enumerate(({}, {"crc": False})):
        path = auditing.write(tmp_path, index, **how)
        assert look(str(path), True, lambda: None)["crc32"] == zlib.crc32(path.read_bytes())


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_numpy_finds_the_same_bad_value(dtype: str) -> None:
    item, infinite = FLOATS[dtype]
    sign, chance = 1 << (8 * item - 1), random.Random(dtype)
    code = {2: "H", 4: "I", 8: "Q"}[item]
    odd = [infinite, infinite | sign, infinite + 1, infinite + 1 | sign, sign - 1, 2 * sign - 1]
    fine = [0, sign, infinite - 1, infinite - 1 | sign, 1]
    for _ in range(200):
        words = [chance.choice(fine) for _ in range(chance.randint(1, 50))]
        for _ in range(chance.randint(0, 2)):
            words[chance.randrange(len(words))] = chance.choice(odd)
        data = struct.pack(f"<{len(words)}{code}", *words)
        wanted = next((at for at, word in enumerate(words) if word in odd), -1)
        assert withnumpy.first_bad(numpy, data, dtype) == first_bad(data, dtype) == wanted
