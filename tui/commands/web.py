"""`eightzeros web`: the console in a browser of this machine."""

from __future__ import annotations

import ipaddress
import shlex
import socket
import sys

import click

from tui.commands.session import FAILED, USAGE, Session, Stop, pass_session


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="The port on loopback.")
@click.option("--bind", default="127.0.0.1", hidden=True)
@click.option("--allow-actions", is_flag=True, help="Let the page reset, launch, stop and delete; else it only looks.")
@click.option("--page", is_flag=True, hidden=True, help="Be the console of one page.")
@pass_session
def web(session: Session, port: int, bind: str, allow_actions: bool, page: bool) -> None:
    """Serve the console to a browser of this machine. It only looks, unless --allow-actions is given.

    From another machine: `ssh -L 8000:127.0.0.1:8000 THIS_MACHINE`, and open the printed address there.
    """
    if page:
        from backend.fleet import Fleet
        from tui.app import run

        run(Fleet(session.config()), read_only=not allow_actions)
        return
    _only_loopback(bind, port)
    session.config()  # what is wrong with it is said here, not on each page
    try:
        from aiohttp import web as http

        from tui.webserver import LoopbackServer
    except ModuleNotFoundError as error:
        raise Stop(f"{error.name} is missing: pip install 'eightzeros[web]'", USAGE) from None
    config = ["--config", str(session.path.absolute())] if session.path else []
    words = [sys.executable, "-m", "tui.cli", *config, "web", "--page", *(["--allow-actions"] if allow_actions else [])]
    server = LoopbackServer(shlex.join(words), port)
    with _listening(port) as sock:
        may = "it may act on the hosts" if allow_actions else "it only looks; --allow-actions lets it act"
        click.echo(f"{server.url}\n{may}. Who has this address has the console. Ctrl+C ends it.")
        http.run_app(server._make_app(), sock=sock, print=None)


def _only_loopback(bind: str, port: int) -> None:
    try:
        safe = bind == "127.0.0.1" or ipaddress.ip_address(bind) == ipaddress.ip_address("127.0.0.1")
    except ValueError:
        safe = False
    if not safe:
        raise Stop(
            f"--bind {bind}: the console is served on 127.0.0.1 only; from another machine: "
            f"ssh -L {port}:127.0.0.1:{port} THIS_MACHINE",
            USAGE,
        )


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise Stop(f"port {port} cannot be used: {error.strerror}; choose another with --port", FAILED) from None
