"""A whole world on one seed: random models, hosts, faults, clients and operators, then peace.

Safe while it hurts, moving once it stops: the claims of `capyctl.control.invariants` and the truth of the
shell are checked as it runs, and after the faults are healed everything must come to an end (61-72).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from world import START_MS, Shell
from world_values import CUSTOM, LLAMA, SGLANG, VLLM, Faults, Model, policy

from capyctl.control import changes, invariants, operations, switching, transitions
from capyctl.control import events as e
from capyctl.control import orders as o
from capyctl.control.book import Settings
from capyctl.control.traffic import QueueLimits
from capyctl.control.world import Step
from capyctl.fsm import deployment, operation
from capyctl.fsm.activation import ACTIVATION
from capyctl.fsm.cleanup import CLEANUP
from capyctl.fsm.deployment import DEPLOYMENT
from capyctl.fsm.gate import GATE
from capyctl.fsm.operation import OPERATION
from capyctl.fsm.request import REQUEST
from capyctl.fsm.residency import RESIDENCY
from capyctl.fsm.switch import SWITCH
from capyctl.fsm.table import Machine, Row, Taken, first_line
from capyctl.fsm.types import Activation, DeploymentId, Lane, Millis, Residency

MACHINES: tuple[Machine[Any], ...] = (
    ACTIVATION,
    RESIDENCY,
    CLEANUP,
    GATE,
    REQUEST,
    DEPLOYMENT,
    OPERATION,
    SWITCH,
)
EVERY = 25  # steps between two checks of the dearer claims
PEACE_MS = 6 * 3_600_000  # virtual time after which a healed world must be at rest
REST_STEPS = 30_000  # and the steps: samples of six hours are fewer
CLOSE = (
    invariants.inv_01_charges_within_limits,
    invariants.inv_13_exactly_what_may_run_is_charged,
    invariants.inv_13_no_charge_without_an_owner,
    invariants.inv_28_open_means_ready_proven_and_online,
    invariants.inv_20_tokens_are_drawn,
    invariants.inv_36_what_parks_runs_nothing,
    invariants.inv_38_what_an_operator_stopped_does_not_start,
    invariants.inv_48_only_a_running_switch_drains,
    invariants.inv_49_wishes_name_running_switches,
    invariants.inv_49_made_room_is_wanted,
    invariants.inv_50_an_open_start_is_pursued,
)
"""Claims that are checked after every step of a simulation; the others every EVERY steps and at its end."""


# --- rows that fired ------------------------------------------------------------------------------


def label(machine: Machine[Any], row: Row) -> str:
    """`activation: planned+held Activated [guard]`: a row as a failure names it."""
    phases = "+".join(sorted(phase.value for phase in row.when))
    guard = f" [{first_line(row.given)}]" if row.given else ""
    kind = " ignored" if row.ignored else f" refused {row.code}" if row.code else ""
    return f"{machine.name}: {phases} {row.on.__name__}{guard}{kind}"


@contextmanager
def recording(fired: Counter[str]) -> Iterator[None]:
    """Count every row that any machine of the world takes while this lasts."""
    take = Machine.take
    labels = {id(row): label(machine, row) for machine in MACHINES for row in machine.rows}

    def counted(self: Machine[Any], state: Any, event: object) -> Taken[Any]:
        taken = take(self, state, event)
        name = labels.get(id(taken.row))
        if name is not None:
            fired[name] += 1
        return taken

    Machine.take = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Machine.take = take  # type: ignore[method-assign]


# --- checks ---------------------------------------------------------------------------------------


def remember(shell: Shell) -> changes.Before:
    return changes.remember(shell.world.book)


def check(shell: Shell, before: changes.Before, event: e.Event, step: Step) -> None:
    """Everything that is claimed of a step, and now and then everything that is claimed of a book."""
    book = shell.world.book
    transitions.assert_change(
        changes.Change(before=before, event=event, book=book, orders=step.orders, changed=step.changed)
    )
    invariants.assert_state(book, invariants.STATE if shell.steps % EVERY == 0 else CLOSE)
    shell.assert_truth()


def checked(shell: Shell) -> Shell:
    """`shell`, every step of which is checked."""
    shell.check, shell.before = check, remember
    return shell


# --- one life -------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Life:
    """One seed: a shell, and who acts on it."""

    seed: int
    shell: Shell
    names: list[DeploymentId]
    spare: list[Model]
    acts_ms: int
    appetite: int  # of a hundred acts, how many are requests
    kept: dict[DeploymentId, Model] = attrs.field(factory=dict)

    @property
    def told(self) -> list[object]:
        """What the outside saw of this life: each client's end, each launch, each operation's end."""
        book = self.shell.world.book
        return [
            *((client.request, client.told, str(client.served_by)) for client in self.shell.clients.values()),
            *map(str, self.shell.launches),
            *((state.operation, state.phase.value, state.ended_at_ms) for state in book.operations.values()),
            sorted(book.counters.items()),
        ]

    @property
    def rng(self) -> random.Random:
        return self.shell.rng

    @classmethod
    def drawn(cls, seed: int, *, faults: dict[str, int] | None = None, parks: bool | None = None) -> Life:
        """What a seed says, with these faults instead, or with models that park or do not."""
        rng = random.Random(seed)
        hosts = [policy("h1", managed=rng.choice((4, 7, 7, 8)), max_parked=rng.choice((1, 4)))]
        if rng.random() < 0.5:
            hosts.append(policy("h2", managed=rng.choice((4, 7)), parked=rng.choice((0.25, 2))))
        settings = Settings(
            queue=QueueLimits(
                pending_per_deployment=rng.choice((64, 64, 64, 3, 0)), pending_total=rng.choice((256, 256, 256, 8))
            ),
            admission_window_ms=Millis(rng.choice((2_000, 100, 10_000))),
            request_deadline_ms=Millis(rng.choice((20_000, 120_000, 1_800_000))),
            drain_timeout_ms=Millis(rng.choice((30_000, 2_000))),
            stop_limit_ms=Millis(rng.choice((900_000, 20_000))),
            ready_idle_ms=rng.choice((None, None, Millis(40_000))),
            parked_idle_ms=rng.choice((None, Millis(60_000))),
        )
        drawn = Faults.drawn(rng)
        if faults is not None:
            drawn.percent = dict(faults)
        shell = Shell(
            rng=rng,
            faults=drawn,
            policies=tuple(hosts),
            settings=settings,
            sample_ms=rng.choice((2_000, 5_000, 10_000)),
            attributed=rng.random() < 0.5,
        )
        checked(shell)
        drawn_parks = rng.choice((False, True))
        parks = drawn_parks if parks is None else parks
        models = [_model(rng, f"M{number}", parks=parks) for number in range(rng.randint(2, 5))]
        return cls(seed, shell, [], models, rng.choice((300, 1_000, 4_000)), rng.choice((50, 70, 90)))

    def act(self) -> None:
        """One thing that somebody does, and the next one is planned."""
        if self.shell.quiet:
            return
        self.shell.later(self.rng.randint(1, 2 * self.acts_ms), self.act)
        if self.spare and (not self.names or self.rng.random() < 0.3):
            self._deploy(self.spare.pop())
        elif self.rng.randrange(100) < self.appetite:
            self._ask()
        else:
            self.rng.choice(self._operators())()

    def _ask(self) -> None:
        rows = self.shell.world.book.deployments
        known = [one for one in self.kept if one in rows and (self.rng.random() < 0.1 or not _refuses(rows[one].state))]
        route = self.kept[self.rng.choice(known)].name if known and self.rng.random() < 0.98 else "nobody"
        leaves = self.rng.randint(0, 12_000) if self.shell.faults.hits("hang_up") else None
        many = self.rng.choice((1, 1, 1, 1, 2, 5)) if self.rng.random() < 0.995 else 40
        for number in range(many):
            self.shell.ask(
                self.rng.choice((route, route, f"{route}-alias")),
                stream=self.rng.random() < 0.7,
                nameable=number % 3 != 1,
                hangs_up_in_ms=leaves,
                answer_ms=self.rng.choice((None, None, None, 20_000)),
            )

    def _deploy(self, model: Model, **options: Any) -> None:
        identity = self.shell.deploy(model, **options)
        if identity in self.shell.world.book.deployments:
            self.names.append(identity)
            self.kept[identity] = model

    def _operators(self) -> list[Callable[[], object]]:
        shell, rng = self.shell, self.rng
        known = [one for one in self.names if one in shell.world.book.deployments]
        for gone in [one for one in self.names if one not in known]:
            self.names.remove(gone)
            model = self.kept.pop(gone)
            self.spare.append(attrs.evolve(model, name=model.name))
        host = rng.choice(list(shell.hosts.values()))
        acts: list[Callable[[], object]] = [self._repeat, lambda: self._drain(host)]
        if not known:
            return acts
        one = rng.choice(known)
        model = self.kept[one]
        deadline = Millis(shell.now + rng.choice((5_000, 60_000))) if rng.random() < 0.5 else None
        evict = rng.random() < 0.5
        parked = rng.choice([each for each in known if self.kept[each].residency.parks] or [one])
        acts += [
            *[lambda: shell.start(one, evict=evict, deadline_ms=deadline)] * 5,
            lambda: shell.start(one, expected_revision=rng.choice((1, 2))),
            *[lambda: self._stop(one)] * 2,
            lambda: shell.stop(one, expected_revision=rng.choice((1, 2))),
            *[lambda: shell.park(parked)] * 5,
            lambda: shell.start(parked, park=True, deadline_ms=deadline),
            *[lambda: self._prepare(known, deadline)] * 2,
            lambda: shell.park(one, expected_revision=rng.choice((1, 2))),
            lambda: shell.delete(one),
            *([lambda: shell.delete(one, stop=True)] if rng.random() < 0.5 else []),
            lambda: self._revise(one, attrs.evolve(model, instances=rng.choice((1, 2, 3)))),
            *[lambda: self._revise(one, attrs.evolve(model, note="v2"), activate=evict, evict=evict)] * 2,
            lambda: self._spoil(one, model),
            lambda: self._revise(one, attrs.evolve(model, note="x"), revision=99),
            lambda: self._deploy(attrs.evolve(model, note="again")),
        ]
        return acts

    def _stop(self, one: DeploymentId) -> None:
        """An operator stops it, and starts it again after a while."""
        self.shell.stop(one)
        if self.rng.random() < 0.9:
            self.shell.later(self.rng.randint(1, 30_000), lambda: self.shell.start(one))

    def _prepare(self, known: list[DeploymentId], deadline: Millis | None) -> None:
        """Several are prepared with one command; now and then one of them cannot be, or is named twice."""
        asleep = [one for one in known if self.kept[one].residency.parks]
        lot = known if self.rng.random() < 0.1 or not asleep else asleep
        chosen = self.rng.sample(lot, self.rng.randint(1, len(lot)))
        if self.rng.random() < 0.05:
            chosen.append(chosen[0])
        self.shell.prepare(*chosen, deadline_ms=deadline)

    def _spoil(self, one: DeploymentId, model: Model) -> None:
        """A revision that cannot be used, and one that mends it."""
        self._revise(one, attrs.evolve(model, note=self.rng.choice(NOTES)), activate=self.rng.random() < 0.3)
        self.shell.later(
            self.rng.randint(1, 20_000),
            lambda: one in self.shell.world.book.deployments and self._revise(one, attrs.evolve(model, note="mended")),
        )

    def _drain(self, host: Any) -> None:
        """An operator works on a machine for a while."""
        self.shell.drain(host.policy.host)
        self.shell.later(
            self.rng.randint(1, 60_000), lambda: self.shell.drain(host.policy.host, undrain=True), mortal=False
        )

    def _revise(self, one: DeploymentId, model: Model, **options: Any) -> None:
        before = self.shell.world.book.deployments[one].state.revision
        self.shell.revise(one, model, **options)
        row = self.shell.world.book.deployments.get(one)
        if row is not None and row.state.revision > before:
            self.kept[one] = model

    def _repeat(self) -> None:
        """An old command once more: with the same body, or with another one."""
        if not self.shell.commands:
            return
        event = self.rng.choice(self.shell.commands)
        command = event.command
        if self.rng.random() < 0.5:
            command = attrs.evolve(command, digest=f"{command.digest} and more")
        self.shell.tell(attrs.evolve(event, command=command, now_ms=Millis(self.shell.now)))

    # --- running ----------------------------------------------------------------------------------

    def hurt(self, steps: int) -> None:
        """Let everybody act for so many steps."""
        self.shell.later(1, self.act)
        self.shell.run(10**12, steps_max=steps)

    def heal(self) -> None:
        """No more faults, no more clients or operators: hosts are back, and what could not die can."""
        shell = self.shell
        shell.quiet = True
        shell.faults.heal()
        for host in shell.hosts.values():
            host.stale_until_ms, host.foreign_bytes = 0, host.foreign_bytes * 0
            host.forgotten.clear()
            for engine in host.engines.values():
                engine.unkillable = False

    def come_to_rest(self) -> None:
        """61-72: within the bound everything has ended, or says why it goes on waiting."""
        shell = self.shell
        self.heal()
        ends_at = shell.now + PEACE_MS
        began = shell.steps
        while True:
            shell.run(ends_at - shell.now, until=lambda: not self.unrest(), steps_max=REST_STEPS)
            assert shell.steps - began < REST_STEPS, f"71: it does not come to rest: {shell.log[-4:]}"
            assert not self.unrest(), f"not at rest after {PEACE_MS // 3_600_000} h: {self.unrest()[:5]}"
            tokens = shell.world.book.counters.get("token")
            shell.run(120_000, steps_max=REST_STEPS)  # what an idle timer frees, whoever waits for memory takes
            if tokens == shell.world.book.counters.get("token") and not self.unrest():
                break
        invariants.assert_state(shell.world.book)
        for client in shell.clients.values():
            assert client.told is not None, f"61: {client.request} for {client.route} was never answered"
        given: list[o.Order] = []
        for _ in range(3):  # 71: nothing goes on by itself
            shell.now += 3_600_000
            for host in shell.hosts.values():
                shell._observe(host)
            step = shell.world.handle(e.Ticked(now_ms=Millis(shell.now)))
            # An idle timer may have its hour and begin a drain, which only looks at the engine's gauges.
            given += [order for order in step.orders if not isinstance(order, o.ReadLoad)]
        assert not given, f"71: a world at rest gives no orders: {given[:3]}"

    def unrest(self) -> list[str]:
        """What is not at rest, and has no reason to be."""
        book = self.shell.world.book
        found = [f"{one.request} waits" for one in self.shell.clients.values() if one.told is None]
        found += [f"{state.request} is {state.phase.value}" for state in book.requests.values() if not _stays(state)]
        found += [f"switch to {book.switches[one].target}" for one in book.active_switches.values()]
        for lane in sorted(book.busy):
            row = book.instances[lane]
            if row.waits_for is None:
                found.append(f"{lane} is {row.phase} {row.run.last_error}")
        for opened in book.open_operations.values():
            for one in opened:
                state = book.operations[one]
                quiet = [self._says_why(state.deployment, target) for target in state.targets]
                turns = state.kind is operation.Kind.PREINITIALIZE  # one after the other: who waits for its turn waits
                before = None if state.after is None else book.operations.get(state.after)
                if before is not None and before.phase in operations.OPEN:
                    continue  # another deployment's turn, which has to say why itself
                if not (any(quiet) if turns else all(quiet)):
                    found.append(f"{one} ({state.kind.value} {state.deployment}) is {state.phase.value}")
        return found

    def _says_why(self, deployment: DeploymentId, target: operation.Target) -> bool:
        """Its outcome is known, or its instance says what it waits for."""
        row = self.shell.world.book.instances.get(Lane(deployment, target.index))
        known = target.result in (operation.Result.MET, operation.Result.FAILED)
        return known or (row is not None and row.waits_for is not None)


def _refuses(state: deployment.State) -> bool:
    """Requests for it are refused as they come."""
    return deployment.operator_stopped(state) or state.phase in (deployment.Phase.UNUSABLE, deployment.Phase.DELETING)


def _stays(state: Any) -> bool:
    """A place that only its engine's end gives back may stay for as long as the engine serves."""
    return state.phase.value == "cancel_stop"


