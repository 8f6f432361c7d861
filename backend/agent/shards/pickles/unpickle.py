"""A reader of pickles that imports nothing and calls nothing: it follows the opcodes and keeps descriptions.

Whatever a file says, it costs bounded time and memory. Values from the file are never turned into text here:
a structure that shares itself explodes in repr().
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List, Tuple

from backend.agent.shards.pickles import rebuild
from backend.agent.shards.pickles.nodes import Array, EndsEarly, Global, Mapping, Opaque, Storage, Tensor, Unreadable

MAX_WORK = 400_000
"""Opcodes, and what single ones cost more than others. A file of 8,000 tensors stays below; a sample takes 200."""

_OBJECT_WORK = 4
"""Of what makes an object of ours, beside the opcode: a hundred bytes and more each."""

MAX_INT_BYTES = 32
MAX_LINE = 1024
MAX_NAMES = 10_000

_MARK = object()


class Unpickler:
    """Reads one pickle. `position` ends behind its STOP; `names` are those it asks for, `storages` by key."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.position = position
        self.names: Dict[str, Global] = {}
        self.storages: Dict[str, Storage] = {}
        self._data, self._work = data, MAX_WORK
        self._stack: List[Any] = []
        self._memo: Dict[int, Any] = {}

    def load(self) -> Any:
        """Follow the opcodes to STOP and return the root. Raises EndsEarly or Unreadable."""
        data, actions = self._data, _ACTIONS
        while True:
            if self.position >= len(data):
                raise EndsEarly()
            self.spend(1)
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                if len(self._stack) != 1 or self._stack[0] is _MARK:
                    raise _damaged("STOP without one value")
                return self._stack.pop()
            action = actions.get(code)
            if action is None:
                raise _damaged("opcode 0x%02x, which torch.save does not write" % code)
            action(self)

    def spend(self, amount: int) -> None:
        """Charge work. Raises Unreadable where the budget is used up."""
        self._work -= amount
        if self._work < 0:
            raise Unreadable("too-large", "the description of its contents is longer than is read here")

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        end = self.position + size
        if end > len(self._data):
            raise EndsEarly()
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, size: int) -> int:
        """Return the next bytes as an unsigned number."""
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        """Return the text up to the next LF."""
        end = self._data.find(b"\n", self.position, self.position + MAX_LINE)
        if end < 0:
            if len(self._data) - self.position < MAX_LINE:
                raise EndsEarly()
            raise _damaged("a name of over %d bytes" % MAX_LINE)
        text = self._data[self.position : end]
        self.position = end + 1
        return text

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the value on top of the stack."""
        self.top()
        return self._stack.pop()

    def top(self) -> Any:
        """Return the value on top of the stack."""
        if not self._stack or self._stack[-1] is _MARK:
            raise _damaged("an opcode that finds nothing on the stack")
        return self._stack[-1]

    def discard(self) -> None:
        """Take the value or mark on top of the stack."""
        if not self._stack:
            raise _damaged("an opcode that finds nothing on the stack")
        self._stack.pop()

    def since_mark(self) -> List[Any]:
        """Take everything above the last mark, and the mark."""
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise _damaged("an opcode that finds no mark on the stack")

    def last(self, size: int) -> Tuple[Any, ...]:
        """Take the last `size` values."""
        items = [self.pop() for _ in range(size)]
        return tuple(reversed(items))

    def remember(self, number: int) -> None:
        """Keep the value on top of the stack under a number."""
        self._memo[number] = self.top()

    def remember_next(self) -> None:
        """Keep the value on top of the stack under the next number."""
        self.remember(len(self._memo))

    def recall(self, number: int) -> None:
        """Push what was kept under a number."""
        if number not in self._memo:
            raise _damaged("a value that was never kept")
        self.push(self._memo[number])

    def name(self, module: Any, name: Any) -> None:
        """Push a name. It is noted, not imported."""
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > MAX_LINE:
            raise _damaged("a name that is no short text")
        self.spend(_OBJECT_WORK)
        found = Global(rebuild.canonical(module), name)
        if len(self.names) < MAX_NAMES:
            self.names.setdefault(found.full, found)
        self.push(found)

    def call(self, target: Any, args: Any) -> None:
        """Push the description of a call."""
        self.spend(_OBJECT_WORK)
        if not isinstance(target, Global):
            self.push(Opaque("something that is no name", [target, args]))
        elif not isinstance(args, tuple):
            raise _damaged("a call without a tuple of arguments")
        else:
            self.push(rebuild.call(target.full, args, self.spend))

    def persistent(self) -> None:
        """Replace a persistent id by its storage. One storage may be named twice, but with one size."""
        self.spend(_OBJECT_WORK)
        found = rebuild.storage(self.pop())
        if isinstance(found, Storage):
            self._know(found)
            if found.whole is not None:
                self._know(found.whole)
        self.push(found)

    def _know(self, found: Storage) -> None:
        known = self.storages.setdefault(found.key, found)
        if (known.size_bytes, known.start_bytes) != (found.size_bytes, found.start_bytes):
            raise Unreadable("bad-storage", "storage %s is declared with two sizes" % found.key[:20])

    def set_items(self, flat: List[Any]) -> None:
        """Add pairs to the dictionary on top of the stack. torch once wrote past others (CVE-2026-24747)."""
        if len(flat) % 2:
            raise _damaged("a dictionary with half a pair")
        target = self.top()
        if isinstance(target, Mapping):
            target.pairs.extend(zip(flat[::2], flat[1::2]))
        elif isinstance(target, Opaque):
            target.parts.extend(flat[1::2])
        else:
            raise _damaged("items set on something that is no dictionary")

    def extend(self, items: List[Any]) -> None:
        """Add items to the list on top of the stack."""
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Opaque):
            target.parts.extend(items)
        else:
            raise _damaged("items added to something that is no list")

    def build(self) -> None:
        """Attach a state to the object on top of the stack."""
        state = self.pop()
        target = self.top()
        if isinstance(target, Opaque):
            target.parts.append(state)
        elif isinstance(target, Tensor):
            target.extra.append(("attributes", state))
        elif isinstance(target, Array):
            rebuild.fill_array(target, state)


def _damaged(what: str) -> Unreadable:
    return Unreadable("bad-pickle", "its description is not a pickle that torch.save writes: %s" % what)


def _whole(text: bytes) -> int:
    if len(text) > 40:
        raise _damaged("a number of over 40 digits")
    try:
        return int(text.rstrip(b"L"))
    except ValueError:
        raise _damaged("a number that is none") from None


def _text_int(u: Unpickler) -> None:
    text = u.line()
    u.push(text == b"01" if text in (b"00", b"01") else _whole(text))


def _long(u: Unpickler, size: int) -> None:
    if size > MAX_INT_BYTES:
        raise _damaged("a number of %d bytes" % size)
    u.push(int.from_bytes(u.take(size), "little", signed=True))


def _text(u: Unpickler, size: int) -> None:
    u.push(u.take(size).decode("utf-8", "replace"))


def _float_line(u: Unpickler) -> None:
    try:
        u.push(float(u.line()[:60]))
    except ValueError:
        raise _damaged("a number that is none") from None


def _global_lines(u: Unpickler) -> None:
    module, name = u.line(), u.line()
    u.name(module.decode("utf-8", "replace"), name.decode("utf-8", "replace"))


def _stack_global(u: Unpickler) -> None:
    name, module = u.pop(), u.pop()
    u.name(module, name)


def _call(u: Unpickler) -> None:
    args, target = u.pop(), u.pop()
    u.call(target, args)


def _new_with_names(u: Unpickler) -> None:
    named, args, target = u.pop(), u.pop(), u.pop()
    u.push(Opaque(target.full if isinstance(target, Global) else "something that is no name", [args, named]))


def _set_item(u: Unpickler) -> None:
    value, key = u.pop(), u.pop()
    u.set_items([key, value])


def _append(u: Unpickler) -> None:
    value = u.pop()
    u.extend([value])


def _empty_dict(u: Unpickler) -> None:
    u.spend(_OBJECT_WORK)
    u.push(Mapping())


def _new_dict(u: Unpickler) -> None:
    flat = u.since_mark()
    _empty_dict(u)
    u.set_items(flat)


def _empty_list(u: Unpickler) -> None:
    u.spend(1)
    u.push([])


def _protocol(u: Unpickler) -> None:
    version = u.number(1)
    if version > 5:
        raise _damaged("protocol %d" % version)


_ACTIONS: Dict[int, Callable[[Unpickler], Any]] = {
    0x80: _protocol,
    0x95: lambda u: u.take(8),  # FRAME
    ord("("): lambda u: u.push(_MARK),
    ord("0"): lambda u: u.discard(),
    ord("1"): lambda u: u.since_mark(),
    ord("2"): lambda u: u.push(u.top()),
    ord("N"): lambda u: u.push(None),
    0x88: lambda u: u.push(True),
    0x89: lambda u: u.push(False),
    ord("I"): _text_int,
    ord("L"): lambda u: u.push(_whole(u.line())),
    ord("J"): lambda u: u.push(struct.unpack("<i", u.take(4))[0]),
    ord("K"): lambda u: u.push(u.number(1)),
    ord("M"): lambda u: u.push(u.number(2)),
    0x8A: lambda u: _long(u, u.number(1)),
    0x8B: lambda u: _long(u, u.number(4)),
    ord("G"): lambda u: u.push(struct.unpack(">d", u.take(8))[0]),
    ord("F"): _float_line,
    ord("T"): lambda u: u.push(u.take(u.number(4))),
    ord("U"): lambda u: u.push(u.take(u.number(1))),
    ord("B"): lambda u: u.push(u.take(u.number(4))),
    ord("C"): lambda u: u.push(u.take(u.number(1))),
    0x8E: lambda u: u.push(u.take(u.number(8))),
    0x96: lambda u: u.push(u.take(u.number(8))),
    ord("X"): lambda u: _text(u, u.number(4)),
    0x8C: lambda u: _text(u, u.number(1)),
    0x8D: lambda u: _text(u, u.number(8)),
    ord("]"): _empty_list,
    ord("l"): lambda u: u.push(u.since_mark()),
    ord("a"): _append,
    ord("e"): lambda u: u.extend(u.since_mark()),
    ord(")"): lambda u: u.push(()),
    ord("t"): lambda u: u.push(tuple(u.since_mark())),
    0x85: lambda u: u.push(u.last(1)),
    0x86: lambda u: u.push(u.last(2)),
    0x87: lambda u: u.push(u.last(3)),
    ord("}"): _empty_dict,
    ord("d"): _new_dict,
    ord("s"): _set_item,
    ord("u"): lambda u: u.set_items(u.since_mark()),
    0x8F: _empty_list,  # EMPTY_SET
    0x90: lambda u: u.extend(u.since_mark()),
    0x91: lambda u: u.push(u.since_mark()),
    ord("g"): lambda u: u.recall(_whole(u.line())),
    ord("h"): lambda u: u.recall(u.number(1)),
    ord("j"): lambda u: u.recall(u.number(4)),
    ord("p"): lambda u: u.remember(_whole(u.line())),
    ord("q"): lambda u: u.remember(u.number(1)),
    ord("r"): lambda u: u.remember(u.number(4)),
    0x94: lambda u: u.remember_next(),
    ord("c"): _global_lines,
    0x93: _stack_global,
    ord("R"): _call,
    0x81: _call,  # NEWOBJ
    0x92: _new_with_names,
    ord("b"): lambda u: u.build(),
    ord("Q"): lambda u: u.persistent(),
}
"""Refused: PERSID as text, INST, OBJ, EXT1 to 4, out-of-band buffers. torch.save writes none of them."""
