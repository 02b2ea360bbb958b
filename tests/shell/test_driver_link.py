"""The memory link and the translation of orders: one result per command, in both sides' words."""

from __future__ import annotations

import json

import attrs
import pytest
import trio
import trio.testing

from capyctl.control import events, orders
from capyctl.control.records import DeploymentRow
from capyctl.control.spec import Spec, Traits
from capyctl.control.world import World
from capyctl.errors import Lost
from capyctl.fsm import deployment
from capyctl.fsm.proofs import (
    Aborted,
    Back,
    Canary,
    Gone,
    NeverLaunched,
    Quiet,
    Resident,
    SameEngine,
    Unsent,
    Usable,
)
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Domain,
    Generation,
    HostId,
    Incarnation,
    Lane,
    Millis,
    Phase,
    ProcessIdentity,
    Residency,
    Role,
)
from capyctl.ledger.types import Allocation, Plan
from capyctl.server.hosts import HostLinks, listener
from capyctl.session import codec, kinds
from capyctl.session import messages as m
from capyctl.session.memory import MemoryLink

HOST = HostId("H")
RUN = Incarnation(Lane(DeploymentId("D"), 0), Generation(3))
PROCESS = ProcessIdentity(7, "boot", 9)
GONE = Gone(incarnation=RUN, processes=(PROCESS,), absent=frozenset([PROCESS]), group_empty=True, observed_at_ms=5)


class Agent:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.news, self.reports = trio.open_memory_channel[m.Report](8)
        self.asked: list[m.Command] = []
        self.go = trio.Event()
        self.go.set()

    async def handle(self, command: m.Command) -> m.Result:
        self.asked.append(command)
        await self.go.wait()
        return m.Done(command_id=command.command_id)


def close(identity: str) -> m.CloseIngress:
    return m.CloseIngress(command_id=identity, incarnation=RUN)


# --- the link --------------------------------------------------------------------------------------


async def test_each_caller_gets_the_result_of_its_own_command(autojump_clock, nursery):
    link = MemoryLink(Agent())
    await nursery.start(link.run, lambda report: None)
    results = {}

    async def call(identity: str) -> None:
        results[identity] = (await link.call(close(identity))).command_id

    async with trio.open_nursery() as callers:
        for number in range(100):
            callers.start_soon(call, f"c{number}")
    assert results == {f"c{number}": f"c{number}" for number in range(100)}


async def test_news_arrives_in_order_and_beside_results(autojump_clock, nursery):
    agent, heard = Agent(), []
    link = MemoryLink(agent)
    await nursery.start(link.run, heard.append)
    for number in range(50):
        await agent.news.send(m.LoadReport(seen_at_ms=number, incarnation=RUN, running=0, waiting=0, kv_usage_ppm=None))
        await link.call(close(str(number)))
    assert [report.seen_at_ms for report in heard] == list(range(50))


async def test_a_session_that_ends_leaves_its_callers_with_lost(autojump_clock):
    agent = Agent()
    agent.go = trio.Event()
    link = MemoryLink(agent)

    async def call() -> None:
        with pytest.raises(Lost):
            await link.call(close("c"))

    async with trio.open_nursery() as callers, trio.open_nursery() as session:
        await session.start(link.run, lambda report: None)
        callers.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        session.cancel_scope.cancel()
    with pytest.raises(Lost):
        await link.call(close("d"))
    assert [command.command_id for command in agent.asked] == ["c"]


async def test_a_caller_that_gives_up_does_not_call_the_command_off(autojump_clock, nursery):
    agent = Agent()
    agent.go = trio.Event()
    link = MemoryLink(agent)
    await nursery.start(link.run, lambda report: None)
    with trio.move_on_after(1):
        await link.call(close("c"))
    agent.go.set()
    assert (await link.call(close("c"))).command_id == "c"


# --- outcomes --------------------------------------------------------------------------------------


class Answering:
    """A session that answers everything with one result, or with an error."""

    def __init__(self, result: m.Result | Exception | None) -> None:
        self.result = result
        self.asked: list[m.Command] = []

    async def call(self, command: m.Command) -> m.Result:
        self.asked.append(command)
        if self.result is None:
            await trio.sleep_forever()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def links(result: m.Result | Exception | None) -> HostLinks:
    world = World.load([], now_ms=0)
    return HostLinks(world.book, lambda: 1_000, {HOST: Answering(result)})


