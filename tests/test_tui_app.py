"""The console as the operator drives it: keys, buttons, dialogs and screens, on a made-up fleet."""

from __future__ import annotations

import time

import pytest
from textual.widgets import Input

from backend.config import Console
from backend.fleet import HostKey, LinkState, LinkStatus
from tests.driving import LARGE, MIDDLE, SMALL, console
from tests.fakefleet import FakeFleet, config, make_progress, make_run
from tui.actions import ACTIONS
from tui.app import EightZeros
from tui.screens.fleet import FleetScreen
from tui.screens.host import HostScreen
from tui.screens.logs import LogScreen
from tui.screens.reset import ResetDialog
from tui.widgets.buttons import ActionButton
from tui.widgets.host_panel import HostPanel
from tui.widgets.painted import RowList

# --- the fleet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_everything_is_in_sight_at_every_size(size: tuple[int, int]) -> None:
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].runs["e"] = make_run("e", "extract", progress=make_progress())
    fleet.event("gpu-01", "info", "hello there")
    async with console(size, fleet=fleet) as shown:
        await shown.sees(
            "RUNNING", "43.2% of the tokens", "extract running", "hello there", "R Reset", "L Launch", "q quit"
        )
        gpus = [line for line in shown.text.splitlines() for number in range(8) if f" {number} OK" in line]
        assert len(gpus) == 8
        assert not shown.app.screen.query_one("#hosts").show_vertical_scrollbar
        assert all(button.region.height == 1 for button in shown.app.screen.query(ActionButton))


async def test_a_resize_changes_the_layout() -> None:
    async with console(SMALL) as shown:
        panel = shown.app.screen.query_one(HostPanel)
        assert panel.form.kind == "lines"
        await shown.pilot.resize_terminal(*LARGE)
        await shown.until(lambda: panel.form.kind == "roomy")
        await shown.until(lambda: panel.size.height == panel.form.height(8))
        await shown.pilot.resize_terminal(*SMALL)
        await shown.until(lambda: panel.form.kind == "lines")


async def test_new_telemetry_is_painted() -> None:
    async with console() as shown:
        before = shown.text
        for _ in range(20):
            shown.fleet.tick()
        await shown.until(lambda: shown.text != before)
        used = shown.fleet.hosts["gpu-01"].reading(7, "utilisation_percent").value
        await shown.sees(f"{used}%")


async def test_space_stops_and_resumes_painting() -> None:
    async with console() as shown:
        await shown.press("space")
        await shown.sees("PAUSED")
        panel = shown.app.screen.query_one(HostPanel)
        before = panel.rows
        shown.fleet.tick()
        await shown.pilot.pause(0.2)
        assert panel.rows is before
        await shown.press("space")
        await shown.until(lambda: panel.rows is not before and "PAUSED" not in shown.text)


async def test_gpus_that_come_late_get_room() -> None:
    fleet = FakeFleet(config(1))
    host = fleet.hosts["gpu-01"]
    inventory, host.inventory = host.inventory, None
    async with console(fleet=fleet) as shown:
        await shown.sees("no answer from the driver yet")
        host.inventory = inventory
        fleet.tick()
        await shown.sees(" 7 OK")


async def test_keys_move_over_gpus_and_hosts() -> None:
    async with console(LARGE, hosts=2) as shown:
        first, second = shown.app.screen.query(HostPanel)
        assert first.has_focus
        await shown.press("5")
        assert first.gpu == 5
        await shown.press("h", "l", "right")
        assert first.gpu == 6
        await shown.press("j")
        await shown.until(lambda: second.has_focus)
        assert shown.app.host_name == "gpu-02"
        assert second.gpu == 2
        await shown.press("up")
        await shown.until(lambda: first.has_focus)
        assert first.gpu == 6
        await shown.pilot.click(second, offset=(second.form.pane + 8, 2))
        await shown.until(lambda: second.has_focus and second.gpu == 1)
        await shown.sees("gpu-02 / 1")


async def test_an_event_comes_from_another_thread_and_is_read_as_it_stands() -> None:
    import threading

    async with console() as shown:
        worker = threading.Thread(target=shown.fleet.event, args=("gpu-01", "bad", "lost [bold]it[/bold]"))
        worker.start()
        worker.join()
        await shown.sees("lost [bold]it[/bold]")


