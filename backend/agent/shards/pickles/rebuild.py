"""What the names in a torch pickle stand for: those that are understood, each turned into a description.

A name that is not on the list makes an Opaque, so the list is a matter of what can be shown, never of safety.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, Tuple

from backend.agent.shards.pickles.nodes import Array, Global, Mapping, Opaque, Storage, Tensor, Unreadable
from backend.shardfmt.dtypes import ITEM_BYTES, MAX_COUNT, NUMPY_TYPES, STORAGE_CLASSES

MAX_DIMENSIONS = 64
"""More than torch or numpy accept; a longer shape is no shape."""

STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")

Spend = Callable[[int], None]


def sizes(value: Any, what: str) -> Tuple[int, ...]:
    """Read a shape or strides. Raises Unreadable for anything that is not a short tuple of counts."""
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMENSIONS:
        raise Unreadable("bad-tensor", "a tensor's %s is not a tuple of at most %d numbers" % (what, MAX_DIMENSIONS))
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_COUNT:
            raise Unreadable("bad-tensor", "a tensor's %s holds something that is no count" % what)
    return tuple(value)


def storage(value: Any) -> Any:
    """Read a persistent id: ("storage", class, key, device, elements[, view]). Others are opaque.

    Files before 1.6 may name a part of a storage by (key, offset, elements), and a class by ("module", ...).
    """
    if isinstance(value, tuple) and len(value) > 1 and value[0] == "module" and isinstance(value[1], Global):
        return value[1]
    if not isinstance(value, tuple) or len(value) < 5 or value[0] != "storage":
        return Opaque("a persistent id", [value])
    kind, key, device, numel = value[1:5]
    if not isinstance(kind, Global) or kind.module not in STORAGE_MODULES or kind.name not in STORAGE_CLASSES:
        raise Unreadable("bad-storage", "a storage of a class that torch has not")
    if not isinstance(key, str) or not isinstance(device, str) or len(key) > 100 or len(device) > 100:
        raise Unreadable("bad-storage", "a storage whose key or device is not short text")
    found = Storage(key, STORAGE_CLASSES[kind.name], sizes((numel,), "storage size")[0], device)
    if len(value) > 5 and value[5] is not None:
        return _storage_part(found, value[5])
    return found


def _storage_part(whole: Storage, view: Any) -> Storage:
    if not isinstance(view, (tuple, list)) or len(view) != 3 or not isinstance(view[0], str) or len(view[0]) > 100:
        raise Unreadable("bad-storage", "a storage whose view is not (key, offset, elements)")
    offset, numel = sizes(view[1:], "storage view")
    if offset + numel > whole.numel:
        raise Unreadable("bad-storage", "a part of storage %s that reaches beyond it" % whole.key[:20])
    return Storage(view[0], whole.dtype, numel, whole.device, whole, offset * ITEM_BYTES[whole.dtype])


def call(name: str, args: Tuple[Any, ...], spend: Spend) -> Any:
    """Describe the call of a name. `spend` charges what grows with the arguments to the budget."""
    maker = _MAKERS.get(name)
    if maker is None:
        return Opaque(name, list(args[:MAX_DIMENSIONS]))
    try:
        return maker(args, spend)
    except (IndexError, ValueError, TypeError):
        raise Unreadable("bad-tensor", "%s is called with other arguments than torch gives it" % name) from None


def _tensor(args: Tuple[Any, ...], _spend: Spend) -> Tensor:
    """Read _rebuild_tensor and _rebuild_tensor_v2: (storage, offset, size, stride, grad, hooks, metadata)."""
    held, offset, shape, stride = args[:4]
    if not isinstance(held, Storage):
        raise Unreadable("bad-tensor", "a tensor that is made of no storage")
    made = Tensor(held.dtype, sizes(shape, "shape"), sizes(stride, "stride"), sizes((offset,), "offset")[0], held)
    if len(made.shape) != len(made.stride):
        raise Unreadable("bad-tensor", "a tensor with %d sizes and %d strides" % (len(made.shape), len(made.stride)))
    if len(args) > 6 and isinstance(args[6], Mapping):
        made.kind = " ".join(
            str(name) for name, value in args[6].pairs[:4] if value is True and name in ("conj", "neg")
        )
    return made


def _tensor_v3(args: Tuple[Any, ...], spend: Spend) -> Tensor:
    """Read _rebuild_tensor_v3: as v2, then the type, for storages that have none (fp8)."""
    made = _tensor(args[:6], spend)
    made.dtype = _type(args[6])
    return made


def _type(value: Any) -> str:
    if not isinstance(value, Global) or value.module != "torch":
        raise Unreadable("bad-tensor", "a tensor whose type is no torch type")
    return value.name[:40]


def _copy(data: Tensor, kind: str) -> Tensor:
    return Tensor(data.dtype, data.shape, data.stride, data.offset, data.storage, kind, list(data.extra))


def _parameter(args: Tuple[Any, ...], _spend: Spend) -> Any:
    """Read _rebuild_parameter(_with_state): (data, requires_grad, hooks, state)."""
    data = args[0]
    if isinstance(data, Tensor):
        data = _copy(data, "parameter")
        data.extra += [("attributes", state) for state in args[3:4]]
    return data


def _quantized(args: Tuple[Any, ...], spend: Spend) -> Tensor:
    """Read _rebuild_qtensor: (storage, offset, size, stride, (scheme, scale, zero point, ...), ...)."""
    made = _tensor(args[:4], spend)
    made.kind = "quantized"
    if isinstance(args[4], tuple):
        made.extra = [("qparam%d" % n, part) for n, part in enumerate(args[4][:6])]
    return made


def _sparse(args: Tuple[Any, ...], _spend: Spend) -> Any:
    """Read _rebuild_sparse_tensor and _csr_tensor: (layout, (indices, values, size)), with one index more for CSR."""
    data = args[1]
    coo = len(data) < 4 or not isinstance(data[2], Tensor)
    names = ("indices", "values", "size") if coo else ("compressed_indices", "plain_indices", "values", "size")
    held = dict(zip(names, data))
    values = held["values"]
    if not isinstance(values, Tensor):
        raise Unreadable("bad-tensor", "a sparse tensor without values")
    parts = [(name, part) for name, part in held.items() if isinstance(part, Tensor)]
    return Tensor(values.dtype, sizes(held["size"], "shape"), kind="sparse", extra=parts)


def _nested(args: Tuple[Any, ...], _spend: Spend) -> Any:
    """Read _rebuild_nested_tensor: (buffer, sizes, strides, offsets)."""
    if not isinstance(args[0], Tensor):
        raise Unreadable("bad-tensor", "a nested tensor without a buffer")
    parts = list(zip(("buffer", "sizes", "strides", "offsets"), args))
    return Tensor(args[0].dtype, args[0].shape, kind="nested", extra=parts)


def _meta(args: Tuple[Any, ...], _spend: Spend) -> Tensor:
    """Read _rebuild_meta_tensor_no_storage: (type, size, stride, grad). It has no values."""
    return Tensor(_type(args[0]), sizes(args[1], "shape"), sizes(args[2], "stride"), kind="meta")


def _wrapper(args: Tuple[Any, ...], _spend: Spend) -> Tensor:
    """Read _rebuild_wrapper_subclass: (class, type, size, stride, ...). What it wraps is in its state."""
    return Tensor(_type(args[1]), sizes(args[2], "shape"), sizes(args[3], "stride"), kind=_class_kind(args[0]))


def _class_kind(value: Any) -> str:
    plain = not isinstance(value, Global) or value.full == "torch.Tensor"
    return "" if plain else "parameter" if value.name == "Parameter" else "a %s" % value.full[:120]


def _from_type(args: Tuple[Any, ...], spend: Spend) -> Any:
    """Read _rebuild_from_type(_v2): (function, class, its arguments, state)."""
    function, kind, inner, state = args[:4]
    made = call(function.full, inner, spend) if isinstance(function, Global) and isinstance(inner, tuple) else None
    if not isinstance(made, Tensor):
        return Opaque(kind.full if isinstance(kind, Global) else "something that is no name", list(args[2:4]))
    made.kind = made.kind or _class_kind(kind)
    made.extra.append(("attributes", state))
    return made


def _device_tensor(args: Tuple[Any, ...], _spend: Spend) -> Any:
    """Read _rebuild_device_tensor_from_cpu_tensor and _from_numpy: (data, type, device, grad)."""
    data = args[0]
    return _copy(data, data.kind or "on another device") if isinstance(data, Tensor) else data


def _array_type(value: Any) -> Tuple[str, int]:
    """Return the name and item size of numpy.dtype(code), or its code and 0."""
    if isinstance(value, Opaque) and value.name == "numpy.dtype" and value.parts and isinstance(value.parts[0], str):
        code = value.parts[0].lstrip("<>=|")[:40]
        name = NUMPY_TYPES.get(code, code)
        return name, ITEM_BYTES.get(name, 0)
    return "unknown", 0


def fill_array(made: Array, state: Any) -> None:
    """Take an array's state: (version, shape, type, whether in Fortran's order, bytes)."""
    if isinstance(state, tuple) and len(state) == 5 and isinstance(state[4], (bytes, list)):
        made.dtype, made.shape = _array_type(state[2])[0], sizes(state[1], "shape")
        made.held_bytes = len(state[4])


def _array_bytes(args: Tuple[Any, ...], _spend: Spend) -> Array:
    """Read numpy's _frombuffer: (bytes, type, shape, order)."""
    return Array(_array_type(args[1])[0], sizes(args[2], "shape"), len(args[0]))


