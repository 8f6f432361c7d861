"""A shard folder as real machines leave it (case R1), listed without going anywhere else."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.shards import listing
from backend.agent.shards.listing import list_shards
from backend.shardfmt import layout
from backend.wire import MAX_LINE_BYTES, Refused

if TYPE_CHECKING:
    from pathlib import Path


def names(result: dict[str, Any], kind: str) -> list[str]:
    return [entry["name"] for entry in result["entries"] if entry["kind"] == kind]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Make the group folder of case R1: samples, and leftovers of every kind."""
    folder = tmp_path / "rows_0-2000"
    (folder / "data_10.ckpt").mkdir(parents=True)
    for name in [*(f"data_{i}.ckpt" for i in range(6)), "data_0 (1).ckpt", "data_01.ckpt", "data_2.ckpt~",
                 "data_6.ckpt.tmp", ".nfs00000001", "._data_0.ckpt", "hs_2.safetensors.lock"]:  # fmt: skip
        (folder / name).write_bytes(b"x" * 900)
    (folder / ".data_7.ckpt.part").touch()
    (folder / "data_12.ckpt").touch()
    (folder / "loop").symlink_to("..")
    (folder / "data_8.ckpt").symlink_to("/nonexistent/data_8.ckpt")
    os.link(folder / "data_3.ckpt", folder / "data_11.ckpt")
    os.mkfifo(folder / "data_9.ckpt")
    return folder


def test_leftovers_are_no_samples(rows: Path) -> None:
    result = list_shards(str(rows))
    notes = {entry["name"]: entry["note"] for entry in result["entries"]}
    assert names(result, "folder") == ["data_10.ckpt", "loop"]
    assert [n for n in names(result, "shard") if layout.sample_index(n) is not None] == [
        *(f"data_{i}.ckpt" for i in range(6)), "data_11.ckpt", "data_12.ckpt",
    ]  # fmt: skip
    assert notes["data_0 (1).ckpt"] == notes["data_01.ckpt"] == "not the name of a sample"
    for leftover in (
        "data_2.ckpt~",
        "data_6.ckpt.tmp",
        ".data_7.ckpt.part",
        "._data_0.ckpt",
        "hs_2.safetensors.lock",
    ):
        assert notes[leftover] == "a leftover, not a sample"
    assert (notes["data_8.ckpt"], notes["data_9.ckpt"]) == ("a link to nothing", "a FIFO")
    assert notes["data_10.ckpt"] == "a folder with the name of a shard"
    assert notes["data_11.ckpt"] == notes["data_3.ckpt"] == "a hard link: its bytes count once"
    assert (notes["data_12.ckpt"], notes["loop"]) == ("empty", "a link to another folder")
    assert result["total"] == len(result["entries"]) == len(list(rows.iterdir()))


def test_order_sizes_and_times(tmp_path: Path) -> None:
    for name in ("data_10.ckpt", "data_9.ckpt", "data_2.ckpt"):
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / "z").mkdir()
    result = list_shards(str(tmp_path))
    assert [entry["name"] for entry in result["entries"]] == [
        "z",
        "data_2.ckpt",
        "data_9.ckpt",
        "data_10.ckpt",
    ]
    last = result["entries"][-1]
    assert (last["bytes"], last["modified_at"]) == (3, (tmp_path / "data_10.ckpt").stat().st_mtime)
    assert (result["truncated"], result["next"]) == (False, None)


def test_large_folders_come_in_parts_that_fit_a_message(tmp_path: Path) -> None:
    wanted = [f"data_{i}.ckpt" for i in range(3000)]
    for name in wanted:
        (tmp_path / name).touch()
    seen: list[str] = []
    offset: int | None = 0
    while offset is not None:
        part = list_shards(str(tmp_path), offset)
        assert len(json.dumps(part)) < MAX_LINE_BYTES
        assert part["truncated"] == (part["next"] is not None)
        seen += [entry["name"] for entry in part["entries"]]
        offset = part["next"]
    assert seen == wanted


def pages(path: Path, since: float = 0.0) -> list[dict[str, Any]]:
    found = [list_shards(str(path), 0, since)]
    while found[-1]["next"] is not None:
        found.append(list_shards(str(path), found[-1]["next"], since))
    return found


def test_the_pages_of_a_growing_folder_are_of_one_moment_and_it_is_sorted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_LISTED_BYTES", 400)
    for number in range(9):
        (tmp_path / f"data_{number}.ckpt").touch()
    first = list_shards(str(tmp_path))
    (tmp_path / "data_0 (1).ckpt").touch()  # would be third, and move what follows
    (tmp_path / "data_8.ckpt").unlink()
    monkeypatch.setattr(listing.os, "scandir", None)
    rest = list_shards(str(tmp_path), first["next"])
    while rest["next"] is not None:
        first["entries"] += rest["entries"]
        rest = list_shards(str(tmp_path), rest["next"])
    assert [entry["name"] for entry in first["entries"] + rest["entries"]] == [f"data_{i}.ckpt" for i in range(8)]
    assert listing._kept == []


def test_what_is_new_in_a_large_folder_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_ENTRIES", 3)
    for number in range(20):
        (tmp_path / f"data_{number}.ckpt").touch()
        os.utime(tmp_path / f"data_{number}.ckpt", (1000, 2000 if number in (4, 11, 12, 17) else 1000))
    (tmp_path / "data_20.ckpt").symlink_to("nowhere")
    found = pages(tmp_path, since=1500.0)
    assert [len(page["entries"]) for page in found] == [3, 2] and found[0]["total"] == 21
    names = [entry["name"] for page in found for entry in page["entries"]]
    assert names == [f"data_{number}.ckpt" for number in (4, 11, 12, 17, 20)]


def test_a_folder_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_SEEN", 5)
    for number in range(9):
        (tmp_path / str(number)).touch()
    result = list_shards(str(tmp_path))
    assert (result["total"], result["truncated"], len(result["entries"])) == (5, True, 5)


def test_names_that_a_terminal_would_obey(tmp_path: Path) -> None:
    for name in (b"a\x1b[31mb", b"new\nline", b"not utf-8 \xff"):
        (tmp_path / os.fsdecode(name)).touch()
    result = list_shards(str(tmp_path))
    assert all(entry["name"].isprintable() for entry in result["entries"])
    json.dumps(result).encode("ascii")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, code in {
        "file": "not-a-folder",
        "gone": "not-found",
        "file/x": "not-found",
        "a\0": "not-found",
    }.items():
        with pytest.raises(Refused) as refused:
            list_shards(f"{tmp_path}/{name}")
        assert refused.value.code == code
