"""The console in a browser: textual-serve on loopback, behind a token and checks of Host and Origin."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from aiohttp import web
from textual_serve.server import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COOKIE = "eightzeros"


class LoopbackServer(Server):
    """Serves one console per page. Every request must name 127.0.0.1 and carry the token of this start.

    A page of another site can neither read the token nor pass the check of Origin; a name that it points at 127.0.0.1
    (DNS rebinding) fails the check of Host.
    """

    def __init__(self, command: str, port: int) -> None:
        super().__init__(command, host="127.0.0.1", port=port, title="eightzeros")
        self.token = secrets.token_urlsafe(24)
        self.place = f"127.0.0.1:{port}"

    @property
    def url(self) -> str:
        """Return the address to open; who has it may use the console."""
        return f"http://{self.place}/?token={self.token}"

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app.middlewares.append(guard)
        return app

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Host") != self.place:
            raise web.HTTPForbidden(text=f"refused: open http://{self.place}, by this very name\n")
        if request.headers.get("Origin", f"http://{self.place}") != f"http://{self.place}":
            raise web.HTTPForbidden(text="refused: asked by a page of another site\n")
        given = request.query.get("token", "") if request.path == "/" else ""
        known = given or request.cookies.get(COOKIE, "")
        if not secrets.compare_digest(known.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="refused: open the address that `eightzeros web` printed, with its token\n")
        if given:
            # The address bar and the history keep no token.
            found = web.HTTPSeeOther("/")
            found.set_cookie(COOKIE, self.token, httponly=True, samesite="Strict")
            return found
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
            response.headers["Cache-Control"] = "no-store"
        return response

    async def on_startup(self, app: web.Application) -> None:
        """Say nothing: the command has said where it serves."""
