"""What every command shares: the configuration, a connected host, exit codes, and JSON on stdout."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backend.config import Config, ConfigError, load
from backend.fleet import ChainError, Fleet, HostState, LinkState
from backend.wire import Refused, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OK, FAILED, USAGE, UNREACHABLE, GATE = 0, 1, 2, 3, 4
"""Exit codes (DESIGN section 9): clean or ok; not clean or failed; usage; unreachable; refused by a gate."""

REFUSALS = ("gate", "plan-changed", "pipeline-running", "precondition")
"""Codes of what a host declines because something is not as it must be."""

READY_S = 45.0


class Stop(click.ClickException):
    """End the command with a message on stderr and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # click types it as the class's, and reads the instance's


class Session:
    """The configuration that the command line chose. `fleet` may be replaced, which the demo does."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def config(self) -> Config:
        """Read the configuration, or stop with what is wrong with it."""
        try:
            return load(self.path)
        except ConfigError as error:
            raise Stop(str(error), USAGE) from None

    def only(self, name: str | None) -> Config:
        """Return the configuration with the one host that is meant, or stop naming the choices."""
        config = self.config()
        if name is None and len(config.hosts) == 1:
            return config
        if name is None:
            raise Stop(
                f"there are {len(config.hosts)} hosts; choose one with --host: {', '.join(config.hosts)}",
                USAGE,
            )
        if name not in config.hosts:
            raise Stop(f"there is no host `{name}` in the configuration; hosts: {', '.join(config.hosts)}", USAGE)
        return Config(
            hosts={name: config.hosts[name]},
            stages=config.stages,
            thresholds=config.thresholds,
            console=config.console,
        )

    @contextmanager
    def connected(self, name: str | None) -> Iterator[tuple[Fleet, HostState]]:
        """Connect to one host and wait until it has told what it is. Stops with UNREACHABLE where it does not."""
        fleet = Fleet(self.only(name))
        host = next(iter(fleet.hosts.values()))
        with fleet, answers():
            try:
                fleet.ready(host.name, READY_S).result()
            except TimeoutError:
                raise Stop(unreachable(host), UNREACHABLE) from None
            if host.link.state is LinkState.REFUSED:
                raise Stop(unreachable(host), UNREACHABLE)
            yield fleet, host


def unreachable(host: HostState) -> str:
    """Say why a host cannot be reached, and what to do."""
    reason = host.link.reason or f"no answer within {READY_S:.0f} s"
    return f"{host.name}: {host.link.state}: {reason}" + (f"\n{host.link.hint}" if host.link.hint else "")


@contextmanager
def answers() -> Iterator[None]:
    """Turn what an action raises into a message and an exit code."""
    try:
        yield
    except Refused as error:
        raise Stop(str(error), GATE if error.code in REFUSALS else FAILED) from None
    except (ConfigError, ChainError) as error:
        raise Stop(str(error), USAGE) from None
    except ConnectionError as error:
        raise Stop(f"the connection ended: {error}", UNREACHABLE) from None
    except TimeoutError:
        raise Stop("no answer in time", UNREACHABLE) from None


def put_json(record: Any) -> None:
    """Print a record as JSON on stdout."""
    sys.stdout.write(json.dumps(plain(record), indent=1) + "\n")
    sys.stdout.flush()


def host_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --host."""
    return click.option(
        "--host", "host_name", metavar="NAME", help="A host of the configuration.", shell_complete=complete_host
    )(command)


def complete_host(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the hosts of the configuration that begin with what is typed; none where it cannot be read."""
    try:
        return [name for name in load(context.find_root().params.get("path")).hosts if name.startswith(typed)]
    except ConfigError:
        return []


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


pass_session = click.make_pass_decorator(Session, ensure=True)
