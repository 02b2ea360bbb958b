"""A launch of an adapter's own command, as the host would start it: until it answers, and no longer than its test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator

import attrs
import trio

from capyctl.engines.adapter import Adapter, LaunchFacts
from capyctl.host.http import LoopbackClient


@attrs.frozen(kw_only=True)
class Running:
    """A started launch."""

    process: subprocess.Popen[bytes]
    client: LoopbackClient
    facts: LaunchFacts


@contextlib.asynccontextmanager
async def started(adapter: Adapter, facts: LaunchFacts, *, dies: bool = False) -> AsyncIterator[Running]:
    """Loaded, or ended by itself where the test expects that it `dies`."""
    command = adapter.render(facts)
    with open(facts.log_path, "ab") as log:
        process = subprocess.Popen(
            command.argv, env=dict(command.env), stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    client = LoopbackClient(port=facts.port, key=facts.key, admin_key=facts.admin_key)
    try:
        with trio.fail_after(30):
            while process.poll() is None:
                with contextlib.suppress(ConnectionError):
                    if await adapter.loaded(client):
                        break
                await trio.sleep(0.02)
        assert (process.poll() is not None) is dies, facts.log_path.read_text()
        yield Running(process=process, client=client, facts=facts)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
