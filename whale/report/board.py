"""`whale board runs/`: a page in a browser that follows runs. It listens on this machine only,
reads files only, and needs nothing from elsewhere.

    /              the page
    /runs          all runs, as JSON
    /run/NAME      one run, as JSON
    /plan/NAME     the page of its plan
"""

from __future__ import annotations

import http.server
import ipaddress
import json
import socket
import urllib.parse
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path

from whale.report.run_data import Runs
from whale.report.svg import render

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)
"""a page of ours may talk to this server and to nobody else"""


def make_server(folder: Path, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """A server of the runs below a folder, bound but not yet running. Port 0: any that is free."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder. Try: whale board runs")
    if not _is_loopback(host):
        raise ValueError(
            f"--host {host}: whale board shows runs to this machine only, since it asks for no "
            "password. Try: --host 127.0.0.1, and from elsewhere ssh -L 8080:127.0.0.1:8080"
        )
    handler = partial(_Handler, Runs(folder))
    server = _Server6 if ":" in host else http.server.ThreadingHTTPServer
    try:
        return server((host, port), handler)
    except OSError as error:
        raise ValueError(
            f"--port {port} cannot be opened: {error.strerror}. Try: --port 0 for any"
        ) from error


def _is_loopback(host: str) -> bool:
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name of another host
        return False


class _Server6(http.server.ThreadingHTTPServer):
    """A server on an address like ::1."""

    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET; whatever else is asked for is refused."""

    server_version = "whale"
    sys_version = ""

    def __init__(self, runs: Runs, *rest: object) -> None:
        self._runs = runs
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        # a page elsewhere may point its own name at this machine: then the name gives it away
        name = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if not _is_loopback(name):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"not a name of this machine: {name}")
            return
        _, _, path = self.path.partition("/")
        kind, _, argument = path.partition("?")[0].partition("/")
        answers: dict[str, Callable[[str], None]] = {
            "": self._page,
            "runs": self._overview,
            "run": self._run,
            "plan": self._plan,
        }
        answer = answers.get(kind, self._nothing)
        answer(urllib.parse.unquote(argument))

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not printed: the page asks every second."""

    def _page(self, argument: str) -> None:
        if argument:
            self._nothing(argument)
            return
        text = render("board.html", title="Whale runs", summary=str(self._runs.folder.name))
        self._answer(HTTPStatus.OK, "text/html", text)

    def _overview(self, argument: str) -> None:
        self._answer(HTTPStatus.OK, "application/json", json.dumps(self._runs.overview()))

    def _run(self, name: str) -> None:
        found = self._runs.run(name)
        if found is None:
            self._nothing(name)
            return
        self._answer(HTTPStatus.OK, "application/json", json.dumps(found))

    def _plan(self, name: str) -> None:
        path = self._runs.plan_file(name)
        if path is None:
            self._nothing(name)
            return
        # torch is imported here: only those who look at a plan wait for it
        from whale.plans.plan import Plan
        from whale.report.plan_page import html
        from whale.simulation.simulate import simulate

        try:
            plan = Plan.load(path)
            text = html(plan, simulate(plan))
        except (ValueError, OSError) as error:
            self._answer(HTTPStatus.OK, "text/plain", f"this plan cannot be shown: {error}")
            return
        self._answer(HTTPStatus.OK, "text/html", text)

    def _nothing(self, argument: str) -> None:
        self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", PAGE_POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)
