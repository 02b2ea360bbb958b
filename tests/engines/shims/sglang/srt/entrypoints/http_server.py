"""Starts the server."""

import argparse
import sys

from simulated_engine.sglang import Sglang

from sglang.version import __version__


class Application:
    """What takes middleware before the server starts, as the framework's application does."""

    def __init__(self):
        self.middlewares = []

    def add_middleware(self, middleware, **options):
        self.middlewares.append(lambda app: middleware(app, **options))


app = Application()


def launch_server(server_args, **callbacks):
    """Serve until the end; the process ends here."""
    server_args.resolve_once()
    engine = Sglang(__version__)
    engine.middlewares = app.middlewares
    sys.exit(engine.serve(argparse.Namespace(**vars(server_args)), sys.argv[1:]))


async def flush_cache(timeout=0.0):
    raise NotImplementedError("routes of the simulated engine lie in simulated_engine")


release_memory_occupation = resume_memory_occupation = update_weights_from_disk = abort_request = flush_cache
