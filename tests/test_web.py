"""The console in a browser: loopback, token, Host and Origin checks, and no action unless asked for."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from click.testing import CliRunner

from tests.driving import MIDDLE, Driven
from tests.fakefleet import FakeFleet, config
from tui.app import EightZeros
from tui.cli import main
from tui.readonly import ReadOnlyFleet
from tui.screens.fleet import FleetScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOTHING = '[hosts.gone]\naddress = "127.0.0.1"\nport = 9\n'


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[str]:
    """Serve a console on a host that is not there, and return the address that was printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "c.toml").write_text(NOTHING)
    words = ["-m", "tui.cli", "--config", str(tmp_path / "c.toml"), "web", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    yield line.strip()
    process.terminate()
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]


async def test_a_page_needs_the_token_the_right_name_and_its_own_origin(served: str) -> None:
    place = served.partition("/?")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        for path, headers in (
            ("/", {}), ("/ws", {}), ("/?token=guess", {}), ("/static/js/textual.js", {}),
            (served.removeprefix(place), {"Host": "evil.example"}),
            (served.removeprefix(place), {"Origin": "https://evil.example"}),
        ):  # fmt: skip
            async with http.get(place + path, headers=headers) as answer:
                assert answer.status == 403, path
        async with http.get(served) as answer:
            assert answer.status == 200 and "token" not in str(answer.url)
            assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(place + "/ws", origin="https://evil.example")
        painted = b""
        async with http.ws_connect(place + "/ws?width=100&height=30", origin=place) as page:
            async with asyncio.timeout(30):
                while b"gone" not in re.sub(rb"\x1b\[[0-9;]*m", b"", painted):
                    painted += (await page.receive()).data


async def test_what_changes_a_host_is_refused_by_key_button_and_palette() -> None:
    fleet = FakeFleet(config(1))
    fleet.tick()
    app = EightZeros(fleet, read_only=True)
    async with app.run_test(size=MIDDLE, notifications=True) as pilot:
        shown = Driven(pilot, app, fleet)
        await shown.sees("gpu-01")
        for key in ("R", "L", "B", "C", "X"):
            before = len(app._notifications)
            await shown.press(key)
            await shown.until(lambda before=before: len(app._notifications) > before)
            assert isinstance(app.screen, FleetScreen)
        await shown.pilot.click("#do-reset")
        await shown.press("ctrl+p", *"Record what idle")
        await shown.sees("Baseline")
        await shown.press("enter")
        await shown.shows(FleetScreen)
        assert {call[0] for call in fleet.calls} <= {"start"}


def test_the_fleet_itself_refuses_what_is_not_known_to_read() -> None:
    fleet = FakeFleet(config(1))
    looking = ReadOnlyFleet(fleet)
    assert looking.verify("gpu-01").result()
    for name in ("start_reset", "launch", "stop_run", "record_baseline", "trust", "retry"):
        with pytest.raises(Exception, match="may only look"):
            getattr(looking, name)("gpu-01").result()
    with pytest.raises(AttributeError, match="may only look"):
        looking.config = None
    assert [call[0] for call in fleet.calls] == ["verify"]


@pytest.mark.parametrize("address", ["0.0.0.0", "10.1.2.3", "::", "example.org"])
def test_another_address_is_refused_with_the_way_by_ssh(address: str) -> None:
    found = CliRunner().invoke(main, ["web", "--bind", address, "--port", "8123"])
    assert found.exit_code == 2
    assert "ssh -L 8123:127.0.0.1:8123" in found.output
