"""The one configuration file: hosts, stages, thresholds. Every error names file, line and key, and what to do."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import platformdirs
from msgspec import Meta, Struct, field

from backend.stages.definition import Seconds, mistakes
from backend.stages.definition import Stage as Stage
from backend.tomllines import line_of
from backend.wire import RESET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T", bound=Struct)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names become folders and ids on the host, so they hold nothing that a shell or a path reads otherwise."""

Percent = Annotated[float, Meta(gt=0, le=100)]
LOCAL = "local"
"""The address that means this machine."""


class ConfigError(Exception):
    """A configuration that cannot be used; the text is for the operator as it stands."""


class Host(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One GPU host. `address` is what `ssh` would be given, or "local" for this machine.

    What is not set here comes from ~/.ssh/config. `python` is the interpreter that runs the agent (3.8 or newer).
    `roots` are the folders whose files may be inspected; empty means any that the user may read. `retire_roots` are
    those below which `retire` may delete; empty means none. `chain` names the
    stages, and "reset", in the order in which `pipeline run` takes them; empty means the order of the file.
    """

    address: str = LOCAL
    user: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    python: str = "python3"
    roots: list[str] = []
    retire_roots: list[str] = []
    accept_limited: bool = False
    other_users: bool = False
    cuda_test: bool = True
    confirm: Literal["always", "never"] = "always"
    chain: list[str] = []

    @property
    def local(self) -> bool:
        """Say whether this is the machine that the console runs on."""
        return self.address == LOCAL


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
    """The whole file. Hosts and stages keep the order in which it names them."""

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
        text = chosen.read_text("utf-8-sig")
    except FileNotFoundError:
        if path is None:
            return Config(hosts={"local": Host()})
        raise ConfigError(f"{chosen}: no such file; `eightzeros config path` prints where it is looked for") from None
    except UnicodeDecodeError as error:
        line = chosen.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{chosen}:{line}: not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{chosen}: {error.strerror}") from None
    return parse(text, str(chosen))


def parse(text: str, source: str) -> Config:
    """Check the text of a configuration file; `source` names it in errors."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said, _, at = str(error).partition(" (at line ")
        line = at.partition(",")[0] if at else str(text.rstrip("\n").count("\n") + 1)
        raise ConfigError(f"{source}:{line}: not TOML: {said.removesuffix(' (at end of document)')}") from None
    return _Reader(text, source).read(data)


class _Reader:
    """Turns the data of one file into a Config, table by table, so that each error knows its keys."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source

    def read(self, data: dict[str, Any]) -> Config:
        """Return the configuration, or raise ConfigError for the first thing that is wrong."""
        for key in data:
            if key not in Config.__struct_fields__:
                raise self._unknown([key], Config)
        config = Config(
            hosts=self._tables(data, "hosts", Host),
            stages=self._tables(data, "stages", Stage),
            thresholds=self._convert(data.get("thresholds", {}), Thresholds, ["thresholds"]),
            console=self._convert(data.get("console", {}), Console, ["console"]),
        )
        for name, host in config.hosts.items():
            self._check_host(host, ["hosts", name])
        for name, stage in config.stages.items():
            self._check_stage(name, stage, config)
        for name, host in config.hosts.items():
            self._check_chain(name, host, config)
        limits = config.thresholds
        if limits.temperature_warn_c >= limits.temperature_bad_c:
            low, high = limits.temperature_warn_c, limits.temperature_bad_c
            said = f"{low:g} is not below temperature_bad_c, which is {high:g}"
            raise self._error(["thresholds", "temperature_warn_c"], said)
        return config if config.hosts else msgspec.structs.replace(config, hosts={"local": Host()})

    def _tables(self, data: dict[str, Any], key: str, kind: type[T]) -> dict[str, T]:
        tables = data.get(key, {})
        if not isinstance(tables, dict):
            raise self._error([key], f"write one table a name: [{key}.NAME]")
        for name in tables:
            if not NAME.fullmatch(name):
                raise self._error([key, name], "this is no name: letters, digits, `.`, `_`, `-`, up to 64 of them")
        return {name: self._convert(table, kind, [key, name]) for name, table in tables.items()}

    def _convert(self, table: Any, kind: type[T], where: Sequence[str | int]) -> T:
        if not isinstance(table, dict):
            raise self._error(where, f"expected a table, [{'.'.join(map(str, where))}], got {_kind(table)}")
        for key, value in table.items():
            if key not in kind.__struct_fields__:
                raise self._unknown([*where, key], kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise self._error([*where, key], f"expected a finite number, got {value}")
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            said, _, at = str(error).partition(" - at `$")
            steps = _steps(at.rstrip("`"), table)
            raise self._error([*where, *steps], _plainly(said) + _choices(said, kind, steps)) from None

    def _check_host(self, host: Host, where: list[str]) -> None:
        if not host.address or host.address.startswith("-") or re.search(r"[\s\x00-\x1f]", host.address):
            said = f'`{host.address}` is no address: what `ssh` would be given, or "{LOCAL}" for this machine'
            raise self._error([*where, "address"], said)
        if not host.python.strip():
            raise self._error([*where, "python"], "this is empty; leave it out for python3")
        for key in ("roots", "retire_roots"):
            for number, root in enumerate(getattr(host, key)):
                if not root.startswith(("/", "~")):
                    raise self._error([*where, key, number], f"`{root}` must begin with `/` or `~`")
        for key in ("user", "port", "identity_file"):
            if host.local and getattr(host, key) is not None:
                said = "there is no SSH to this machine; set `address`, or leave this out"
                raise self._error([*where, key], said)

    def _check_chain(self, name: str, host: Host, config: Config) -> None:
        for number, step in enumerate(host.chain):
            where: list[str | int] = ["hosts", name, "chain", number]
            if step != RESET and step not in config.stages:
                known = ", ".join([*config.stages, RESET])
                raise self._error(where, f"`{step}` is no stage of this file; a chain takes {known}")
            if step != RESET and config.stages[step].hosts and name not in config.stages[step].hosts:
                raise self._error(where, f"`{step}` does not run on this host: see its `hosts`")

    def _check_stage(self, name: str, stage: Stage, config: Config) -> None:
        where = ["stages", name]
        for keys, said in mistakes(name, stage):
            raise self._error([*where, *keys], said)
        for number, host in enumerate(stage.hosts):
            if host not in config.hosts:
                known = ", ".join(config.hosts) or "none"
                raise self._error([*where, "hosts", number], f"`{host}` is no host of this file; hosts: {known}")

    def _unknown(self, keys: Sequence[str | int], kind: type[Struct]) -> ConfigError:
        names = kind.__struct_fields__
        close = difflib.get_close_matches(str(keys[-1]), names, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"keys here: {', '.join(names)}"
        return self._error(keys, f"unknown key; {meant}")

    def _error(self, keys: Sequence[str | int], said: str) -> ConfigError:
        name = ""
        for key in keys:
            name += f"[{key}]" if isinstance(key, int) else f".{key}" if NAME.fullmatch(key) else f'."{key}"'
        return ConfigError(f"{self._source}:{line_of(self._text, keys)}: {name.removeprefix('.')}: {said}")


def _steps(path: str, table: dict[str, Any]) -> list[str | int]:
    """Read the rest of msgspec's path, `.env[...]` or `.roots[0]`. It does not say which key `[...]` is."""
    steps: list[str | int] = []
    value: Any = table
    for name, index in re.findall(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]", path):
        step: str | int = name or (int(index) if index.isdigit() else _odd_one(value))
        steps.append(step)
        value = value[step] if name or not index.isdigit() else value[int(index)]
    return steps


def _odd_one(table: Any) -> str:
    """Find the key whose value is no text: tables with free keys hold texts only."""
    return next((key for key, value in table.items() if not isinstance(value, str)), "")


def _plainly(said: str) -> str:
    """Say what msgspec says without its type notation."""
    said = said.replace(" | null", "").replace("`", "").replace("enum value", "word")
    for theirs, ours in (("str", "text"), ("int", "a whole number"), ("float", "a number"), ("bool", "true or false"),
                         ("array", "a list"), ("object", "a table")):  # fmt: skip
        said = re.sub(rf"\b{theirs}\b", ours, said)
    return said[:1].lower() + said[1:]


def _choices(said: str, kind: type[Struct], steps: list[str | int]) -> str:
    """List the words that a key takes, where it got another one."""
    if not said.startswith("Invalid enum value") or not steps:
        return ""
    return f"; it takes {', '.join(word for word in _words(get_type_hints(kind)[str(steps[0])]) if word)}"


def _words(hint: Any) -> Iterator[str]:
    """Yield the words of every Literal in a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _words(part)


def _kind(value: Any) -> str:
    return {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list"}.get(
        type(value), type(value).__name__
    )


def as_dict(config: Config) -> dict[str, Any]:
    """Return the configuration with every default filled in."""
    result: dict[str, Any] = msgspec.to_builtins(config)
    return result
