"""What a pickle describes, as plain descriptions: nothing here was made by calling what the file names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional, Tuple

from backend.shardfmt.dtypes import ITEM_BYTES, count


class Unreadable(Exception):
    """A stream or file that this reader does not understand or does not accept; the text says why."""

    def __init__(self, code: str, text: str, subject: str = "") -> None:
        super().__init__(text)
        self.code, self.text, self.subject = code, text, subject


class EndsEarly(Unreadable):
    """The bytes ended before the pickle did."""

    def __init__(self) -> None:
        super().__init__("truncated", "the file ends inside its description (data.pkl)")


class Global:
    """A name that the pickle asks for. It is never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @property
    def full(self) -> str:
        """Return module and name."""
        return self.module + "." + self.name


@dataclass(eq=False)
class Storage:
    """A run of elements in the archive; `numel` counts elements of `dtype`.

    Where `whole` is set, it is a part of that storage, `start_bytes` into it: files before torch 0.4.
    """

    key: str
    dtype: str
    numel: int
    device: str
    whole: Optional["Storage"] = None
    start_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Return its size as the pickle states it."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(eq=False)
class Tensor:
    """A view of a storage: `offset` and `stride` count elements.

    `kind` says what it is beside a plain tensor (parameter, sparse, quantized, ...); one that is made of
    other tensors has no storage of its own. `extra` are (name, value) of what is attached to it.
    """

    dtype: str
    shape: Tuple[int, ...]
    stride: Tuple[int, ...] = ()
    offset: int = 0
    storage: Optional[Storage] = None
    kind: str = ""
    extra: List[Tuple[str, Any]] = field(default_factory=list)

    @property
    def item_bytes(self) -> Optional[int]:
        """Return the size of one element, or None for a type that this version does not know."""
        return ITEM_BYTES.get(self.dtype)

    @property
    def size_bytes(self) -> Optional[int]:
        """Return the bytes of all its elements, or None where they cannot be counted."""
        total, item = count(self.shape), self.item_bytes
        return None if total is None or item is None else total * item

    @property
    def contiguous(self) -> bool:
        """Say whether its elements lie in order without gaps."""
        want = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride)):
            if size == 0:
                return True
            if size != 1:
                if step != want:
                    return 0 in self.shape
                want *= size
        return True

    @property
    def end(self) -> int:
        """Return the element of the storage that follows the last one it touches."""
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride)) + 1


@dataclass(eq=False)
class Mapping:
    """A dictionary as its pairs in order: keys may be anything, and anything twice."""

    pairs: List[Tuple[Any, Any]] = field(default_factory=list)
    kind: str = "dict"


@dataclass(eq=False)
class Opaque:
    """An object that loading the file would make by calling `name`. Its parts may hold tensors."""

    name: str
    parts: List[Any] = field(default_factory=list)


@dataclass(eq=False)
class Array:
    """A numpy array or scalar, whose bytes lie in the pickle itself."""

    dtype: str = ""
    shape: Tuple[int, ...] = ()
    held_bytes: int = 0
