"""Files that a role may have open: idle strangers take no more of them than leaves it its own work."""

from __future__ import annotations

import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from capyctl.fsm.types import HostId
from capyctl.host.reports import DOMAINS_EVERY_S, Reports
from capyctl.roles.descriptors import FILES_KEPT, FILES_WANTED, for_clients
from capyctl.router.listener import CONNECTIONS_MAX


@pytest.mark.parametrize("files", [64, 256, 1024, 2048, 4096, FILES_WANTED])
def test_clients_leave_the_role_half_of_its_files_or_all_that_it_needs(files: int) -> None:
    assert 0 < for_clients(files) <= CONNECTIONS_MAX
    assert files - for_clients(files) >= min(files // 2, FILES_KEPT)


def test_a_role_takes_the_files_that_it_may_have_and_no_more() -> None:
    program = (
        "import resource; from capyctl.roles import descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1500)); "
        "print(descriptors.raise_limit(), descriptors.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1500", "1500", "1500", "1500"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256


async def test_a_look_that_cannot_be_made_is_no_report_and_ends_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    failing = [True, True, False]

    async def sample(owners: object, *, asked: bool = False) -> dict[str, object]:
        if failing and failing.pop(0):
            raise OSError(24, "Too many open files", "/proc/meminfo")
        return {}

    async def look() -> None:
        pass

    observer: Any = SimpleNamespace(sample=sample, look=look)
    custody: Any = SimpleNamespace(owners=dict)
    reports = Reports(host=HostId("h"), custody=custody, ingress=SimpleNamespace(), observer=observer)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reports.sample_domains)
        with trio.fail_after(4 * DOMAINS_EVERY_S):
            assert (await reports.channel.receive()).host == HostId("h")  # type: ignore[union-attr]
        nursery.cancel_scope.cancel()
