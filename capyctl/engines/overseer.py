"""Runs one program and ends whatever it started: `overseer.py <descriptor> <program> <word>…`.

A process of its own, since the kernel gives orphans to the nearest ancestor that asks for them: what the program
moved into another session comes back to this process, which knows that everything it has is the program's.

Standard library alone, and no package: it runs with `-I -S`, so that it costs a few milliseconds. On the descriptor,
a socket, it says `exit <status>` (negative for a signal) or `errno <number>` once; when the other side closes it,
everything that is left is ended.
Source: engines 2.3 step 4; security 16.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
END_LIMIT_S = 5.0


def main(line: int, argv: list[str]) -> None:
    os.set_inheritable(line, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    report, told = os.pipe()
    program = os.fork()
    if program == 0:
        _become(argv, told)
    os.close(told)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # the streams are the program's: they end with it and what it leaves behind
    os.dup2(nothing, 2)
    failed = os.read(report, 16)
    asked = True
    while asked:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            break
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            os.read(woken, 64)
        asked = line not in ready  # nothing is ever said on it: it was closed
    if asked:
        said = f"errno {failed.decode()}" if failed else f"exit {os.waitstatus_to_exitcode(status)}"
        try:
            os.write(line, said.encode())
            os.read(line, 64)
        except OSError:
            pass  # whoever asked is gone, which means the same as a closed line
    end_children()


def _become(argv: list[str], told: int) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(argv[0], argv, given())
    except OSError as wrong:
        os.write(told, str(wrong.errno).encode())
    finally:
        os._exit(127)


def given() -> dict[bytes, bytes]:
    """The environment as it was given; the interpreter may have added a locale of its own."""
    with open("/proc/self/environ", "rb") as stream:
        pairs = [pair.partition(b"=") for pair in stream.read().split(b"\0") if pair]
    return {name: value for name, _, value in pairs}


def end_children() -> None:
    """SIGKILL to every child, until none is left: the children of one that ends become this process's."""
    ends = time.monotonic() + END_LIMIT_S
    while time.monotonic() < ends:
        for child in children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)  # what was killed ends soon; new orphans may still arrive


def children(parent: int) -> list[int]:
    """Children of a process, zombies included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if len(fields) > 1 and int(fields[1]) == parent:
                found.append(int(name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
