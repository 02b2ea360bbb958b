"""What every test process needs, whoever started it."""

from __future__ import annotations

import signal

# A shell that runs a job in the background has it ignore SIGINT, nohup has it ignore SIGHUP, and children inherit that
# through exec. A handler is not inherited: with one here, what a test starts hears both wherever the tests run.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
