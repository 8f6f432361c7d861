"""What a stage is: its keys in the configuration, which kind has which, and what is wrong with one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

Seconds = Annotated[float, Meta(gt=0)]
Gib = Annotated[float, Meta(ge=0)]
KINDS = ("extract", "serve", "prepare", "audit", "export", "train")
"""The kinds that are built in, beside a command of one's own. A reset is no stage: it is a step of the chain."""

NEEDED = {
    "command": ("command",), "extract": ("corpus", "out"), "serve": ("model", "points"),
    "prepare": ("datasets", "out"), "audit": ("folder",), "export": ("format", "folder", "out"),
    "train": ("data",),
}  # fmt: skip

SERVER_KEYS = ("server", "staging", "concurrency", "retries")
"""What only an extraction from a server has."""

TRAINERS = ("specforge", "speculators")
"""The trainers whose command is built in."""

TRAINER_KEYS = ("gpus", "max_steps", "epochs")
"""What only a training by one of those has, beside `config`, `points`, `entry` and `arguments`."""

ONLY = {
    **dict.fromkeys(("limit", "order", "suffix", "only", *SERVER_KEYS), ("extract",)),
    **dict.fromkeys(("tp", "mem_fraction", "staging_gib"), ("serve",)),
    **dict.fromkeys(("data", "trainer", "config", *TRAINER_KEYS), ("train",)), "points": ("serve", "train"),
    "entry": ("serve", "train"),
    **dict.fromkeys(("datasets", "tokenizer", "seed"), ("prepare",)),
    **dict.fromkeys(("deep", "quarantine"), ("audit",)),
    **dict.fromkeys(("service", "ready_url"), ("command",)),
    "command": ("command", "train"), "format": ("export",),
    "corpus": ("extract", "audit"), "max_tokens": ("prepare", "audit"), "folder": ("audit", "export"),
    "arguments": ("serve", "prepare", "audit", "export", "train"), "ready_timeout_s": ("serve", "command"),
    "port": ("serve", "command", "train"), "model": ("serve", "export", "train", "command"),
}  # fmt: skip
"""The kinds that have a key; a key that is not listed is of every kind."""

SERVER_OPTIONS = {
    "--host": "it is bound to 127.0.0.1", "--port": "use `port`",
    "--model-path": "use `model`", "--model": "use `model`",
    "--tp": "use `tp`", "--tp-size": "use `tp`", "--tensor-parallel-size": "use `tp`",
    "--mem-fraction-static": "use `mem_fraction`", "--forward-hooks": "the capture hook needs it",
    "--speculative-algorithm": "it says how layers are counted here",
    "--enable-return-aux-hidden-states": "use `points`", "--return-aux-hidden-state-layer-ids": "use `points`",
}  # fmt: skip
"""Options of the server that a serve stage sets itself, and what to do instead of naming them."""

ORDER = re.compile(r"corpus|shortest|longest|seed:[0-9]+")
PACKAGE = re.compile(r"[A-Za-z0-9._-]+\s*(?:(?:==|!=|>=|<=|>|<)\s*[0-9][^,\s]*\s*,?\s*)*")
TAKEN = ("reset", "pipeline", "adopt", "retire")
"""Names that runs of ours have already."""


