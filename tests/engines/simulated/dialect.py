"""Chat and text completions as the families stream them: one generation loop, and a dialect per family.

The knob `stream` bends it: `bytes_per_write`, `line_end` (such as "\\r\\n"), `space` (false: `data:{`), `comment`
(a `:` line before each event), `event` (an `event:` field), `usage` (`finish`, `every`, `none`), `pad_bytes`
(text in one delta), `pad_arguments` (bytes of a call's arguments, in one delta), `extra_delta`, `done` (false:
no `[DONE]`), `last_blank` (false), and, counted in tokens: `cut_after` (connection reset), `silent_after`
(nothing more comes), `error_after` (an error event).
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .http import ClientLeft, Reply, Request
from .scheduler import Aborted, Job, Scheduler
from .text import Model, answer, count_tokens

Json = dict[str, Any]


class Refused(Exception):
    """A request that the engine answers with an error of its own."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


class Dead(Exception):
    """The engine's worker is gone."""


class Dialect:
    """What differs between families. Every figure that an answer carries is measured, not made up."""

    reasoning_field = "reasoning_content"
    first_delta: Json = {"role": "assistant", "content": ""}
    left_streamed_s = 0.05  # from the client's leaving to the end of the work, before scaling
    left_whole_s = 0.05
    scaled = False
    usage_always = False  # on the finish chunk, without being asked
    cut_on_last_token = False  # whether the chunk of an answer's last token says that it was cut
    last_delta: Json = {}  # of a finish chunk that carries no token

    def chunk_choice(self, choice: Json, *, final: bool) -> Json:
        return choice

    def chunk(self, chunk: Json, *, first: bool) -> Json:
        return chunk

    def usage(self, job: Job, *, streamed: bool = False) -> Json:
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.produced,
            "total_tokens": job.prompt_tokens + job.produced,
        }

    def whole(self, body: Json, *, chat: bool) -> Json:
        """A whole answer, before usage and figures."""
        return body

    def figures(self, job: Job) -> Json:
        """Top-level objects of an answer, or of its usage chunk."""
        return {}

    def finish_figures(self, job: Job) -> Json:
        """Top-level objects of the finish chunk."""
        return {}


class Asked:
    """A request's body, read once."""

    def __init__(self, body: Json, *, chat: bool) -> None:
        self.body, self.chat = body, chat
        self.stream = body.get("stream") is True
        options = body.get("stream_options") or {}
        self.include_usage = bool(isinstance(options, dict) and options.get("include_usage"))
        self.max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        self.choices = int(body.get("n") or 1)
        self.return_ids = bool(body.get("return_token_ids"))
        self.tools = body.get("tools") or []
        self.tool_choice = body.get("tool_choice", "auto" if self.tools else "none")
        self.prompt = _chat_prompt(body) if chat else _text_prompt(body)

    @property
    def calls(self) -> str | None:
        """The function that the answer calls: a named one, the first when one is required or asked for in words."""
        if not self.tools or self.tool_choice == "none":
            return None
        if isinstance(self.tool_choice, dict):
            return str(self.tool_choice["function"]["name"])
        names = [str(tool["function"]["name"]) for tool in self.tools]
        if self.tool_choice == "required":
            return names[0]
        return next((name for name in names if name in self.prompt), None)


def _chat_prompt(body: Json) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: at least one message is needed", param="messages")
    parts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"{message.get('role')}: {content or ''}" if isinstance(message, dict) else str(message))
    return "\n".join(parts)


def _text_prompt(body: Json) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        prompt = " ".join(str(part) for part in prompt)
    if not isinstance(prompt, str):
        raise Refused(400, "prompt: a text or a list of token ids is needed", param="prompt")
    return prompt