def _array_scalar(args: Tuple[Any, ...], _spend: Spend) -> Array:
    """Read numpy's scalar: (type, bytes)."""
    held = args[1] if len(args) > 1 else b""
    return Array(_array_type(args[0])[0], (), len(held) if isinstance(held, bytes) else 0)


def _mapping(kind: str) -> Callable[[Tuple[Any, ...], Spend], Any]:
    def make(args: Tuple[Any, ...], spend: Spend) -> Mapping:
        items = args[0] if args else ()
        pairs: List[Tuple[Any, Any]] = []
        if isinstance(items, Mapping):
            spend(len(items.pairs))
            pairs = list(items.pairs)
        elif isinstance(items, (list, tuple)):
            spend(len(items))
            pairs = [(pair[0], pair[1]) for pair in items if isinstance(pair, (list, tuple)) and len(pair) == 2]
        return Mapping(pairs, kind)

    return make


def _size(args: Tuple[Any, ...], _spend: Spend) -> Any:
    return sizes(args[0], "size")


def _bytes(args: Tuple[Any, ...], spend: Spend) -> Any:
    """Read _codecs.encode(text, "latin1"): how protocol 2 writes bytes."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        spend(len(args[0]) // 64)
        return args[0].encode("latin-1", "replace")
    return Opaque("_codecs.encode", list(args[:2]))


def _collection(args: Tuple[Any, ...], spend: Spend) -> Any:
    """Read set(items) and frozenset(items): their order means nothing."""
    items = args[0] if args else []
    if not isinstance(items, (list, tuple)):
        return Opaque("builtins.set", [items])
    spend(len(items))
    return list(items)


def _byte_array(args: Tuple[Any, ...], _spend: Spend) -> Any:
    return args[0] if args and isinstance(args[0], bytes) else Opaque("builtins.bytearray", list(args[:1]))


_MAKERS: Dict[str, Callable[[Tuple[Any, ...], Spend], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _device_tensor,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "collections.OrderedDict": _mapping("OrderedDict"),
    "collections.Counter": _mapping("Counter"),
    "collections.defaultdict": lambda args, spend: Mapping([], "defaultdict"),
    "_codecs.encode": _bytes,
    "builtins.set": _collection,
    "builtins.frozenset": _collection,
    "builtins.bytearray": _byte_array,
    "numpy.core.multiarray._reconstruct": lambda args, spend: Array(),
    "numpy.core.multiarray.scalar": _array_scalar,
    "numpy.core.numeric._frombuffer": _array_bytes,
}
_RENAMED = {
    "__builtin__": "builtins",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}
"""Modules that are called otherwise in other versions."""

_DISTRIBUTED = "torch.distributed."
_ORDINARY: FrozenSet[str] = frozenset(
    ["torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
    + ["torch.serialization._get_layout", "builtins.complex", "numpy.ndarray", "numpy.dtype"]
    + ["torch.per_tensor_affine", "torch.per_tensor_symmetric", "torch.per_channel_affine"]
    + ["torch.per_channel_symmetric", "torch.per_channel_affine_float_qparams"]
    + [_DISTRIBUTED + "tensor.DTensor", _DISTRIBUTED + "tensor._dtensor_spec.DTensorSpec"]
    + [_DISTRIBUTED + "tensor._dtensor_spec.TensorMeta", _DISTRIBUTED + "tensor._dtensor_spec.ShardOrderEntry"]
    + [_DISTRIBUTED + "tensor.placement_types." + name for name in ("Shard", "Replicate", "Partial")]
    + [_DISTRIBUTED + "device_mesh.DeviceMesh", _DISTRIBUTED + "_mesh_layout._MeshLayout"]
    + [_DISTRIBUTED + "_mesh_layout._FlatLayout"]
)
"""Names of tensor files that are shown as objects (facts: shards, section 2)."""


def canonical(module: str) -> str:
    """Return a module's name as the lists here have it."""
    return _RENAMED.get(module, module)


def understood(name: Global) -> bool:
    """Say whether a name is one that a file of tensors ordinarily holds."""
    if name.full in _MAKERS or name.full in _ORDINARY:
        return True
    if name.module in STORAGE_MODULES and name.name in STORAGE_CLASSES:
        return True
    return name.module == "torch" and name.name in ITEM_BYTES
