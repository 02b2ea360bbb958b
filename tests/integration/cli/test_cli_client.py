"""Client commands against a management listener: printed shapes, exit statuses, identities."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_fake_role import FakeRole
from conftest import Shell

from capyctl import ulid
from capyctl.server import lock

IDENTITY = "01N8C3BT6E0000000000000000"
RECOVER = f"Request identity: {IDENTITY} (reuse --request-id {IDENTITY} to recover this command)\n"


def document(shell: Shell, name: str = "writer") -> str:
    path = shell.home / f"{name}.yaml"
    path.write_text(f"name: {name}\nengine: llamacpp\nmodel: {name}\n")
    return str(path)


def test_an_empty_list_is_its_header_and_says_so_beside_it(shell: Shell, role: FakeRole) -> None:
    done = shell("list", "deployments")
    assert (done.status, done.out) == (0, "NAME   STATE   READY   REVISION   HOSTS\n")
    assert done.err == "There are no deployments. Try: capyctl deploy model <file>\n"
    assert shell("list", "deployments", "--json").err == ""


def test_a_table_is_padded_to_its_widest_cell_and_read_over_pages(shell: Shell, role: FakeRole) -> None:
    role.add("writer", observed_state="ready", ready="1/1", revision="12")
    role.add("ab")
    role.add("third")
    assert shell("list", "deployments").out == (
        "NAME     STATE     READY   REVISION   HOSTS\n"
        "ab       stopped   0/1     1          box\n"
        "third    stopped   0/1     1          box\n"
        "writer   ready     1/1     12         box\n"
    )
    role.add("lazy", desired_state="ready")  # stopped for another, or idle
    told = "Stopped by an operator, and refusing requests until `capyctl start deployment <name>`: ab, third\n"
    assert shell("list", "deployments").err == told
    role.views = {identity: one for identity, one in role.views.items() if one["name"] != "lazy"}
    listed = shell("list", "deployments", "--json").out
    assert listed.count("\n") == 1
    assert [row["name"] for row in json.loads(listed)["deployments"]] == ["ab", "third", "writer"]
    assert shell("list", "deployments", "--format", "table").out == shell("list", "deployments").out


def test_status_shows_the_reason_and_who_a_model_was_stopped_for(shell: Shell, role: FakeRole) -> None:
    writer = role.add(
        "writer",
        observed_state="failed",
        revision="2",
        startup={"bytes": {"gpu0": "14173392076", "system": str(4 << 30)}, "provenance": "derived"},
        latest_operation={"action": "initialize", "state": "failed", "error_code": "launch_failed"},
        ledger=[{"domain": "unified", "phase": "ready", "bytes": "1073741824", "provenance": "derived"}],
    )
    writer["instances"][0] |= {
        "host": "rack-a",
        "observed_state": "failed",
        "devices": ["gpu0"],
        "last_error": {"code": "launch_failed", "message": "the engine exited before readiness:\nI a\nE b"},
        "stopped": {"kind": "pressure", "for": "notes", "switch_id": "01N8C2F0QW7V5T3R9JX4B6M1KD"},
    }
    assert shell("status", "deployment", "writer").out == (
        "NAME     STATE    READY   REVISION   STARTUP                   INITIALIZE   LAST OPERATION\n"
        "writer   failed   0/1     2          13.2 GiB (+4.0 GiB RAM)   130s         "
        "initialize failed (launch_failed)\n"
        "\n"
        "INSTANCE   HOST     STATE    LIFECYCLE   DEVICES   LAST ERROR\n"
        "0          rack-a   failed   active      gpu0      launch_failed: the engine exited before readiness\n"
        "\n"
        "  Engine       llamacpp 1\n"
        "  Context      16384 tokens, fitted\n"
        "  Stopped      for notes (switch 01N8C2F0QW7V5T3R9JX4B6M1KD)\n"
        "  Last words   I a\n"
        "               E b\n"
        "  Charged      1.0 GiB ready on unified (derived)\n"
    )


@pytest.mark.parametrize(
    ("instance", "line"),
    [
        (
            {"parked": {"first_bytes": {}, "latest_bytes": {}, "growth": True}},
            "its copy outgrew the bound, the next park stops it",
        ),
        (
            {"stopped": {"kind": "growth", "for": None, "switch_id": None}},
            "its copy outgrew the bound, so it was stopped instead",
        ),
        (
            {"stopped": {"kind": "cut_request", "for": None, "switch_id": None}},
            "a cut request ended only with its engine, so it was stopped instead",
        ),
    ],
)
def test_a_park_that_is_a_stop_is_shown_with_its_reason(
    shell: Shell, role: FakeRole, instance: dict, line: str
) -> None:
    writer = role.add("writer")
    writer["instances"][0] |= instance
    assert f"  Parked    instance 0: {line}\n" in shell("status", "deployment", "writer").out


def test_a_context_above_the_cache_and_requests_below_the_wish_are_shown(shell: Shell, role: FakeRole) -> None:
    short = "32000 tokens are more than the 7280 that 1.0 GiB of KV cache hold"
    running = "Running limited to 3 requests by the state cache"
    facts = {"context_warning": short, "longest_input": "7273", "running_limited": running}
    role.add("writer", context={"tokens": 32000, "reason": None}, facts=facts)
    shown = shell("status", "deployment", "writer").out
    assert f"  Context   32000 tokens; {short}, so inputs end at 7273\n" in shown
    assert "  Running   limited to 3 requests by the state cache\n" in shown


def test_deploy_activate_wait_ends_with_the_ready_summary(shell: Shell, role: FakeRole) -> None:
    pending = 409, {"error": {"code": "checkpoint_digest_pending", "message": "not yet", "retryable": True}}
    role.refuse["start"] = [pending]
    words = ("deploy", "model", "--file", document(shell), "--activate", "--wait", "--request-id", IDENTITY)
    done = shell(*words)
    assert done.status == 0, done.err
    assert done.out == (
        "Deployed writer: ready\n"
        "\n"
        "  Revision    1\n"
        "  Hosts       box\n"
        "  Ready       1/1\n"
        "  Startup     28.5 GiB\n"
        "  Context     16384 tokens\n"
        "  Operation   initialize succeeded\n"
    )
    assert done.err == (RECOVER + "Waiting for the checkpoint digest of writer to be measured (at most 900s)\n")
    sent = [(method, path, key) for method, path, _, key in role.seen if method == "POST"]
    assert {key for _, _, key in sent} == {IDENTITY}
    config = next(body for method, path, body, _ in role.seen if (method, path) == ("POST", "/deployments"))
    assert config is not None
    assert config["config"]["routes"] == ["writer"]
    starts = [body for _, path, body, _ in role.seen if path.endswith("/actions")]
    assert starts[0] == starts[1], "one identity sends one body"
    assert starts[0] is not None
    assert starts[0]["deadline_ms"] == ulid.instant_ms(IDENTITY) + 3_600_000


def test_deploy_says_that_a_short_request_deadline_bounds_the_start_too(shell: Shell, role: FakeRole) -> None:
    file = document(shell)
    with Path(file).open("a") as more:
        more.write("request_deadline: 1s\n")
    done = shell("deploy", "model", "--file", file)
    assert done.status == 0
    assert "request_deadline, 1s, bounds a start of writer too" in done.err


def test_deploy_without_activate_says_what_comes_next(shell: Shell, role: FakeRole) -> None:
    done = shell("deploy", "model", "--file", document(shell))
    lines = done.out.splitlines()
    assert lines[0] == "Deployment writer created (revision 1)"
    assert [line.split("  ")[1] for line in lines[2:5]] == ["Deployment ID", "Operation", "Checkpoint digest"]
    again = shell("deploy", "model", "--file", document(shell), "--revision", "1", "--json")
    assert again.status == 0
    assert json.loads(again.out)["revision"] == "2"
    refused = shell("deploy", "model", "--file", document(shell), "--revision", "0x10")
    assert (refused.status, refused.err.splitlines()[0]) == (
        2,
        "error [invalid_config]: --revision 0x10: expected the number in the REVISION column",
    )


def test_start_waits_out_a_stop_that_is_going_on(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    stopping = 409, {"error": {"code": "still_stopping", "message": "not yet", "retryable": True}}
    role.refuse["start"] = [stopping, stopping]
    done = shell("start", "deployment", "writer", "--wait", "--request-id", IDENTITY)
    assert done.err == RECOVER + "Waiting for the stop of writer to finish (at most 160s)\n"
    assert done.out == (
        "Started writer: ready\n\n  Ready       1/1\n  Hosts       box\n  Operation   initialize succeeded\n"
    )
    role.refuse["start"] = [stopping]
    done = shell("start", "deployment", "writer")
    assert (done.status, done.err.splitlines()[-1]) == (25, "error [still_stopping]: not yet")


@pytest.mark.parametrize(
    ("code", "status"),
    [("launch_failed", 13), ("insufficient_resources", 4), ("activation_timeout", 10), ("capacity_blocked", 4)],
)
def test_a_start_that_gave_up_exits_by_its_code(shell: Shell, role: FakeRole, code: str, status: int) -> None:
    role.add("writer")
    role.outcome = ("failed", code, "the last words")
    done = shell("start", "deployment", "writer", "--wait")
    assert done.status == status
    shown = "insufficient_resources" if code == "capacity_blocked" else code
    assert done.err.splitlines()[-1] == f"error [{shown}]: writer: the last words"


def test_stop_park_and_delete_print_what_was_accepted(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    done = shell("stop", "deployment", "writer")
    first, empty, operation = done.out.splitlines()
    assert (first, empty) == ("Stop requested for writer", "")
    assert ulid.is_ulid(operation.removeprefix("  Operation   "))
    assert shell("stop", "deployment", "writer", "--wait").out.startswith(
        "Stopped writer\n\n  Operation   stop succeeded"
    )
    role.refuse["park"] = [(409, {"error": {"code": "unsupported_capability", "message": "it cannot park"}})]
    assert shell("park", "deployment", "writer").status == 5
    done = shell("delete", "deployment", "writer", "--stop")
    assert done.out.startswith("Deleted writer\n")
    assert role.seen[-2][2] is not None or role.seen[-3][2] is not None
    assert shell("status", "deployment", "writer").status == 2


def test_a_delete_takes_wait_as_the_others_do(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    assert shell("delete", "deployment", "writer", "--stop", "--wait").out.startswith("Deleted writer\n")


def test_a_park_that_became_a_stop_does_not_say_parked(shell: Shell, role: FakeRole) -> None:
    role.add("writer", residency="deep")
    assert shell("park", "deployment", "writer", "--wait").out.startswith("Parked writer\n")
    told(role, instances=[{"index": 0, "result": "met", "code": None, "reason": "9.0 GiB left on gpu0\nlast words"}])
    out = shell("park", "deployment", "writer", "--wait").out
    assert out.startswith("writer was stopped instead of parked\n")
    assert "  Why         instance 0: 9.0 GiB left on gpu0\n" in out


def told(role: FakeRole, **more: object) -> None:
    """Let every operation say this too."""
    poll = role.poll
    role.poll = lambda operation: {**poll(operation), **more}  # type: ignore[method-assign]


def test_a_victim_without_room_to_park_and_a_model_that_parks_say_so(shell: Shell, role: FakeRole) -> None:
    writer = role.add("writer", residency="deep")
    writer["instances"][0]["stopped"] = {"kind": "pressure", "for": "notes", "switch_id": None, "no_room_to_park": True}
    out = shell("status", "deployment", "writer").out
    assert "  Stopped   for notes, no room to park: see parked_limit\n" in out
    assert "Parking uses control routes of the engine, on loopback" in out


@pytest.mark.parametrize(("wanted_by", "line"), [("chat", "Gives way   for chat"), (None, "Stopping   pressure")])
def test_a_model_that_still_answers_is_not_called_stopped(
    shell: Shell, role: FakeRole, wanted_by: str | None, line: str
) -> None:
    row = role.add("writer")["instances"][0]
    row |= {"observed_state": "draining", "stopped": {"kind": "pressure", "for": wanted_by, "switch_id": None}}
    out = shell("status", "deployment", "writer").out
    assert f"  {line}\n" in out
    assert "Stopped " not in out


def test_a_reason_that_names_its_deployment_is_not_named_twice(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    told(role, state="failed", error_code="insufficient_resources", reason="writer: instances: is 40, and h1 holds 2")
    done = shell("start", "deployment", "writer", "--wait")
    assert "writer: instances: is 40" in done.err
    assert "writer: writer:" not in done.err


def test_eviction_lists_its_victims(shell: Shell, role: FakeRole) -> None:
    writer = role.add("writer")
    original = role.accept

    def accept(deployment: str, action: str) -> dict[str, object]:
        return {**original(deployment, action), "switch_id": IDENTITY, "victims": [f"{writer['id']}/0"]}

    role.accept = accept  # type: ignore[method-assign, assignment]
    told(
        role,
        victims=[
            {"name": "notes/0", "way": "park", "released": None},
            {"name": "sums/0", "way": "stop (no room to park)", "released": "released: stopped (no room to park)"},
        ],
    )
    done = shell("start", "deployment", "writer", "--evict", "--initialize-timeout", "300s")
    assert "  Makes room   notes/0 to park\n               sums/0 released: stopped (no room to park)\n" in done.out
    waited = shell("start", "deployment", "writer", "--evict", "--wait")
    assert "  Made room   notes/0 to park\n" in waited.out
    body = next(body for _, path, body, _ in role.seen if path.endswith("/actions"))
    assert body is not None
    assert (body["evict"], body["initialize_timeout_ms"]) == (True, 300_000)


def test_a_parked_model_says_since_when_and_for_whom(shell: Shell, role: FakeRole) -> None:
    writer = role.add("writer", residency="deep", observed_state="parked")
    now_ms = time.time_ns() // 1_000_000
    for kind, for_whom, said in (
        ("operator", None, "by operator"),
        ("preinitialize", None, "by preinitialize"),
        ("idle", None, "idle"),
        ("switch", "notes", f"for notes (switch {IDENTITY})"),
    ):
        switch = IDENTITY if for_whom else None
        slept = {"since_ms": str(now_ms - 300_000), "kind": kind, "for": for_whom, "switch_id": switch}
        writer["instances"][0] |= {"sleeps": slept, "observed_state": "parked"}
        assert f"  Parked    instance 0: 5 min ago, {said}\n" in shell("status", "deployment", "writer").out


def test_several_are_prepared_in_one_command_and_each_is_reported(shell: Shell, role: FakeRole) -> None:
    a, b = role.add("a"), role.add("b")
    done = shell("preinitialize", "deployment", "a", "b", "--request-id", IDENTITY)
    first, empty, *lines = done.out.splitlines()
    assert (first, empty) == ("Preinitialize requested for a, b", "")
    assert [line.split()[0] for line in lines] == ["a", "b"]
    body = next(body for _, path, body, _ in role.seen if path == "/preinitializations")
    assert body == {
        "members": [{"deployment_id": one["id"], "expected_revision": 1, "final_state": "parked"} for one in (a, b)],
        "deadline_ms": ulid.instant_ms(IDENTITY) + 3_600_000,
    }
    done = shell("preinitialize", "deployment", "a", "b", "--wait")
    assert (done.status, done.out.splitlines()[0]) == (0, "Preinitialized a, b")
    assert "Waiting for the preinitialize of a, b to finish (at most 3600s)" in done.err
    role.outcome = ("failed", "parked_capacity", "two are parked, and max_parked is 2")
    done = shell("preinitialize", "deployment", "a", "b", "--wait")
    assert done.status == 4
    assert done.out.splitlines()[0] == "Preinitialized 0 of 2"
    for name in ("a", "b"):
        assert f"  {name}   preinitialize failed (parked_capacity): two are parked, and max_parked is 2" in done.out
    assert done.err.splitlines()[-1] == "error [parked_capacity]: a: two are parked, and max_parked is 2"
    assert shell("preinitialize", "deployment").status == 2


def test_hosts_and_engines_are_tables(shell: Shell, role: FakeRole) -> None:
    assert shell("list", "hosts").out.splitlines()[1] == (
        "box    online   yes        0.2.0     supported       8.0 GiB / 16.0 GiB      llamacpp"
    )
    assert shell("list", "engines").out == (
        "HOST   PROFILE    ENGINE     VERSION   CUSTOM   DEEP PARK   STATE    DEPLOYMENTS\n"
        "box    llamacpp   llamacpp   1         yes      disabled    online   a\n"
    )
    assert "session.domains[0].capacity_bytes" in shell("inspect", "host", "box").out
    assert shell("inspect", "host", "nobody").status == 2


def test_a_code_from_a_newer_role_exits_by_its_http_class(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    for http, status in ((418, 2), (403, 3), (503, 4), (500, 13)):
        role.refuse["stop"] = [(http, {"error": {"code": "brand_new", "message": "who knows"}})]
        done = shell("stop", "deployment", "writer", "--json")
        assert done.status == status
        error = json.loads(done.err.splitlines()[-1])
        assert (error["code"], error["message"]) == ("brand_new", "who knows")


def test_a_busy_role_is_asked_again_under_the_same_identity(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    role.refuse["stop"] = [(429, {"error": {"code": "queue_full", "message": "busy", "retryable": True}})] * 2
    assert shell("stop", "deployment", "writer").status == 0
    keys = [key for _, path, _, key in role.seen if path.endswith("/actions")]
    assert (len(keys), len(set(keys))) == (3, 1)


def test_an_identity_that_is_no_ulid_is_refused_before_anything_is_sent(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    done = shell("stop", "deployment", "writer", "--request-id", IDENTITY.lower())
    assert done.status == 2
    assert role.seen == []


def test_nobody_answering_names_the_address_and_the_command(shell: Shell, role: FakeRole) -> None:
    done = shell("list", "deployments", CAPYCTL_MANAGEMENT_ADDR="127.0.0.1:1")
    assert done.status == 13
    assert done.err == (
        "error [unavailable]: no standalone role answers at 127.0.0.1:1; "
        f"start it with `capyctl start standalone --state-dir {shell.state}`\n"
    )


def test_a_role_that_stops_or_starts_is_named_with_its_pid_instead_of_a_command_to_start_it(
    shell: Shell, role: FakeRole
) -> None:
    path, nobody = shell.state / "role.lock", {"CAPYCTL_MANAGEMENT_ADDR": "127.0.0.1:1"}
    with lock.held(path, "standalone"):
        done = shell("status", **nobody)
        assert f"the standalone role (pid {os.getpid()}) runs and does not answer at 127.0.0.1:1" in done.err
        lock.say_stopping(path, 30)
        done = shell("stop", "deployment", "writer", **nobody)
        assert done.status == 13
        assert re.search(rf"\(pid {os.getpid()}\) is stopping, for at most (29|30) s more; after that, start", done.err)
    assert "no standalone role answers" in shell("status", **nobody).err


def test_no_role_ever_a_host_machine_and_unreadable_credentials(shell: Shell, tmp_path: Path) -> None:
    done = shell("list", "deployments")
    assert done.status == 13
    assert "start standalone" in done.err
    with FakeRole(shell.state):
        (shell.state / "identity/credentials").chmod(0o644)
        done = shell("list", "deployments")
        assert (done.status, "0644" in done.err) == (3, True)
        (shell.state / "identity/credentials").unlink()
        (shell.state / "identity/host-identity.json").write_text("{}")
        done = shell("list", "deployments")
        assert done.status == 2
        assert "on the server" in done.err


def test_an_interrupt_stops_waiting_and_cancels_nothing(shell: Shell, role: FakeRole) -> None:
    role.add("writer")
    role.polls_before_end = 10**6
    words = [sys.executable, "-m", "capyctl", "start", "deployment", "writer", "--wait"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=shell.environ(), text=True
    ) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("Request identity")
        while not any(path.startswith("/operations") for _, path, _, _ in list(role.seen)):
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=60) == 130
        said = waiting.stderr.read()
        assert (
            "Not waited for any longer: the start of writer goes on; `capyctl stop deployment writer` ends it" in said
        )
        assert len(said.splitlines()) == 1
    assert [operation["state"] for operation in role.operations.values()] == ["running"]


def test_a_reader_that_leaves_is_no_error(shell: Shell, role: FakeRole) -> None:
    for index in range(40):
        role.add(f"writer-{index}", routes=["x" * 4000])
    command = f"{sys.executable} -m capyctl list deployments --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=shell.environ(), capture_output=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"{", b"")


def test_status_as_json_has_the_memory_and_the_holders_that_its_text_shows(shell: Shell, role: FakeRole) -> None:
    text, found = shell("status").out, json.loads(shell("status", "--json").out)
    assert "  Memory unified   8.0 GiB free, 16.0 GiB total\n" in text
    assert f"capyctl {found['version']} {found['role']}\n" in text
    (host,) = found["hosts"]
    assert host == json.loads(shell("inspect", "host", "box", "--json").out)
    (domain,) = host["session"]["domains"]
    assert (domain["available_bytes"], domain["capacity_bytes"]) == (str(8 << 30), str(16 << 30))
