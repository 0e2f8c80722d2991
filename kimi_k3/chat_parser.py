"""Replies of K3, read token by token into reasoning, response and tool calls.

A reply starts inside the channel that its prompt opened (think, or response without thinking):

    reasoning close(think) open(response) text close(response) [open(tools) calls close(tools)] close(message) end
    call = open(call, tool=, index=) { open(argument, key=, type=) value close(argument) } close(call)

Structure is told by token id alone: the characters of a marker inside a text are text. Models leave markers out, so one
rule repairs: an element that opens, and an outer one that closes, ends whatever cannot contain it. Marker tokens never
become text. Text outside every channel is response text.
"""

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

# How deep an element stands; it can only be inside elements of lower depth.
_DEPTHS = {"message": 0, "think": 1, "response": 1, "tools": 1, "call": 2, "argument": 3, "json": 3}
_HEADER = re.compile(rf'({"|".join(_DEPTHS)})((?: [\w-]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([\w-]+)="([^"]*)"')
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True)
class ResponseDelta:
    """More text of the response channel."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call was opened; `index` counts the calls of the message from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArgumentDelta:
    """More text of one argument; `key` None: of the arguments as one JSON text. `type` is the JSON type's name."""

    index: int
    key: str | None
    type: str
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call.

    arguments: key -> value; or the text as it came, if the model wrote one text that is no JSON object.
    problems: what was repaired or could not be read, in words; empty for a tidy call. A value that does not fit its
        type stays text and is named here.
    """

    index: int
    name: str
    arguments: dict[str, Any] | str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class MalformedToolCall:
    """A call that must not be run: it was cut off, or names no tool."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class MessageEnd:
    """The last event. `is_complete`: an end id came; else the reply was cut off."""

    is_complete: bool


ChatEvent = (
    ReasoningDelta | ResponseDelta | ToolCallStart | ToolCallArgumentDelta | ToolCall | MalformedToolCall | MessageEnd
)


@dataclass
class _OpenCall:
    index: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw: str = ""  # the arguments as one text: in a json element, or bare between the call's markers
    problems: list[str] = field(default_factory=list)
    key: str = ""
    type: str = ""
    value: str = ""

    def finish_argument(self) -> None:
        if self.key in self.arguments:
            self.problems.append(f"argument {self.key!r} was given twice")
        value: Any = self.value
        if self.type != "string":
            wanted = _JSON_TYPES.get(self.type, ())
            parsed = load_json(self.value)
            # bool is an int in Python, and no number in JSON
            if isinstance(parsed, wanted) and not (self.type == "number" and isinstance(parsed, bool)):
                value = parsed
            else:
                self.problems.append(f"argument {self.key!r} does not fit its type {self.type!r}")
        self.arguments[self.key] = value

    def finish(self) -> ToolCall | MalformedToolCall:
        if not self.name:
            return MalformedToolCall(self.index, self.name, "the call names no tool")
        arguments: dict[str, Any] | str = self.arguments
        if self.raw.strip() and self.arguments:
            self.problems.append("text between the arguments")
        elif self.raw.strip():
            parsed = load_json(self.raw)
            arguments = parsed if isinstance(parsed, dict) else self.raw
            if not isinstance(parsed, dict):
                self.problems.append("the arguments are no JSON object")
        return ToolCall(self.index, self.name, arguments, tuple(self.problems))


