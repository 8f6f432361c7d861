"""What the names in a torch pickle stand for: those that are understood, each turned into a description.

A name that is not on the list makes an Opaque, so the list is a matter of what can be shown, never of safety.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

from backend.agent.shards.nodes import Global, Mapping, Opaque, Storage, Tensor, Unreadable
from backend.shardfmt.dtypes import ITEM_BYTES, MAX_COUNT, STORAGE_CLASSES

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
    """Read a persistent id: ("storage", class, key, device, elements). Others are opaque."""
    if not isinstance(value, tuple) or len(value) < 5 or value[0] != "storage":
        return Opaque("a persistent id", [value])
    kind, key, device, numel = value[1:5]
    if not isinstance(kind, Global) or kind.module not in STORAGE_MODULES or kind.name not in STORAGE_CLASSES:
        raise Unreadable("bad-storage", "a storage of a class that torch has not")
    if not isinstance(key, str) or not isinstance(device, str) or len(key) > 100 or len(device) > 100:
        raise Unreadable("bad-storage", "a storage whose key or device is not short text")
    return Storage(key, STORAGE_CLASSES[kind.name], sizes((numel,), "storage size")[0], device)


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
    """Read _rebuild_tensor and _rebuild_tensor_v2: (storage, offset, size, stride, ...)."""
    held, offset, shape, stride = args[:4]
    if not isinstance(held, Storage):
        raise Unreadable("bad-tensor", "a tensor that is made of no storage")
    made = Tensor(held.dtype, sizes(shape, "shape"), sizes(stride, "stride"), sizes((offset,), "offset")[0], held)
    if len(made.shape) != len(made.stride):
        raise Unreadable("bad-tensor", "a tensor with %d sizes and %d strides" % (len(made.shape), len(made.stride)))
    return made


def _tensor_v3(args: Tuple[Any, ...], spend: Spend) -> Tensor:
    """Read _rebuild_tensor_v3: as v2, then the type, for storages that have none (fp8)."""
    made, dtype = _tensor(args, spend), args[6]
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise Unreadable("bad-tensor", "a tensor whose type is no torch type")
    made.dtype = dtype.name[:40]
    return made


def _parameter(args: Tuple[Any, ...], _spend: Spend) -> Any:
    """Read _rebuild_parameter(_with_state): (data, requires_grad, hooks, state)."""
    data = args[0]
    if isinstance(data, Tensor):
        data = Tensor(data.dtype, data.shape, data.stride, data.offset, data.storage, True, data.extra)
        data.extra = data.extra + list(args[3:4])
    return data


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


_MAKERS: Dict[str, Callable[[Tuple[Any, ...], Spend], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": _size,
    "collections.OrderedDict": _mapping("OrderedDict"),
    "collections.Counter": _mapping("Counter"),
    "collections.defaultdict": lambda args, spend: Mapping([], "defaultdict"),
    "_codecs.encode": _bytes,
}


def understood(name: Global) -> bool:
    """Say whether a name is one that a file of tensors ordinarily holds."""
    if name.full in _MAKERS:
        return True
    if name.module in STORAGE_MODULES and name.name in STORAGE_CLASSES:
        return True
    return name.module == "torch" and (name.name in ITEM_BYTES or name.name in ("device", "Size"))
