"""What an operator is told who deletes what still runs."""

from __future__ import annotations

from simulation import checked
from world import shell
from world_values import Model

from capyctl.fsm.activation import ActivationPhase


def test_a_delete_of_what_runs_names_its_state_and_the_way_to_its_end() -> None:
    here = checked(shell(1))
    a = here.deploy(Model(name="a", ready_gib=6, cold_gib=6, load_ms=5_000, answer_ms=250))
    here.run(4_000)
    both = "capyctl delete deployment a --stop"

    def refused() -> tuple[str | None, str | None]:
        key = here.delete(a)
        here.run(50)
        return here.reply(key).code, here.reply(key).message

    here.start(a)
    here.run(30_000, until=lambda: here.lane(a).gate_open)
    code, said = refused()
    assert code == "delete_requires_cleanup"
    assert said == f"a is ready. Stop it first: capyctl stop deployment a --wait; or in one step: {both}"
    here.stop(a)
    here.run(20)
    code, said = refused()
    assert (code, said) == (
        "delete_requires_cleanup",
        f"a is stopping; try again when it is stopped, or: {both}",
    )
    here.run(60_000, until=lambda: here.lane(a).phase is ActivationPhase.STOPPED)
    here.run(1_000)
    assert refused()[0] is None
