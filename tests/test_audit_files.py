"""Every kind of fault that one file can have, each in a file made for it, among enough good ones to vote."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from backend.shardfmt import torchzip as fmt
from tests import auditing
from tests.auditing import H, K, ids, sample, states
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Call, Storage, T

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = 80
NAN, ZERO = 0x7FC0, 0


def cut(path: Path, left: int = -1) -> None:
    path.write_bytes(path.read_bytes()[:left])


def header_of(path: Path, record: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(f"{path.name.partition('.')[0]}/{record}").header_offset


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def patch_header(record: str, at: int, data: bytes) -> Callable[[Path], None]:
    return lambda path: patch(path, header_of(path, record) + at, data)


def flag_as_encrypted(path: Path) -> None:
    at = path.read_bytes().index(fmt.CENTRAL_MAGIC)
    patch(path, at + 8, b"\x09")


def add(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        twice = pytest.warns(UserWarning, match="Duplicate") if name == "data.pkl" else contextlib.nullcontext()
        with zipfile.ZipFile(path, "a") as archive, twice:
            archive.writestr(f"{path.name.partition('.')[0]}/{name}", b"\x80\x02}.")

    return change


def add_elsewhere(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02}.")


def packed_again(method: int, **replaced: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            kept = [(name, archive.read(name)) for name in archive.namelist()]
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, data in kept:
                archive.writestr(name, replaced.get(name.partition("/")[2], data))

    return change


def tail_never_written(path: Path) -> None:
    size, at = path.stat().st_size, header_of(path, "data/3")
    patch(path, at, bytes(size - at))


def storages(value: Any) -> tuple[bytes, list[tuple[str, bytes]]]:
    pickled = files.Pickled()
    pickled.value(value)
    return bytes(pickled.data) + b".", [(s.key, s.data) for s in pickled.storages]


def with_storages(change: Callable[[list[tuple[str, bytes]]], Any], tail: bytes = b"") -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        data, held = storages(sample(901))
        change(held)
        files.save_pickle(path, data + tail, held)

    return rewrite


def with_hole(path: Path) -> None:
    """Leave out a tensor's pages when its file is copied."""
    files.save(path, sample(902, 900))
    data = path.read_bytes()
    begin = -(-(header_of(path, "data/2") + 4096) // 4096) * 4096
    with path.open("wb") as file:
        file.write(data[:begin])
        file.seek(begin + 8192)
        file.write(data[begin + 8192 :])


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"input_ids": [1, 2]}, protocol=2))


def words(tensor: T, at: int, *values: int) -> T:
    """Replace 16-bit words of a tensor's storage."""
    assert tensor.storage is not None
    data = bytearray(tensor.storage.data)
    data[2 * at : 2 * (at + len(values))] = struct.pack(f"<{len(values)}H", *values)
    tensor.storage.data = bytes(data)
    return tensor


FILES: dict[str, Callable[[Path], None]] = {
    "empty-file": lambda path: path.write_bytes(b"") and None,
    "zero-filled": lambda path: path.write_bytes(bytes(5000)) and None,
    "truncated": cut,
    "not-written": tail_never_written,
    "bad-local-header": patch_header("data/2", 0, bytes(30)),
    "name-mismatch": patch_header("data/2", 30, b"X"),
    "two-data-pkl": add_elsewhere,
    "duplicate-record": add("data.pkl"),
    "torchscript": add("constants.pkl"),
    "pickle-tail": with_storages(lambda held: None, tail=b"hidden"),
    "storage-missing": with_storages(lambda held: held.pop()),
    "storage-size": with_storages(lambda held: held.append((held[-1][0], held.pop()[1][:-2]))),
    "unreferenced-record": with_storages(lambda held: held.append(("9", b"spare"))),
    "trailing-bytes": lambda path: path.write_bytes(path.read_bytes() + b"more") and None,
    "compressed-storage": packed_again(zipfile.ZIP_DEFLATED),
    "misaligned": packed_again(zipfile.ZIP_STORED),
    "big-endian": packed_again(zipfile.ZIP_STORED, byteorder=b"big"),
    "encrypted-flag": flag_as_encrypted,
    "sparse": with_hole,
    "bare-pickle": bare_pickle,
}
"""Damage to a container, by the code that must name it."""

REMARKS = ("trailing-bytes", "compressed-storage", "misaligned", "unreferenced-record")
"""Where the readers do not say that a loader gets wrong values, a remark is enough."""

