"""Files made to hurt whoever opens them: nothing runs, nothing raises, nothing grows."""

from __future__ import annotations

import json
import pickle
import random
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.shards.show import show
from backend.wire import MAX_LINE_BYTES
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Call, T

if TYPE_CHECKING:
    from pathlib import Path

MARK, STOP = b"(", b"."


def put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def shared_lists(levels: int) -> bytes:
    """Each list holds the one before twice: 2 to the power of `levels` values in some hundred bytes."""
    data = b"\x80\x02]" + put(0)
    for level in range(1, levels):
        data += b"](" + get(level - 1) * 2 + b"e" + put(level)
    return data + STOP


def tensor_of(shape: bytes) -> bytes:
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nLongStorage\n"
    head += b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0"
    return head + shape + shape + b"\x89)tR" + STOP


HOSTILE = {
    "memo bomb": shared_lists(60),
    "memo bomb as keys": b"\x80\x02" + b"".join(
        b"(" + (get(n - 1) * 2 if n else b"K\1") + b"t" + put(n) + b"0" for n in range(60)
    ) + b"}(" + get(59) + b"K\1u" + STOP,
    "deep lists": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + STOP,
    "deep tuples": b"\x80\x02)" + b"\x85" * 100_000 + STOP,
    "deep calls": b"\x80\x02" + b"cos\nsystem\n" * 50_000 + b")R" + b"\x85R" * 49_999 + STOP,
    "holds itself": b"\x80\x02]" + put(0) + b"(" + get(0) * 2 + b"e" + STOP,
    "dictionary that holds itself": b"\x80\x02}" + put(0) + b"(K\1" + get(0) + b"K\2" + get(0) + b"u" + STOP,
    "absurd literal": b"\x80\x02\x8d" + struct.pack("<Q", 1 << 62) + b"x" + STOP,
    "absurd number": b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b"x" + STOP,
    "decimal of many digits": b"\x80\x02I" + b"9" * 900 + b"\n" + STOP,
    "endless work": b"\x80\x02" + b"N0" * 1_000_001 + STOP,
    "many marks": b"\x80\x02" + b"(" * 200_000 + b"1" * 199_999 + STOP,
    "shape of many": tensor_of(b"(" + b"K\1" * 100_000 + b"t"),
    "negative shape": tensor_of(b"J\xff\xff\xff\xff\x85"),
    "true as a size": tensor_of(b"\x88\x85"),
    "huge shape": tensor_of(b"(" + (b"\x8a\x08" + struct.pack("<q", 1 << 61)) * 3 + b"t"),
    "set items on a tensor": tensor_of(b"K\1\x85")[:-1] + b"(K\1K\1u" + STOP,
    "copies of a long list": b"\x80\x02](" + b"N" * 20_000 + b"e" + put(0) + b"0" + (
        b"ccollections\nOrderedDict\n" + get(0) + b"\x85R0"
    ) * 5000 + b"N" + STOP,
    "one long list in many": b"\x80\x02](" + b"N" * 90_000 + b"e" + put(0) + b"0](" + get(0) * 1000 + b"e" + STOP,
    "extension": b"\x80\x02\x82\x01" + STOP,
    "instance": b"\x80\x02(ios\nsystem\n" + STOP,
    "no stop": b"\x80\x02K\1",
    "nothing on the stack": b"\x80\x02R" + STOP,
    "two values": b"\x80\x02K\1K\2" + STOP,
    "protocol 9": b"\x80\x09N" + STOP,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_costs_little_and_raises_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data_0.ckpt"
    files.save_pickle(path, HOSTILE[name], [("0", bytes(8))])
    result = show(str(path))
    assert len(json.dumps(result)) < MAX_LINE_BYTES
    assert result["ok"] == (name in ("memo bomb as keys", "one long list in many")), result["notes"]


def test_names_are_told_and_never_called(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = tmp_path / "data_0.ckpt"
    files.save(
        path,
        {"a": T("int64", (2,)), "b": Call("os", "system", (f"touch {trap}",)), "c": Call("x\x1b[2J", "y")},
    )
    result = show(str(path))
    assert not trap.exists()
    assert result["tensors"] == 1
    assert {v["key"]: v["text"] for v in result["values"]} == {
        "b": "an object made by os.system", "c": "an object made by x.y",
    }  # fmt: skip
    assert "os.system" in result["notes"][0]["text"]


def test_tensors_inside_objects_are_still_listed(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    files.save(path, {"model": Call("their.module", "Net", ({"weight": T("float32", (2, 3))}, "cpu"))})
    result = show(str(path))
    assert [(e["key"], e["shape"]) for e in result["entries"]] == [('model.part0["weight"]', [2, 3])]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_opcodes_of_python_s_own_pickler(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, "x", (1, {"y": 2}), -70000, 1 << 70], "raw": b"bytes", "set": {3}}
    files.save_pickle(tmp_path / "data_0.pt", pickle.dumps(value, protocol), [])
    texts = {v["key"]: v["text"] for v in show(str(tmp_path / "data_0.pt"))["values"]}
    wanted = {"a[0]": "1", "a[1]": "2.5", "a[2]": "None", "a[3]": "True", "a[4]": "x", "a[5][0]": "1",
              'a[5][1]["y"]': "2", "a[6]": "-70000", "a[7]": str(1 << 70), "raw": "5 bytes"}  # fmt: skip
    assert {key: texts[key] for key in wanted} == wanted


def test_mutated_files_raise_nothing(tmp_path: Path) -> None:
    """Flip, cut and repeat bytes of good files; the seed is fixed, so that a failure can be repeated."""
    chance = random.Random(8)
    torch_file, safe_file = tmp_path / "data_0.ckpt", tmp_path / "hs_0.safetensors"
    files.save(
        torch_file,
        {"a": T("int64", (5,)), "b": [T("bfloat16", (2, 3)), {"c": T("float8_e5m2", (4,))}], "d": "t"},
    )
    files.save_safetensors(safe_file, {"a": {"dtype": "I64", "shape": [5], "data_offsets": [0, 40]}}, bytes(40))
    changed = tmp_path / "changed"
    for good in (torch_file.read_bytes(), safe_file.read_bytes()):
        for _ in range(1500):
            data = bytearray(good)
            for _ in range(chance.randint(1, 6)):
                at = chance.randrange(min(len(data), 700) if chance.random() < 0.7 else len(data))
                data[at] = chance.randrange(256)
            if chance.random() < 0.2:
                del data[chance.randrange(len(data)) :]
            changed.write_bytes(data)
            assert show(str(changed))["bytes"] == len(data)


def test_memory_stays_small(tmp_path: Path) -> None:
    """Every hostile file under an address space that any of the sizes they claim would overrun."""
    for number, data in enumerate(HOSTILE.values()):
        files.save_pickle(tmp_path / f"data_{number}.ckpt", data, [("0", bytes(8))])
    program = (
        "import resource, sys, glob\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "from backend.agent.shards.show import show\n"
        "print(sum(show(p)['bytes'] > 0 for p in glob.glob(sys.argv[1] + '/*.ckpt')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == (str(len(HOSTILE)), "")


def directory_that_lies(total: int, size: int, begin: int) -> bytes:
    return struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, total, total, size, begin, 0)


@pytest.mark.parametrize("end", [(0xFFFF, 0xFFFFFFF0, 0), (1, 46, 0xFFFFFF00), (5, 10, 0), (0, 0, 0)])
def test_a_directory_that_lies(tmp_path: Path, end: tuple[int, int, int]) -> None:
    path = tmp_path / "data_0.ckpt"
    files.save(path, {"a": T("int64", (5,))})
    data = path.read_bytes()
    path.write_bytes(data[:-98] + directory_that_lies(*end))
    result: dict[str, Any] = show(str(path))
    assert not result["ok"]
