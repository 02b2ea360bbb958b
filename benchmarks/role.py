"""A throw-away standalone role with the real engine and the small real model, for measurements."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capyctl.cli import demo_parts
from capyctl.documents import places

CAPYCTL = (sys.executable, "-m", "capyctl")
READY_LIMIT_S = 30


@attrs.frozen
class Role:
    """A running role: its room, its endpoint's port, its client key."""

    room: demo_parts.Room
    port: int
    key: str = attrs.field(repr=False)

    def command(self, *words: str) -> str:
        """Run one `capyctl` command; what it prints. Raises CalledProcessError."""
        done = subprocess.run([*CAPYCTL, *words], env=self.room.environ(), capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.decode().strip()}")
        return done.stdout.decode()

    def deploy(self, name: str, **config: Any) -> None:  # Any: a document's plain values
        """Deploy the small model under a name, and wait until its checkpoint is known."""
        path = self.room.root / f"{name}.json"
        path.write_text(json.dumps({"name": name, "engine": "llamacpp", "model": "small", **config}))
        self.command("deploy", "model", "--file", str(path))

    def ask(self, name: str) -> None:
        """One request, until its whole answer of one token is here."""
        chat(self.port, self.key, name)

    def pid(self, name: str) -> int:
        """The engine of a deployment that runs."""
        view = json.loads(self.command("inspect", "deployment", name, "--json"))
        return int(view["instances"][0]["pid"])


def chat(port: int, key: str, name: str) -> None:
    """One question of one token to whatever serves it on `port`. Raises unless it is answered 200."""
    body = json.dumps({"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{name} answered {answer.status}: {said[:300]!r}")


@contextlib.contextmanager
def running(settings: Mapping[str, str]) -> Iterator[Role]:
    """A role with these settings, until the block ends; engines and files end with it."""
    room = demo_parts.Room.make()
    room.place_model("small", demo_parts.model(lambda text: print(text, file=sys.stderr)))
    engine = demo_parts.engine(lambda text: print(text, file=sys.stderr))
    first, last = demo_parts.free_ports(8)
    words = ["--models-root", str(room.models), "--listen", "127.0.0.1:0", "--management-listen", "127.0.0.1:0"]
    words += ["--engine-ports", f"{first}-{last}"]
    words += [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    with room.log.open("wb") as log:
        process = None
        try:
            # One thread for the engine: it is the control plane that is measured.
            added = subprocess.run(
                [*CAPYCTL, "engine", "add", str(engine), "--arg=--threads", "--arg=1"],
                env=room.environ(),
                capture_output=True,
                check=False,
            )
            if added.returncode:
                raise RuntimeError(added.stderr.decode())
            process = subprocess.Popen(
                [*CAPYCTL, "start", "standalone", "--format", "text", *words],
                env=room.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            role = Role(room=room, port=_port(room, process), key=places.read_credentials(_credentials(room)).api_key)
            yield role
            role.command("drain", "standalone")
        finally:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            room.remove()


def _credentials(room: demo_parts.Room) -> str:
    return places.Places(str(room.state)).credentials


def _port(room: demo_parts.Room, process: subprocess.Popen[bytes]) -> int:
    """The endpoint's port, once the role says that it is ready."""
    ends_at = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < ends_at and process.poll() is None:
        if os.path.exists(places.Places(str(room.state)).management_address):
            for line in room.log.read_text().splitlines():
                if line.split()[:1] == ["Inference"]:
                    return int(line.split()[1].rpartition(":")[2])
        time.sleep(0.05)
    raise RuntimeError(f"the role did not come up: {room.log.read_text()}")
