"""The main job as a user does it: three fields, one command, and any client gets answers."""

from __future__ import annotations

import re
import time

import openai
import pytest

from .machine import Machine

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

SHOWS_TOOLS = (  # SmolLM2's own template leaves them out
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat(machine: Machine) -> str:
    """Deployed with three fields; what the command printed."""
    file = machine.write("chat.yaml", "name: chat\nengine: llamacpp\nmodel: smollm2\n")
    done = machine.ok("deploy", "model", "--file", file, "--activate", "--wait")
    machine.write("printed", done.out)
    assert re.fullmatch(
        r"Request identity: (\w{26}) \(reuse --request-id \1 to recover this command\)\n"
        r"(Waiting for the checkpoint digest of chat to be measured \(at most 900s\)\n)?",
        done.err,
    )
    return done.out


@pytest.fixture
def client(machine: Machine) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{machine.inference}/v1", api_key=machine.credential("api_key"), max_retries=0
    )


def test_deploying_prints_the_summary_of_a_model_that_answers(chat: str) -> None:
    print(chat)
    assert re.fullmatch(
        r"Deployed chat: ready\n\n"
        r"  Revision    1\n"
        r"  Hosts       \S+\n"
        r"  Ready       1/1\n"
        r"  Startup     \d+\.\d GiB\n"
        r"  Context     \d+ tokens\n"
        r"  Operation   initialize succeeded\n",
        chat,
    )


@pytest.mark.usefixtures("chat")
def test_status_shows_the_model_and_what_it_holds(machine: Machine) -> None:
    text = machine.ok("status", "deployment", "chat").out
    assert re.search(r"^NAME +STATE +READY +REVISION +STARTUP +INITIALIZE +LAST OPERATION$", text, re.MULTILINE)
    assert re.search(r"^chat +ready +1/1 +1 +\d+\.\d GiB +\d+s +initialize succeeded$", text, re.MULTILINE)
    assert re.search(r"^  Charged +\d+\.\d GiB ready on unified", text, re.MULTILINE)
    assert re.search(r"^chat +ready +1/1 +1 +\S+$", machine.ok("list", "deployments").out, re.MULTILINE)


@pytest.mark.usefixtures("chat")
def test_a_plain_client_gets_an_answer_whole_and_streamed(machine: Machine) -> None:
    whole = machine.ask("chat", max_tokens=16, temperature=0, prompt="Name three colours.")
    assert whole.status == 200, whole.body
    assert re.search(r"red|blue|green|black|white", whole.text, re.IGNORECASE), "the model's own words"
    streamed = machine.ask("chat", max_tokens=16, temperature=0, prompt="Name three colours.", stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert (streamed.status, streamed.done, streamed.text) == (200, True, whole.text)
    assert len(streamed.events) > 5


@pytest.mark.usefixtures("chat")
def test_models_are_listed_in_the_form_that_clients_read(machine: Machine, client: openai.OpenAI) -> None:
    listed = machine.send("GET", "/v1/models").json
    assert [(row["id"], row["object"], row["owned_by"]) for row in listed["data"]] == [("chat", "model", "capyctl")]
    assert [model.id for model in client.models.list()] == ["chat"]
    assert client.models.retrieve("chat").id == "chat"


@pytest.mark.usefixtures("chat")
def test_the_openai_package_gets_answers_and_streams(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    whole = client.chat.completions.create(model="chat", messages=messages, max_tokens=12, temperature=0)  # type: ignore[call-overload]
    assert len(whole.choices[0].message.content) > 10
    assert whole.usage.completion_tokens > 0
    stream = client.chat.completions.create(
        model="chat",
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[call-overload]
    )
    pieces = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == (
        whole.choices[0].message.content
    )
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.usefixtures("chat")
def test_the_openai_package_raises_its_own_errors(client: openai.OpenAI, machine: Machine) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://{machine.inference}/v1", api_key="capy-wrong", max_retries=0).models.list()


@pytest.mark.usefixtures("chat")
def test_an_operator_stops_and_starts_it(machine: Machine) -> None:
    assert machine.ok("stop", "deployment", "chat", "--wait").out.startswith("Stopped chat\n")
    assert machine.engines() == []
    refused = machine.ask("chat")
    assert (refused.status, refused.json["code"]) == (409, "deployment_stopped")
    assert "capyctl start deployment" in refused.json["error"]["message"]
    assert re.search(r"^  Stopped +operator$", machine.ok("status", "deployment", "chat").out, re.MULTILINE)
    began = time.monotonic()
    machine.ok("start", "deployment", "chat", "--wait")
    print(f"start --wait took {time.monotonic() - began:.2f} s")
    assert machine.ask("chat").status == 200
    assert machine.served("chat", 1) == 1


@pytest.mark.usefixtures("chat")
def test_tools_reach_the_model(client: openai.OpenAI, machine: Machine) -> None:
    machine.deploy("tooled", "smollm2", extra_args=["--chat-template", SHOWS_TOOLS], accept_extra_args=True)
    messages = [{"role": "user", "content": "Weather in Paris?"}]
    plain = client.chat.completions.create(model="tooled", messages=messages, max_tokens=8)  # type: ignore[call-overload]
    tooled = client.chat.completions.create(model="tooled", messages=messages, max_tokens=8, tools=[TOOL])  # type: ignore[call-overload]
    print(f"prompt of {plain.usage.prompt_tokens} tokens, {tooled.usage.prompt_tokens} with a tool")
    assert tooled.usage.prompt_tokens > plain.usage.prompt_tokens + 30
    machine.ok("delete", "deployment", "tooled", "--stop")


@pytest.mark.usefixtures("chat")
def test_deleting_it_with_stop_leaves_neither_engine_nor_charge(machine: Machine) -> None:
    machine.ok("delete", "deployment", "chat", "--stop")
    assert machine.engines() == []
    assert machine.charged() == {}
    assert machine.ask("chat").status == 404
    assert machine.ok("list", "deployments").out.splitlines() == ["NAME   STATE   READY   REVISION   HOSTS"]
