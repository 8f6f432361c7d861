"""The shapes by which malicious files got past scanners and loaders: each is shown as what it is, and nothing runs."""

from __future__ import annotations

import pickle
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from backend.agent.shards.audit.look import look
from backend.agent.shards.show import show
from backend.shardfmt import torchzip as fmt
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Call, Storage, T
from tests.shardlooks import codes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = {"input_ids": T("int64", (4,)), "hidden_state": T("bfloat16", (1, 4, 8))}


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def command(trap: str) -> str:
    return f"touch {trap}"


PICKLES: dict[str, tuple[Callable[[str], bytes], str, str]] = {
    "reduce": (lambda t: b"\x80\x02cos\nsystem\n" + text(command(t)) + b"\x85R.", "unknown-global", "os.system"),
    "reduce of posix": (
        lambda t: b"\x80\x02cposix\nsystem\n" + text(command(t)) + b"\x85R.", "unknown-global", "posix.system"),
    "exec": (
        lambda t: b"\x80\x02c__builtin__\nexec\n" + text(f"open({t!r}, 'w')") + b"\x85R.",
        "unknown-global", "builtins.exec"),
    "a name that no list of bad ones held": (  # CVE-2025-1716
        lambda t: b"\x80\x02cpip._internal.cli.main\nmain\n](" + text("install") + text(t) + b"e\x85R.",
        "unknown-global", "pip._internal.cli.main.main"),
    "a name put together on the stack": (
        lambda t: b"\x80\x04" + text("os") + b"\x94" + text("system") + b"\x94\x93" + text(command(t)) + b"\x85R.",
        "unknown-global", "os.system"),
    "a name out of the memo": (
        lambda t: b"\x80\x04" + text("system") + b"q\x01" + text("os") + b"q\x020h\x02h\x01\x93" + text(t) + b"\x85R.",
        "bad-pickle", "STOP without one value"),
    "a dotted name": (
        lambda t: b"\x80\x04" + text("collections") + text("abc.sys.modules") + b"\x93.",
        "unknown-global", "collections.abc.sys.modules"),
    "new object": (
        lambda t: b"\x80\x02csubprocess\nPopen\n" + text(command(t)) + b"\x85\x81.",
        "unknown-global", "subprocess.Popen"),
    "new object with names": (
        lambda t: b"\x80\x04csubprocess\nPopen\n)}" + text("args") + text(command(t)) + b"s\x92.",
        "unknown-global", "subprocess.Popen"),
    "state of an object": (
        lambda t: b"\x80\x02ctypes\nSimpleNamespace\n)R}" + text("f") + b"cos\nsystem\nsb.",
        "unknown-global", "os.system"),
    "instance": (lambda t: b"(" + text(command(t)) + b"ios\nsystem\n.", "", ""),
    "object": (lambda t: b"\x80\x02(cos\nsystem\n" + text(command(t)) + b"o.", "bad-pickle", "opcode 0x6f"),
    "persistent id as text": (lambda t: b"\x80\x02Pfile\n.", "bad-pickle", "opcode 0x50"),
    "extension registry": (lambda t: b"\x80\x02\x82\x01.", "bad-pickle", "opcode 0x82"),
    "a call that is thrown away": (
        lambda t: b"\x80\x02cos\nsystem\n" + text(command(t)) + b"\x85R0}.", "unknown-global", "os.system"),
    "behind the end": (  # fickling #20
        lambda t: b"\x80\x02}.cos\nsystem\n" + text(command(t)) + b"\x85R.", "pickle-tail", "bytes follow the end"),
    "a pickle in a pickle": (
        lambda t: b"\x80\x02c_pickle\nloads\n" + b"U\x05cos\n." + b"\x85R.", "unknown-global", "_pickle.loads"),
    "items set on a tensor": (  # CVE-2026-24747
        lambda t: b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nLongStorage\n"
        + text("0") + text("cpu") + b"K\x01tQK\0K\x01\x85K\x01\x85\x89)tR(K\x01K\x02u.",
        "bad-pickle", "items set on something that is no dictionary"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_a_malicious_description_is_told_and_nothing_runs(tmp_path: Path, name: str) -> None:
    make, code, said = PICKLES[name]
    trap, path = tmp_path / "trap", tmp_path / "data_0.ckpt"
    files.save_pickle(path, make(str(trap)), [("0", bytes(8))])
    told, found = show(str(path), deep=True, values=True), look(str(path), True, lambda: None)
    assert not trap.exists() and not told["ok"]
    errors = codes(told, "error")
    assert code in errors or not code, errors
    assert said in " ".join(note["text"] for note in told["notes"])
    assert {each for each, level, _ in found["notes"] if level == "error"} >= set(errors)


@pytest.mark.parametrize("name", ["data_0.ckpt", "data_0.pt", "model.pth", "data_0.ckpt.gz", "hs_0.safetensors"])
def test_a_bare_pickle_is_one_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    """Scanners went by a file's extension (CVE-2025-1889)."""
    trap = tmp_path / "trap"
    (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n" + text(command(str(trap))) + b"\x85R.")
    told = show(str(tmp_path / name))
    assert {"bare-pickle", "unknown-global"} & set(codes(told, "error")) and not trap.exists()


def patched(path: Path, old: bytes, new: bytes, last: bool = False) -> None:
    data = path.read_bytes()
    at = data.rindex(old) if last else data.index(old)
    path.write_bytes(data[:at] + new + data[at + len(old) :])


def _two_pickles(path: Path) -> None:
    """Name the description twice: torch reads the first, Python's zipfile the last."""
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("data_0/data.pkl", b"\x80\x02cos\nsystem\nU\x04true\x85R.")


def _flags(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(fmt.CENTRAL_MAGIC)
    path.write_bytes(data[: at + 8] + b"\x09" + data[at + 9 :])


def _bad_record(path: Path) -> None:
    """Spoil a record that a scanner tries first, to hide the rest (modelscan #354)."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data_0/aaa.pkl", b"\xff not a pickle")
    patched(path, b"PK\x01\x02", b"PK\x01\x02", last=True)


CONTAINERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another name in a record's own header": (  # CVE-2025-1944
        lambda path: patched(path, b"data_0/data.pkl", b"data_0/datb.pkl"), "name-mismatch"),
    "flags that make a scanner give up": (_flags, "encrypted-flag"),  # CVE-2025-1945
    "two descriptions": (_two_pickles, "duplicate-record"),
    "a spoilt record first": (_bad_record, "unknown-global"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_hides_its_description_is_named(tmp_path: Path, name: str) -> None:
    change, code = CONTAINERS[name]
    path, trap = tmp_path / "data_0.ckpt", tmp_path / "trap"
    files.save(path, {**GOOD, "x": Call("os", "system", (command(str(trap)),))})
    change(path)
    assert code in codes(show(str(path)), "error") and not trap.exists()


def test_a_storage_smaller_than_it_says_is_named(tmp_path: Path) -> None:
    """torch before 2.10 read beyond the record (CVE-2026-24747)."""
    pickled = files.Pickled()
    pickled.value(GOOD)
    path = tmp_path / "data_0.ckpt"
    files.save_pickle(path, bytes(pickled.data) + b".", [(s.key, s.data[:-8]) for s in pickled.storages])
    assert {"storage-size", "cut-tensor"} <= set(codes(show(str(path)), "error"))


def test_all_that_is_wrong_with_a_file_is_told_at_once(tmp_path: Path) -> None:
    """A bad view, an unlisted name, a tail, a spare and a damaged storage: five codes, each with its text."""
    path = tmp_path / "data_0.ckpt"
    view = T("bfloat16", (1, 4, 8), Storage("bfloat16", 32), offset=8)
    pickled = files.Pickled()
    pickled.value({"input_ids": T("int64", (4,)), "hidden_state": view, "x": Call("os", "system", ("true",))})
    held = [(s.key, s.data) for s in pickled.storages]
    files.save_pickle(path, bytes(pickled.data) + b".tail", [*held, ("7", b"spare")])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\x3f" * 32)] ^= 1
    path.write_bytes(data)
    told = show(str(path), deep=True)
    wanted = {"view-outside-storage", "unknown-global", "pickle-tail", "unreferenced-record", "crc-mismatch"}
    assert wanted <= set(codes(told)) and all(note["text"] for note in told["notes"])
    assert wanted <= {code for code, _, _ in look(str(path), True, lambda: None)["notes"]}


def test_python_s_own_pickles_of_commands_are_told(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (command(str(tmp_path / "trap")),)

    for protocol in (2, 3, 4, 5):
        files.save_pickle(tmp_path / "data_0.pt", pickle.dumps({"a": Trap()}, protocol), [])
        told = show(str(tmp_path / "data_0.pt"))
        assert "posix.system" in " ".join(note["text"] for note in told["notes"]) and not (tmp_path / "trap").exists()
