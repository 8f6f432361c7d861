"""Valid shards of every kind, changed by chance, and what reading each costs; run as a program it prints the worst.

python -m tests.fuzzing CASES SEED FOLDER
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backend.agent.shards.audit.look import look
from backend.agent.shards.formats.alike import Alike
from backend.agent.shards.repair import repair
from backend.agent.shards.show import show
from backend.shardfmt.torchpickle import TensorSpec, pickle_of
from backend.wire import MAX_LINE_BYTES, Refused
from tests.cases import torchfiles as files
from tests.cases.torchfiles import T

if TYPE_CHECKING:
    from collections.abc import Callable

VALUE = {
    "input_ids": T("int64", (5,)),
    "loss_mask": T("int64", (5,)),
    "hidden_state": T("bfloat16", (1, 5, 8)),
    "more": [T("bfloat16", (2, 3)), {"c": T("float8_e5m2", (4,)), "d": "text"}],
}


def legacy(path: Path) -> None:
    """Write what torch wrote before 1.6: five pickles, then each storage's length and bytes."""
    pickled = files.Pickled()
    pickled.value({"input_ids": T("int64", (5,)), "hidden_state": T("bfloat16", (1, 5, 8))})
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}]
    data = b"".join(pickle.dumps(each, 2) for each in head) + bytes(pickled.data) + b"."
    data += pickle.dumps([held.key for held in pickled.storages], 2)
    sizes = {"int64": 8, "bfloat16": 2}
    for held in pickled.storages:
        data += struct.pack("<q", len(held.data) // sizes[held.dtype]) + held.data
    path.write_bytes(data)


def canonical(path: Path) -> None:
    """Write what an extraction writes: the kind that an audit recognises."""
    specs = [TensorSpec("input_ids", "int64", (5,)), TensorSpec("hidden_state", "bfloat16", (1, 5, 8))]
    files.save_pickle(path, pickle_of(specs), [("0", bytes(range(40))), ("1", b"\x3f" * 80)])


def gzipped(path: Path) -> None:
    canonical(path)
    path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def safetensors(path: Path) -> None:
    header = {"token_ids": {"dtype": "I64", "shape": [5], "data_offsets": [0, 40]}, "__metadata__": {"a": "b"}}
    files.save_safetensors(path, header, bytes(40))


def array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(30, dtype=np.float32).reshape(5, 6))


def archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, input_ids=np.arange(5), hidden_state=np.ones((5, 8), np.float16))


def texts(path: Path) -> None:
    path.write_text(json.dumps({"a": [1, 2.5, None, {"b": "c"}], "n": 9}))


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "torch zip": ("data_0.ckpt", lambda path: files.save(path, VALUE)),
    "canonical": ("data_1.ckpt", canonical),
    "legacy": ("data_2.pt", legacy),
    "gzip": ("data_3.ckpt.gz", gzipped),
    "safetensors": ("hs_4.safetensors", safetensors),
    "numpy": ("data_5.npy", array),
    "numpy archive": ("data_6.npz", archive),
    "json": ("data_config.json", texts),
}  # fmt: skip


def change(good: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, mostly near the front or the end, where descriptions lie; cut, repeat or drop a piece."""
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        where = chance.random()
        at = chance.randrange(min(len(data), 900)) if where < 0.5 else chance.randrange(len(data))
        at = max(0, len(data) - 1 - chance.randrange(900)) if where > 0.8 else at
        data[at] = chance.choice((chance.randrange(256), data[at] ^ 1 << chance.randrange(8), 0, 0xFF))
    if chance.random() < 0.15:
        del data[chance.randrange(len(data)) :]
    elif chance.random() < 0.15:
        at = chance.randrange(len(data))
        size = chance.randrange(1, 200)
        data[at:at] = data[at : at + size] * chance.choice((1, 2, 50)) if chance.random() < 0.5 else bytes(size)
        del data[at + size : at + size + chance.choice((0, size))]
    return bytes(data)


def try_all(path: Path, out: Path, met: Alike) -> None:
    """Read one file in every way; what is refused must be refused in words."""
    for how in ({}, {"deep": True, "values": True}):
        try:
            told = show(str(path), **how)
            assert len(json.dumps(told)) < MAX_LINE_BYTES
        except Refused as refused:
            in_words(refused)
    for deep in (False, True):
        found = look(str(path), deep, lambda: None, met)
        assert found == look(str(path), deep, lambda: None), path
    try:
        repair(str(path), str(out))
        out.unlink()
    except Refused as refused:
        in_words(refused)


def in_words(refused: Refused) -> None:
    """Hold a refusal to be one that says something."""
    assert refused.code and refused.message


def main(cases: int, seed: int, folder: Path) -> dict[str, object]:
    """Try as many cases, every kind in turn; return the count, the slowest (CPU seconds) and the peak of memory."""
    chance, met = random.Random(seed), Alike()
    good: dict[str, bytes] = {}
    for name, (file, make) in KINDS.items():
        make(folder / file)
        good[name] = (folder / file).read_bytes()
        assert show(str(folder / file))["ok"], (name, show(str(folder / file))["notes"])
        look(str(folder / file), False, lambda: None, met)
    slowest: tuple[float, str, int] = (0.0, "", 0)
    for number in range(cases):
        name = list(KINDS)[number % len(KINDS)]
        path = folder / KINDS[name][0]
        path.write_bytes(change(good[name], chance))
        began = time.process_time()
        try:
            try_all(path, folder / "mended", met)
        except BaseException:
            (folder / "failing").write_bytes(path.read_bytes())
            raise
        slowest = max(slowest, (time.process_time() - began, name, number))
    # not ru_maxrss: that one begins with what the parent had
    status = Path("/proc/self/status").read_text().splitlines()
    [peak] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
    return {"cases": cases, "slowest_s": slowest[0], "slowest": slowest[1:], "peak_bytes": peak}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
