"""What can go wrong with a connection, in words for the operator."""

from __future__ import annotations

from backend.link.status import HostKey, LinkState, LinkStatus


class LinkLost(ConnectionError):
    """The connection ended before an answer came, or is not live. The request may or may not have had its
    effect."""


class Trouble(Exception):
    """Why a connection failed or ended. `refused` means that trying again without the operator is wrong."""

    def __init__(
        self, code: str, reason: str, hint: str = "", *,
        refused: bool = False, host_key: HostKey | None = None,
    ) -> None:  # fmt: skip
        super().__init__(reason)
        self.code, self.reason, self.hint = code, reason, hint
        self.refused, self.host_key = refused, host_key

    def status(self, retry_in_s: float | None = None) -> LinkStatus:
        """Return the status that this trouble leaves a link in."""
        return LinkStatus(
            LinkState.REFUSED if self.refused else LinkState.LOST,
            reason=self.reason, code=self.code, hint=self.hint, retry_in_s=retry_in_s, host_key=self.host_key,
        )  # fmt: skip
