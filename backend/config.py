"""The one configuration file: hosts, stages, thresholds. Every error names file, line and key, and what to do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import platformdirs
from msgspec import Meta, Struct, field

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names become folders and ids on the host, so they hold nothing that a shell or a path reads otherwise."""

Seconds = Annotated[float, Meta(gt=0)]
Percent = Annotated[float, Meta(gt=0, le=100)]
LOCAL = "local"
"""The address that means this machine."""


class ConfigError(Exception):
    """A configuration that cannot be used; the text is for the operator as it stands."""


class Host(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One GPU host. `address` is what `ssh` would be given, or "local" for this machine.

    What is not set here comes from ~/.ssh/config. `python` is the interpreter that runs the agent (3.8 or newer).
    `roots` are the folders whose files may be inspected; empty means any that the user may read.
    """

    address: str = LOCAL
    user: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    python: str = "python3"
    roots: list[str] = []
    accept_limited: bool = False
    other_users: bool = False
    confirm: Literal["always", "never"] = "always"

    @property
    def local(self) -> bool:
        """Say whether this is the machine that the console runs on."""
        return self.address == LOCAL


class Stage(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One stage of the chain, in the order of the file.

    Either `kind = "extract"` with engine, corpus and out, or a `command` of your own. `needs` may hold "clean-gpus".
    `disk_gib` and `shm_gib` are what must be free in `out` (or `cwd`) and /dev/shm before a launch.
    """

    kind: Literal["command", "extract"] = "command"
    hosts: list[str] = []
    command: list[str] = []
    python: str = "python3"
    cwd: str = ""
    env: dict[str, str] = {}
    needs: list[Literal["clean-gpus"]] = []
    disk_gib: Annotated[float, Meta(ge=0)] = 0.0
    shm_gib: Annotated[float, Meta(ge=0)] = 0.0
    grace_s: Seconds = 15.0
    engine: Literal["embedded"] = "embedded"
    corpus: str = ""
    out: str = ""
    limit: Annotated[int, Meta(ge=1)] | None = None


class Thresholds(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where the console's marks change. Degrees Celsius, percent, GiB and seconds."""

    temperature_warn_c: float = 80.0
    temperature_bad_c: float = 90.0
    memory_warn_percent: Percent = 97.0
    disk_warn_gib: Annotated[float, Meta(ge=0)] = 50.0
    stall_s: Seconds = 120.0


class Console(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How the console behaves. `fps` is frames a second; without a value it is 4, or 2 when run over SSH."""

    fps: Annotated[float, Meta(gt=0, le=30)] | None = None
    theme: str = "eightzeros"
    known_hosts: str | None = None


class Config(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The whole file. `path` is where it was read from, empty where there is none."""

    hosts: dict[str, Host] = {}
    stages: dict[str, Stage] = {}
    thresholds: Thresholds = field(default_factory=Thresholds)
    console: Console = field(default_factory=Console)


def default_path() -> Path:
    """Return where the file is looked for: the platform's configuration folder."""
    return Path(platformdirs.user_config_dir("eightzeros", appauthor=False)) / "config.toml"


def load(path: Path | None = None) -> Config:
    """Read and check the configuration. Without a file at the default path, this machine is the only host.

    Raises ConfigError naming file, line and key where the file is absent (if named), no TOML, or not understood.
    """
    chosen = path or default_path()
    try:
        text = chosen.read_text("utf-8")
    except FileNotFoundError:
        if path is None:
            return Config(hosts={"local": Host()})
        raise ConfigError(f"{chosen}: no such file; `eightzeros config path` prints where it is looked for") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{chosen}: {error}") from None
    return parse(text, str(chosen))


def parse(text: str, source: str) -> Config:
    """Check the text of a configuration file; `source` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from None
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), text, source)) from None
    _check(config, text, source)
    return config if config.hosts else msgspec.structs.replace(config, hosts={"local": Host()})


def _check(config: Config, text: str, source: str) -> None:
    for table, names in (("hosts", config.hosts), ("stages", config.stages)):
        for name in names:
            if not NAME.fullmatch(name):
                raise ConfigError(
                    f"{_at(text, [table, name], source)}: `{name}` is no name: letters, digits, '.', '_', '-', up to 64"
                )
    for name, stage in config.stages.items():
        where = ["stages", name]
        if stage.kind == "command" and not stage.command:
            raise ConfigError(f"{_at(text, where, source)}: [stages.{name}] needs `command`, or kind = \"extract\"")
        if stage.kind == "extract" and not (stage.corpus and stage.out):
            raise ConfigError(f"{_at(text, where, source)}: [stages.{name}] needs `corpus` and `out`")
        for host in stage.hosts:
            if host not in config.hosts:
                known = ", ".join(config.hosts) or "none"
                raise ConfigError(
                    f"{_at(text, [*where, 'hosts'], source)}: `{host}` is no host of this file; hosts: {known}"
                )


def _explain(message: str, text: str, source: str) -> str:
    """Turn msgspec's message, which ends in a path such as `$.hosts[...].port`, into ours."""
    said, _, at = message.partition(" - at `")
    keys = _keys(at.rstrip("`"), said, text)
    unknown = re.search(r"unknown field `([^`]+)`", said)
    if unknown:
        keys.append(unknown.group(1))
        said = f"unknown key `{unknown.group(1)}`; see docs/configuration.md for the keys there are"
        return f"{_at(text, keys, source)}: {'.'.join(keys[:-1]) or 'top level'}: {said}"
    return f"{_at(text, keys, source)}: {'.'.join(keys) or 'top level'}: {said}"


def _keys(path: str, said: str, text: str) -> list[str]:
    """Read msgspec's path. It writes `[...]` for a key of a table, so the table's name is found by trying each."""
    keys = re.findall(r"[A-Za-z_][A-Za-z0-9_-]*|\[\.\.\.\]|\[\d+\]", path.removeprefix("$"))
    if "[...]" not in keys or keys[0] not in ("hosts", "stages"):
        return [key for key in keys if not key.startswith("[")]
    kind = {"hosts": Host, "stages": Stage}[keys[0]]
    for name, table in tomllib.loads(text).get(keys[0], {}).items():
        try:
            msgspec.convert({keys[0]: {name: table}}, Config)
        except msgspec.ValidationError as error:
            if str(error).partition(" - at `")[0] == said:
                return [keys[0], name, *(key for key in keys[2:] if not key.startswith("[") and hasattr(kind, key))]
    return [keys[0]]


def _at(text: str, keys: list[str], source: str) -> str:
    """Name the line of a key: its own, or its table's where it stands in an inline table or is missing."""
    best, table = 1, []  # type: tuple[int, list[str]]
    depth = 0
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*\[\[?([^\[\]]+)\]\]?\s*(#.*)?$", line)
        if header:
            table = _dotted(header.group(1))
        else:
            assignment = re.match(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*[^=\s]+)*)\s*=", line)
            if not assignment:
                continue
        path = table if header else table + _dotted(assignment.group(1))  # type: ignore[union-attr]
        shared = next((i for i, (a, b) in enumerate(zip(path, keys, strict=False)) if a != b), min(len(path), len(keys)))
        if shared == len(path) and shared > depth:
            best, depth = number, shared
    return f"{source}:{best}"


def _dotted(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]


def as_dict(config: Config) -> dict[str, Any]:
    """Return the configuration with every default filled in."""
    result: dict[str, Any] = msgspec.to_builtins(config)
    return result