class Generator:
    """Runs requests of one engine."""

    def __init__(
        self, dialect: Dialect, scheduler: Scheduler, model: Model, served_name: str, knobs: Any,
        state: Any,
    ) -> None:  # fmt: skip
        self.dialect, self.scheduler, self.model, self.served_name = dialect, scheduler, model, served_name
        self.knobs, self.state = knobs, state
        self.context = model.context
        self.reasoning_parser: str | None = None
        self.tool_parser: str | None = None
        self.force_usage = False
        self.check_length: Callable[[int, int | None], None] = lambda prompt, wanted: None
        self.on_answer: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    # --- the answer ---------------------------------------------------------------------------------------

    def run(self, request: Request, reply: Reply, asked: Asked, *, rid: str, name: str) -> None:
        """Answer a request. Raises: Refused, Dead before anything was sent; ClientLeft."""
        prompt_tokens = count_tokens(asked.prompt) + (3 if asked.chat else 0)
        self.check_length(prompt_tokens, asked.max_tokens)
        job = Job(rid, prompt_tokens)
        job.cached_tokens = self.scheduler.cached(hash(asked.prompt), prompt_tokens)
        delay = self.dialect.left_streamed_s if asked.stream else self.dialect.left_whole_s
        delay *= self.knobs.time_scale if self.dialect.scaled else 1.0

        def look() -> None:
            if self.state.dead:
                raise Dead
            if reply.left():
                reply.close()
                self.scheduler.linger(job, delay)
                raise ClientLeft

        with self.scheduler.place(job, look):
            writer = (_Stream if asked.stream else _Whole)(self, reply, asked, job, name)
            try:
                for token in self._tokens(asked, job, reply):
                    writer.token(*token)
                writer.finish()
            except (ClientLeft, BrokenPipeError):
                reply.close()
                self.scheduler.linger(job, delay)
                raise ClientLeft from None
            except Aborted:
                writer.aborted()
        self.on_answer()

    def _tokens(self, asked: Asked, job: Job, reply: Reply) -> Iterator[tuple[int, str, int, str, bool]]:
        """(choice, kind, token id, text, last one), paced; kinds are reasoning, content, call, arguments."""
        self._wait(job, reply, self.knobs.prefill_s)
        plans = [self._plan(asked, variant) for variant in range(asked.choices)]
        for at in range(max(map(len, plans))):
            self._wait(job, reply, self.knobs.token_s / (self.knobs.wake_speed if self.state.woken else 1.0))
            for choice, plan in enumerate(plans):
                if at < len(plan):
                    job.token()
                    self.scheduler.on_change()
                    kind, number, text = plan[at]
                    job.reasoned += kind == "reasoning"
                    yield choice, kind, number, text, at == len(plan) - 1

    def _wait(self, job: Job, reply: Reply, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while True:
            if reply.left(max(0.0, min(0.05, ends - time.monotonic()))):
                raise ClientLeft
            if job.aborted:
                raise Aborted
            if self.state.dead:
                raise Dead
            if not self.scheduler.paused and not self.state.silent and time.monotonic() >= ends:
                return
            if self.scheduler.paused or self.state.silent:
                time.sleep(0.005)

    def _plan(self, asked: Asked, variant: int) -> list[tuple[str, int, str]]:
        mode = self.knobs.wake_answers if self.state.woken else "same"
        if self.state.garbage:
            mode = "garbage"
        length = self.knobs.answer_tokens
        if (asked.body.get("ignore_eos") or not asked.chat) and asked.max_tokens is not None:
            length = asked.max_tokens
        if asked.body.get("min_tokens"):
            length = max(length or 0, asked.body["min_tokens"])
        tokens = answer(self.model.seed, asked.prompt, length, mode, variant)
        thinks = self.reasoning_parser is not None and asked.chat and self.knobs.reasons
        template = asked.body.get("chat_template_kwargs") or {}
        if template.get("enable_thinking") is False or template.get("thinking") is False:
            thinks = False
        thoughts = answer(self.model.seed, f"think {asked.prompt}", 4, mode, variant) if thinks else []
        plan = [("reasoning", number, text) for number, text in thoughts]
        called = asked.calls if self.tool_parser is not None else None
        if called is not None:
            arguments = "{" + " " * int(self.knobs.stream.get("pad_arguments", 0)) + "}"
            plan += [("call", 900, called), ("arguments", 901, arguments)]
        else:
            plan += [("content", number, text) for number, text in tokens]
        return plan if asked.max_tokens is None else plan[: int(asked.max_tokens)]

    def finish_reason(self, asked: Asked, plan_kind: str, job: Job) -> str:
        if plan_kind in ("call", "arguments"):
            return "tool_calls"
        full = len(self._plan(_Unbounded(asked), 0))
        return "length" if asked.max_tokens is not None and asked.max_tokens < full else "stop"


class _Unbounded:
    """A request as if it had no limit, to know whether its answer was cut."""

    def __init__(self, asked: Asked) -> None:
        self.body, self.chat, self.calls, self.prompt = asked.body, asked.chat, asked.calls, asked.prompt
        forced = asked.body.get("ignore_eos") or not asked.chat
        self.max_tokens = None if not forced or asked.max_tokens is None else asked.max_tokens + 1


class _Writer:
    """Collects what every answer needs to know at its end."""

    def __init__(self, generator: Generator, reply: Reply, asked: Asked, job: Job, name: str) -> None:
        self.generator, self.reply, self.asked, self.job, self.name = generator, reply, asked, job, name
        self.dialect, self.created = generator.dialect, int(time.time())
        self.stream: Json = generator.knobs.stream
        self.ids: list[list[int]] = [[] for _ in range(asked.choices)]
        self.texts: list[dict[str, str]] = [{} for _ in range(asked.choices)]
        self.last_kind = "content"
        self.call_id = f"chatcmpl-tool-{secrets.token_hex(8)}"

    def note(self, choice: int, kind: str, number: int, text: str) -> None:
        self.ids[choice].append(number)
        self.texts[choice][kind] = self.texts[choice].get(kind, "") + text
        self.last_kind = kind

    @property
    def prompt_ids(self) -> list[int]:
        return list(range(self.job.prompt_tokens))

    def logprob(self, number: int, text: str) -> Json:
        broken = self.generator.knobs.wake_answers == "nonfinite" and self.generator.state.woken
        value = math.nan if broken else -0.5 - number % 7 / 10
        top = int(self.asked.body.get("top_logprobs") or 0)
        others = [{"token": f"{text}{at}", "logprob": value - at, "bytes": list(text.encode())} for at in range(top)]
        return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": others}

    def text_logprobs(self, number: int, text: str) -> Json:
        value = self.logprob(number, text)["logprob"]
        return {"tokens": [text], "token_logprobs": [value], "top_logprobs": [{text: value}], "text_offset": [0]}


class _Whole(_Writer):
    def token(self, choice: int, kind: str, number: int, text: str, last: bool) -> None:
        self.note(choice, kind, number, text)

    def aborted(self) -> None:
        self.finish(reason="abort")

    def finish(self, reason: str | None = None) -> None:
        asked, job = self.asked, self.job
        reason = reason or self.generator.finish_reason(asked, self.last_kind, job)
        choices = []
        for index, texts in enumerate(self.texts):
            choice: Json = {"index": index, "finish_reason": reason, "logprobs": None}
            if asked.chat:
                message: Json = {"role": "assistant", "content": texts.get("content")}
                if "reasoning" in texts:
                    message[self.dialect.reasoning_field] = texts["reasoning"]
                if "call" in texts:
                    function = {"name": texts["call"], "arguments": texts.get("arguments", "{}")}
                    message["tool_calls"] = [{"id": self.call_id, "type": "function", "function": function}]
                elif message["content"] is None:
                    message["content"] = ""
                choice["message"] = message
                if asked.body.get("logprobs"):
                    choice["logprobs"] = {"content": [self.logprob(number, "x") for number in self.ids[index]]}
            else:
                choice["text"] = texts.get("content", "")
                if asked.body.get("logprobs") is not None:
                    choice["logprobs"] = self.text_logprobs(self.ids[index][0] if self.ids[index] else 0, "x")
            if asked.return_ids:
                choice["token_ids"] = self.ids[index]
                if not asked.chat:
                    choice["prompt_token_ids"] = self.prompt_ids
            choices.append(self.dialect.chunk_choice(choice, final=True))
        kind = "chat.completion" if asked.chat else "text_completion"
        body = {"id": job.rid, "object": kind, "created": self.created, "model": self.name, "choices": choices}
        body = self.dialect.whole(body, chat=asked.chat)
        body |= {"usage": self.dialect.usage(job)} | self.dialect.figures(job) | self.dialect.finish_figures(job)
        self.reply.send(200, json.dumps(body, ensure_ascii=False).encode())


class _Stream(_Writer):
    def __init__(self, generator: Generator, reply: Reply, asked: Asked, job: Job, name: str) -> None:
        super().__init__(generator, reply, asked, job, name)
        reply.bytes_per_write = int(self.stream.get("bytes_per_write", 0))
        self.begun = False
        self.finished = 0  # choices whose finish reason was said with their last token

    def _begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        self.reply.begin()
        if self.asked.chat:
            for index in range(self.asked.choices):
                self._event(index, dict(self.dialect.first_delta), first=True)

    def token(self, choice: int, kind: str, number: int, text: str, last: bool) -> None:
        self._begin()
        self.note(choice, kind, number, text)
        if kind == "content":
            text += "x" * int(self.stream.get("pad_bytes", 0))
        if not self.asked.chat:
            delta: Json = {"content": text}
        elif kind == "reasoning":
            delta = {self.dialect.reasoning_field: text}
        elif kind == "call":
            function: Json = {"name": text, "arguments": ""}
            delta = {"tool_calls": [{"index": 0, "id": self.call_id, "type": "function", "function": function}]}
        elif kind == "arguments":
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        else:
            delta = {"content": text}
        delta |= self.stream.get("extra_delta", {})
        logprobs = None
        if self.asked.body.get("logprobs"):
            both = self.logprob(number, text), self.text_logprobs(number, text)
            logprobs = {"content": [both[0]]} if self.asked.chat else both[1]
        reason = None
        if last and self.dialect.cut_on_last_token:
            cut = self.generator.finish_reason(self.asked, kind, self.job)
            reason = cut if cut == "length" else None
            self.finished += reason is not None
        final = self.finished == self.asked.choices
        ids = [number] if self.asked.return_ids else None
        self._event(choice, delta, reason=reason, final=final, logprobs=logprobs, ids=ids)
        self._broken(self.job.produced)

    def _broken(self, produced: int) -> None:
        """The faults that are counted in tokens."""
        if produced == self.stream.get("cut_after"):
            self.reply.reset()
            raise ClientLeft
        if produced == self.stream.get("silent_after"):
            while not self.reply.left(1.0):
                pass
            raise ClientLeft
        if produced == self.stream.get("error_after"):
            self._write({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}})
            raise Aborted

    def aborted(self) -> None:
        self._begin()
        self._end("abort")

    def finish(self) -> None:
        self._begin()
        self._end(self.generator.finish_reason(self.asked, self.last_kind, self.job))

    def _end(self, reason: str) -> None:
        job, where = self.job, self.stream.get("usage")
        for index in range(self.asked.choices if not self.finished else 0):
            last = index == self.asked.choices - 1
            self._event(index, dict(self.dialect.last_delta), reason=reason, final=last)
        if (self.asked.include_usage or self.generator.force_usage) and where is None:
            chunk = self._chunk([])
            self._write(chunk | {"usage": self.dialect.usage(job, streamed=True)} | self.dialect.figures(job))
        if self.stream.get("done", True):
            self._raw("[DONE]", blank=self.stream.get("last_blank", True))
        self.reply.end()

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {
            "id": self.job.rid, "object": kind, "created": self.created, "model": self.name, "choices": choices,
        }  # fmt: skip

    def _event(
        self, index: int, delta: Json, *, reason: str | None = None, first: bool = False, final: bool = False,
        logprobs: Json | None = None, ids: list[int] | None = None,
    ) -> None:  # fmt: skip
        choice: Json = {"index": index}
        choice |= {"delta": delta} if self.asked.chat else {"text": delta.get("content", "")}
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        if ids is not None:
            choice["token_ids"] = ids
        chunk = self._chunk([self.dialect.chunk_choice(choice, final=reason is not None)])
        chunk = self.dialect.chunk(chunk, first=first)
        if final:
            chunk |= self.dialect.finish_figures(self.job)
        where = self.stream.get("usage")
        asked = self.asked.include_usage
        if (
            (where == "every" and asked)
            or (final and where == "finish" and asked)
            or (final and self.dialect.usage_always and not asked)
        ):
            chunk["usage"] = self.dialect.usage(self.job, streamed=True)
        self._write(chunk)

    def _write(self, chunk: Json) -> None:
        self._raw(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))

    def _raw(self, text: str, *, blank: bool = True) -> None:
        end = str(self.stream.get("line_end", "\n"))
        piece = f": ping{end}{end}" if self.stream.get("comment") else ""
        piece += f"event: {self.stream['event']}{end}" if self.stream.get("event") else ""
        piece += f"data:{' ' if self.stream.get('space', True) else ''}{text}{end}{end if blank else ''}"
        self.reply.write(piece.encode())
