"""What a well-behaved client gets: answers, streams, errors in both shapes, models, names."""

from __future__ import annotations

import json

import openai
import pytest
import trio
from router_fakes import (
    DONE,
    TOKEN,
    WHOLE,
    Engine,
    answers_at_once,
    chat,
    chunk,
    house,
    request,
)

from capyctl import ulid
from capyctl.errors import Failure, Refusal
from capyctl.router import Key, Keys, Model, NoKeys, Settings


async def test_a_whole_answer_arrives_as_it_came_with_figures_beside_it() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(chat(), headers=["X-Request-Id: mine-1"])
        assert answer.status == 200
        assert answer.body.startswith(WHOLE[:-1])
        assert answer.header("content-type") == "application/json"
        assert answer.header("x-request-id") == "mine-1"
        assert ulid.is_ulid(answer.header("x-capyctl-request-id") or "")
        assert answer.header("server") is None
        metrics = answer.json["capyctl"]["metrics"]
        assert metrics["prefill_ms"] == {"value": 12.5, "source": "engine"}
        assert metrics["decode_tokens_per_second"] == {"value": 80.25, "source": "engine"}
        assert metrics["cached_tokens"] == {"value": 3, "source": "engine"}
        assert metrics["total_ms"]["source"] == "router"
        assert await here.told() == ["placed", "sent", "first_output", "finished"]
        assert await here.upstream.fate() == "returned"
        assert here.desk.arrivals[0].request == answer.header("x-capyctl-request-id")


async def test_a_stream_is_passed_on_byte_for_byte_with_figures_before_its_end() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert answer.status == 200
        assert answer.header("content-type") == "text/event-stream"
        assert answer.header("cache-control") == "no-store"
        assert answer.header("x-accel-buffering") == "no"
        before, _, after = answer.body.partition(b": x-capyctl-metrics ")
        assert before.startswith(chunk() + chunk("Hel") + chunk("lo"))
        comment, _, end = after.partition(b"\n\n")
        assert end == DONE
        metrics = json.loads(comment)
        assert metrics["ttft_ms"]["source"] == "router"
        assert metrics["decode_tokens_per_second"] == {"value": 80.25, "source": "engine"}
        assert await here.told() == ["placed", "sent", "first_output", "finished"]
        assert await here.upstream.fate() == "returned"


async def test_the_opening_chunk_is_not_the_first_output() -> None:
    go_on = trio.Event()

    async def slow(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk())
        await go_on.wait()
        await engine.say(chunk("x"), DONE)

    async with house(slow) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await client.until(chunk())
        ticket = await here.desk.ticket()
        assert ticket.told == ["placed", "sent"]
        go_on.set()
        await ticket.until("first_output")
        await client.until(DONE)


async def test_many_requests_use_one_connection() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        for number in range(20):
            assert (await client.ask(chat(stream=number % 2 == 1))).status == 200
        await here.app.drained()
        assert here.upstream.fates == ["returned"] * 20


async def test_the_served_name_goes_up_and_the_route_comes_back() -> None:
    async def names_itself(engine: Engine) -> None:
        assert json.loads(engine.body)["model"] == "engine's own 名"
        named = json.loads(engine.body)["model"]
        if b'"stream": true' in engine.body:
            engine.head()
            await engine.say(chunk("a", model=named), chunk("b", model=named), DONE)
        else:
            engine.head(content_type="application/json")
            await engine.say(json.dumps({"model": named, "n": 1.10, "choices": []}).encode())

    async with house(names_itself) as here:
        here.desk.served_name = "engine's own 名"
        client = await here.connect()
        body = b'{ "messages":[{"role":"user","content":"\\u00e9"}], "model" : "m" ,"x":1.0e3,"stream": false}'
        answer = await client.ask(body)
        assert here.upstream.opened[0].body == body.replace(b'"m"', '"engine\'s own 名"'.encode())
        assert answer.json["model"] == "m"
        assert b'"n": 1.1' in answer.body
        answer = await client.ask(chat(stream=True))
        assert [json.loads(event)["model"] for event in answer.events[:-1]] == ["m", "m"]
        assert answer.events[-1] == "[DONE]"


