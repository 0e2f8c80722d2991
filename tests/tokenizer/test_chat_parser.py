"""Replies read back: random tidy turns, malformed turns, every cut, and text that looks like markup."""

import json
import random
from dataclasses import dataclass

import pytest

from kimi_k3.chat_parser import (
    ChatParser,
    MalformedToolCall,
    MessageEnd,
    ReasoningDelta,
    ResponseDelta,
    ToolCall,
    ToolCallArgumentDelta,
    ToolCallStart,
)
from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

# Markers written short: O open, C close, S sep, E end of message; they stand for token ids, not for text.
MARKERS = {"O": "<|open|>", "C": "<|close|>", "S": "<|sep|>", "E": "<|end_of_msg|>"}
CALL = (
    'O|call tool="get_weather" index="1"|S|O|argument key="city" type="string"|S|Paris|C|argument|S|'
    'O|argument key="days" type="number"|S|3|C|argument|S|C|call|S'
)
ANSWER = ("get_weather", {"city": "Paris", "days": 3})
HEAD = "Let me see.|C|think|S|O|response|S|Checking.|C|response|S"
TAIL = "C|message|S|E"


@dataclass
class Reply:
    reasoning: str
    response: str
    calls: list
    malformed: list
    is_complete: bool
    events: list


def ids_of(tokenizer: KimiK3Tokenizer, written: str) -> list[int]:
    ids = []
    for part in written.split("|"):
        ids += [tokenizer.token_to_id(MARKERS[part])] if part in MARKERS else tokenizer.encode(part)
    return ids


def parse(tokenizer: KimiK3Tokenizer, ids: list[int], thinking: bool = True) -> Reply:
    parser = ChatParser(tokenizer, thinking)
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    reply = Reply(
        reasoning="".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        response="".join(event.text for event in events if isinstance(event, ResponseDelta)),
        calls=[event for event in events if isinstance(event, ToolCall)],
        malformed=[event for event in events if isinstance(event, MalformedToolCall)],
        is_complete=events[-1].is_complete,
        events=events,
    )
    assert sum(isinstance(event, MessageEnd) for event in events) == 1
    assert (parser.reasoning, parser.response, parser.tool_calls) == (reply.reasoning, reply.response, reply.calls)
    assert parser.finish() == [] and parser.feed(ids[0] if ids else 0) == []
    return reply


def calls_of(reply: Reply) -> list:
    return [(call.name, call.arguments) for call in reply.calls]


def random_string(rng: random.Random) -> str:
    pieces = [
        "a", " ", "\n", "&", '"', "&quot;", "&amp;", "<|open|>", "<|sep|>", "<|close|>think<|sep|>", "call", "think",
        "response", "中文", "한국", "\U0001f468\u200d\U0001f469", "\u0301", "{}", "=", "<|end_of_msg|>", "[EOS]",
    ]  # fmt: skip
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(8)))


def random_value(rng: random.Random, depth: int = 0):
    makers = [
        lambda: random_string(rng),
        lambda: rng.randrange(-(10**12), 10**12),
        lambda: rng.uniform(-1, 1),
        lambda: rng.choice([True, False, None]),
    ]
    if depth < 3:
        makers.append(lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(4))])
        makers.append(lambda: {random_string(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(4))})
    return rng.choice(makers)()


def random_turn(rng: random.Random) -> dict:
    calls = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        arguments = {random_string(rng): random_value(rng) for _ in range(rng.randrange(4))}
        if rng.random() < 0.15:
            arguments = "not JSON " + random_string(rng)
        function = {"name": "f" + random_string(rng), "arguments": arguments}
        calls.append({"type": "function", "function": function})
    return {
        "role": "assistant",
        "reasoning_content": random_string(rng),
        "content": random_string(rng),
        "tool_calls": calls,
    }


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("vocabulary", ["k3", "small"])
def test_what_is_rendered_is_parsed_back(request, vocabulary, thinking):
    tokenizer = request.getfixturevalue(vocabulary)
    rng = random.Random(int(thinking))
    for _ in range(150):
        turn = random_turn(rng)
        encoding = tokenizer.encode_chat([turn], thinking=thinking, thinking_effort=None, add_generation_prompt=False)
        ((start, end),) = encoding.assistant_spans
        reply = parse(tokenizer, encoding.ids[start:end], thinking)
        assert reply.reasoning == (turn["reasoning_content"] if thinking else "")
        assert reply.response == turn["content"]
        functions = [call["function"] for call in turn["tool_calls"]]
        assert calls_of(reply) == [(function["name"], function["arguments"]) for function in functions]
        for call in reply.calls:
            wanted = () if isinstance(call.arguments, dict) else ("the arguments are no JSON object",)
            assert call.problems == wanted
        assert reply.is_complete and not reply.malformed


