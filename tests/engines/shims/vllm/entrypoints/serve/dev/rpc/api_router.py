"""Calls into the workers."""

from vllm.entrypoints.serve.dev import Router

router = Router(("POST", "/collective_rpc"))