def order(kind: type, **more) -> orders.HostOrder:
    return kind(incarnation=RUN, token=4, host=HOST, **more)


TERMINATE = order(orders.Terminate, processes=(PROCESS,), limit_ms=10)
IDLE = order(orders.AwaitIdle, limit_ms=10)
PROBE = order(orders.Probe, processes=(PROCESS,))
PLAN = Plan(phases={}, provenance={}, initialize_ms=1, wake_ms=1, context_tokens=512)
LAUNCH = order(orders.Launch, revision=1, plan=PLAN, digest="d", deadline_ms=2_000)
DEPLOYED = DeploymentRow(
    state=deployment.State(deployment=DeploymentId("D"), revision=1),
    spec=Spec(
        name="notes",
        routes=("n", "notes"),
        profile="llamacpp",
        traits=Traits(family="llamacpp"),
        document='{"name": "notes", "engine": "llamacpp", "model": "notes"}',
    ),
    created_at_ms=0,
)
AT = {"incarnation": RUN, "token": 4, "now_ms": 1_000}


@pytest.mark.parametrize(
    ("given", "result", "outcome"),
    [
        (TERMINATE, m.Absent(command_id="c", proof=GONE), events.Terminated(**AT, proof=GONE)),
        (TERMINATE, m.Unresolved(command_id="c", reason="no"), events.TerminateUnproven(**AT, reason="no")),
        (
            TERMINATE,
            m.Refused(command_id="c", code="internal", message="no"),
            events.TerminateUnproven(**AT, reason="no"),
        ),
        (IDLE, m.IdleVerdict(command_id="c", verdict="busy"), events.IdleGateEnded(**AT, verdict="busy")),
        (IDLE, m.Refused(command_id="c", code="internal", message="no"), events.OrderLost(**AT, reason="no")),
        (PROBE, m.ProbeResult(command_id="c", same=None, usable=None, gone=GONE), events.Probed(**AT, gone=GONE)),
        (PROBE, m.Unresolved(command_id="c", reason="no"), events.OrderLost(**AT, reason="no")),
        (PROBE, Lost("unavailable", "gone"), events.OrderLost(**AT, reason="gone")),
        (
            PROBE,
            m.Done(command_id="c"),
            events.OrderLost(**AT, reason="the host answered Probe with Done"),
        ),
    ],
)
async def test_what_a_host_says_becomes_the_one_outcome_of_its_order(autojump_clock, given, result, outcome):
    assert await links(result).perform(given) == outcome


async def test_a_host_that_never_answers_leaves_the_outcome_unknown_after_the_limit_and_its_slack(autojump_clock):
    began = trio.current_time()
    outcome = await links(None).perform(TERMINATE)
    assert isinstance(outcome, events.OrderLost)
    assert 120 <= trio.current_time() - began <= 121


async def test_an_order_to_a_host_without_a_session_is_lost_not_refused(autojump_clock):
    outcome = await HostLinks(World.load([], now_ms=0).book, lambda: 1_000).perform(PROBE)
    assert isinstance(outcome, events.OrderLost)


@pytest.mark.parametrize(
    ("result", "kind", "proof"),
    [
        (
            m.LaunchRefused(
                command_id="c",
                code="launch_failed",
                reason="exit 1",
                proof=NeverLaunched(incarnation=RUN, fenced=True, observed_at_ms=1),
                transient=False,
            ),
            events.LaunchFailed,
            NeverLaunched,
        ),
        (m.Refused(command_id="c", code="port_conflict", message="none free"), events.LaunchFailed, Unsent),
        (m.Refused(command_id="c", code="lifecycle_conflict", message="it runs"), events.OrderLost, None),
        (m.Refused(command_id="c", code="idempotency_conflict", message="other"), events.OrderLost, None),
        (m.Unresolved(command_id="c", reason="unknown"), events.OrderLost, None),
        (
            m.Launched(
                command_id="c",
                processes=(PROCESS,),
                usable=Usable(incarnation=RUN, answer_chars=1, probed_at_ms=1),
                peak_bytes={},
            ),
            events.LaunchReady,
            None,
        ),
    ],
)
async def test_only_a_refusal_that_leaves_nothing_running_counts_as_nothing_sent(autojump_clock, result, kind, proof):
    made = links(result)
    made.book.deployments[DeploymentId("D")] = DEPLOYED
    outcome = await made.perform(LAUNCH)
    (sent,) = made.links[HOST].asked
    assert (sent.served_name, sent.model, sent.context_tokens, sent.slots) == ("n", "notes", 512, 4)
    assert sent.document == {"name": "notes", "engine": "llamacpp", "model": "notes"}
    assert type(outcome) is kind
    if proof is not None:
        assert type(outcome.proof) is proof