async def test_the_body_goes_up_untouched_when_the_names_agree() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        body = b' {"zz":{"unknown":[1,2.50]},"model":"m","messages":[{}],"stream":null}\n'
        assert (await client.ask(body)).status == 200
        assert here.upstream.opened[0].body == body
        assert here.upstream.opened[0].path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/embeddings", {"model": "m", "input": ["x"]}),
        ("/v1/rerank", {"model": "m", "query": "x", "documents": ["y"]}),
        ("/v1/responses", {"model": "m", "input": "x"}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/systemone", {"model": "m", "state": "x", "questions": {}}),
    ],
)
async def test_what_the_engine_serves_is_relayed(path: str, body: dict) -> None:
    async def echo(engine: Engine) -> None:
        engine.head(content_type="application/json")
        await engine.say(b'{"model":"m","path":"' + engine.path.encode() + b'"}')

    async with house(echo) as here:
        client = await here.connect()
        answer = await client.ask(body, path=path)
        assert answer.status == 200
        assert answer.json["path"] == path
        assert here.desk.arrivals[0].api == ("decisions" if path.endswith("systemone") else "chat")


async def test_an_answers_end_comes_with_its_last_bytes() -> None:
    """Many clients leave when they read the terminator: who has it has the whole answer."""
    async with house(answers_at_once) as here:
        client = await here.connect()
        for _ in range(10):
            await client.send(request(chat(stream=True)))
            while DONE not in client.held:
                assert await client.fill()
            assert client.held.endswith(DONE + b"\r\n0\r\n\r\n")
            client.held.clear()
        assert (await client.ask(chat())).status == 200


async def test_typed_streams_end_with_their_own_terminators() -> None:
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    completed = b'event: response.completed\ndata: {"type":"response.completed","response":{"model":"e"}}\n\n'

    async def messages(engine: Engine) -> None:
        engine.head()
        await engine.say(
            b'event: message_start\ndata: {"type":"message_start","message":{"model":"e","usage":{}}}\n\n',
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
            stop,
        )

    async def responses(engine: Engine) -> None:
        engine.head()
        await engine.say(
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n', completed
        )

    async with house(messages, responses) as here:
        here.desk.served_name = "e"
        client = await here.connect()
        answer = await client.ask(chat(stream=True), path="/v1/messages")
        assert answer.body.endswith(stop)
        assert json.loads(answer.events[0])["message"]["model"] == "m"
        answer = await client.ask({"model": "m", "input": "x", "stream": True}, path="/v1/responses")
        assert json.loads(answer.events[1])["response"]["model"] == "m"
        await here.app.drained()
        assert [ticket.told[-1] for ticket in here.desk.tickets] == ["finished", "finished"]


