"""Odd sequences over a whole world, drawn and shrunk: every step is checked, and in the end everything rests."""

from __future__ import annotations

import os

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import Life, checked
from world import Crashed, Shell, shell
from world_values import CUSTOM, LLAMA, SGLANG, VLLM, Model, policy

from capyctl.control.book import Settings
from capyctl.fsm.types import Activation, DeploymentId, Millis, Residency

CAMPAIGN = os.environ.get("CAPYCTL_CAMPAIGN") == "1"
MODELS = (
    Model(name="a", traits=LLAMA, ready_gib=4, cold_gib=4, load_ms=2_000),
    Model(name="b", traits=VLLM, residency=Residency.DEEP, ready_gib=3.5, cold_gib=3.75, load_ms=2_000),
    Model(name="c", traits=SGLANG, residency=Residency.DEEP, ready_gib=3, cold_gib=3, parked_gib=0.25, load_ms=8_000),
    Model(name="d", traits=CUSTOM, ready_gib=2, cold_gib=2, instances=2, load_ms=1_000),
    Model(name="e", activation=Activation.EXPLICIT, ready_gib=2, cold_gib=2, load_ms=1_000),
    Model(name="f", warm=True, ready_gib=2, cold_gib=2, load_ms=1_000),
)
BRIEF = ("launch_never", "exit_early", "order_lost", "park_refused", "wake_mismatch", "wake_mute", "refused_connection",
         "errors", "probe_mute", "abort_mute")  # fmt: skip

names = st.sampled_from([model.name for model in MODELS])


class Worlds(RuleBasedStateMachine):
    """One shell, six models, and whatever anybody may do."""

    shell: Shell
    ids: dict[str, DeploymentId]

    @initialize(hosts=st.integers(1, 2), managed=st.sampled_from((4, 7)), idle=st.sampled_from((None, 20_000)))
    def begin(self, hosts: int, managed: int, idle: int | None) -> None:
        self.shell = checked(
            shell(
                hosts,
                policies=tuple(policy(f"h{number}", managed=managed) for number in range(1, hosts + 1)),
                settings=Settings(ready_idle_ms=None if idle is None else Millis(idle), drain_timeout_ms=Millis(5_000)),
                sample_ms=5_000,
            )
        )
        self.ids = {model.name: self.shell.deploy(model) for model in MODELS}
        self.shell.run(4_000)

    def known(self, name: str) -> DeploymentId | None:
        identity = self.ids[name]
        return identity if identity in self.shell.world.book.deployments else None

    # --- time, clients --------------------------------------------------------------------------------

    @rule(span_ms=st.sampled_from((1, 50, 500, 3_000, 15_000, 70_000)))
    def wait(self, span_ms: int) -> None:
        self.shell.run(span_ms)

    @rule(
        name=names,
        count=st.sampled_from((1, 1, 3)),
        stream=st.booleans(),
        leaves_ms=st.sampled_from((None, None, 0, 5, 2_000)),
        answer_ms=st.sampled_from((None, 12_000)),
    )
    def ask(self, name: str, count: int, stream: bool, leaves_ms: int | None, answer_ms: int | None) -> None:
        for _ in range(count):
            self.shell.ask(name, stream=stream, hangs_up_in_ms=leaves_ms, answer_ms=answer_ms)

    # --- operators --------------------------------------------------------------------------------------

    @rule(name=names, evict=st.booleans(), limit_ms=st.sampled_from((None, 10_000)))
    def start(self, name: str, evict: bool, limit_ms: int | None) -> None:
        if (identity := self.known(name)) is not None:
            deadline = None if limit_ms is None else Millis(self.shell.now + limit_ms)
            self.shell.start(identity, evict=evict, deadline_ms=deadline)

    @rule(name=names)
    def stop(self, name: str) -> None:
        if (identity := self.known(name)) is not None:
            self.shell.stop(identity)

    @rule(name=st.sampled_from(("b", "c")))
    def park(self, name: str) -> None:
        if (identity := self.known(name)) is not None:
            self.shell.park(identity)

    @rule(name=names, note=st.sampled_from(("v2", "v3", "bad")), activate=st.booleans())
    def revise(self, name: str, note: str, activate: bool) -> None:
        if (identity := self.known(name)) is not None:
            model = next(one for one in MODELS if one.name == name)
            self.shell.revise(identity, attrs.evolve(model, note=note), activate=activate)

    @rule(name=names, count=st.integers(1, 3))
    def recount(self, name: str, count: int) -> None:
        if (identity := self.known(name)) is not None:
            row = self.shell.world.book.deployments[identity]
            model = self.shell.models[identity][row.state.revision]
            self.shell.revise(identity, attrs.evolve(model, instances=count))

    @rule(name=names, stop=st.booleans())
    def delete(self, name: str, stop: bool) -> None:
        if (identity := self.known(name)) is not None:
            self.shell.delete(identity, stop=stop)

    @rule(name=names)
    def deploy_again(self, name: str) -> None:
        if self.known(name) is None:
            self.ids[name] = self.shell.deploy(next(one for one in MODELS if one.name == name))

    @rule(which=st.integers(0, 1), undrain=st.booleans())
    def drain(self, which: int, undrain: bool) -> None:
        hosts = list(self.shell.hosts)
        self.shell.drain(hosts[which % len(hosts)], undrain=undrain)

    # --- faults -------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(BRIEF), chance=st.sampled_from((0, 100)))
    def fault(self, name: str, chance: int) -> None:
        self.shell.faults.percent[name] = chance

    @precondition(lambda self: self.shell.engines())
    @rule(which=st.integers(0, 5))
    def engine_exits(self, which: int) -> None:
        engines = self.shell.engines()
        self.shell.exit(engines[which % len(engines)])

    @rule(which=st.integers(0, 1), reboots=st.booleans())
    def session_drops(self, which: int, reboots: bool) -> None:
        hosts = list(self.shell.hosts.values())
        host = hosts[which % len(hosts)]
        if reboots:
            self.shell.reboot(host)
        else:
            self.shell.drop_session(host)

    @rule(after=st.integers(0, 3))
    def controller_crashes(self, after: int) -> None:
        """Now, or at one of the next boundaries."""
        self.shell.crash_at = self.shell.boundaries + 1 + after
        try:
            self.shell.run(2_000)
        except Crashed:  # from a command given outside of `run`
            self.shell.crash()
        self.shell.crash_at = None

    # --- claims ---------------------------------------------------------------------------------------------

    @invariant()
    def processes_are_charged(self) -> None:
        """The truth beside the world; the world's own claims are checked in every step."""
        if hasattr(self, "shell"):
            self.shell.assert_truth()

    def teardown(self) -> None:
        if hasattr(self, "shell"):
            Life(0, self.shell, [], [], 0, 0).come_to_rest()


Worlds.TestCase.settings = settings(
    derandomize=not CAMPAIGN,
    max_examples=2_000 if CAMPAIGN else 120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestWorlds = Worlds.TestCase
