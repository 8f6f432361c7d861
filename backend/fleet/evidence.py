"""What past resets left: their receipts on the host, and segments and ports of processes that are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from backend.fleet.launching import SHORT_S
from backend.wire import Leftovers, Receipt

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


class Evidence:
    """The part of a Fleet that shows what is past."""

    if TYPE_CHECKING:

        def _ask(
            self, name: str, op: str, kind: type[T], timeout_s: float, args: dict[str, Any] | None = None
        ) -> Future[T]: ...

    def receipts(self, name: str) -> Future[list[dict[str, Any]]]:
        """List the host's receipts, newest first."""
        return self._ask(name, "receipts.list", list[dict[str, Any]], SHORT_S)

    def receipt(self, name: str, receipt_id: str) -> Future[Receipt]:
        """Return one receipt."""
        return self._ask(name, "receipts.get", Receipt, SHORT_S, {"id": receipt_id})

    def leftovers(self, name: str, remove: bool = False) -> Future[Leftovers]:
        """Ask what processes that are gone left behind; with `remove` the user's own segments are removed."""
        return self._ask(name, "leftovers.find", Leftovers, SHORT_S, {"remove": remove})
