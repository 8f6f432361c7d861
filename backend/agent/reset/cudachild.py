"""The child of a CUDA test: one GPU from cuInit to the end of its context, by the driver's own library.

It sees one GPU alone (CUDA_VISIBLE_DEVICES) and writes a JSON line as each step ends: {step, s}, with {code, name} of
the driver's error or {text} where a step failed, which is then the last. Whoever started it tells a hang or a crash
by the step that is missing. It takes no torch, no compiler and no file of the toolkit: the kernel is text, which the
driver compiles for the GPU that it finds.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from array import array
from typing import Any, Callable, Dict, Iterator, List, Tuple

from backend.agent import ours
from backend.agent.driverloop import die_with

STEPS = ("load", "init", "device", "context", "allocate", "set", "read back", "compile", "kernel", "free", "end")
"""In this order; the first one that is not said to have ended is the one that failed, hangs or crashed."""

LIBRARY_MISSING = -1
"""The code of a `load` that found no library: no error of CUDA's, which are positive."""

WANTED_BYTES, PIECE_BYTES = 256 << 20, 64 << 10
PATTERN, FACTOR, WORD = 0xA5C3F10E, 0x9E3779B1, 0xFFFFFFFF
THREADS = 256

KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry stamp(.param .u64 words, .param .u32 count)
{
    .reg .pred %past;
    .reg .b32 %n<8>;
    .reg .b64 %at<4>;
    ld.param.u64 %at1, [words];
    ld.param.u32 %n1, [count];
    mov.u32 %n2, %ctaid.x;
    mov.u32 %n3, %ntid.x;
    mov.u32 %n4, %tid.x;
    mad.lo.u32 %n5, %n2, %n3, %n4;
    setp.ge.u32 %past, %n5, %n1;
    @%past bra over;
    cvta.to.global.u64 %at1, %at1;
    mul.wide.u32 %at2, %n5, 4;
    add.u64 %at3, %at1, %at2;
    ld.global.u32 %n6, [%at3];
    xor.b32 %n6, %n6, %n5;
    mul.lo.u32 %n6, %n6, 0x9E3779B1;
    st.global.u32 [%at3], %n6;
over:
    ret;
}
"""
"""Every word becomes (word xor its number) * FACTOR. PTX 6.0 is taken by every driver since 384 (CUDA 9), and what is
written for sm_50 is compiled for every later GPU; ptxas 13.0 takes it for sm_75 to sm_120."""


class Failed(Exception):
    """A step failed: the driver's code (0 where CUDA saw no error), and what was wrong in words."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


def main(library: str, parent: int) -> int:
    """Run the test of the one GPU that CUDA may see, and say how each step went. Returns 0 where all passed."""
    die_with(parent)
    mark = ours.register("cuda test")
    try:
        return 0 if _Gpu(library).run() else 1
    finally:
        ours.forget(mark)


def stamped(first: int, count: int) -> array[int]:
    """Return what the kernel leaves in `count` words from the word of number `first`."""
    return array("I", [((PATTERN ^ number) * FACTOR) & WORD for number in range(first, first + count)])


class _Gpu:
    """The steps, each a method; what one makes the next ones use."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._cuda: Any = None
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._words, self._count = ctypes.c_uint64(), 0

    def run(self) -> bool:
        """Take the steps in order. Returns whether all passed; after one that failed nothing more is asked."""
        for step, work in zip(STEPS, self._work()):
            began = time.monotonic()
            said: Dict[str, Any] = {"step": step}
            try:
                work()
            except Failed as failure:
                said.update(code=failure.code, name=self._name(failure.code), text=failure.text)
            said["s"] = round(time.monotonic() - began, 4)
            os.write(1, json.dumps(said).encode("ascii") + b"\n")
            if "code" in said:
                return False
        return True

    def _work(self) -> List[Callable[[], None]]:
        return [
            self._load, lambda: self._ask("cuInit", 0), self._find, self._enter, self._allocate, self._set,
            lambda: self._compare(lambda first, count: array("I", [PATTERN]) * count), self._compile, self._launch,
            self._free, lambda: self._ask("cuCtxDestroy_v2", self._context),
        ]  # fmt: skip

    def _ask(self, function: str, *arguments: Any) -> None:
        """Call the driver. Raises Failed with its code where it is not success, or lacks the function."""
        try:
            call = getattr(self._cuda, function)
        except AttributeError:
            raise Failed(LIBRARY_MISSING, "%s has no %s" % (self._library, function)) from None
        code = int(call(*arguments))
        if code:
            raise Failed(code, function)

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        known = code > 0 and self._cuda.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
        return name.value.decode("ascii", "replace") if known and name.value else ""

    def _load(self) -> None:
        try:
            self._cuda = ctypes.CDLL(self._library)
        except OSError as error:
            raise Failed(LIBRARY_MISSING, str(error)) from None

    def _find(self) -> None:
        count = ctypes.c_int()
        self._ask("cuDeviceGetCount", ctypes.byref(count))
        if count.value != 1:
            raise Failed(0, "CUDA shows %d GPUs under this UUID, not one" % count.value)
        self._ask("cuDeviceGet", ctypes.byref(self._device), 0)

    def _enter(self) -> None:
        self._ask("cuCtxCreate_v2", ctypes.byref(self._context), 0, self._device)

    def _allocate(self) -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        size = max(3 * PIECE_BYTES, min(WANTED_BYTES, free.value // 2 & ~0xFFFF))
        self._ask("cuMemAlloc_v2", ctypes.byref(self._words), ctypes.c_size_t(size))
        self._count = size // 4

    def _set(self) -> None:
        self._ask("cuMemsetD32_v2", self._words, ctypes.c_uint(PATTERN), ctypes.c_size_t(self._count))
        self._ask("cuCtxSynchronize")

    def _compile(self) -> None:
        self._ask("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(KERNEL))
        self._ask("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, b"stamp")

    def _launch(self) -> None:
        words, count = ctypes.c_uint64(self._words.value), ctypes.c_uint(self._count)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(words), ctypes.addressof(count))
        blocks = (self._count + THREADS - 1) // THREADS
        self._ask("cuLaunchKernel", self._kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, arguments, None)
        self._ask("cuCtxSynchronize")
        self._compare(stamped)

    def _free(self) -> None:
        self._ask("cuModuleUnload", self._module)
        self._ask("cuMemFree_v2", self._words)

    def _compare(self, expected: Callable[[int, int], array[int]]) -> None:
        """Copy head, middle and tail to the host. Raises Failed naming the first word that is not as it should be."""
        for first, count in self._pieces():
            got = array("I", bytes(4 * count))
            at = ctypes.c_uint64(self._words.value + 4 * first)
            self._ask("cuMemcpyDtoH_v2", ctypes.c_void_p(got.buffer_info()[0]), at, ctypes.c_size_t(4 * count))
            want = expected(first, count)
            if got != want:
                wrong = [number for number in range(count) if got[number] != want[number]]
                at_byte, one = 4 * (first + wrong[0]), wrong[0]
                text = "%d of %d words read back are wrong: at byte %d stands 0x%08x, not 0x%08x"
                raise Failed(0, text % (len(wrong), count, at_byte, got[one], want[one]))

    def _pieces(self) -> Iterator[Tuple[int, int]]:
        count = PIECE_BYTES // 4
        for first in (0, (self._count - count) // 2, self._count - count):
            yield first, count
