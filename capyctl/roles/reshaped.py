"""A start on a machine that is another one than before: other limits, other memory, other cards.

Nothing is ended to make new limits true. What is charged on memory that is no more ends first, with proof, under the
limits of before; then the machine is taken as it is now. Source: memory 1, 2.2.
"""

from __future__ import annotations

from capyctl.control.naming import names
from capyctl.control.world import World
from capyctl.errors import Refusal
from capyctl.fsm.types import Domain, HostId
from capyctl.host.custody import observe
from capyctl.ledger import limits
from capyctl.ledger.charges import Ledger
from capyctl.ledger.shortfall import Shortfall
from capyctl.ledger.types import HostPolicy
from capyctl.roles.machine import Machine
from capyctl.server import log as logging

log = logging.Log("role")


class Reshaped(Exception):
    """Engines of before are charged on memory that this machine has no more: nothing was begun."""

    def __init__(self, short: Shortfall) -> None:
        super().__init__(short.message())
        self.short = short


def check_limits(world: World, policy: HostPolicy) -> None:
    """Limits below what running models hold are refused until they stop.

    Raises: Refusal naming them; Reshaped where they are charged on other memory than there is.
    """
    short = limits.set_policy(world.book.ledger, policy)
    if isinstance(short, Shortfall):
        if short.check == "domains":
            raise Reshaped(short)
        raise Refusal(
            short.code,
            f"the memory limits cannot be put in force: {short.message(names(world.book))} Running models keep what "
            "they hold: start with a limit that leaves them room, then stop them, or keep that limit",
        )


async def check_cards(ledger: Ledger, here: Machine) -> None:
    """Cards that were exchanged or numbered anew take their names once nothing lives of what is charged under them.

    Where an engine of before lives it goes on, and they wait for its end and the next start of the role.
    Raises: Reshaped.
    """
    if not here.left_out:
        return
    host, card = here.agent.host, here.left_out[0]
    name = Domain(f"gpu{card.index}")
    if await _somebody_lives(ledger, host, here):
        log.warning("card.left_out", card=card.index, name=card.name, why=f"{name} is what another card is charged as")
        return
    raise Reshaped(
        Shortfall(
            code="device_policy_mismatch",
            check="domains",
            host=host,
            host_name=here.agent.name,
            owner="",
            domain=name,
            reason=f"{name} of {here.agent.name} is charged as another card, and nothing lives of what was started",
        )
    )


async def _somebody_lives(ledger: Ledger, host: HostId, here: Machine) -> bool:
    """Whether a process of whoever is charged, or of another launch on record, may be alive."""
    records = await here.journal.launches()
    if not {owner for owner, _ in ledger.on(host)} <= {record.incarnation.lane.owner for record in records}:
        return True  # nothing here says what became of it
    for record in records:
        if isinstance(await observe(record.incarnation, record.processes), str):
            return True
    return False