async def test_a_fleet_that_does_not_start_says_why() -> None:
    fleet = FakeFleet(config(1))

    def refuse() -> None:
        raise RuntimeError("no agent to ship [x]")

    fleet.start = refuse  # type: ignore[method-assign]
    async with console(fleet=fleet) as shown:
        await shown.sees("no agent to ship [x]")


async def test_quit_leaves_at_once_and_lets_runs_go_on() -> None:
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].runs["e"] = make_run("e", "extract", progress=make_progress())
    async with console(fleet=fleet) as shown:
        await shown.press("q")
        await shown.until(lambda: not shown.app.is_running)
    assert not [call for call in fleet.calls if call[0] in ("stop_run", "start_reset")]
    assert fleet.listener is None


# --- one host ---------------------------------------------------------------------------------------------------


async def test_enter_opens_the_host_with_every_reading_and_escape_goes_back() -> None:
    async with console(MIDDLE) as shown:
        await shown.press("3", "enter")
        await shown.shows(HostScreen)
        await shown.sees("GPU 3", "PCIe width", "thermal margin", "41213", "utilisation")
        await shown.press("down")
        await shown.sees("GPU 4")
        await shown.press("escape")
        await shown.shows(FleetScreen)


# --- stop, keys of hosts ----------------------------------------------------------------------------------------


async def test_stop_asks_first() -> None:
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].runs["e"] = make_run("e", "extract", progress=make_progress(samples_in_flight=3))
    async with console(fleet=fleet) as shown:
        await shown.press("X")
        await shown.sees("Stop extract", "3 in flight", "4,320 samples are written and stay")
        assert shown.app.focused.id == "cancel"
        await shown.pilot.click("#go")
        await shown.until(lambda: shown.asked("stop_run"))


@pytest.mark.parametrize("verdict", ["unknown", "changed", "revoked"])
async def test_a_host_key_is_accepted_only_where_it_is_new(verdict: str) -> None:
    fleet = FakeFleet(config(1))
    key = HostKey("gpu-01.cluster", 22, "ssh-ed25519", "SHA256:abcdef", verdict)
    fleet.hosts["gpu-01"].link = LinkStatus(LinkState.REFUSED, "the host key", "host-key", host_key=key)
    async with console(fleet=fleet) as shown:
        await shown.press("C")
        await shown.sees("SHA256:abcdef")
        assert shown.app.focused.id == "cancel"
        offered = shown.app.screen.query("#go")
        assert bool(offered) is (verdict == "unknown")
        if offered:
            await shown.press("right", "enter")
            await shown.until(lambda: shown.asked("trust"))
            assert shown.asked("trust") == [("trust", "gpu-01", key)]


async def test_connect_tries_a_lost_host_again() -> None:
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].link = LinkStatus(LinkState.LOST, "no answer")
    async with console(fleet=fleet) as shown:
        await shown.press("c")
        await shown.until(lambda: shown.asked("retry"))


async def test_a_baseline_is_recorded_and_said() -> None:
    async with console() as shown:
        await shown.press("B")
        await shown.sees("baseline recorded for 8 GPUs")


# --- shards and logs --------------------------------------------------------------------------------------------


def with_shards() -> FakeFleet:
    """Make a fleet whose host has a folder of shards."""
    fleet = FakeFleet(config(1))
    names = ["data_9.ckpt", "data_10.ckpt"]
    entries = [{"name": "rows_0-2000", "kind": "folder", "bytes": 0}]
    entries += [{"name": name, "kind": "shard", "bytes": 99_250_000} for name in names]
    fleet.files["/data/hidden"] = {"path": "/data/hidden", "entries": entries, "truncated": False}
    fleet.files["/data/hidden/rows_0-2000"] = {"path": "/data/hidden/rows_0-2000", "entries": [], "truncated": False}
    fleet.files["/data/hidden/data_9.ckpt"] = {
        "path": "/data/hidden/data_9.ckpt", "format": "torch zip", "bytes": 99_250_000,
        "entries": [{"key": "hidden_state", "shape": [1, 1731, 7168], "dtype": "bfloat16", "bytes": 24_815_616}],
        "notes": [{"code": "odd", "level": "warning", "text": "a note [b]"}],
    }  # fmt: skip
    return fleet