class Stage(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One stage of the chain, in the order of the file.

    `kind = "extract"` with engine, corpus and out, `kind = "serve"` with model and points, `kind = "prepare"` with
    datasets and out, `kind = "audit"` with a folder of shards, `kind = "export"` with format, folder and out,
    `kind = "train"` with a trainer (or a command) and the shards that it trains on, or a `command` of your own.
    `needs` may hold "clean-gpus"; a server and a training need it unless it is said to be empty.
    `disk_gib`, `shm_gib` and `ram_gib` are what must be free in `out` (or `cwd`), /dev/shm and memory before a launch.
    """

    kind: Literal["command", "extract", "serve", "prepare", "audit", "export", "train"] = "command"
    hosts: list[str] = []
    command: list[str] = []
    python: str = "python3"
    cwd: str = ""
    env: dict[str, str] = {}
    needs: list[Literal["clean-gpus"]] | None = None
    packages: list[str] = []
    inputs: list[str] = []
    outputs: list[str] = []
    disk_gib: Gib = 0.0
    shm_gib: Gib = 0.0
    ram_gib: Gib = 0.0
    grace_s: Seconds = 15.0
    service: bool = False
    ready_url: str = ""
    engine: Literal["embedded", "sglang"] = "embedded"
    corpus: str = ""
    out: str = ""
    limit: Annotated[int, Meta(ge=1)] | None = None
    order: str = ""
    only: str = ""
    suffix: Literal["", ".ckpt", ".pt"] = ""
    server: str | None = None
    staging: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1024)] | None = None
    retries: Annotated[int, Meta(ge=0)] | None = None
    model: str | None = None
    points: list[Annotated[int, Meta(ge=0)]] = []
    tp: Annotated[int, Meta(ge=1, le=1024)] | None = None
    port: Annotated[int, Meta(ge=1024, le=65535)] | None = None
    mem_fraction: Annotated[float, Meta(gt=0, lt=1)] | None = None
    staging_gib: Annotated[float, Meta(gt=0)] | None = None
    arguments: list[str] = []
    entry: list[str] = []
    ready_timeout_s: Seconds | None = None
    datasets: list[str] = []
    tokenizer: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    folder: str = ""
    deep: bool = False
    quarantine: str = ""
    format: Literal["", "speculators", "specforge"] = ""
    data: str = ""
    trainer: Literal["", "specforge", "speculators"] = ""
    config: str = ""
    gpus: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_steps: Annotated[int, Meta(ge=1)] | None = None
    epochs: Annotated[int, Meta(ge=1)] | None = None

    @property
    def clean_gpus(self) -> bool:
        """Say whether it starts only on GPUs that are verified clean at that moment."""
        return self.kind in ("serve", "train") if self.needs is None else "clean-gpus" in self.needs

    @property
    def serves(self) -> bool:
        """Say whether it stays up while other stages run."""
        return self.kind == "serve" or self.service


def mistakes(name: str, stage: Stage) -> Iterator[tuple[list[str | int], str]]:
    """Yield what is wrong with a stage, each with the keys below its table, the first thing first."""
    if name in TAKEN:
        yield [], f"`{name}` is what runs of eightzeros itself are called; choose another name"
    for key in NEEDED[stage.kind]:
        if not getattr(stage, key):
            kinds = f", or kind = {_listed(KINDS)}" if stage.kind == "command" else ""
            said = "this stage" if stage.kind == "command" else f'a stage of kind = "{stage.kind}"'
            yield [], f"{said} needs `{key}`{kinds}"
    if stage.kind == "train":
        yield from _training(stage)
    if stage.command and stage.kind not in ONLY["command"]:
        yield ["command"], f'a stage of kind = "{stage.kind}" brings its own; leave this out'
    for key, kinds_of in ONLY.items():
        if stage.kind not in kinds_of and getattr(stage, key):
            yield [key], f"only a stage of kind = {_listed(kinds_of)} has this"
    yield from _values(stage)


def _training(stage: Stage) -> Iterator[tuple[list[str | int], str]]:
    if not stage.trainer:
        if not stage.command:
            yield [], f'a stage of kind = "train" needs `trainer` ({_listed(TRAINERS)}), or a `command` of your own'
        for key in ("config", "points", "arguments", "entry", *TRAINER_KEYS):
            if getattr(stage, key):
                yield [key], "only a training with `trainer` has this; say it in `command`"
        return
    if stage.command:
        yield ["command"], f"the command of {stage.trainer} is built in; leave this out, or leave `trainer` out"
    for key in ("out", "model", *(("config",) if stage.trainer == "specforge" else ())):
        if not getattr(stage, key):
            yield [], f'a training with trainer = "{stage.trainer}" needs `{key}`'
    if stage.points and stage.trainer == "specforge":
        yield ["points"], "SpecForge takes every state that the shards hold; leave this out"


def _values(stage: Stage) -> Iterator[tuple[list[str | int], str]]:
    for key in SERVER_KEYS:
        if stage.kind == "extract" and stage.engine != "sglang" and getattr(stage, key):
            yield [key], 'only an extraction with engine = "sglang" has this'
    if len(set(stage.points)) != len(stage.points):
        yield ["points"], "a capture point stands here twice"
    if stage.order and not ORDER.fullmatch(stage.order):
        yield ["order"], f"`{stage.order}` is no order; it takes corpus, shortest, longest, seed:N"
    if (stage.ready_url or (stage.ready_timeout_s and stage.kind == "command")) and not stage.serves:
        yield ["ready_url" if stage.ready_url else "ready_timeout_s"], "only a stage with service = true is waited for"
    if stage.ready_url and not stage.ready_url.startswith("http://"):
        yield ["ready_url"], "write http://127.0.0.1:PORT/PATH, an address on the host"
    for number, spec in enumerate(stage.packages):
        if not PACKAGE.fullmatch(spec.strip()):
            yield ["packages", number], f"`{spec}` is no package: write a name, or name>=version"
    for number, word in enumerate(stage.arguments):
        option = word.partition("=")[0]
        if stage.kind == "serve" and option in SERVER_OPTIONS:
            yield ["arguments", number], f"the stage sets {option} itself: {SERVER_OPTIONS[option]}"
    for variable in stage.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            yield ["env", variable], "this is no name of an environment variable"


def _listed(kinds: tuple[str, ...]) -> str:
    quoted = [f'"{kind}"' for kind in kinds]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}" if len(quoted) > 1 else quoted[0]