async def test_the_official_client_reads_answers_streams_and_errors() -> None:
    async with house(answers_at_once) as here:

        def use() -> tuple:
            client = openai.OpenAI(base_url=f"http://{here.address}/v1", api_key=TOKEN, max_retries=0)
            messages = [{"role": "user", "content": "hi"}]
            whole = client.chat.completions.create(model="m", messages=messages)
            stream = client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            said = "".join(each.choices[0].delta.content or "" for each in stream)
            models = [model.id for model in client.models.list()]
            one = client.models.retrieve("m").id
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="m", messages=[])
            wrong = openai.OpenAI(base_url=f"http://{here.address}/v1", api_key="no", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            client.close()
            wrong.close()
            return whole.choices[0].message.content, said, models, one, caught.value

        content, said, models, one, refusal = await trio.to_thread.run_sync(use)
        assert content == "Hello é 😀"
        assert said == "Hello"
        assert models == ["m"]
        assert one == "m"
        assert refusal.code == "invalid_request"
        assert refusal.param == "messages"


async def test_the_official_client_sees_an_error_event_as_an_error() -> None:
    async def dies(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("x"))
        engine.die()

    async with house(dies) as here:

        def use() -> str:
            client = openai.OpenAI(base_url=f"http://{here.address}/v1", api_key=TOKEN, max_retries=0)
            with pytest.raises(openai.APIError) as caught, client:
                for _ in client.chat.completions.create(model="m", messages=[{}], stream=True):
                    pass
            return str(caught.value.code)

        assert await trio.to_thread.run_sync(use) == "engine_error"
        assert (await here.told())[-1] == "upstream_lost"


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"model":"m","model":"m","messages":[{}]}', None),
        ({"messages": [{}]}, "model"),
        ({"model": 3, "messages": [{}]}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": [{}], "stream": "yes"}, "stream"),
        ({"model": "m", "messages": [{}], "stream": 1}, "stream"),
        ({"model": "m", "messages": [{}], "rid": "1"}, "rid"),
        ({"model": "m", "messages": [{}], "kv_transfer_params": {}}, "kv_transfer_params"),
        ({"model": "m", "messages": [{}], "return_hidden_states": True}, "return_hidden_states"),
        ({"model": "m", "messages": [{}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"model": "m", "messages": [{}], "n_probs": 5000}, "n_probs"),
        (b'{"model":"m","messages":[{}],"n_probs":5e3}', "n_probs"),
        (b'{"model":"m","messages":[{}],"n_probs":5.' + b"0" * 999 + b"e3}", "n_probs"),
        ({"model": "m", "messages": [{}], "cache_salt": ""}, "cache_salt"),
        ({"model": "m", "messages": [{}], "cache_salt": "é" * 513}, "cache_salt"),
        ({"model": "m", "messages": [{}], "cache_salt": {}}, "cache_salt"),
    ],
)
async def test_a_bad_body_is_refused_naming_the_field_and_the_connection_stays(body: object, param: str | None) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(body if isinstance(body, bytes) else json.dumps(body).encode())
        assert answer.status == 400
        assert answer.error == "invalid_request"
        assert answer.json["error"]["param"] == param
        assert ulid.is_ulid(answer.header("x-capyctl-request-id") or "")
        assert here.desk.arrivals == []
        assert (await client.ask(chat())).status == 200


async def test_a_refusal_of_the_desk_keeps_its_status_on_streams_too() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        for error, status, retry_after in (
            (Refusal("not_found", "no deployment `m`"), 404, None),
            (Refusal("queue_full", "64 wait"), 429, "1"),
            (Refusal("cache_salt_unsupported", "no"), 400, None),
            (Failure("activation_failed", "out of memory", details={"retry_after_s": 30}), 503, "30"),
        ):
            here.desk.refuse = error
            answer = await client.ask(chat(stream=True, cache_salt="s"))
            assert answer.status == status
            assert answer.error == error.code
            assert answer.json["retryable"] is error.retryable
            assert answer.header("retry-after") == retry_after
        assert here.desk.arrivals[-1].cache_salt


async def test_a_request_that_expires_while_it_waits_gets_the_worlds_code() -> None:
    async with house(answers_at_once) as here:
        here.desk.refuse_place = Failure("unavailable", "not servable within 600 s")
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert (answer.status, answer.error) == (503, "unavailable")
        assert await here.told() == ["refused"]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_engines_refusal_is_relayed_with_its_status_and_words(status: int) -> None:
    async def refuses(engine: Engine) -> None:
        engine.head(status, "application/json")
        await engine.say(b'{"error":{"message":"the request exceeds\\u0007 the context","type":"exceed_context"}}')

    async with house(refuses) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert (answer.status, answer.error) == (status, "engine_rejected")
        assert answer.json["message"] == "the request exceeds  the context"
        assert answer.json["error"]["type"] == "exceed_context"
        assert (await here.told())[-1] == "rejected"
        assert await here.upstream.fate() == "returned"


