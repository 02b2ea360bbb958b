"""Caches."""

from vllm.entrypoints.serve.dev import Router

router = Router(("POST", "/reset_prefix_cache"), ("POST", "/reset_mm_cache"), ("POST", "/reset_encoder_cache"))