async def test_a_typed_path_opens_a_shard_and_a_wrong_one_says_so() -> None:
    async with console(fleet=with_shards()) as shown:
        await shown.press("S")
        await shown.sees("data_9.ckpt", "rows_0-2000/")
        await shown.press("p")
        path = shown.app.screen.query_one("#path", Input)
        path.value = "/data/hidden/data_9.ckpt"
        await shown.press("enter")
        await shown.sees("1×1731×7168", "odd: a note [b]")
        path.value = "/nowhere"
        path.focus()
        await shown.press("enter")
        await shown.sees("cannot be read", "/nowhere: no such file")
        await shown.press("escape")
        await shown.shows(FleetScreen)


async def test_the_log_follows_holds_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.screens.logs.MOST_LINES", 50)
    monkeypatch.setattr("tui.screens.logs.AGAIN_S", 0.0)
    fleet = FakeFleet(config(1))
    fleet.hosts["gpu-01"].runs = {
        "e": make_run("e", "extract"),
        "old": make_run("old", "serve", "lost", started_at=1.0),
    }
    fleet.logs = {"e": "".join(f"line {n}\n" for n in range(200)), "old": "ancient\n"}
    async with console(fleet=fleet) as shown:
        await shown.press("O")
        await shown.sees("line 199", "FOLLOWING")
        fleet.logs["e"] += "10%\r20%\x1b[31m\r30% of [it]\nlast\n"
        await shown.sees("30% of [it]", "last")
        lines = shown.app.screen.query_one("#lines", RowList)
        assert len(lines.lines) == 50
        assert "20%" not in shown.text
        await shown.press("f")
        await shown.sees("HELD")
        fleet.logs["e"] += "unseen\n"
        screen = shown.app.screen
        assert isinstance(screen, LogScreen)
        await shown.until(lambda: "unseen" in str(screen.lines[-1]))
        assert "unseen" not in shown.text
        await shown.press("f")
        await shown.sees("unseen")
        await shown.press("left")
        await shown.sees("ancient", "old  LOST")


# --- help, palette, colours -------------------------------------------------------------------------------------


async def test_the_help_holds_every_action_and_key() -> None:
    async with console(LARGE) as shown:
        await shown.press("question_mark")
        await shown.sees("Moving")
        for action in ACTIONS:
            assert any(action.key in line and action.label in line for line in shown.text.splitlines()), action.id
        await shown.press("question_mark")
        await shown.shows(FleetScreen)


def test_every_action_has_a_method_and_no_key_twice() -> None:
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))
    assert not {key for key in keys if key in ("ctrl+m", "ctrl+i", "ctrl+j") or key.startswith("alt+")}
    for action in ACTIONS:
        assert hasattr(EightZeros, f"action_{action.id}"), action.id


async def test_the_palette_finds_an_action() -> None:
    async with console() as shown:
        await shown.press("ctrl+p")
        await shown.sees("Reset (R)", "Launch (L)")
        await shown.press(*"verify t")
        await shown.sees("Verify (V)")
        await shown.press("enter")
        await shown.until(lambda: isinstance(shown.app.screen, ResetDialog))
        await shown.sees("Verified")


async def test_no_color_refuses_a_theme_that_would_be_black_on_black(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    fleet = FakeFleet(config(1, console=Console(fps=20, theme="ansi-dark")))
    async with console(fleet=fleet) as shown:
        assert shown.app.theme == "eightzeros"
        shown.app.theme = "ansi-light"
        await shown.until(lambda: shown.app.theme == "eightzeros")
        await shown.sees("OK")


def test_frames_are_fewer_over_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(1, console=Console())
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert EightZeros(FakeFleet(settings)).fps == 4
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    assert EightZeros(FakeFleet(settings)).fps == 2


async def test_under_a_dialog_the_wall_moves_once_a_second() -> None:
    async with console() as shown:
        await shown.press("question_mark")
        screen = next(screen for screen in shown.app.screen_stack if isinstance(screen, FleetScreen))
        ticks: list[float] = []
        screen.tick = lambda: ticks.append(time.monotonic())  # type: ignore[method-assign]
        await shown.until(lambda: len(ticks) >= 2)
        assert ticks[1] - ticks[0] > 0.5


async def test_a_terminal_that_is_behind_gets_no_new_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as shown:
        monkeypatch.setattr(shown.app, "_behind", lambda: True)
        panel = shown.app.screen.query_one(HostPanel)
        before = panel.rows
        shown.fleet.tick()
        await shown.pilot.pause(0.2)
        assert panel.rows is before
        monkeypatch.undo()
        await shown.until(lambda: panel.rows is not before)
