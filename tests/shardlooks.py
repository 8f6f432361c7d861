"""Looking at shards in tests: write a structure, show it, find a row or a code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.agent.shards.show import show
from tests.cases import torchfiles as files
from tests.cases.torchfiles import T

if TYPE_CHECKING:
    from pathlib import Path

H, L = 8, 5


def sample(**more: Any) -> dict[str, Any]:
    return {"input_ids": T("int64", (L,)), "loss_mask": T("int64", (L,)), **more}


def shown(tmp_path: Path, value: Any, name: str = "data_0.ckpt", **how: Any) -> dict[str, Any]:
    files.save(tmp_path / name, value, **how)
    return show(str(tmp_path / name))


def row(result: dict[str, Any], key: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in result["entries"] if entry["key"] == key)
    return found


def codes(result: dict[str, Any], *levels: str) -> list[str]:
    return [note["code"] for note in result["notes"] if not levels or note["level"] in levels]


def bytes_at(path: Path, entry: dict[str, Any]) -> bytes:
    with path.open("rb") as file:
        file.seek(entry["offset"])
        return file.read(entry["bytes"])
