"""The hook itself: which rows of a forward pass belong to which request."""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import json
import os
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .config import NAME, Config, Counters, Refused, words
from .folder import Folder, replace
from .sink import Form, Rows, Sink
from .writer import CLOSE_S
from .writing import Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from .folder import Request

REPORT_EVERY_S = 0.5
LOOK_IN_A_PASS_S = 0.05
"""How old what is known of the folder may be in a pass: looking takes its time from the server's own thread."""

FIRST_PASS = "the server's first pass only begins the capture; send it again"
NO_STATES = {
    "model": "the layer stack returned no captured states",
    "logits": "the logits processor returned no states: is --enable-return-aux-hidden-states on?",
}


class _Rows(NamedTuple):
    """One request's rows in a pass: from `row` of the pass, from `prefix` of its prompt."""

    rid: str
    row: int
    rows: int
    prefix: int


class _Pass:
    """One forward pass: collects neighbouring rows into pieces of at most a slot's size."""

    def __init__(self, sink: Sink, folder: Folder, sources: list[Any], deadline: float) -> None:
        self.deadline = deadline
        self._sink, self._folder, self._sources = sink, folder, sources
        self._parts: list[Part] = []
        self._requests: list[Request] = []
        self._first = self._rows = 0

    def add(self, request: Request, file_row: int, row: int, rows: int) -> None:
        """Take `rows` rows of the pass for a request."""
        while rows:
            if self._rows and (row != self._first + self._rows or self._rows == self._sink.slot_rows):
                self.flush()
            if not self._rows:
                self._first = row
            taken = min(rows, self._sink.slot_rows - self._rows)
            self._parts.append(Part(request.number, request.rid, request.tokens, file_row, self._rows, taken))
            self._requests.append(request)
            self._rows += taken
            file_row, row, rows = file_row + taken, row + taken, rows - taken

    def flush(self) -> None:
        """Hand over what is collected; where that fails, its requests fail."""
        parts, requests, first, end = self._parts, self._requests, self._first, self._first + self._rows
        self._parts, self._requests, self._rows = [], [], 0
        if not parts:
            return
        try:
            ids, aux, last = self._sources
            rows = [point[first:end] for point in aux]
            self._sink.send(parts, Rows(ids[first:end], rows, last[first:end]), self.deadline)
        except Exception as problem:
            for request in requests:
                self._folder.fail(request.rid, words(problem), request)