async def test_a_picture_for_a_model_that_reads_none_is_the_clients_mistake() -> None:
    async def reads_none(engine: Engine) -> None:
        engine.head(500, "application/json")
        words = b"image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
        await engine.say(b'{"error":{"code":500,"message":"%s","type":"server_error"}}' % words)

    async with house(reads_none) as here:
        client = await here.connect()
        answer = await client.ask(chat())
        assert (answer.status, answer.error, answer.json["retryable"]) == (400, "engine_rejected", False)
        assert answer.json["message"].startswith("image input is not supported")
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert (await here.told())[-1] == "rejected"
        await here.upstream.fate()


@pytest.mark.parametrize(
    ("status", "content_type", "body", "says"),
    [
        (400, "text/html", b"<h1>no</h1>", "the engine answered 400"),
        (500, "application/json", b'{"error":"boom"}', "the engine answered 500: boom"),
        (503, "application/json", b'{"error":{"message":"Loading model"}}', "the engine answered 503: Loading model"),
        (302, "text/plain", b"elsewhere", "the engine answered 302: elsewhere"),
        (200, "text/html", b"<h1>", "the engine answered with text/html"),
        (200, "application/json", b'{"cut', "the engine's answer is not a JSON object"),
        (500, "text/plain", b"x" * 5000, "the engine answered 500: " + "x" * 2048),
        (500, "text/plain", b"x" * 70_000, None),
    ],
)
async def test_any_other_answer_is_an_engine_error(
    status: int, content_type: str, body: bytes, says: str | None
) -> None:
    async def errs(engine: Engine) -> None:
        engine.head(status, content_type)
        await engine.say(body)

    async with house(errs) as here:
        client = await here.connect()
        answer = await client.ask(chat())
        assert (answer.status, answer.error) == (502, "engine_error")
        assert says is None or answer.json["message"] == says
        assert (await here.told())[-1] == "errored"
        assert "boom" not in here.desk.tickets[0].reasons[-1]
        await here.upstream.fate()


async def test_an_engine_that_answers_nothing_is_unreachable_and_its_address_stays_here() -> None:
    async def vanishes(engine: Engine) -> None:
        pass

    async with house(vanishes) as here:
        client = await here.connect()
        answer = await client.ask(chat())
        assert (answer.status, answer.error) == (502, "engine_unreachable")
        assert b"10.1.2.3" not in answer.body
        assert (await here.told())[-1] == "upstream_lost"


async def test_a_closed_door_is_tried_elsewhere_and_nothing_was_sent_twice() -> None:
    async with house(answers_at_once) as here:
        here.upstream.refusals = 2
        client = await here.connect()
        assert (await client.ask(chat())).status == 200
        assert await here.told() == [
            *("placed", "not_accepted") * 2,
            *("placed", "sent", "first_output", "finished"),
        ]
        assert len(here.upstream.opened) == 1


async def test_a_stream_without_its_terminator_ends_with_an_error_event_and_no_done() -> None:
    async def stops(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("x"), b'data: {"half')

    async with house(stops) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        assert b'{"half' not in answer.body
        assert json.loads(answer.events[-1])["error"]["code"] == "engine_error"
        assert (await here.told())[-1] == "errored"


@pytest.mark.parametrize(
    "said", [b'data: {"error":{"message":"no slot","code":500}}\n\n', b'error: {"message":"no slot"}\n\n']
)
async def test_an_error_inside_a_stream_keeps_the_engines_words(said: bytes) -> None:
    async def errs(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("x"), said)

    async with house(errs) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        event = json.loads(answer.events[-1])
        assert event["error"]["message"] == event["message"] == "no slot"
        assert event["code"] == "engine_error"
        assert (await here.told())[-1] == "errored"


