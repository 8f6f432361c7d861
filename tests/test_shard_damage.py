"""Files as crashes, full disks and killed writers leave them: each kind of damage under its code."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from backend.agent.shards.show import show
from backend.shardfmt import torchzip as fmt
from backend.wire import Refused
from tests.cases import torchfiles as files
from tests.cases.torchfiles import T
from tests.shardlooks import H, L, codes, row, sample, shown

if TYPE_CHECKING:
    from pathlib import Path


def test_a_cut_file_says_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    whole = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H)), more=T("bfloat16", (600, H))))
    size = path.stat().st_size
    os.truncate(path, size - 1)
    result = show(str(path))
    assert [e["shape"] for e in result["entries"]] == [e["shape"] for e in whole["entries"]]
    assert [e["offset"] for e in result["entries"]] == [e["offset"] for e in whole["entries"]]
    note = result["notes"][0]
    assert (note["code"], result["ok"]) == ("truncated", False)
    assert f"{size - 1} of {size} bytes" in note["text"]
    assert "4 of 4 storages are whole" in note["text"]
    os.truncate(path, row(whole, "more")["offset"] + 10)
    result = show(str(path))
    assert "3 of 4 storages are whole" in result["notes"][0]["text"]
    assert [e["whole"] for e in result["entries"]] == [True, True, True, False]


def test_cut_at_every_length_is_told_and_never_raises(tmp_path: Path) -> None:
    path, cut = tmp_path / "data_0.ckpt", tmp_path / "data_1.ckpt"
    files.save(path, sample())
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        cut.write_bytes(data[:size])
        result = show(str(cut))
        assert not result["ok"], size
        assert result["notes"], size


def test_a_zeroed_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    result = shown(tmp_path, sample(hidden_state=T("bfloat16", (1, L, H))))
    at = fmt.LOCAL_BYTES + 200
    with path.open("r+b") as file:
        file.seek(row(result, "hidden_state")["offset"] - at)
        file.write(bytes(at))
    assert "bad-local-header" in codes(show(str(path)), "error")


def test_a_flipped_bit_in_the_description(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    shown(tmp_path, sample())
    data = bytearray(path.read_bytes())
    at = data.index(b"loss_mask")
    data[at] ^= 1
    path.write_bytes(data)
    assert "crc-mismatch" in codes(show(str(path)), "error")


def test_archive_and_pickle_that_disagree(tmp_path: Path) -> None:
    pickled = files.Pickled()
    pickled.value({"a": T("int64", (4,)), "b": T("int64", (2,))})
    path = tmp_path / "data_0.ckpt"
    files.save_pickle(path, bytes(pickled.data) + b".tail", [("0", bytes(24)), ("7", bytes(8))])
    assert codes(show(str(path))) == [
        "pickle-tail", "storage-size", "storage-missing", "unreferenced-record", "cut-tensor",
    ]  # fmt: skip


OTHERS = {
    "empty": (b"", "0 bytes"),
    "zeros": (bytes(5000), "all zero"),
    "text": ("a log line\nätsch\n".encode() * 900, "a text file; read here"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "stream is damaged"),
    "torch (before 1.6)": (
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
        "ends inside its description",
    ),
    "pickle": (b"\x80\x04\x95" + bytes(40), "a bare pickle"),
    "numpy": (b"\x93NUMPY\x01\0" + bytes(40), "numpy header"),
    "AppleDouble": (bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(4072), "macOS"),
    "tar": (b"sys_info".ljust(257, b"\0") + b"ustar" + bytes(762), "before 0.1.10"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(40), "compressed by zstd"),
    "unknown": (bytes(range(128, 256)) * 40, "no format that is known"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_named(tmp_path: Path, name: str) -> None:
    content, words = OTHERS[name]
    path = tmp_path / "data_3.ckpt"
    path.write_bytes(content)
    result = show(str(path))
    assert (result["format"], result["ok"], result["entries"]) == (name, False, [])
    assert words in result["notes"][0]["text"]


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    shown(tmp_path, sample())
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"data.pkx"))
    assert (show(str(path))["format"], codes(show(str(path)))) == ("zip", ["not-torch"])


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nothing").symlink_to(tmp_path / "gone")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        expected = {"fifo": "not-a-file", "nothing": "not-found", "round": "not-found",
                    "socket": "not-a-file",
                    "gone": "not-found", ".": "is-folder", "a\0b": "not-found"}  # fmt: skip
        for name, code in expected.items():
            with pytest.raises(Refused) as refused:
                show(str(tmp_path / name))
            assert refused.value.code == code, name
    with pytest.raises(Refused) as refused:
        show("/dev/zero")
    assert "a device" in refused.value.message