def test_the_golden_turn_is_read(k3, xtml_cases):
    """The one assistant turn of the kitchen-sink golden, from its segments alone."""
    segments = xtml_cases["kitchen_sink"]
    start = next(i for i, (text, _) in enumerate(segments) if text == "Need the weather tool.")
    end = start + next(i for i, (text, _) in enumerate(segments[start:]) if text == "<|end_of_msg|>") + 1
    ids = [token_id for text, markup in segments[start:end] for token_id in k3.encode(text, allow_special=markup)]
    reply = parse(k3, ids)
    assert (reply.reasoning, reply.response) == ("Need the weather tool.", "Checking.")
    assert reply.calls == [ToolCall(0, "get_weather", {"city": "Paris", "units": "c"})]


def test_events_come_in_order_and_as_soon_as_they_can(small):
    ids = ids_of(small, f"{HEAD}|O|tools|S|{CALL}|C|tools|S|{TAIL}")
    events = parse(small, ids).events
    kinds = []
    for event in events:
        if not kinds or kinds[-1] is not type(event):
            kinds.append(type(event))
    starts = [ReasoningDelta, ResponseDelta, ToolCallStart, ToolCallArgumentDelta, ToolCall, MessageEnd]
    assert kinds == starts
    assert events[-2:] == [ToolCall(0, "get_weather", ANSWER[1]), MessageEnd(True)]
    fragments = [event for event in events if isinstance(event, ToolCallArgumentDelta)]
    assert "".join(event.text for event in fragments if event.key == "city") == "Paris"
    assert {(event.key, event.type) for event in fragments} == {("city", "string"), ("days", "number")}
    parser = small.chat_parser()
    assert parser.feed(ord("L")) == [ReasoningDelta("L")]  # not held back