@pytest.mark.parametrize(("kib", "passes"), [(63, True), (65, True), (512, True), (4095, True), (4097, False)])
async def test_a_piece_passes_up_to_its_bound_and_a_larger_one_is_cut_with_an_event(kib: int, passes: bool) -> None:
    event = chunk("y" * (kib * 1024 - 120))

    async def large(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("x"))
        for at in range(0, len(event), 65536):
            await engine.say(event[at : at + 65536])
        await engine.say(DONE)

    async with house(large, answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        if passes:
            assert event in answer.body
            assert answer.events[-1] == "[DONE]"
        else:
            assert b"yyyy" not in answer.body
            assert json.loads(answer.events[-1])["code"] == "engine_error"
            assert "4194304 bytes" in json.loads(answer.events[-1])["message"]
            assert await here.upstream.fate() == "abandoned"
            assert (await here.told())[-1] == "errored"
        assert (await client.ask(chat())).status == 200


@pytest.mark.parametrize("bad", [b"data: \xff\xfe\n\n", b"data: hello\n\n", b"data: [1]\n\n"])
async def test_what_is_no_event_of_json_ends_the_stream(bad: bytes) -> None:
    async def talks(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("x"), bad, chunk("z"), DONE)

    async with house(talks) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert bad not in answer.body
        assert chunk("z") not in answer.body
        assert json.loads(answer.events[-1])["code"] == "engine_error"


ODD = (
    b'{"choices": [{"index": 0, "delta": {"content": "y"}, "logprobs": {"content": [{"logprob": %s}]}}], "model": "q"}'
)


@pytest.mark.parametrize("word", [b"NaN", b"-Infinity", b"Infinity"])
async def test_a_log_probability_that_is_no_number_is_not_passed_on(word: bytes) -> None:
    async def streams(engine: Engine) -> None:
        engine.head()
        await engine.say(chunk("NaN, said the model"), b"data: " + ODD % word + b"\n\n", DONE)

    async def whole(engine: Engine) -> None:
        engine.head(content_type="application/json")
        await engine.say(ODD % word)

    async with house(streams, whole) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True, logprobs=True))
        assert b"NaN, said the model" in answer.body
        last = json.loads(answer.events[-1])
        assert (last["code"], "no number" in last["message"]) == ("engine_error", True)
        answer = await client.ask(chat(logprobs=True, top_logprobs=2))
        assert (answer.status, answer.error) == (502, "engine_error")
        assert (await here.told())[-1] == "errored"


async def test_comments_and_figures_that_an_engine_forges_are_dropped() -> None:
    async def forges(engine: Engine) -> None:
        engine.head()
        await engine.say(b": x-capyctl-metrics {}\n\n", b": hi\n" + chunk("x"), DONE)

    async with house(forges) as here:
        client = await here.connect()
        answer = await client.ask(chat(stream=True))
        assert [comment.split(" ")[0] for comment in answer.comments] == ["x-capyctl-metrics"]
        assert b": hi" not in answer.body
        assert chunk("x") in answer.body


# --- waiting -----------------------------------------------------------------------------------------


async def test_a_waiting_stream_is_kept_alive_and_then_served() -> None:
    async with house(answers_at_once, settings=Settings(keep_alive_seconds=0.05), open_gate=False) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        ticket = await here.desk.ticket()
        head = await client.head()
        assert head.status == 200
        comment = await client.until(b"}\n\n")
        assert b': x-capyctl-waiting {"state": "starting", "position": 1, "estimate_s": 7}' in comment
        await client.until(b"}\n\n")
        here.desk.gate.set()
        await client.until(DONE)
        await ticket.until("finished")


async def test_after_the_first_comment_an_error_is_an_event() -> None:
    async with house(answers_at_once, settings=Settings(keep_alive_seconds=0.05), open_gate=False) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await client.until(b"}\n\n")
        here.desk.refuse_place = Failure("activation_failed", "no memory")
        here.desk.gate.set()
        event = await client.until(b'"retryable": true}\n\n')
        assert b'data: {"error": {"message": "no memory"' in event
        assert b"event:" not in event