async def test_a_launch_for_a_revision_that_is_gone_is_never_sent(autojump_clock):
    made = links(m.Done(command_id="c"))
    outcome = await made.perform(LAUNCH)
    assert isinstance(outcome, events.LaunchFailed)
    assert isinstance(outcome.proof, Unsent)
    assert made.links[HOST].asked == []


# --- parks and wakes -------------------------------------------------------------------------------

RAM, GPU = Domain("system"), Domain("gpu0")
PARKS = Plan(
    phases={
        Phase.READY: Allocation(bytes={RAM: Bytes(4), GPU: Bytes(40)}),
        Phase.PARKED: Allocation(bytes={RAM: Bytes(4), GPU: Bytes(1)}),
    },
    provenance={},
    initialize_ms=1,
    wake_ms=1,
    context_tokens=512,
)
RELEASE = order(
    orders.Release,
    tier=Residency.DEEP,
    plan=PARKS,
    gate_closed_at_ms=10,
    processes=(PROCESS,),
    deadline_ms=91_000,
)
RESTORE = order(orders.Restore, tier=Residency.DEEP, digest="d", canary="42", deadline_ms=91_000, processes=(PROCESS,))
SAME = SameEngine(
    incarnation=RUN, recorded=(PROCESS,), alive=frozenset([PROCESS]), strangers=0, observed_at_ms=Millis(20)
)
QUIET = Quiet(incarnation=RUN, gate_closed_at_ms=10, router_in_flight=0, running=0, waiting=0, read_at_ms=11)
LEFT = {
    GPU: Resident(
        incarnation=RUN, resident_bytes=1, budget_bytes=1, released_at_ms=Millis(12), sampled_at_ms=Millis(13)
    )
}
BACK = Back(incarnation=RUN, restored_at_ms=1, sampled_at_ms=2, fresh_until_ms=9, recorded_at_ms=3)
USABLE = Usable(incarnation=RUN, answer_chars=1, probed_at_ms=1)
PASSED = Canary(incarnation=RUN, expected="42", actual="42")
UNSENT = Unsent(incarnation=RUN, refused_before_sending=True)


@pytest.mark.parametrize(
    ("given", "result", "outcome"),
    [
        (
            RELEASE,
            m.Parked(command_id="c", quiet=QUIET, same=SAME, resident=LEFT),
            events.ParkConfirmed(**AT, quiet=QUIET, same=SAME, resident=LEFT),
        ),
        (
            RELEASE,
            m.NotParked(command_id="c", code="not_quiescent", reason="busy", unsent=UNSENT),
            events.ParkRefused(**AT, code="not_quiescent", reason="busy", unsent=UNSENT),
        ),
        (
            RELEASE,
            m.Refused(command_id="c", code="unsupported", message="what?"),
            events.ParkRefused(**AT, code="unsupported", reason="what?", unsent=UNSENT),
        ),
        (
            RELEASE,
            m.Refused(command_id="c", code="idempotency_conflict", message="other"),
            events.OrderLost(**AT, reason="other"),
        ),
        (RELEASE, m.Unresolved(command_id="c", reason="lost"), events.OrderLost(**AT, reason="lost")),
        (
            RESTORE,
            m.Awake(command_id="c", back=BACK, usable=USABLE, same=SAME, canary=PASSED),
            events.WakeConfirmed(**AT, back=BACK, usable=USABLE, canary=PASSED, same=SAME),
        ),
        (
            RESTORE,
            m.NotAwake(command_id="c", code="wake_mismatch", reason="!!!!", mismatch=True),
            events.WakeFailed(**AT, code="wake_mismatch", reason="!!!!", mismatch=True),
        ),
        (
            RESTORE,
            m.NotAwake(command_id="c", code="insufficient_memory", reason="full", unsent=UNSENT),
            events.WakeFailed(**AT, code="insufficient_memory", reason="full", unsent=UNSENT),
        ),
        (RESTORE, m.Unresolved(command_id="c", reason="lost"), events.OrderLost(**AT, reason="lost")),
        (RESTORE, Lost("unavailable", "gone"), events.OrderLost(**AT, reason="gone")),
        (
            PROBE,
            m.ProbeResult(command_id="c", same=SAME, usable=USABLE, gone=None, resident=LEFT, canary=PASSED),
            events.Probed(**AT, same=SAME, usable=USABLE, resident=LEFT, canary=PASSED),
        ),
    ],
)
async def test_what_a_host_says_of_a_park_or_a_wake_keeps_its_proofs(autojump_clock, given, result, outcome):
    assert await links(result).perform(given) == outcome