class ChatParser:
    """Reads one reply: `feed` every generated id, end id included, then `finish` once; both return the new events.

    Args:
        tokenizer: its markers are needed. Raises: ValueError if it has none.
        thinking: whether the prompt opened the think channel (else response).
    The whole of what was read stands in `reasoning`, `response` and `tool_calls` at any time.
    """

    def __init__(self, tokenizer: "KimiK3Tokenizer", thinking: bool = True) -> None:
        markers = [tokenizer.token_to_id(name) for name in ("<|open|>", "<|close|>", "<|sep|>")]
        if None in markers:
            raise ValueError("chat_parser: this tokenizer has no special tokens <|open|>, <|close|> and <|sep|>")
        self._open_id, self._close_id, self._sep_id = markers
        self._end_ids = tokenizer.end_token_ids
        self._is_hidden = tokenizer.is_hidden
        self._decoder = tokenizer.stream_decoder()
        self._elements = ["think" if thinking else "response"]  # open elements, outermost first; message is not listed
        self._header: str | None = None  # text since <|open|> or <|close|>, until <|sep|>
        self._is_opening = False
        self._held = ""  # text outside every channel, while it may still be a header whose <|open|> is missing
        self._call: _OpenCall | None = None
        self._num_calls = 0
        self._is_over = False
        self._events: list[ChatEvent] = []
        self._reasoning: list[str] = []
        self._response: list[str] = []
        self.tool_calls: list[ToolCall] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def response(self) -> str:
        return "".join(self._response)

    def feed(self, token_id: int) -> list[ChatEvent]:
        """Events that this id completes; none after an end id."""
        if self._is_over:
            return []
        is_end = token_id in self._end_ids
        if is_end or token_id in (self._open_id, self._close_id, self._sep_id):
            self._take(self._decoder.finish())
            if token_id == self._sep_id:
                self._separate()
            else:
                self._settle_header(is_whole=False)
                self._release_held()
            if is_end:
                self._leave(0, "the message ended")
                self._end(is_complete=True)
            elif token_id != self._sep_id:
                self._header, self._is_opening = "", token_id == self._open_id
        elif not self._is_hidden(token_id):
            self._take(self._decoder.feed(token_id))
        return self._drain()

    def finish(self) -> list[ChatEvent]:
        """Events of the end of the output; without an end id before, an open call is cut off, not whole."""
        if not self._is_over:
            self._take(self._decoder.finish())
            match = _HEADER.match(self._header or "")
            if match and _DEPTHS[match[1]] == 1 and match.end() < len(self._header or ""):
                self._settle_header(is_whole=False)  # a channel without <|sep|>, and its text
            self._header = None  # any other cut-off header says nothing yet
            self._release_held()
            if self._call is not None:
                self._events.append(MalformedToolCall(self._call.index, self._call.name, "the call was cut off"))
            self._end(is_complete=False)
        return self._drain()

    def _drain(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _end(self, is_complete: bool) -> None:
        self._is_over = True
        self._events.append(MessageEnd(is_complete))

    def _take(self, text: str) -> None:
        """Put decoded text where it belongs."""
        place = self._elements[-1] if self._elements else "message"
        if not text:
            return
        if self._header is not None:
            self._header += text
            if not _may_be_header(self._header):
                self._settle_header(is_whole=False)
        elif place == "think":
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
        elif place == "response":
            self._response.append(text)
            self._events.append(ResponseDelta(text))
        elif self._call is not None and place in ("argument", "json"):
            is_json = place == "json"
            if is_json:
                self._call.raw += text
            else:
                self._call.value += text
            key, kind = (None, "object") if is_json else (self._call.key, self._call.type)
            self._events.append(ToolCallArgumentDelta(self._call.index, key, kind, text))
        else:
            self._held += text
            start = self._held.lstrip()
            if start and not _may_be_header(start):
                self._release_held()

    def _release_held(self) -> None:
        """Text outside every channel: in a call the bare arguments, elsewhere response text; space alone is nothing."""
        text, self._held = self._held, ""
        if not text.strip():
            return
        if self._call is not None:
            self._call.raw += text
            self._events.append(ToolCallArgumentDelta(self._call.index, None, "object", text))
        else:
            self._enter("response", {})
            self._take(text.lstrip())

    def _separate(self) -> None:
        """<|sep|>: ends a header; one without <|open|> still opens its element; any other means nothing."""
        if self._header is None and self._held and _HEADER.fullmatch(self._held.strip()):
            self._header, self._is_opening, self._held = self._held.strip(), True, ""
        self._settle_header(is_whole=True)
        self._release_held()

    def _settle_header(self, is_whole: bool) -> None:
        """Act on the header read so far; `is_whole`: <|sep|> ended it; else it has none, and text may follow in it."""
        if self._header is None:
            return
        header, self._header = self._header, None
        match = _HEADER.match(header)
        rest = header[match.end() :] if match else ""
        if match is None or (is_whole and rest and not rest[0].isspace()):
            self._take(header)  # no element of K3: its words are text
            return
        tag = match[1]
        if self._is_opening:
            attributes = {
                key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(match[2])
            }
            self._enter(tag, attributes)
        else:
            self._close(tag)
        if not is_whole:
            self._take(rest)

    def _enter(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "message":
            return  # the prompt opened it
        self._leave(_DEPTHS[tag], f"{tag} was opened")
        if _DEPTHS[tag] >= 2 and "tools" not in self._elements:
            self._elements = ["tools"]
        if tag == "call" or (_DEPTHS[tag] == 3 and self._call is None):
            self._call = _OpenCall(self._num_calls, attributes.get("tool", "") if tag == "call" else "")
            self._num_calls += 1
            if self._call.name:
                self._events.append(ToolCallStart(self._call.index, self._call.name))
            if tag != "call":
                self._elements.append("call")
        if tag == "argument" and self._call is not None:
            self._call.key, self._call.type = attributes.get("key", ""), attributes.get("type", "string")
            self._call.value = ""
        self._elements.append(tag)

    def _close(self, tag: str) -> None:
        depth = _DEPTHS[tag]
        if tag == "message" or tag in self._elements:
            self._leave(depth + 1 if depth else 0, f"{tag} was closed")
            if depth:
                self._pop("")
        elif self._elements and _DEPTHS[self._elements[-1]] == depth:
            self._leave(depth, f"{tag} was closed")

    def _leave(self, depth: int, reason: str) -> None:
        """End every open element of this depth or deeper; calls and arguments among them were not closed."""
        while self._elements and _DEPTHS[self._elements[-1]] >= depth:
            self._pop(reason)

    def _pop(self, reason: str) -> None:
        tag = self._elements.pop()
        call = self._call
        if call is None or tag not in ("call", "argument", "json"):
            return
        if reason:
            call.problems.append(f"{tag} was not closed before {reason}")
        if tag == "argument":
            call.finish_argument()
        if tag == "call":
            event = call.finish()
            self._call = None
            self._events.append(event)
            if isinstance(event, ToolCall):
                self.tool_calls.append(event)


def _may_be_header(text: str) -> bool:
    return any(tag.startswith(text) or text.startswith(tag) for tag in _DEPTHS)


def load_json(text: str) -> Any:
    """The JSON value of a text; the text itself if it is no JSON (NaN and Infinity are none)."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