NOTES = ("bad", "bad checkpoint_mismatch", "bad not_found")


def _model(rng: random.Random, name: str, *, parks: bool) -> Model:
    traits = rng.choice((VLLM, SGLANG) if parks else (LLAMA, LLAMA, VLLM, SGLANG, CUSTOM))
    residency = Residency.DEEP if traits.parks and rng.random() < 0.7 else Residency.RESTART_ONLY
    ready = rng.choice((1.5, 3.0, 3.5, 6.0))
    odd = name.endswith(("1", "3"))
    return Model(
        name=name,
        traits=traits,
        residency=residency,
        activation=Activation.EXPLICIT if rng.random() < 0.15 else Activation.ON_DEMAND,
        warm=rng.random() < 0.1,
        instances=rng.choice((1, 1, 2)),
        max_per_host=rng.choice((None, None, 1)),
        ready_gib=ready,
        cold_gib=ready + rng.choice((0, 0.25)),
        peak_gib=ready + 0.125 if odd else None,
        parked_gib=rng.choice((0.25, 0.5, 1)),
        residue_gib=rng.choice((None, None, 0.3, 0.9)),
        residue_grows_gib=rng.choice((0.0, 0.2)),
        load_ms=rng.choice((1_000, 5_000, 40_000)),
        answer_ms=rng.choice((200, 2_000)),
        deadline_ms=rng.choice((None, None, Millis(15_000))),
    )