SAMPLES: dict[str, dict[str, Any]] = {
    "view-outside-storage": sample(1, hidden_state=T("bfloat16", (1, 5, H), Storage("bfloat16", 5 * H), offset=1)),
    "unknown-global": sample(2, more=Call("os", "system", ("true",))),
    "schema": sample(3, hidden_state=states((1, 5, H), 3, "float32")),
    "hidden-size": sample(4, hidden_state=states((1, 5, H + 1), 4)),
    "layer-count": sample(5, aux_hidden_state=states((1, 5, (K - 1) * H), 5)),
    "ids-dtype": sample(6, input_ids=ids([1, 2, 3, 4, 5], "int16")),
    "ids-not-tensor": sample(7, input_ids=[1, 2, 3, 4, 5]),
    "no-ids": sample(8, input_ids=None),
    "seq-mismatch": sample(9, hidden_state=states((1, 4, H), 9)),
    "zero-length": sample(10, 0, input_ids=ids([])),
    "too-long": sample(11, 1200),
    "token-range": sample(12, input_ids=ids([1, 2, 4096, 3, 4])),
    "mask-values": sample(13, loss_mask=ids([0, 1, 2, 1, 0])),
    "mask-empty": sample(14, loss_mask=ids([0] * 5)),
    "non-finite": sample(15, hidden_state=words(states((1, 5, H), 15), 4 * H + 2, NAN)),
    "zero-row": sample(16, hidden_state=words(states((1, 5, H), 16), 4 * H, *[ZERO] * H)),
    "duplicate-ids": sample(17, input_ids=ids([0, *range(10, 14)])),
    "same-states-other-ids": sample(0, input_ids=ids([77, 78, 79, 80, 81])),
    "length-index": sample(19),
}
"""Samples that are wrong, in sound containers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one folder: good files first, then one for each fault."""
    root = tmp_path_factory.mktemp("shards")
    for index in range(GOOD):
        auditing.write(root, index)
    for index, value in enumerate(SAMPLES.values(), GOOD):
        auditing.write(root, index, value)
    for index, change in enumerate(FILES.values(), GOOD + len(SAMPLES)):
        path = auditing.write(root, index, sample(index))
        change(path)
        auditing.age(path)
    (root / "data_config.json").write_text(json.dumps({"vocab_size": 4096}))
    number = GOOD + list(SAMPLES).index("length-index")
    (root / "sample_lengths.json").write_text(json.dumps({str(number): 6}))
    return root


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    os.environ["XDG_STATE_HOME"] = str(folder.parent)
    try:
        return auditing.audit(folder, "--max-tokens", "1000")
    finally:
        del os.environ["XDG_STATE_HOME"]


def name_of(index: int) -> str:
    return f"rows_0-2000/data_{index}.ckpt"


def test_good_files_have_no_fault_but_twins(found: dict[str, Any]) -> None:
    assert found["files"] == GOOD + len(SAMPLES) + len(FILES)
    for index in range(GOOD):
        assert auditing.codes(found, name_of(index)) <= {"same-states-other-ids"}
    assert (found["hidden_size"], found["layers"]) == (H, K + 1)


@pytest.mark.parametrize("code", SAMPLES)
def test_a_wrong_sample_is_named(found: dict[str, Any], code: str) -> None:
    assert code in auditing.codes(found, name_of(GOOD + list(SAMPLES).index(code)))


@pytest.mark.parametrize("code", FILES)
def test_a_damaged_container_is_named(found: dict[str, Any], code: str) -> None:
    level = "warning" if code in REMARKS else "error"
    assert code in auditing.codes(found, name_of(GOOD + len(SAMPLES) + list(FILES).index(code)), level)


def test_a_batch_mix_up_names_both(found: dict[str, Any]) -> None:
    mixed = GOOD + list(SAMPLES).index("same-states-other-ids")
    for index in (0, mixed):
        assert "same-states-other-ids" in auditing.codes(found, name_of(index))


# --- what only reading every byte tells -------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    at = header_of(path, "data/2") + 200
    patch(path, at, bytes([path.read_bytes()[at] ^ 1]))


