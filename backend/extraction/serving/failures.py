"""Why a server did not start or has ended, in one sentence, with the line of its log that shows it.

A table of patterns. What names a cause goes before what follows from one (the other ranks' broken connections, the
parent's SIGQUIT), and that before a mere exception; among equals the earliest line is the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from backend.extraction.serving.logtext import is_start, records

if TYPE_CHECKING:
    from collections.abc import Callable

CAUSE, SYMPTOM, BARE = 0, 1, 2


@dataclass(frozen=True)
class Failure:
    """A cause. `kind` is for programs, `port` is the one that is taken, `line` is what shows it, where one does."""

    kind: str
    sentence: str
    line: str = ""
    port: int = 0


class _Pattern(NamedTuple):
    kind: str
    pattern: str
    sentence: str | Callable[[re.Match[str]], str]
    rank: int = CAUSE


def _memory(found: re.Match[str]) -> str:
    text = found.string
    gpu = re.search(r"GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    said = f"GPU {gpu.group(1)} ran out of memory" if gpu else "a GPU ran out of memory"
    said += f": {asked.group(1)} asked for" if asked else ""
    said += f", {gpu.group(3)} of {gpu.group(2)} free" if gpu and asked else ""
    return f"{said}; lower mem_fraction, raise tp, or reset the GPUs if something else holds them"


_TABLE = [
    _Pattern("hook", r"eightzeros[_ ]capture[^\n]*(?:Error|:)[^\n]*|No module named 'eightzeros_capture",
             lambda found: f"the capture hook did not load: {found.group(0)[:200]}"),
    _Pattern("memory", r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory", _memory),
    _Pattern("memory", r"Not enough memory\. Please try to increase --mem-fraction-static|Not enough GPU memory|"
             r"KV cache .{0,40}(?:too small|negative)",
             "after the weights no memory is left for the cache: raise mem_fraction or tp, or reset the GPUs if "
             "something else holds them"),
    _Pattern("memory", r"memory capacity is unbalanced|Some GPUs may be occupied",
             "something else holds memory of some of the GPUs: reset them and start again"),
    _Pattern("host memory", r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|MemoryError\b",
             "the host ran out of memory (not the GPUs): free some, or load with fewer processes"),
    _Pattern("port", r"(?:\('[^']*', |\b[Pp]ort:? ?|(?:\d\.\d\.\d+|localhost|\]|\*):)(\d{2,5})\b[^\n]{0,160}?"
             r"(?:EADDRINUSE|already in use|is not available|is occupied|in use)",
             lambda found: f"port {found.group(1)} is taken"),
    _Pattern("port", r"EADDRINUSE|[Aa]ddress already in use", "a port is taken"),
    _Pattern("model", r"trust_remote_code",
             "the model brings its own code: check it, then add \"--trust-remote-code\" to the stage's `arguments`"),
    _Pattern("model", r"GatedRepoError|401 Client Error|403 Client Error|[Gg]ated repo",
             "the model may not be downloaded with this user's token: request access, or name a local folder"),
    _Pattern("model", r"LocalEntryNotFoundError|couldn't connect to '?https?://[^\s']*|OfflineModeIsEnabled|"
             r"Max retries exceeded with url",
             "the model is not on this host and cannot be downloaded: name a local folder"),
    _Pattern("model", r"does not appear to have a file named ([\w.]+)|Cannot find any model weights|"
             r"[Nn]o model weights|RepositoryNotFoundError|"
             r"is not a local folder and is not a valid model identifier|HFValidationError|"
             r"Can't load the configuration of|No such file or directory: '[^']*(?:config\.json|safetensors)'",
             "the model's folder is missing or not whole: correct the stage's `model`"),
    _Pattern("model", r"SafetensorError|header too large|invalid safetensors|MetadataIncompleteBuffer",
             "a weight file of the model is damaged or not whole: copy it again"),
    _Pattern("flag", r"unrecognized arguments: ([^\n]+)",
             lambda found: f"this SGLang does not know {found.group(1).strip()}: correct the stage's `arguments`"),
    _Pattern("flag", r"(?:error: |^)"
             r"(argument --[^\n]+|ambiguous option: [^\n]+|the following arguments are required: [^\n]+)",
             lambda found: f"the server refuses an option: {found.group(1)[:200]}"),
    _Pattern("architecture", r"has no attribute '(set_(?:eagle3|dflash)_layers_to_capture)'|"
             r"does not implement set_\w+_layers_to_capture|does not support (?:EAGLE3|DFLASH) [\w ]*capture",
             "SGLang's code of this architecture cannot capture layers: another SGLang version may"),
    _Pattern("architecture", r"Model architectures? \[?['\"]?(\w+)[^\n]*not supported|"
             r"does not recognize this architecture",
             "this SGLang (or its transformers) does not know the model's architecture: use a version that does"),
    _Pattern("capture", r"\w+Error: ([^\n]*return-aux-hidden-state[^\n]*)",
             lambda found: f"SGLang refuses the capture: {found.group(1)[:200]}"),
    _Pattern("parallel", r"[^\n]{0,80}\b(?:is not divisible by|must be divisible by|not divisible)\b[^\n]{0,80}",
             lambda found: f"the model cannot be divided over this tp: {found.group(0)[:160]}"),
    _Pattern("parallel", r"invalid device ordinal",
             "tp asks for more GPUs than this host shows: lower tp, or see CUDA_VISIBLE_DEVICES"),
    _Pattern("compiler", r"nvcc[^\n]{0,40}(?:not found|No such file)|Could not find nvcc|Ninja is required|'ninja'|"
             r"ninja: (?:not found|command not found)|CUDA_HOME environment variable is not set|No CUDA toolkit|"
             r"\b(?:gcc|g\+\+|cc|c\+\+|nvcc)['\"]?: (?:not found|command not found|No such file)|cannot find -l\w+|"
             r"Failed to find C compiler|fatal error: [^\n]*: No such file or directory|Unsupported gpu architecture|"
             r"Error (?:building|compiling)[^\n]*",
             "a kernel could not be compiled on this host: install the CUDA toolkit (nvcc), ninja and a C++ compiler"),
    _Pattern("driver", r"Found no NVIDIA driver|driver version is insufficient|driver initialization failed|"
             r"no CUDA-capable device|No CUDA GPUs are available|libcuda\.so\.1: cannot open|No accelerator|"
             r"system not yet initialized|cudaErrorSystemNotReady|unsupported display driver|"
             r"Driver/library version mismatch|forward compatibility was attempted|no kernel image is available",
             "the GPU driver cannot be used by this server: see `nvidia-smi`, the fabric manager, and the CUDA version "
             "of the stage's Python"),
    _Pattern("gpu", r"uncorrectable ECC|GPU is lost|fallen off the bus|"
             r"CUDA error: (?:an illegal memory access|unspecified launch failure|device-side assert)[^\n]*",
             "a GPU failed while the server ran: see the host's XID errors and verify it"),
    _Pattern("shared memory", r"(?:shared memory segment|/dev/shm)[^\n]*(?:No space left|nccl-|too small|Bus error)|"
             r"Bus error[^\n]*shared memory",
             "/dev/shm is too small or full: free it, or give the container more (--shm-size)"),
    _Pattern("disk", r"No space left on device", "a disk is full: see `df -h`, the caches in HOME and /tmp as well"),
    _Pattern("nccl", r"NCCL (?:WARN|error)[^\n]*|nccl(?:UnhandledCuda|System|Internal|Invalid\w+)Error[^\n]*|"
             r"DistBackendError[^\n]*",
             "NCCL failed between the GPUs: NCCL_DEBUG=INFO in the stage's `env` says more", SYMPTOM),
    _Pattern("watchdog", r"[Ww]atchdog (?:timeout|caught)[^\n]*",
             "a forward pass took longer than SGLang's watchdog allows: see whether the disk or the reader of the "
             "staging stalls", SYMPTOM),
    _Pattern("module", r"^\s*(?:\[rank\d+\]: ?)?ModuleNotFoundError: No module named '([\w.]+)'",
             lambda found: f"the server's Python lacks the module {found.group(1)}: install it there", SYMPTOM),
    _Pattern("module", r"^\s*(?:\[rank\d+\]: ?)?ImportError: ([^\n]{1,200})",
             lambda found: f"the server's Python is broken: {found.group(1)}", SYMPTOM),
    _Pattern("exception", r"^\s*(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Exit): [^\n]+)",
             lambda found: found.group(1)[:300], BARE),
]  # fmt: skip
_COMPILED = [(entry, re.compile(entry.pattern, re.MULTILINE)) for entry in _TABLE]

_CONSEQUENCE = re.compile(
    r"remote process exited|[Cc]onnection reset by peer|Connection closed by remote|Broken pipe|"
    r"Rank \d+ scheduler is dead|Received sigquit|detected dead|EOFError|Scheduler or DataParallelController"
)
"""What the others say when one has died: no cause, whatever error it calls itself."""


def find_failure(lines: list[str]) -> Failure | None:
    """Return the most likely cause in a log, or None where it holds none. Only what the last start wrote counts."""
    best: tuple[int, Failure] | None = None
    for record in records(lines):
        if record.noise:
            continue
        for line in record.lines:
            found = None if is_start(line) else _judge(line)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    return best[1] if best else None


def _judge(line: str) -> tuple[int, Failure] | None:
    """Return (rank, cause) of the first pattern that a line fits, the best rank first."""
    worse = 1 if _CONSEQUENCE.search(line) else 0
    for entry, pattern in _COMPILED:
        found = pattern.search(line)
        if found is None:
            continue
        sentence = entry.sentence if isinstance(entry.sentence, str) else entry.sentence(found)
        port = int(found.group(1)) if entry.kind == "port" and found.groups() and found.group(1) else 0
        return entry.rank + 3 * worse, Failure(entry.kind, sentence, line.strip()[:500], port)
    return None