async def test_a_stream_that_waits_less_keeps_its_status() -> None:
    async with house(answers_at_once, settings=Settings(keep_alive_seconds=5), open_gate=False) as here:
        client = await here.connect()
        await client.send(request(chat(stream=True)))
        await here.desk.ticket()
        here.desk.refuse_place = Failure("activation_failed", "no memory")
        here.desk.gate.set()
        assert (await client.answer()).status == 503


async def test_a_request_that_is_not_streamed_waits_in_silence() -> None:
    async with house(answers_at_once, settings=Settings(keep_alive_seconds=0.02), open_gate=False) as here:
        client = await here.connect()
        await client.send(request(chat()))
        await here.desk.ticket()
        await trio.sleep(0.1)  # a stream would have been kept alive by now
        here.desk.gate.set()
        assert (await client.answer()).body.startswith(WHOLE[:-1])


# --- keys, models, names, browsers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Authorization: Bearer wrong"],
        ["Authorization: Bearer " + "x" * 43],
        ["Authorization: Bearer"],
        ["Authorization: Bearer "],
        [f"Authorization: Basic {TOKEN}"],
        [f"Authorization: Bearer  {TOKEN}"],
        [f"Authorization: Bearer\t{TOKEN}"],
        [f"Authorization: {TOKEN}"],
        [f"Authorization: Bearer {TOKEN}", "Authorization: Bearer wrong"],
        ["Authorization: Bearer wrong", f"Authorization: Bearer {TOKEN}"],
        [f"Authorization: Bearer {TOKEN}, Bearer {TOKEN}"],
        [f"Cookie: authorization=Bearer {TOKEN}", f"X-Api-Key: {TOKEN}"],
    ],
)
async def test_whoever_has_no_key_learns_nothing(headers: list[str]) -> None:
    async with house(answers_at_once) as here:
        bodies = set()
        for path in ("/v1/models", "/v1/chat/completions", "/nowhere"):
            client = await here.connect()
            answer = await client.ask(path=path, token=None, headers=headers)
            assert (answer.status, answer.error) == (401, "unauthorized")
            assert answer.header("www-authenticate") == "Bearer"
            assert await client.at_end()
            bodies.add(answer.body)
        assert len(bodies) == 1


async def test_the_scheme_may_be_written_in_any_case() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        assert (
            await client.ask(token=None, path="/v1/models", headers=[f"Authorization: bEARER {TOKEN}"])
        ).status == 200


async def test_a_named_key_sees_and_asks_for_its_own_deployments() -> None:
    keys = Keys((Key.of("all", TOKEN), Key.of("few", "f" * 40, ["b"])))
    assert TOKEN not in repr(keys)
    async with house(answers_at_once, keyring=keys) as here:
        here.desk.names = [
            Model(id="b-route", api="chat", created_s=5, deployment="b"),
            Model(id="a", api="decisions", created_s=5),
        ]
        client = await here.connect()
        every = await client.ask(path="/v1/models")
        assert [(each["id"], each["capyctl"]["api"]) for each in every.json["data"]] == [
            ("a", "decisions"),
            ("b-route", "chat"),
        ]
        few = await client.ask(path="/v1/models", token="f" * 40)
        assert [each["id"] for each in few.json["data"]] == ["b-route"]
        assert (await client.ask(path="/v1/models/a", token="f" * 40)).status == 404
        await client.ask(chat(), token="f" * 40)
        assert here.desk.arrivals[-1].allowed == frozenset({"b"})


@pytest.mark.parametrize("name", ["org/Model-7B:Q4", "with space", "Grüße 名", "a%b", "m"])
async def test_each_listed_name_can_be_retrieved_plain_and_escaped(name: str) -> None:
    from urllib.parse import quote

    async with house(answers_at_once) as here:
        here.desk.names = [Model(id=name, api="chat", created_s=1)]
        client = await here.connect()
        assert (await client.ask(path="/v1/models")).json["data"][0]["id"] == name
        for written in {quote(name), quote(name, safe="")}:
            answer = await client.ask(path=f"/v1/models/{written}")
            assert (answer.status, answer.json["id"]) == (200, name)
        answer = await client.ask(chat() | {"model": name})
        assert here.desk.arrivals[-1].route == name
        answer = await client.ask(path=f"/v1/models/{quote(name, safe='')}x")
        assert (answer.status, f'"{name}x"' in answer.json["message"]) == (404, True)