def zero_a_page(path: Path) -> None:
    begin = -(-(header_of(path, "data/2") + 100) // 4096) * 4096
    patch(path, begin, bytes(4096))


def no_change(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("value", "how", "change", "code"),
    [
        (sample(90, 300), {}, flip_a_bit, "crc-mismatch"),
        (sample(91, 300), {}, zero_a_page, "crc-mismatch"),
        (sample(92, 300), {"crc": False}, zero_a_page, "zero-pages"),
        (sample(93, hidden_state=words(states((1, 5, H), 93), H + 1, NAN)), {}, no_change, "non-finite"),
        (
            sample(94, aux_hidden_state=words(states((1, 5, K * H), 94), 0, *[ZERO] * (K * H))),
            {},
            no_change,
            "zero-row",
        ),
    ],
)
def test_damage_that_torch_loads_is_found_by_a_deep_look(
    tmp_path: Path, value: Any, how: dict[str, Any], change: Callable[[Path], None], code: str
) -> None:
    for index in range(4):
        auditing.write(tmp_path, index)
    path = auditing.write(tmp_path, 4, value, **how)
    change(path)
    auditing.age(path)
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.load(path, weights_only=True)
    shallow, deep = auditing.audit(tmp_path), auditing.audit(tmp_path, "--deep")
    assert shallow["ok"] and not deep["ok"]
    assert code in auditing.codes(deep, name_of(4))
    assert deep["faulty_files"] == 1 and auditing.audit(tmp_path)["cached"] == 5


def test_gzipped_samples_are_audited_without_inflating_them(tmp_path: Path) -> None:
    for index in range(5):
        plain = auditing.write(tmp_path, index)
        packed = plain.with_suffix(".ckpt.gz")
        packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
        plain.unlink()
        auditing.age(packed)
    assert auditing.audit(tmp_path, "--deep")["ok"]
    cut(packed, -20)
    auditing.age(packed)
    found = auditing.audit(tmp_path)
    assert found["faulty_files"] == 1 and found["faults"]


def hs(path: Path, index: int, tokens: int = 5, layers: int = 4, **header: Any) -> None:
    rows = states((tokens, layers, H), index).storage
    assert rows is not None
    size = 8 * tokens
    stated = {
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, size]},
        "hidden_states": {"dtype": "BF16", "shape": [tokens, layers, H], "data_offsets": [size, size + len(rows.data)]},
    } | header
    data = struct.pack(f"<{tokens}q", index, *range(1, tokens))
    files.save_safetensors(path, stated, data + rows.data)
    auditing.age(path)


def test_safetensors_of_one_token_keep_their_axis(tmp_path: Path) -> None:
    """A leading 1 is the token axis there, and a sequence may be as long as the state is wide."""
    for index, tokens in enumerate((5, 1, H, 4, 3, 7)):
        hs(tmp_path / f"hs_{index}.safetensors", index, tokens)
    assert auditing.audit(tmp_path)["ok"]
    hs(tmp_path / "hs_6.safetensors", 6, layers=3)
    hs(tmp_path / "hs_7.safetensors", 7, extra={"dtype": "U8", "shape": [2], "data_offsets": [10, 12]})
    (tmp_path / "data_config.json").write_text(
        json.dumps(
            {"model": {"hidden_size": H}, "hidden_states": {"layer_ids": [1, 2, 3, 4]}, "data": {"num_samples": 9}}
        )
    )
    found = auditing.audit(tmp_path)
    assert "layer-count" in auditing.codes(found, "hs_6.safetensors")
    assert "overlap" in auditing.codes(found, "hs_7.safetensors")
    assert auditing.codes(found) == {"missing-id"}


def test_without_a_majority_nobody_is_called_right(tmp_path: Path) -> None:
    for index in range(6):
        value = sample(index) if index % 2 else sample(index, hidden_state=states((1, 5, H), index, "float32"))
        auditing.write(tmp_path, index, value)
    found = auditing.audit(tmp_path)
    assert auditing.codes(found) == {"no-majority"} and found["faulty_files"] == 0


def test_the_files_are_held_against_the_configuration(tmp_path: Path) -> None:
    for index in range(3):
        auditing.write(tmp_path, index)
    (tmp_path / "data_config.json").write_text(json.dumps({"hidden_size": H, "hidden_states": {"layer_ids": [1, 2]}}))
    assert auditing.codes(auditing.audit(tmp_path)) == {"layer-count"}
    (tmp_path / "data_config.json").write_text(json.dumps({"model": {"hidden_size": 7168}}))
    assert auditing.codes(auditing.audit(tmp_path)) == {"hidden-size"}