class Capture:
    """The hook of one rank. SGLang calls it as hook(module, args, output); it may replace the output."""

    def __init__(self, config: Config, rank: int, writes: bool) -> None:
        """Prepare the folder. Raises OSError or ValueError, which ends the server's start."""
        versions = {"torch": str(torch.__version__), "sglang": _version("sglang")}
        self.counters = Counters(config.run, rank, writes, config.adapter, list(config.points), versions=versions)
        self._config, self._writes = config, writes
        self._prefix = config.run + "-"
        self._folder = Folder(config, self.counters)
        self._sink: Sink | None = None
        self._sinkless = ""
        self._asked = False
        if writes:
            self._folder.clear()
        self.report()
        self._ended = threading.Event()
        self._reporter = threading.Thread(target=self._report_all, name="eightzeros-report", daemon=True)
        self._reporter.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the threads and remove what this run has left in the folder, but for the counters. Raises OSError."""
        atexit.unregister(self.close)
        self._ended.set()
        self._reporter.join(CLOSE_S)
        if self._sink is not None:
            self._sink.close()
        if self._writes:
            self._folder.clear()
        self.report()

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        """See a module's output. Never raises; returns what the caller expects, or None: unchanged."""
        stack = hasattr(module, "layers_to_capture")
        if self._config.adapter == "logits":
            self._quietly(self._see_layers if stack else self._see_logits, module, args, output)
            return None
        if not stack:
            return None
        captured = self._asked and isinstance(output, tuple) and len(output) == 2
        last, aux = output if captured else (output, None)
        self._quietly(self._see_stack, module, args, aux, last)
        return last if captured else None

    def _see_stack(self, module: Any, args: Any, aux: Any, last: Any) -> None:
        trouble = NO_STATES["model"]
        if not self._asked:
            trouble = self._ask(module)
            self._see_layers(module)
            self.counters.error = "" if self._asked else trouble
        self._see(args, aux, last, trouble)

    def _ask(self, module: Any) -> str:
        """Have the layer stack capture our points from the next pass on; say why this pass has none."""
        points, layers, now = list(self._config.points), len(module.layers), list(module.layers_to_capture)
        if now:  # then it also expects them from the stack, and would die of a hook that takes them away
            return f"the server itself captures the layers {now} already: the adapter should be logits"
        if points[0] < 1 or points[-1] >= layers:
            return f"the points {points} must lie within 1 to {layers - 1}: the model has {layers} layers"
        module.layers_to_capture = points
        self._asked = True
        return FIRST_PASS

    def _see_layers(self, module: Any, *_: Any) -> None:
        self.counters.effective_layers = sorted(int(layer) for layer in module.layers_to_capture)

    def _see_logits(self, _module: Any, args: Any, output: Any) -> None:
        aux, last = getattr(output, "hidden_states", None), getattr(output, "last_hidden_states", None)
        self._see(args, None if last is None else aux, last, NO_STATES["logits"])

    def _see(self, args: Any, aux: Any, last: Any, trouble: str) -> None:
        """Take our requests' rows of a prefill; whatever goes wrong becomes their failure."""
        batch = next(arg for arg in args if hasattr(arg, "forward_mode"))
        parts = [aux] if isinstance(aux, torch.Tensor) else list(aux or ())
        if self._writes and parts and self._sink is None:
            self._quietly(self._sink_for, parts, last)  # now, in the server's warm-up: pinning takes a while
        if not self._writes or not batch.forward_mode.is_extend() or not batch.rids:
            return
        ours = [rid for rid in batch.rids if self._is_ours(rid)]
        self.counters.foreign += len(batch.rids) - len(ours)
        if not ours:
            return
        self.counters.passes += 1
        try:
            self._folder.look(LOOK_IN_A_PASS_S)
            if not parts:
                raise Refused(trouble)
            self._take(batch, parts, last)
        except Exception as problem:
            for rid in ours:
                self._folder.fail(rid, words(problem))

    def _is_ours(self, rid: Any) -> bool:
        return isinstance(rid, str) and rid.startswith(self._prefix) and NAME.fullmatch(rid) is not None

    def _take(self, batch: Any, aux: list[torch.Tensor], last: torch.Tensor) -> None:
        """Assign rows: they lie one request after the other; more of them may follow as padding."""
        ours, at = [], 0
        lengths, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        for rid, rows, prefix in zip(batch.rids, lengths, prefixes, strict=False):  # these may be padded
            if self._is_ours(rid):
                ours.append(_Rows(rid, at, int(rows), int(prefix)))
            at += int(rows)
        have = min(tensor.shape[0] for tensor in (batch.input_ids, last, *aux))
        if have < at:
            raise Refused(f"the pass gave {have} rows for requests of {at}: is it split over ranks?")
        sink = self._sink_for(aux, last)
        work = _Pass(sink, self._folder, [batch.input_ids, aux, last], time.monotonic() + self._config.patience_s)
        for part in ours:
            try:
                self._receive(work, sink.form, part)
            except Exception as problem:
                self._folder.fail(part.rid, words(problem))
        work.flush()

    def _sink_for(self, aux: list[torch.Tensor], last: torch.Tensor) -> Sink:
        """Check the form of a pass; make the slots with the first one, once: it takes seconds of the server's time."""
        if self._sinkless:
            raise Refused(self._sinkless)
        width, points = sum(tensor.shape[-1] for tensor in aux), len(self._config.points)
        if width != points * last.shape[-1]:
            raise Refused(f"the server captured {width / last.shape[-1]:g} points where {points} were asked for")
        form = Form(points, last.shape[-1], last.dtype)
        if self._sink is None:
            self.counters.hidden_size, self.counters.device = form.hidden_size, str(last.device)
            self.counters.dtype = str(form.dtype).rpartition(".")[2]
            try:
                self._sink = Sink(self._config, self._folder, self.counters, form, last.device)
            except Exception as problem:
                self._sinkless = f"the slots could not be made when the server started: {words(problem)}"
                raise
        if form != self._sink.form or any(tensor.dtype != form.dtype for tensor in aux):
            raise Refused(f"the form of a row changed from {self._sink.form} to {form}, {aux[0].dtype}")
        return self._sink

    def _receive(self, work: _Pass, form: Form, part: _Rows) -> None:
        """Take one request's rows of a pass. Raises Refused where earlier rows are missing, or OSError."""
        rid, row, rows, prefix = part
        length = rid.rpartition("-")[2]
        tokens = int(length) if length.isdigit() else 0
        request = self._folder.receiving(rid)
        if not tokens:
            raise Refused("its rid does not end with the number of its tokens")
        if not rows or (request is None and prefix and (prefix >= tokens or self._folder.is_over(rid))):
            return  # padding, a generated token, or a later chunk of what has failed
        if not prefix:
            request = self._folder.reserve(rid, tokens, form.file_bytes(tokens), work.deadline, work.flush)
        elif request is None:
            raise Refused(f"the server's prefix cache held its first {prefix} rows: --disable-radix-cache is missing")
        if prefix != request.next_row or prefix + rows > tokens:
            raise Refused(f"rows {prefix} to {prefix + rows} came where {request.next_row} to {tokens} were due")
        request.next_row, request.touched = prefix + rows, time.monotonic()
        work.add(request, prefix, row, rows)

    def report(self) -> None:
        """Write the counters now. Raises OSError."""
        self.counters.at = time.time()
        path = os.path.join(self._config.folder, f"rank{self.counters.rank}.json")
        replace(path, json.dumps(asdict(self.counters)).encode("ascii") + b"\n")

    def _report_all(self) -> None:
        while not self._ended.wait(REPORT_EVERY_S):
            if self._writes:
                self._quietly(self._folder.look)
            self._quietly(self.report)

    def _quietly(self, action: Callable[..., object], *args: Any) -> None:
        try:
            action(*args)
        except Exception as problem:
            self.counters.error = words(problem)


def factory(config: dict[str, Any]) -> Capture:
    """Make the hook; SGLang calls this once in each rank's scheduler process."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    try:
        context = importlib.import_module("sglang.srt.runtime_context")
        writes = context.get_parallel().attn_tp_rank == 0
    except Exception:
        writes = rank == 0  # right wherever attention is not run data-parallel
    return Capture(Config.of(config), rank, writes)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
