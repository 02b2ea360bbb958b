"""The older place of the server's start."""

from vllm.entrypoints.launchers.api_server.entry import run_server

__all__ = ["run_server"]
