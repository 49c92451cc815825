"""HTTP servers of ours: a FastAPI app under uvicorn, in a thread (`launch_in_thread`) or in the foreground (`serve`).

The listening socket is bound here, before uvicorn starts, so that port 0 gives a free port, a port in use is an error
with its mend, and requests sent right after the call returns are queued by the kernel rather than refused.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from astrolabe.records.errors import ServerError, UsageError

START_TIMEOUT_S = 60.0


@dataclass
class RunningServer:
    """A server in a thread. Use as a context manager, or call `stop`."""

    url: str
    """Base address without a trailing slash, e.g. `http://127.0.0.1:40123`."""
    port: int
    _server: Any = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the server to finish, then wait; open connections are cut after `timeout_s`."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(timeout_s)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine: such requests go past any configured proxy."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket. UsageError if the port is in use, forbidden, or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use", "stop what listens there, or give another port (0 takes a free one)"
            ) from None
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}", "check host and port") from None
    except OverflowError:
        sock.close()
        raise UsageError(f"{port} is no port", "give a port from 0 to 65535") from None
    return sock


def _uvicorn_server(app: Any, log_level: str) -> Any:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,  # its own would close every log handler of the process
        log_level=log_level,
        access_log=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def launch_in_thread(app: Any, port: int = 0, *, host: str = "127.0.0.1", name: str = "server") -> RunningServer:
    """Serve the ASGI `app` from a daemon thread and return once it answers.

    UsageError if the port is in use; ServerError if the app fails to start.
    """
    sock = bind(host, port)
    server = _uvicorn_server(app, "error")
    failure: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(server.serve(sockets=[sock]))
        except (SystemExit, Exception) as error:  # handed to the caller below; uvicorn exits on a failed start
            failure.append(error)
        finally:
            sock.close()

    thread = threading.Thread(target=body, name=name, daemon=True)
    bound = sock.getsockname()[1]
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    if failure or not server.started:
        server.should_exit = True
        detail = f": {failure[0]}" if failure else ""
        raise ServerError(f"{name} did not start on {host}:{port}{detail}", "see its log above")
    shown = f"[{host}]" if ":" in host else host
    return RunningServer(url=f"http://{shown}:{bound}", port=bound, _server=server, _thread=thread)


def serve(app: Any, *, host: str = "127.0.0.1", port: int = 0, name: str = "server") -> None:
    """Serve the ASGI `app` in the foreground until Ctrl-C or SIGTERM; prints the address to stderr when it listens."""
    import sys

    sock = bind(host, port)
    print(f"{name}: http://{host}:{sock.getsockname()[1]}", file=sys.stderr, flush=True)
    server = _uvicorn_server(app, "warning")
    try:
        asyncio.run(server.serve(sockets=[sock]))
    except KeyboardInterrupt:
        return  # uvicorn has shut down in order and raises the signal again
    finally:
        sock.close()
