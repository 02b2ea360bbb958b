"""The inference endpoint: authentication, queueing at the desk, relay, hang-ups, figures."""

from capyctl.router.app import Router, build_app
from capyctl.router.connection import Bounds
from capyctl.router.desk import (
    Arrival,
    Desk,
    Exchange,
    Model,
    NotAccepted,
    Place,
    Ticket,
    Upstream,
    UpstreamBroken,
    Waiting,
)
from capyctl.router.keys import Caller, Key, Keyring, Keys, NoKeys
from capyctl.router.listener import serve
from capyctl.router.relay import Settings

__all__ = [
    "Arrival",
    "Bounds",
    "Caller",
    "Desk",
    "Exchange",
    "Key",
    "Keyring",
    "Keys",
    "Model",
    "NoKeys",
    "NotAccepted",
    "Place",
    "Router",
    "Settings",
    "Ticket",
    "Upstream",
    "UpstreamBroken",
    "Waiting",
    "build_app",
    "serve",
]