async def test_a_park_says_what_may_be_left_where_it_empties_and_how_long_it_may_take(autojump_clock):
    made = links(m.Unresolved(command_id="c", reason="lost"))
    await made.perform(RELEASE)
    await made.perform(RESTORE)
    released, restored = made.links[HOST].asked
    assert released == m.Release(
        command_id=f"release:{RUN}#4",
        incarnation=RUN,
        token=4,
        tier=Residency.DEEP,
        budget={GPU: 10},  # a placeholder may be passed by a quarter of what is to come free
        gate_closed_at_ms=10,
        processes=(PROCESS,),
        limit_ms=90_000,
    )
    assert (restored.canary, restored.digest, restored.deadline_ms) == ("42", "d", 91_000)


async def test_a_look_for_a_lost_wake_asks_for_the_canary(autojump_clock):
    made = links(m.ProbeResult(command_id="c", same=None, usable=None, gone=GONE))
    await made.perform(order(orders.Probe, processes=(PROCESS,), canary="42"))
    (asked,) = made.links[HOST].asked
    assert (asked.canary, asked.parked, asked.parked_budget) == ("42", False, {})


ABORT = orders.Abort(request="R", incarnation=RUN, host=HOST)
ENDED = Aborted(incarnation=RUN, request="R", acknowledged_at_ms=5)


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (
            m.AbortAcknowledged(command_id="c", proof=ENDED),
            events.AbortAcknowledged(request="R", proof=ENDED, now_ms=1_000),
        ),
        (m.Refused(command_id="c", code="unsupported_capability", message="no"), None),
        (m.AbortAcknowledged(command_id="c", proof=attrs.evolve(ENDED, request="S")), None),
        (Lost("unavailable", "gone"), None),
        (None, None),
    ],
)
async def test_only_an_acknowledged_abort_settles_its_request(autojump_clock, result, outcome):
    answer = await links(result).abort(ABORT)
    assert answer == (outcome or events.AbortUnanswered(request="R", now_ms=1_000))


def test_reports_become_facts():
    made = links(None)
    exited = m.MemberExit(seen_at_ms=5, incarnation=RUN, process=PROCESS, role=Role.API, status=-9, last_words="killed")
    assert made.heard(exited) == events.EngineExited(
        incarnation=RUN, role=Role.API, status=-9, reason="killed", now_ms=1_000
    )
    load = m.LoadReport(seen_at_ms=900, incarnation=RUN, running=1, waiting=2, kv_usage_ppm=3)
    assert made.heard(load).read_at_ms == 900
    profile = m.Profile(
        name="p",
        engine="vllm",
        version="0.32.0",
        custom=False,
        deep_park="enabled",
        executable="/opt/vllm",
        fingerprint="0.32.0",
    )
    assert made.heard(m.ProfilesChanged(seen_at_ms=5, host=HOST, profiles=(profile,))) == events.ProfilesPublished(
        host=HOST, installations={"p": "0.32.0 /opt/vllm"}, now_ms=1_000
    )


def test_how_long_requests_took_is_no_fact_of_the_world_and_is_kept_for_whoever_asks():
    made, fed = links(None), []
    bucket = m.Bucket(le_us=None, count=1)
    figure = m.Distribution(figure="ttft", source="vllm:ttft", count=1, sum_us=5, buckets=(bucket,))
    report = m.LatencyReport(seen_at_ms=900, incarnation=RUN, distributions=(figure,))
    listener(made, fed.append)(report)
    assert fed == []
    assert kinds.decode_message(json.loads(codec.canonical(kinds.encode_message(report)))) == report
    assert RUN.lane not in made.latencies.last, "nobody has such an instance"