def live(seed: int, steps: int, *, faults: dict[str, int] | None = None) -> Life:
    """One life from its first deploy to its rest. Raises AssertionError or InvariantBroken, with the last steps."""
    life = Life.drawn(seed, faults=faults)
    try:
        life.hurt(steps)
        life.come_to_rest()
    except Exception as wrong:
        tail = "\n".join(life.shell.log[-40:])
        drawn = {name: chance for name, chance in life.shell.faults.percent.items() if chance}
        raise AssertionError(
            f"seed {seed}, step {life.shell.steps}, {life.shell.now - START_MS} ms: {type(wrong).__name__}: {wrong}\n"
            f"faults {drawn}\n{tail}\n"
            f"again: .venv/bin/python tests/property/simulation.py {seed} {steps}"
        ) from wrong
    return life


def ended_operations(life: Life) -> Counter[str]:
    """How the operations of a life ended, for the histogram."""
    return Counter(state.phase.value for state in life.shell.world.book.operations.values())


if __name__ == "__main__":
    import sys

    one = live(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2_000)
    print(f"seed {one.seed}: {one.shell.steps} steps, {one.shell.crashes} crashes, {ended_operations(one)}")
    if "digest" in sys.argv:
        print("digest", hashlib.sha256(repr(one.told).encode()).hexdigest())


__all__ = ["MACHINES", "Life", "checked", "label", "live", "o", "operations", "recording", "switching"]
