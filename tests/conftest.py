"""What every test process needs, whoever started it."""

from __future__ import annotations

import signal

# A shell that runs a job in the background has it ignore SIGINT, and children inherit that through exec.
# A handler is not inherited: with one here, what a test starts can be interrupted wherever the tests run.
signal.signal(signal.SIGINT, signal.default_int_handler)
