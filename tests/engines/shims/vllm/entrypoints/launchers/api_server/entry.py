"""Starts the API server."""

import sys

from simulated_engine.vllm import Vllm

from vllm._version import __version__


async def run_server(args, **uvicorn_kwargs):
    """Serve until the end; the process ends here."""
    Vllm(__version__).serve(args, sys.argv[1:])