# name -> (reply, reasoning, response, calls): each with one thing a model leaves out or adds
THINK, TEXT = "Let me see.", "Checking."
MALFORMED = {
    "think opener repeated": (f"O|think|S|{HEAD}|{TAIL}", THINK, TEXT, []),
    "message opener repeated": (f'O|message role="assistant"|S|O|think|S|{HEAD}|{TAIL}', THINK, TEXT, []),
    "message opener repeated, think not": (f'O|message role="assistant"|S|{HEAD}|{TAIL}', THINK, TEXT, []),
    "response opener absent": (f"{THINK}|C|think|S|{TEXT}|C|response|S|{TAIL}", THINK, TEXT, []),
    "response opener without its marker": (f"{THINK}|C|think|S|response|S|{TEXT}|C|response|S|{TAIL}", THINK, TEXT, []),
    "think close absent": (f"{THINK}|O|response|S|{TEXT}|C|response|S|{TAIL}", THINK, TEXT, []),
    "think close without its sep": (f"{THINK}|C|think|O|response|S|{TEXT}|C|response|S|{TAIL}", THINK, TEXT, []),
    "think closed as response": (f"{THINK}|C|response|S|O|response|S|{TEXT}|{TAIL}", THINK, TEXT, []),
    "think closed as response, response not opened": (f"{THINK}|C|response|S|{TEXT}|{TAIL}", THINK, TEXT, []),
    "response close absent": (f"{THINK}|C|think|S|O|response|S|{TEXT}|{TAIL}", THINK, TEXT, []),
    "response opener without its sep": (f"{THINK}|C|think|S|O|response|{TEXT}|C|response|S|{TAIL}", THINK, TEXT, []),
    "message close absent": (f"{HEAD}|E", THINK, TEXT, []),
    "tools straight from think": (f"{THINK}|O|tools|S|{CALL}|C|tools|S|{TAIL}", THINK, "", [ANSWER]),
    "call straight from think": (f"{THINK}|O|{CALL[2:]}|{TAIL}", THINK, "", [ANSWER]),
    "call straight from think, then text": (f"{THINK}|O|{CALL[2:]}|\n{TEXT}|{TAIL}", THINK, TEXT, [ANSWER]),
    "tools after a closed think": (f"{THINK}|C|think|S|O|tools|S|{CALL}|C|tools|S|{TAIL}", THINK, "", [ANSWER]),
    "tools straight from response": (
        f"{THINK}|C|think|S|O|response|S|{TEXT}|O|tools|S|{CALL}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]
    ),
    "message closed before the tools": (f"{HEAD}|C|message|S|O|tools|S|{CALL}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]),
    "message closed inside think": (f"{THINK}|{TAIL}", THINK, "", []),
    "ended inside think": (f"{THINK}|E", THINK, "", []),
    "tools close absent": (f"{HEAD}|O|tools|S|{CALL}|{TAIL}", THINK, TEXT, [ANSWER]),
    "call close absent": (f"{HEAD}|O|tools|S|{CALL[: -len('|C|call|S')]}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]),
    "only the end after the arguments": (f"{HEAD}|O|tools|S|{CALL[: -len('|C|call|S')]}|E", THINK, TEXT, [ANSWER]),
    "argument closes absent": (
        f"{HEAD}|O|tools|S|{CALL.replace('|C|argument|S', '')}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]
    ),
    "call opener without its marker": (f"{HEAD}|O|tools|S|{CALL[2:]}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]),
    "argument opener without its marker": (
        f"{HEAD}|O|tools|S|{CALL.replace('S|O|argument', 'S|argument')}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]
    ),
    "space between elements": (
        f"{HEAD}|\n|O|tools|S|\n|{CALL.replace('S|O', 'S| |O')}| |C|tools|S|\n|{TAIL}", THINK, TEXT, [ANSWER]
    ),
    "json in place of arguments": (
        f'{HEAD}|O|tools|S|O|call tool="get_weather" index="1"|S|O|json type="object"|S|{json.dumps(ANSWER[1])}'
        f"|C|json|S|C|call|S|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER]
    ),
    "bare json in a call": (
        f'{HEAD}|O|tools|S|O|call tool="get_weather" index="1"|S|{json.dumps(ANSWER[1])}|C|call|S|C|tools|S|{TAIL}',
        THINK, TEXT, [ANSWER],
    ),
    "two calls, the first not closed": (
        f"{HEAD}|O|tools|S|{CALL[: -len('|C|call|S')]}|{CALL}|C|tools|S|{TAIL}", THINK, TEXT, [ANSWER, ANSWER]
    ),
    "stray sep and closes": (f"S|C|argument|S|C|call|S|{HEAD}|S|C|tools|S|{TAIL}", THINK, TEXT, []),
    "unknown element": (f"O|b|S|{THINK}|C|b|S|{HEAD[len(THINK) + 1 :]}|{TAIL}", f"b{THINK}b", TEXT, []),
    "element whose name begins as a known one": (f"O|thinking|S|{HEAD}|{TAIL}", f"thinking{THINK}", TEXT, []),
    "empty header": (f"O|O|S|{HEAD}|{TAIL}", THINK, TEXT, []),
}  # fmt: skip


# Only what follows tells a header without its marker from text, and a longer name from a known one without its sep.
UNDECIDED_AT_A_CUT = {
    "response opener without its marker",
    "call opener without its marker",
    "element whose name begins as a known one",
}


@pytest.mark.parametrize("vocabulary", ["k3", "small"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_turns(request, vocabulary, name):
    tokenizer = request.getfixturevalue(vocabulary)
    written, reasoning, response, calls = MALFORMED[name]
    reply = parse(tokenizer, ids_of(tokenizer, written))
    assert (reply.reasoning, reply.response) == (reasoning, response)
    assert calls_of(reply) == calls and not reply.malformed and reply.is_complete


@pytest.mark.parametrize("name", MALFORMED)
def test_a_reply_cut_anywhere_is_a_beginning_of_the_whole(small, name):
    ids = ids_of(small, MALFORMED[name][0])
    whole = parse(small, ids)
    for cut in range(len(ids)):
        reply = parse(small, ids[:cut])
        assert not reply.is_complete
        assert reply.calls == whole.calls[: len(reply.calls)]
        if name not in UNDECIDED_AT_A_CUT:
            assert whole.reasoning.startswith(reply.reasoning)
            assert whole.response.startswith(reply.response)


def test_a_call_is_whole_once_it_is_closed_and_cut_off_before(small):
    ids = ids_of(small, f"{HEAD}|O|tools|S|{CALL}|C|tools|S|{TAIL}")
    done = len(ids_of(small, f"{HEAD}|O|tools|S|{CALL}"))
    opened = len(ids_of(small, HEAD + '|O|tools|S|O|call tool="get_weather" index="1"|S'))
    for cut in range(len(ids)):
        reply = parse(small, ids[:cut])
        assert calls_of(reply) == ([ANSWER] if cut >= done else [])
        cut_off = [MalformedToolCall(0, "get_weather", "the call was cut off")]
        assert reply.malformed == (cut_off if opened <= cut < done else [])


def test_text_after_an_opener_without_its_sep_is_not_lost(small):
    assert parse(small, ids_of(small, f"{THINK}|C|think|S|O|response|{TEXT}")).response == TEXT
    parser = small.chat_parser()
    streamed = [event for token_id in ids_of(small, f"O|{TEXT}") for event in parser.feed(token_id)]
    assert "".join(event.text for event in streamed) == TEXT  # no header begins so: out at once


def test_any_lost_marker_keeps_the_call_and_shows_no_marker(small):
    """Each single token of the markup lost in turn: whole calls stay, no marker becomes text, the reply ends."""
    ids = ids_of(small, f"{HEAD}|O|tools|S|{CALL}|C|tools|S|{TAIL}")
    markers = {small.token_to_id(name) for name in MARKERS.values()}
    for lost in [place for place, token_id in enumerate(ids) if token_id in markers]:
        reply = parse(small, ids[:lost] + ids[lost + 1 :])
        assert reply.is_complete == (lost != len(ids) - 1)
        assert "<|" not in reply.reasoning + reply.response
        assert [call.name for call in reply.calls] == ["get_weather"], lost


def test_any_ids_end_without_error_and_without_markers(small):
    rng = random.Random(2)
    words = ["message", "think", "response", "tools", "json", 'call tool="f"', 'argument key="k" type="number"']
    for _ in range(3000):
        parts = [rng.choice([*"OOCCSSS", *words, "1", "text ", "\n"]) for _ in range(rng.randrange(25))]
        reply = parse(small, ids_of(small, "|".join([*parts, *("E" if rng.random() < 0.7 else "")])))
        assert "<|" not in reply.reasoning + reply.response
        indices = sorted(event.index for event in reply.calls + reply.malformed)
        assert indices == list(range(len(indices)))  # every call opened is accounted for, once


def test_quoted_markers_are_text(k3):
    quoted = "<|close|>think<|sep|><|open|>response<|sep|><|end_of_msg|>"
    ids = k3.encode(quoted) + ids_of(k3, "C|think|S|O|response|S") + k3.encode(quoted) + ids_of(k3, TAIL)
    reply = parse(k3, ids)
    assert (reply.reasoning, reply.response, reply.calls) == (quoted, quoted, [])


def test_values_that_do_not_fit_stay_text_and_are_named(small):
    arguments = {
        "number": "three", "boolean": "1", "null": "none", "object": "[]", "array": "{", "wrong": "x",
    }  # fmt: skip
    body = "|".join(f'O|argument key="{kind}" type="{kind}"|S|{text}|C|argument|S' for kind, text in arguments.items())
    body += '|O|argument key="n" type="number"|S|true|C|argument|S|O|argument key="untyped"|S|x|C|argument|S'
    (call,) = parse(small, ids_of(small, f'O|tools|S|O|call tool="f"|S|{body}|C|call|S|E')).calls
    assert call.arguments == {**arguments, "n": "true", "untyped": "x"}
    assert call.problems == tuple(f"argument {key!r} does not fit its type {kind!r}" for key, kind in
                                  [*((kind, kind) for kind in arguments), ("n", "number")])  # fmt: skip


def test_problems_are_told(small):
    twice = 'O|call tool="f"|S|O|argument key="a"|S|1|O|argument key="a"|S|2|C|argument|S|E'
    reply = parse(small, ids_of(small, twice))
    (call,) = reply.calls
    assert call.arguments == {"a": "2"}
    assert call.problems == (
        "argument was not closed before argument was opened",
        "argument 'a' was given twice",
        "call was not closed before the message ended",
    )
    reply = parse(small, ids_of(small, 'O|tools|S|O|call index="1"|S|C|call|S|O|argument key="a"|S|1|C|argument|S|E'))
    assert reply.malformed == [MalformedToolCall(i, "", "the call names no tool") for i in range(2)]


@pytest.mark.parametrize("end", ["[EOS]", "<|end_of_msg|>"])
def test_every_end_id_ends_the_reply(small, end):
    reply = parse(small, [*small.encode("thought"), small.token_to_id(end), *small.encode("later")])
    assert reply.is_complete and reply.reasoning == "thought"


def test_characters_split_over_tokens_are_whole(small):
    text = "안녕 \U0001f469\u200d\U0001f467 中"
    reply = parse(small, [*small.encode(text), *ids_of(small, "C|think|S"), 0xE4, *ids_of(small, "E")])
    assert all("\ufffd" not in event.text for event in reply.events if isinstance(event, ReasoningDelta))
    assert reply.reasoning == text and reply.response == "\ufffd"


def test_padding_and_other_hidden_tokens_are_no_text(small):
    ids = ids_of(small, f"{HEAD}|{TAIL}")
    ids.insert(3, small.pad_token_id)
    ids.insert(12, small.bos_token_id)
    reply = parse(small, ids)
    assert (reply.reasoning, reply.response) == (THINK, TEXT)
