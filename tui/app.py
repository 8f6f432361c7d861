"""The app: wiring between the Fleet and the screens, the frame timer, and what each action opens."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual.app import App, ScreenStackError
from textual.css.query import NoMatches
from textual.message import Message
from textual.worker import Worker, WorkerState

from backend.fleet.state import EVENTS_KEPT
from backend.wire import RUN_LIVE
from tui.actions import bindings
from tui.keys import CHANGES
from tui.palette import ActionCommands
from tui.readonly import HINT, WHY, ReadOnlyFleet
from tui.screens.audit import AuditScreen
from tui.screens.base import Dialog, Ticking, answer
from tui.screens.fleet import FleetScreen
from tui.screens.help import HelpDialog
from tui.screens.host import HostScreen
from tui.screens.hostkey import HostKeyDialog
from tui.screens.launch import LaunchDialog
from tui.screens.logs import LogScreen
from tui.screens.reset import ResetDialog
from tui.screens.shards import ShardScreen
from tui.screens.stop import StopDialog
from tui.screens.timeline import TimelineScreen
from tui.theme import DEFAULTS, EIGHTZEROS
from tui.widgets.run_rows import chosen_run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from textual.binding import BindingType
    from textual.dom import DOMNode

    from backend.fleet import Event
    from tui.console import FleetLike

T = TypeVar("T")

FPS, FPS_OVER_SSH = 4.0, 2.0


@dataclass
class Happened(Message):
    """An event of the Fleet, carried from its thread."""

    event: Event


class EightZeros(App[None]):
    """The operator's console on a Fleet."""

    TITLE = "eightzeros"
    CSS_PATH = Path(__file__).with_name("theme.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    COMMANDS = {ActionCommands}  # noqa: RUF012
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, fleet: FleetLike, replay: tuple[str, str] | None = None, *, read_only: bool = False) -> None:
        super().__init__()
        self.read_only, self._replay = read_only, replay
        self.fleet: FleetLike = ReadOnlyFleet(fleet) if read_only else fleet
        self.paused = False
        self.happened: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.animation_level = "none"
        over_ssh = FPS_OVER_SSH if os.environ.get("SSH_CONNECTION") else FPS
        self.fps = fleet.config.console.fps or over_ssh
        self._frame = 0

    # --- life -------------------------------------------------------------------------------------------------

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Give other themes the colours that only ours names."""
        return DEFAULTS

    def on_mount(self) -> None:
        """Show the fleet, then start it: the first frame does not wait for a connection."""
        self.register_theme(EIGHTZEROS)
        wanted = self.fleet.config.console.theme
        self.theme = wanted if wanted in self.available_themes else EIGHTZEROS.name
        self.theme_changed_signal.subscribe(self, lambda theme: self._refuse_ansi(theme.name))
        self._refuse_ansi(self.theme)
        for event in sorted((e for host in self.fleet.hosts.values() for e in list(host.events)), key=lambda e: e.at):
            self.happened.append(event)
        self.fleet.listener = self._heard
        self.push_screen(FleetScreen())
        if self._replay:
            name, run_id = self._replay
            self.push_screen(TimelineScreen(self.fleet.hosts[name], self.fleet, run_id))
        self.run_worker(self._start(), exit_on_error=False)
        self.set_interval(1 / self.fps, self._tick)

    def _heard(self, event: Event) -> None:
        self.post_message(Happened(event))

    async def _start(self) -> None:
        await asyncio.to_thread(self.fleet.start)

    def on_unmount(self) -> None:
        """Let the Fleet's thread no longer post to an app that ends."""
        self.fleet.listener = None

    def _refuse_ansi(self, name: str) -> None:
        # With NO_COLOR Textual paints the ansi themes black on black (seen on 8.2.8).
        if self.no_color and "ansi" in name:
            self.theme = EIGHTZEROS.name
            self.say(f"The theme {name} cannot be read with NO_COLOR; {EIGHTZEROS.name} is used.", "warning")

    # --- painting ---------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._frame += 1
        if self._behind():
            return
        try:
            self._repaint()
        except (NoMatches, ScreenStackError):
            return  # a screen is being put together or taken apart

    def _repaint(self) -> None:
        top = self.screen
        if isinstance(top, Dialog):
            top.tick()
        if self.paused:
            return
        if isinstance(top, Ticking):
            top.tick()
        elif self._frame % max(1, round(self.fps)) == 0 and (below := self.shown) is not None:
            # Under a dialog the wall costs twice as much, so it moves once a second.
            below.tick()

    @property
    def shown(self) -> Ticking | None:
        """Return the full screen that is on top, dialogs aside."""
        screens = reversed(self.screen_stack)
        return next((screen for screen in screens if isinstance(screen, Ticking)), None)

    def _behind(self) -> bool:
        """Say whether earlier frames still wait for the terminal; a full queue would block the loop."""
        writer = getattr(self._driver, "_writer_thread", None)
        queue = getattr(writer, "_queue", None)
        return queue is not None and queue.qsize() > 0

    def on_happened(self, message: Happened) -> None:
        """Keep an event for the log; what is bad is also said aloud."""
        self.happened.append(message.event)
        if message.event.level == "bad":
            self.say(f"{message.event.host}: {message.event.text}", "error")
            self.bell()

    def say(self, text: str, severity: str = "information") -> None:
        """Show a toast; the text is never read as markup."""
        self.notify(text, severity=severity, markup=False, timeout=6)  # type: ignore[arg-type]

    # --- work -------------------------------------------------------------------------------------------------

    def work_on(self, work: Coroutine[None, None, None], group: str) -> None:
        """Run a coroutine beside the screen; what it raises becomes a toast."""
        self.run_worker(work, group=group, exit_on_error=False)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Say why a worker failed; Textual would stay silent."""
        if event.state is WorkerState.ERROR:
            error = event.worker.error
            self.say(str(error) or type(error).__name__, "error")

    def ask(self, future: Future[T], done: Callable[[T], None], group: str) -> None:
        """Wait for an answer beside the screen and hand it to `done`."""

        async def wait() -> None:
            done(await answer(future))

        self.work_on(wait(), group)

    # --- actions ----------------------------------------------------------------------------------------------

    @property
    def host_name(self) -> str:
        """Return the host that actions mean, or an empty name where there is none."""
        return self.shown.host_name if self.shown else ""

    async def _dispatch_action(self, namespace: DOMNode, action_name: str, params: Any) -> bool:
        """Refuse what changes a host where the console may only look: keys, buttons and the palette all come here."""
        if self.read_only and action_name in CHANGES:
            self.say(f"Refused: {WHY}; {HINT}.", "warning")
            return True
        return await super()._dispatch_action(namespace, action_name, params)

    def _on_host(self, show: Callable[[str], object]) -> None:
        if self.host_name:
            show(self.host_name)
        else:
            self.say("There is no host in the configuration.", "warning")

    def action_reset(self) -> None:
        """Show whom a reset would kill."""
        self._on_host(lambda name: self.push_screen(ResetDialog(self.fleet.hosts[name])))

    def action_launch(self) -> None:
        """Choose a stage and check its gates."""
        self._on_host(lambda name: self.push_screen(LaunchDialog(self.fleet.hosts[name])))

    def action_verify(self) -> None:
        """Verify without a kill and show the verdict."""
        self._on_host(lambda name: self.push_screen(ResetDialog(self.fleet.hosts[name], verify=True)))

    def action_shards(self) -> None:
        """Browse shards on the host."""
        self._on_host(lambda name: self.push_screen(ShardScreen(self.fleet.hosts[name])))

    def action_audit(self) -> None:
        """Follow an audit, or start one; of the folder that is browsed, where one is."""
        folder = self.shown.shards.top if isinstance(self.shown, ShardScreen) else ""
        self._on_host(lambda name: self.push_screen(AuditScreen(self.fleet.hosts[name], folder)))

    def action_log(self) -> None:
        """Follow a run's output."""
        self._on_host(lambda name: self.push_screen(LogScreen(self.fleet.hosts[name])))

    def action_timeline(self) -> None:
        """Scrub through a host's flight."""
        self._on_host(lambda name: self.push_screen(TimelineScreen(self.fleet.hosts[name], self.fleet)))

    def open_host(self, name: str) -> None:
        """Open a host's own screen."""
        panel = self.screen.focused
        cursor = getattr(panel, "cursor", 0)
        self.push_screen(HostScreen(self.fleet.hosts[name], cursor))

    def action_open_host(self) -> None:
        """Open the host in focus."""
        self._on_host(self.open_host)

    def action_baseline(self) -> None:
        """Record the idle GPUs as baseline."""

        def done(name: str) -> None:
            self.ask(self.fleet.record_baseline(name), lambda found: self._said_baseline(name, found), "baseline")

        self._on_host(done)

    def _said_baseline(self, name: str, found: dict[str, object]) -> None:
        gpus = found.get("gpus")
        count = len(gpus) if isinstance(gpus, dict) else 0
        self.say(f"{name}: baseline recorded for {count} GPUs")

    def action_stop_run(self) -> None:
        """Ask before the run that is shown is stopped."""
        pick = chosen_run(self.fleet.hosts.values(), self.host_name)
        if pick is None or pick[1].state not in RUN_LIVE:
            self.say("No run is live.", "warning")
            return
        self.push_screen(StopDialog(*pick))

    def action_connect(self) -> None:
        """Show the key that a host offered, or try to connect at once."""

        def connect(name: str) -> None:
            key = self.fleet.hosts[name].link.host_key
            if key is not None:
                self.push_screen(HostKeyDialog(name, key))
            else:
                self.ask(self.fleet.retry(name), lambda _: self.say(f"{name}: connecting"), "connect")

        self._on_host(connect)

    def action_pause(self) -> None:
        """Stop or resume painting."""
        self.paused = not self.paused
        below = self.screen
        if isinstance(below, Ticking):
            below.tick()

    def action_help(self) -> None:
        """Show every key."""
        self.push_screen(HelpDialog(self.shown.KEYS if self.shown else ()))

    def action_palette(self) -> None:
        """Open the command palette."""
        self.action_command_palette()


def run(fleet: FleetLike, replay: tuple[str, str] | None = None, *, read_only: bool = False) -> None:
    """Show the console until the operator leaves, then close the connections. Runs on the hosts go on.

    `replay` opens the timeline of (host, run) on top; no run: all that was recorded. `read_only`: it may only look.
    """
    app = EightZeros(fleet, replay, read_only=read_only)
    try:
        app.run()
    finally:
        fleet.stop()
