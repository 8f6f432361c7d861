"""Peeks and statistics of tensors, counted with numpy and without, against what the values are."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.shards.show import show
from backend.agent.shards.values import statistics, withnumpy, withtorch
from backend.shardfmt.dtypes import ITEM_BYTES
from backend.wire import MAX_LINE_BYTES
from tests.cases import torchfiles as files
from tests.cases.torchfiles import Storage, T

if TYPE_CHECKING:
    from pathlib import Path

FORMS = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
}


@pytest.fixture(params=["numpy", pytest.param("torch", marks=pytest.mark.torch), "plain"])
def counted_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "numpy":
        monkeypatch.setattr(withnumpy, "load", lambda: None)
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="needs torch in the test environment")
        monkeypatch.setattr(withtorch, "load", lambda wanted_bytes: torch)
    return str(request.param)


def packed(dtype: str, values: list[Any]) -> bytes:
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{FORMS[dtype]}", *values)


def told(tmp_path: Path, tensor: T, **how: Any) -> dict[str, Any]:
    path = tmp_path / "data_0.ckpt"
    files.save(path, {"x": tensor})
    result = show(str(path), values=True, **how)
    assert len(json.dumps(result, allow_nan=False)) < MAX_LINE_BYTES
    found: dict[str, Any] = result["statistics"]["tensors"][0]
    return found


def of(dtype: str, values: list[Any], width: int) -> T:
    held = Storage(dtype, len(values), packed(dtype, values))
    return T(dtype, (1, len(values) // width, width), held)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_numbers_that_are_none_are_counted_and_left_out(tmp_path: Path, counted_by: str, dtype: str) -> None:
    nan, inf = math.nan, math.inf
    values = [1.0, -2.0, 3.0, nan, -nan, inf, -inf, -inf, 0.5, -8.0, 0.0, -0.0, 0.0, -0.0, 0.0, 4.0]
    found = told(tmp_path, of(dtype, values, 2))
    assert (found["nan"], found["inf"], found["rows"], found["zero_rows"]) == (2, 3, 8, 2)
    assert (found["min"], found["max"]) == (-8.0, 4.0)
    good = [value for value in values if math.isfinite(value)]
    assert found["mean"] == pytest.approx(sum(good) / len(good))
    assert found["moments_of"] == sum(found["histogram"]["counts"]) == len(good)
    assert (found["first"], found["last"]) == ([1.0, -2.0, 3.0, "nan"], [0.0, -0.0, 0.0, 4.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_all_of_one_sign(tmp_path: Path, counted_by: str, sign: int) -> None:
    found = told(tmp_path, of("bfloat16", [sign * value for value in (2.0, 0.25, 7.0, 3.5)], 2))
    assert sorted([abs(found["min"]), abs(found["max"])]) == [0.25, 7.0]
    assert found["min"] <= found["max"]
    assert found["norm"] == pytest.approx(math.sqrt(4 + 0.0625 + 49 + 12.25))


def test_nothing_but_nan(tmp_path: Path, counted_by: str) -> None:
    found = told(tmp_path, of("bfloat16", [math.nan] * 4, 2))
    assert (found["nan"], found["min"], found["max"], found["mean"], found["histogram"]) == (4, None, None, None, None)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8", "uint16"])
def test_whole_numbers(tmp_path: Path, counted_by: str, dtype: str) -> None:
    low = 0 if dtype.startswith("u") else -100
    found = told(tmp_path, of(dtype, [low, 5, 0, 0, 0, 0, 90, 7], 2))
    assert (found["min"], found["max"], found["zero_rows"]) == (low, 90, 2)
    assert found["mean"] == pytest.approx((low + 102) / 8)
    assert found["first"] == [low, 5, 0, 0]


def test_more_of_64_bits_than_a_float_holds(tmp_path: Path, counted_by: str) -> None:
    found = told(tmp_path, of("int64", [(1 << 62) + 1, -(1 << 62) - 1], 2))
    assert (found["min"], found["max"]) == (-(1 << 62) - 1, (1 << 62) + 1)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_each_eight_bit_word_is_what_torch_says(tmp_path: Path, counted_by: str, name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch in the test environment")
    wide = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float64)
    found = told(tmp_path, T(name, (32, 8), Storage(name, 256, bytes(range(256)))))
    good = wide[torch.isfinite(wide)]
    assert (found["nan"], found["inf"]) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert (found["min"], found["max"]) == (float(good.min()), float(good.max()))
    assert found["mean"] == pytest.approx(float(good.mean()))


def test_views_are_counted_by_their_own_elements(tmp_path: Path, counted_by: str) -> None:
    values = [float(number) for number in range(60)]
    held = Storage("float32", 60, packed("float32", values))
    columns = told(tmp_path, T("float32", (3, 5), held, 4, (20, 1)))
    wanted = [float(20 * row + column) for row in range(3) for column in range(4, 9)]
    assert (columns["min"], columns["max"], columns["rows"]) == (4.0, 48.0, 3)
    assert columns["mean"] == pytest.approx(sum(wanted) / 15)
    assert (columns["first"], columns["last"]) == ([4.0, 5.0, 6.0, 7.0], [45.0, 46.0, 47.0, 48.0])
    turned = told(tmp_path, T("float32", (20, 3), held, 0, (1, 20)))
    assert (turned["first"], turned["mean"], turned["rows"]) == ([0.0, 20.0, 40.0, 1.0], pytest.approx(29.5), 0)
    every = told(tmp_path, T("float32", (9,), held, 0, (7,)))
    assert (every["max"], every["read_bytes"]) == (56.0, 36)
    expanded = told(tmp_path, T("float32", (1 << 40, 2), held, 0, (0, 1)))
    assert (expanded["read_bytes"], expanded["max"]) == (8, 1.0)
    overlapping = told(tmp_path, T("float32", (30, 20), held, 0, (1, 1)), all_values=True)
    assert (overlapping["read_bytes"], overlapping["max"]) == (196, 48.0)


def test_a_sample_reads_both_ends_and_all_reads_everything(
    tmp_path: Path, counted_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "SAMPLE_BYTES", dict.fromkeys(("numpy", "torch", "plain"), 64 << 10))
    values = [1.0] * (500 * 1000)
    values[0], values[-1], values[123_456] = 9.0, -9.0, math.nan
    tensor = of("bfloat16", values, 1000)
    sampled = told(tmp_path, tensor)
    assert (sampled["min"], sampled["max"]) == (-9.0, 9.0)
    assert 60_000 <= sampled["read_bytes"] <= 64 << 10
    whole = told(tmp_path, tensor, all_values=True)
    assert (whole["nan"], whole["read_bytes"], whole["rows"]) == (1, 1_000_000, 500)


def test_values_of_a_gzipped_sample_and_of_a_pattern(tmp_path: Path, counted_by: str) -> None:
    import gzip

    path = tmp_path / "data_0.ckpt"
    files.save(path, {"ids": of("int64", list(range(50_000)), 1), "state": of("bfloat16", [0.5, 2.0], 2)})
    path.write_bytes(gzip.compress(path.read_bytes()))
    found = show(str(path), values=True, only="st*")["statistics"]
    assert [tensor["key"] for tensor in found["tensors"]] == ["state"]
    assert found["tensors"][0]["last"] == [] and found["tensors"][0]["first"] == [0.5, 2.0]
    assert show(str(path), values=True)["statistics"]["tensors"][0]["max"] == 49_999


def test_what_cannot_be_counted_says_why(tmp_path: Path, counted_by: str) -> None:
    path = tmp_path / "data_0.ckpt"
    files.save(path, {"x": T("bfloat16", (4, 1000)), "y": T("float4_e2m1fn_x2", (8,))})
    data = path.read_bytes()
    path.write_bytes(data[:3000])
    first, second = show(str(path), values=True)["statistics"]["tensors"]
    assert first["problem"] == "not all of its bytes are there"
    assert second["problem"] == "values of this type are not known here"


def test_torch_is_started_only_for_much(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(name: str) -> None:
        started.append(name)
        raise OSError("a library of it is missing")

    monkeypatch.setattr(withtorch.importlib, "import_module", start)
    monkeypatch.setattr(withtorch.importlib.util, "find_spec", lambda name: object())
    assert withtorch.load(withtorch.WORTH_BYTES - 1) is None and not started
    assert withtorch.load(withtorch.WORTH_BYTES) is None and started == ["torch"]


def test_statistics_of_many_tensors_fit_one_message(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    files.save(path, {f"layers.{number}.weight": T("bfloat16", (4, 4)) for number in range(2500)})
    result = show(str(path), values=True)
    assert len(json.dumps(result)) < MAX_LINE_BYTES
    assert result["statistics"]["left_out"] > 0
    assert len(result["statistics"]["tensors"]) > 20
    assert ITEM_BYTES["bfloat16"] * 16 == result["statistics"]["tensors"][0]["read_bytes"]
