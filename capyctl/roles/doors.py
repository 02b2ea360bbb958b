"""The two listeners of a role: bound before it says that it is ready, and closed once what runs has ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from capyctl import router
from capyctl.documents.scalars import SocketAddress
from capyctl.documents.settings import StandaloneSettings
from capyctl.errors import CapyError, Refusal
from capyctl.roles import descriptors
from capyctl.roles.machine import Machine
from capyctl.roles.ready import Ready, warn_open
from capyctl.roles.stopping import Stopping
from capyctl.server import lock
from capyctl.server.listener import serve_management
from capyctl.server.management import build_management
from capyctl.server.services import RoleFacts, Services

GRACE_S = 2.0  # for answers that are cut once the drain's time is over


async def open_doors(
    doors: trio.Nursery,
    role: str,
    settings: StandaloneSettings,
    stopping: Stopping,
    services: Services,
    here: Machine,
    form: str,
) -> Ready:
    """Bind and serve both listeners; what the banner says of them."""
    listeners = settings.document.server.listeners
    inference, management = listeners.inference, listeners.management
    if inference.authentication == "none" and not inference.bind.loopback:
        warn_open(str(inference.bind), form)
    bound: str = await doors.start(partial(_serve_inference, inference.bind, settings, stopping, services, here))
    admin: str = await doors.start(
        partial(
            serve_management,
            build_management(services),
            management.bind.host,
            management.bind.port,
            stopping=stopping.asked,
        )
    )
    doors.start_soon(_say_stopping, settings, stopping)
    services.facts = RoleFacts(
        role=role,
        state_dir=settings.places.root,
        inference=bound,
        inference_auth=inference.authentication,
        management=admin,
        document=settings.document_path,
        rows=settings.rows,
    )
    return Ready(
        role=role,
        inference=bound,
        key_required=inference.authentication != "none",
        management=admin,
        engines=[profile.name for profile in here.registry.profiles()],
        state=settings.places.root,
        credentials=settings.places.credentials,
    )


async def _say_stopping(settings: StandaloneSettings, stopping: Stopping) -> None:
    """Tell clients that find no management listener any more that the role ends, and how long that takes at most."""
    path = Path(settings.places.role_lock)
    lock.say_stopping(path, None)  # what a role before left
    await stopping.asked.wait()
    lock.say_stopping(path, settings.document.shutdown.drain_timeout.ms / 1000 + GRACE_S)


async def _serve_inference(
    bind: SocketAddress,
    settings: StandaloneSettings,
    stopping: Stopping,
    services: Services,
    here: Machine,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    """The inference listener, until what runs has ended."""
    server, queue = settings.document.server, settings.document.host.resource_policy.queue
    app = router.build_app(
        services.desk,
        here.ingress,
        services.keys,
        settings=router.Settings(
            buffered_bytes_max=queue.max_buffered_bytes_total.bytes,
            stream_idle_seconds=queue.stream_idle_timeout.ms / 1000,
            piece_bytes_max=server.relay.max_piece.bytes,
            origins=frozenset(server.listeners.inference.allowed_origins),
        ),
    )
    async with trio.open_nursery() as nursery:
        try:
            (address,) = await nursery.start(
                partial(
                    router.serve,
                    app,
                    str(bind),
                    stopping=stopping.asked,
                    hurry=stopping.hurry,
                    alone=stopping.alone,
                    drain_seconds=settings.document.shutdown.drain_timeout.ms / 1000,
                    connections_max=descriptors.for_clients(descriptors.raise_limit()),
                )
            )
        except CapyError as error:
            if error.code == "port_conflict":  # that code is an engine's port; this one ends the start
                raise Refusal(
                    "unavailable",
                    f"the inference listener cannot use {bind}: another program listens there; "
                    "end it, or name another address with --listen",
                ) from None
            raise
        task_status.started(address)
