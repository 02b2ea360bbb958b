"""The program that a launch starts as. It becomes the engine when the gate opens, and nothing else.

Run by path with `python -I -S`, so it imports the standard library only. Descriptor 3 is the gate:
one JSON line `{"argv": [...], "env": {...}}`. The host writes it after the identity of this very
process is durable. End of input before the line is complete means that the host died or changed its
mind, and this process ends without ever having become anything. Descriptor 4 tells about the exec:
it closes when the exec succeeds (close-on-exec), else it carries the error's number.
"""

import json
import os
import signal

GATE, VERDICT = 3, 4
ABANDONED = 125  # the gate closed before it opened
NOT_EXECUTED = 126


def main() -> None:
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = os.read(GATE, 65536)
        if not piece:
            os._exit(ABANDONED)
        received += piece
    order = json.loads(received)
    os.close(GATE)
    os.closerange(VERDICT + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(VERDICT, False)
    os.umask(0o077)
    os.chdir("/")
    # Python ignores these two, and what is ignored stays ignored over an exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        os.write(VERDICT, str(error.errno).encode("ascii"))
    os._exit(NOT_EXECUTED)


if __name__ == "__main__":
    main()
