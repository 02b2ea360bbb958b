"""A small engine process for the host's tests: real sockets, real signals, llama.cpp's way of ending.

`fake_engine.py --port N --as MODE`, key in FAKE_KEY. Modes: serve, die (exit 3 with a word), slow
(loads for 30 s), stubborn (ignores SIGTERM, and so does its child), family (a worker and a grandchild),
foreign (another process of another session takes the port).

It parks: `/sleep` and `/wake` with the key in FAKE_ADMIN give back and take again `--hold` MiB, and every
call is a line of `--diary`. `--fault` makes it misbehave:
lost_sleep, lost_wake (done, and the connection closes without an answer), slow_sleep (done, answered after
30 s), keeps (a 200 that frees nothing), late (frees 1 s after its 200), dies (exits after its 200), refuses (409),
other (answers otherwise once it woke), mute (no canary once it woke), shm (leaves shared memory behind), shm_told
(and exits once a file beside the diary says so), shm_torch (named after itself as PyTorch does, and exits at once),
door (listens on every address as well), door_later (1 s after its start), door_told (once a file beside the diary
says so), worker_door (a child of it does), open (its own port is on every address).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLEEPER = (
    "import signal,sys,time\nif 'deaf' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
)
WORKER_DOOR = "import socket,time\nd = socket.create_server(('0.0.0.0', 0)); print('', flush=True); time.sleep(600)"
running = 0
lock = threading.Lock()
options = argparse.Namespace()
kept: list[object] = []
memory = bytearray()
asleep = False
woken = False
aborted: list[str] = []


def note(line: str) -> None:
    if options.diary:
        with open(options.diary, "a") as diary:
            diary.write(line + "\n")


def release() -> None:
    global memory
    memory = bytearray()


def wait_for(suffix: str) -> None:
    """Until the test has made that file beside the diary."""
    while not os.path.exists(os.path.splitext(options.diary)[0] + suffix):
        time.sleep(0.01)


def open_when_told() -> None:
    wait_for(".door")
    kept.append(socket.create_server(("0.0.0.0", 0)))
    note("door")


def take() -> None:
    global memory
    memory = bytearray(b"x") * (options.hold << 20)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b'{"status":"ok"}')
        elif self.headers["Authorization"] != f"Bearer {os.environ['FAKE_KEY']}":
            self.answer(401, b"{}")
        else:
            if asleep:
                note("gauges asleep")
            self.answer(200, json.dumps({"running": running, "waiting": 0}).encode())

    def do_POST(self) -> None:
        global running
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/sleep", "/wake", "/abort"):
            self.control(asked)
            return
        if self.headers["Authorization"] != f"Bearer {os.environ['FAKE_KEY']}":
            self.answer(401, b"{}")
            return
        if asleep:
            note(f"{self.path} asleep")
            time.sleep(30)
        if self.path == "/v1/completions":
            self.canary()
            return
        with lock:
            running += 1
        try:
            self.chat(asked)
        finally:
            with lock:
                running -= 1

    def canary(self) -> None:
        if woken and options.fault == "mute":
            self.answer(500, b"{}")
        else:
            self.answer(200, b"!!!!" if woken and options.fault == "other" else b"[1, 2, 3]")

    def control(self, asked: dict[str, object]) -> None:
        global asleep, woken
        if self.headers["Authorization"] != f"Bearer {os.environ['FAKE_ADMIN']}":
            self.answer(401, b"{}")
            return
        note(f"{self.path[1:]} {asked.get('rid', '')}".strip())
        fault = options.fault
        if self.path == "/sleep" and fault == "refuses":
            self.answer(409, b"{}")
            return
        if self.path == "/sleep":
            asleep = True
            if fault == "late":
                threading.Timer(1.0, release).start()
            elif fault != "keeps":
                release()
        elif self.path == "/abort":
            aborted.append(str(asked["rid"]))
        elif self.path == "/wake":
            take()
            asleep, woken = False, True
        if (self.path, fault) in (("/sleep", "lost_sleep"), ("/wake", "lost_wake")):
            self.close_connection = True
            return
        if (self.path, fault) == ("/sleep", "slow_sleep"):
            time.sleep(30)
        self.answer(200, b"{}")
        if (self.path, fault) == ("/sleep", "dies"):
            os._exit(9)

    def chat(self, asked: dict[str, object]) -> None:
        """`aborts`: how often it must be asked to end this `rid` before it knows the id, and does."""

        def over() -> bool:
            return "rid" in asked and aborted.count(str(asked["rid"])) >= int(str(asked.get("aborts", 1)))

        if not asked.get("stream"):
            while "aborts" in asked and not over():
                if self.client_gone():
                    self.close_connection = True
                    return
                time.sleep(0.01)
            self.answer(200, b'{"text":"OK"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(int(str(asked.get("pieces", 3)))):
            if self.client_gone():
                self.close_connection = True
                return
            if over():
                break
            piece = f"data: {number}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(float(str(asked.get("wait", 0.0))))
        self.wfile.write(b"0\r\n\r\n")

    def client_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, 2)  # MSG_PEEK


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--as", dest="mode", default="serve")
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--diary", default="")
    parser.add_argument("--fault", default="")
    args = parser.parse_args(namespace=options)
    take()
    print(f"starting as {args.mode} with key {os.environ['FAKE_KEY']}", flush=True)
    if args.diary:
        print(f"parks with key {os.environ['FAKE_ADMIN']}", flush=True)
    if args.mode == "die":
        print("error: cannot load the model", file=sys.stderr, flush=True)
        sys.exit(3)
    if args.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", SLEEPER, "deaf"])
    if args.mode == "family":
        subprocess.Popen([sys.executable, "-c", SLEEPER])
        subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"])
        time.sleep(0.3)  # the shell starts a child of its own
    if args.mode == "slow":
        time.sleep(30)
    if args.fault == "shm":
        with open(f"/dev/shm/fake_{os.getpid()}", "w+b") as file:
            file.truncate(4096)
            kept.append(mmap.mmap(file.fileno(), 4096))
    if args.fault == "shm_told":
        with open(f"/dev/shm/fake_{os.getpid()}", "w+b") as file:
            file.truncate(4096)
            kept.append(mmap.mmap(file.fileno(), 4096))
        wait_for(".exit")
        os._exit(1)
    if args.fault == "shm_torch":
        with open(f"/dev/shm/torch_{os.getpid()}_{time.time_ns()}_0", "w+b") as file:
            file.truncate(4096)
        note(file.name)
        os._exit(1)
    if args.fault == "door":
        door = socket.create_server(("0.0.0.0", 0))
        kept.append(door)
    if args.fault == "door_later":
        threading.Timer(1.0, lambda: kept.append(socket.create_server(("0.0.0.0", 0)))).start()
    if args.fault == "door_told":
        threading.Thread(target=open_when_told, daemon=True).start()
    if args.fault == "worker_door":
        subprocess.Popen([sys.executable, "-S", "-c", WORKER_DOOR], stdout=subprocess.PIPE).stdout.readline()
    server = ThreadingHTTPServer(("0.0.0.0" if args.fault == "open" else "127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
