"""Logging."""


def configure_logging_from_args(args):
    return None
