"""Park and wake."""

from vllm.entrypoints.serve.dev import Router

router = Router(("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"))
