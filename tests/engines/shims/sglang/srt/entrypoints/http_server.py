"""Starts the server."""

import argparse
import sys

from simulated_engine.sglang import Sglang

from sglang.version import __version__


def launch_server(server_args, **callbacks):
    """Serve until the end; the process ends here."""
    server_args.resolve_once()
    engine = Sglang(__version__)
    sys.exit(engine.serve(argparse.Namespace(**vars(server_args)), sys.argv[1:]))


async def flush_cache(timeout=0.0):
    raise NotImplementedError("routes of the simulated engine lie in simulated_engine")


release_memory_occupation = resume_memory_occupation = update_weights_from_disk = abort_request = flush_cache