async def test_methods_and_paths_that_are_not_served() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        for method, path, allow in (
            ("GET", "/v1/chat/completions", "POST"),
            ("OPTIONS", "/v1/chat/completions", "POST"),
            ("DELETE", "/v1/models", "GET, HEAD"),
            ("PUT", "/v1/models/m", "GET, HEAD"),
            ("BREW", "/v1/embeddings", "POST"),
        ):
            answer = await client.ask(method=method, path=path)
            assert (answer.status, answer.error, answer.header("allow")) == (405, "method_not_allowed", allow)
            assert answer.json["message"] == f"{method} is not served here; use {allow.replace(', ', ' or ')}"
        for path in (
            *("/", "/metrics", "/health", "/slots", "/props", "/management/v1/snapshot", "//v1/models", "/v1/models/"),
            *(
                "/v1/../v1/models",
                "/v1/%6dodels",
                "/v1%2Fmodels",
                "/v1/chat/completions/",
                "/V1/models",
                "/v1/models/..",
            ),
        ):
            answer = await client.ask(path=path)
            assert (answer.status, answer.error) == (404, "not_found"), path
        assert here.desk.arrivals == []


async def test_head_answers_like_get_without_a_body() -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        await client.send(request(method="HEAD", path="/v1/models"))
        answer = await client.answer(head_only=True)
        assert answer.status == 200
        assert int(answer.header("content-length") or 0) > 10
        assert (await client.ask(path="/v1/models")).status == 200


async def test_browsers_pass_only_from_listed_origins() -> None:
    settings = Settings(origins=frozenset({"https://chat.example"}))
    ask = ["Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, x-stainless-os"]
    async with house(answers_at_once, settings=settings) as here:
        client = await here.connect()
        answer = await client.ask(
            method="OPTIONS", path="/v1/chat/completions", token=None, headers=["Origin: https://chat.example", *ask]
        )
        assert answer.status == 200
        assert answer.header("access-control-allow-origin") == "https://chat.example"
        assert answer.header("access-control-allow-headers") == "authorization, x-stainless-os"
        answer = await client.ask(chat(stream=True), headers=["Origin: https://chat.example"])
        assert answer.header("access-control-allow-origin") == "https://chat.example"
        assert answer.header("vary") == "Origin"
        answer = await client.ask(chat(), headers=["Origin: https://evil.example"])
        assert answer.header("access-control-allow-origin") is None
        answer = await client.ask(method="OPTIONS", token=None, headers=["Origin: https://evil.example", *ask])
        assert answer.status == 401


async def test_without_keys_everybody_passes_but_a_page_in_a_browser() -> None:
    async with house(answers_at_once, keyring=NoKeys()) as here:
        client = await here.connect()
        assert (await client.ask(chat(), token=None)).status == 200
        assert (await client.ask(chat(), token="whatever")).status == 200
        assert (await client.ask(chat(), token=None, headers=["Origin: http://evil.example"])).status == 401


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (["a"], "a"),
        (['"quote"'], '"quote"'),
        (["x" * 128], "x" * 128),
        (["x" * 129], None),
        (["a b"], None),
        (["é"], None),
        (["a", "b"], None),
        (["a", "a"], None),
    ],
)
async def test_a_clients_own_id_is_echoed_when_it_is_one_plain_word(sent: list[str], echoed: str | None) -> None:
    async with house(answers_at_once) as here:
        client = await here.connect()
        answer = await client.ask(chat(), headers=[f"X-Request-Id: {each}" for each in sent])
        assert answer.status == 200
        assert answer.header("x-request-id") == echoed
