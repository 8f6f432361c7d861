"""Every structure that torch.save writes, in each of its forms, as torch.load reads it back."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest

from backend.agent.shards.show import show
from tests.shardlooks import codes

torch = pytest.importorskip("torch", reason="needs torch in the test environment")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip


def of_dtype(name: str) -> Any:
    raw = torch.arange(48, dtype=torch.uint8)
    return {"x": (raw % 2).bool() if name == "bool" else raw.view(getattr(torch, name))}


def views() -> Any:
    base = torch.arange(120, dtype=torch.float32)
    grid = base.view(6, 20)
    return {
        "slice": grid[1:3], "columns": grid[:, 4:9], "turned": grid.t(), "expanded": torch.ones(1, 4).expand(3, 4),
        "channels": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 8), "grad": torch.ones(3, requires_grad=True), "strided": base[::7],
    }  # fmt: skip


def nested() -> Any:
    deep: Any = torch.ones(2)
    for _ in range(20):
        deep = {"in": [deep]}
    return {"a": [torch.zeros(2), (torch.ones(3), {"b": torch.ones(1)})], "deep": deep, 5: torch.ones(1), None: 1}


def odd() -> Any:
    return {
        "parameter": torch.nn.Parameter(torch.ones(2, 2)), "buffer": torch.nn.Buffer(torch.ones(2)),
        "conj": torch.ones(3, dtype=torch.complex64).conj(), "size": torch.Size([1, 2]), "type": torch.bfloat16,
        "device": torch.device("cpu"), "set": {1, 2}, "frozen": frozenset([3]), "bytes": b"x\x00",
        "array": bytearray(b"y"),
        "complex": 1j, "rng": torch.get_rng_state(),
    }  # fmt: skip


def optimizer() -> Any:
    model = torch.nn.Linear(3, 4)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    return {"model": model.state_dict(), "optimizer": adam.state_dict()}


def made_of_others() -> Any:
    return {
        "coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "meta": torch.empty(3, device="meta"),
        "tensor q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "channel q": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }  # fmt: skip


def with_numpy() -> Any:
    import numpy

    return {"a": numpy.arange(6.0).reshape(2, 3), "s": numpy.float32(3), "t": torch.ones(1)}


STRUCTURES: dict[str, Callable[[], Any]] = {
    "views": views, "nested": nested, "odd": odd, "optimizer": optimizer, "others": made_of_others,
    "numpy": with_numpy, "bare": lambda: torch.ones(2, 3), "empty": dict,
    "shared": lambda: (lambda x: {"a": x, "b": x[1:], "c": [x]})(torch.arange(9)),
    "storage": lambda: {"s": torch.ones(3).untyped_storage(), "t": torch.ones(2)},
    **{name: (lambda name=name: of_dtype(name)) for name in DTYPES},
}  # fmt: skip
FORMS = ("zip", "zip, protocol 4", "zip, protocol 5", "legacy", "legacy, protocol 4", "gzip of zip", "gzip of legacy")


def save(path: Path, value: Any, form: str) -> None:
    protocol = int(form[-1]) if "protocol" in form else 2
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization="legacy" not in form)
    if form.startswith("gzip"):
        path.write_bytes(gzip.compress(path.read_bytes(), 6))


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def flat(value: Any) -> list[Any]:
    """Return the tensors that own or view a storage, in the order in which they were saved."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided and not value.is_nested and not value.is_quantized else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in flat(item)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_shown_is_what_torch_loads(tmp_path: Path, name: str, form: str) -> None:
    path = tmp_path / "data_0.ckpt"
    value = STRUCTURES[name]()
    save(path, value, form)
    result = show(str(path), deep=True)
    assert result["ok"], result["notes"]
    assert set(codes(result)) <= {"shared-storage", "oversized-storage", "two-types", "no-checksum"}, result["notes"]
    whole = tmp_path / "plain.ckpt"
    whole.write_bytes(content(path))
    try:
        tensors = flat(torch.load(whole, weights_only=False))
    except (AttributeError, RuntimeError):
        assert "legacy" in form  # torch 2.13 writes fp8 and nested tensors in this form and cannot read them back
        tensors = flat(value)
    rows = [row for row in result["entries"] if row["storage"] and "." not in row["key"]]
    rows += [row for row in result["entries"] if row["note"] == "meta"]
    found = sorted(
        (row["dtype"], tuple(row["shape"]), tuple(row["stride"])) for row in rows if row["note"] != "quantized"
    )
    assert found == sorted((str(t.dtype)[6:], tuple(t.shape), t.stride()) for t in tensors)
    data = whole.read_bytes()
    for row, tensor in zip(rows, tensors, strict=False):
        if (
            row["note"] in ("", "parameter")
            and row["contiguous"]
            and row["bytes"]
            and row["shape"] == list(tensor.shape)
        ):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[row["offset"] : row["offset"] + row["bytes"]] == raw, row


@pytest.mark.parametrize("alignment", [64, 4096])
def test_alignments_and_the_exact_size_of_a_cut_file(tmp_path: Path, alignment: int) -> None:
    import torch.utils.serialization

    path = tmp_path / "data_0.ckpt"
    with torch.utils.serialization.config.patch({"save.storage_alignment": alignment}):
        torch.save({"a": torch.arange(7), "b": [torch.ones(1000, dtype=torch.bfloat16)]}, path)
    data = path.read_bytes()
    assert show(str(path), deep=True)["notes"] == []
    path.write_bytes(data[:-1])
    assert f"{len(data) - 1} of {len(data)} bytes" in show(str(path))["notes"][0]["text"]


def test_dtensors_subclasses_and_whole_modules_are_shown_without_their_classes(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    path = tmp_path / "data_0.ckpt"
    torch.save({"two": TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)), "net": torch.nn.Linear(3, 4)}, path)
    result = show(str(path))
    assert {tuple(row["shape"]) for row in result["entries"]} == {(2, 3), (4, 3), (4,)}
    assert {note["code"] for note in result["notes"]} == {"unknown-global"}
    assert "torch.nn.modules.linear.Linear" in {note["subject"] for note in result["notes"]}
