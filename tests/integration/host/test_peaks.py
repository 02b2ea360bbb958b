"""A compiler that an engine runs is seen in its group, by the program's own name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import trio

from capyctl.host import identity, peaks


async def test_a_compiler_in_the_engines_group_is_seen_while_it_runs(tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", compiler)
    with subprocess.Popen(["/bin/sh", "-c", f"{compiler} 30; sleep 30"], start_new_session=True) as engine:
        try:
            leader = identity.identify(engine.pid)
            assert leader is not None
            with trio.fail_after(30):
                while not peaks.builds(identity.group_members(leader)):
                    await trio.sleep(0.01)
                (child,) = [one for one in identity.group_members(leader) if one.pid != engine.pid]
                os.kill(child.pid, signal.SIGTERM)
                while peaks.builds(identity.group_members(leader)):
                    await trio.sleep(0.01)
            assert identity.group_members(leader), "the engine goes on"
        finally:
            os.killpg(engine.pid, signal.SIGKILL)
