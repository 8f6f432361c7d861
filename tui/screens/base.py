"""What the console's screens share: a tick, the app's own type, and how an answer is awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen

from tui.widgets.buttons import ActionButton
from tui.widgets.painted import Painted, RowList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from tui.app import EightZeros
    from tui.keys import Key
    from tui.widgets.rows import Row

T = TypeVar("T")


async def answer(future: Future[T]) -> T:
    """Wait for an action's answer. To stop waiting (a closed dialog, a quit) never cancels the action itself."""
    inner = asyncio.wrap_future(future)
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear of it
    return await asyncio.shield(inner)


class Ticking(Screen[None]):
    """A full screen that the app's frame timer repaints. `KEYS` are its own keys, beside those of all screens."""

    KEYS: ClassVar[tuple[Key, ...]] = ()

    @property
    def console(self) -> EightZeros:
        """Return the app with its own type."""
        return cast("EightZeros", self.app)

    @property
    def host_name(self) -> str:
        """Return the host that actions mean while this screen is shown."""
        return ""

    def tick(self) -> None:
        """Repaint what changed."""


class Dialog(ModalScreen[None]):
    """A title, rows that scroll, a hint and a line of buttons. The body only grows, so that nothing jumps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "close", "Close"),
        ("left", "app.focus_previous", "Previous"),
        ("right", "app.focus_next", "Next"),
        ("up,k", "scroll_body(-1)", "Up"),
        ("down,j", "scroll_body(1)", "Down"),
        ("pageup", "scroll_body(-10)", "Page up"),
        ("pagedown", "scroll_body(10)", "Page down"),
        ("home", "scroll_body(-1000000)", "First"),
        ("end", "scroll_body(1000000)", "Last"),
    ]
    frame = 8  # rows of the dialog that are not the body

    @property
    def console(self) -> EightZeros:
        """Return the app with its own type."""
        return cast("EightZeros", self.app)

    def compose(self) -> ComposeResult:
        """Lay out title, body, hint and buttons."""
        with Vertical(classes="dialog"):
            yield Painted(id="title", classes="title")
            yield from self.compose_above()
            yield RowList(id="body")
            yield from self.compose_below()
            yield Painted(id="hint", classes="hint")
            with Horizontal(classes="buttons"):
                yield from self.compose_buttons()

    def compose_above(self) -> Iterable[RowList]:
        """Yield widgets above the body."""
        return ()

    def compose_below(self) -> ComposeResult:
        """Yield widgets below the body."""
        yield from ()

    def compose_buttons(self) -> Iterable[ActionButton]:
        """Yield the buttons."""
        return ()

    @property
    def body(self) -> RowList:
        """Return the rows."""
        return self.query_one("#body", RowList)

    @property
    def text_width(self) -> int:
        """Return the width that rows of the body may have."""
        return max(30, min(110, self.app.size.width * 92 // 100) - 6)

    def show(self, title: Row, rows: Sequence[Row], hint: str = "", *, follow: bool = False) -> None:
        """Fill the dialog."""
        self.query_one("#title", Painted).show([title])
        self.query_one("#hint", Painted).show([(("dim", hint),)])
        tall = self.app.size.height  # the theme gives a dialog 96 % of it at most
        most = max(4, min(tall - 2, tall * 96 // 100) - self.frame)
        height = self.body.styles.height
        before = int(height.value) if height is not None and height.is_cells else 0
        self.body.styles.height = min(most, max(before, len(rows)))
        self.body.show(list(rows), follow=follow)

    def tick(self) -> None:
        """Repaint what changed."""

    def action_close(self) -> None:
        """Close the dialog."""
        self.dismiss()

    def action_scroll_body(self, step: int) -> None:
        """Scroll the rows while a button has the focus."""
        self.body.action_move(step)
