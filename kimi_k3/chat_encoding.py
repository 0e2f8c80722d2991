"""Chat prompts: messages -> XTML segments -> ids.

    open(tag, attributes) = <|open|> tag { key="value"} <|sep|>        close(tag) = <|close|> tag <|sep|>
    message = open(message, role=...) body close(message) <|end_of_msg|>

Order: tool declaration, thinking effort, conversation, tool choice, response format, generation prompt. Every segment
is encoded alone, and only our own markup with special tokens on: what a user types never becomes a control token.
"""

import ast
import base64
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.chat_parser import load_json
from kimi_k3.image_processing_kimi_k3 import image_prompt, open_image

if TYPE_CHECKING:
    from kimi_k3.tokenization_kimi_k3 import KimiK3Tokenizer

CONSTANTS_FILE = "chat_constants.json"
RELEASED_FILE = "encoding_k3.py"
EFFORTS = ("low", "high", "max")
# First 16 hex digits of the SHA-256, and the length in bytes, of the released texts.
RELEASED_BODIES = {
    "effort_low": ("003035f6bf61ffe6", 223),
    "effort_high": ("a8513c631231c09d", 224),
    "effort_max": ("20389202b5a9e0b3", 223),
    "tools_prefix": ("bbd0773d27b2a814", 72),
    "dynamic_tools_prefix": ("b5f3063ffeff6dab", 188),
    "tool_choice_required": ("e2c3dc236d94164a", 91),
    "tool_choice_none": ("efabd595d24633a1", 95),
    "json_object": ("a88696fd119e35ca", 162),
    "json_schema_prefix": ("35c44c528f6c1e22", 218),
}

_MESSAGE_KEYS = {
    "system": {"role", "content", "name", "tools"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning_content", "tool_calls", "token_ids"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


class _DefaultEffort(str):
    __slots__ = ()


# The default of `thinking_effort`. It reads "max" and is told apart from an explicit "max" by its type only.
DEFAULT_EFFORT = _DefaultEffort("max")


@dataclass(frozen=True)
class ChatBodies:
    """The fixed texts of K3's internal system messages, by name.

    They come from `chat_constants.json` next to the vocabulary, or else, word for word, from the release's
    `encoding_k3.py` beside it. `chat_constants.json` is one JSON object; every key is optional:

        effort_low, effort_high, effort_max          whole bodies, written when thinking
        tools_prefix, dynamic_tools_prefix           before the JSON of the tools; of tools declared by a later message
        tool_choice_required, tool_choice_none       whole bodies
        json_object                                  whole body of response_format json_object
        json_schema_prefix                           before the JSON of the schema
        json_suffix                                  after the JSON of tools, schema; default newline, three backticks
    """

    texts: Mapping[str, str]
    source: str

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatBodies":
        """Bodies found in a folder, none if it has neither file. Raises: ValueError if a file cannot be read."""
        constants, released = folder / CONSTANTS_FILE, folder / RELEASED_FILE
        if constants.is_file():
            texts = json.loads(constants.read_text(encoding="utf-8"))
            if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
                raise ValueError(f"{constants}: want one JSON object of strings")
            if unknown := sorted(texts.keys() - RELEASED_BODIES.keys() - {"json_suffix"}):
                raise ValueError(f"{constants}: unknown keys {unknown}, want {[*RELEASED_BODIES, 'json_suffix']}")
            return cls(texts, str(constants))
        if released.is_file():
            return cls(read_released_bodies(released.read_text(encoding="utf-8")), str(released))
        return cls({}, f"{folder} (neither {CONSTANTS_FILE} nor {RELEASED_FILE})")

    def get(self, key: str, feature: str) -> str:
        """The text `key`. Raises: ValueError that says which feature misses it and how to supply it."""
        if key not in self.texts:
            raise ValueError(
                f"encode_chat: {feature} needs the text {key!r}, not found in {self.source}; put the release's "
                f"{RELEASED_FILE}, or a {CONSTANTS_FILE} with this key, next to the vocabulary file"
            )
        return self.texts[key]

    @property
    def json_suffix(self) -> str:
        return self.texts.get("json_suffix", "\n```")


def read_released_bodies(source: str) -> dict[str, str]:
    """The bodies among the string literals of Python source, by length and SHA-256. The source is never executed.

    Literals are constants and f-strings, alone or added with +; a hole of an f-string may stand for an effort's name,
    or for the JSON between a prefix and a suffix. Raises: ValueError if the source does not parse.
    """
    wanted = {fingerprint: key for key, fingerprint in RELEASED_BODIES.items()}
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{RELEASED_FILE}: not Python source: {error}") from error
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        for text in _literal_texts(node):
            data = text.encode("utf-8", "surrogatepass")
            key = wanted.get((hashlib.sha256(data).hexdigest()[:16], len(data)))
            if key is not None:
                found[key] = text
    return found


def _literal_texts(node: ast.AST) -> Iterator[str]:
    parts = _literal_parts(node)
    if not any(parts):
        return
    whole = [part for part in parts if part is not None]
    for effort in EFFORTS if None in parts else ("",):
        whole.append("".join(effort if part is None else part for part in parts))
    for text in whole:
        yield text
        yield text.strip()


def _literal_parts(node: ast.AST) -> list[str | None]:
    """A string expression as constant texts and holes (None), neighbouring constants joined."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else [None]
    if isinstance(node, ast.JoinedStr):
        pieces = [part for value in node.values for part in _literal_parts(value)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pieces = _literal_parts(node.left) + _literal_parts(node.right)
    else:
        return [None]
    joined: list[str | None] = []
    for piece in pieces:
        if piece is not None and joined and joined[-1] is not None:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@dataclass
class ChatEncoding:
    """An encoded conversation.

    ids: token ids; one <|media_pad|> for each image.
    boundaries: increasing offsets into ids where a prefix may be met again: every message end, and the prompt end.
    assistant_spans: half-open ranges of ids that the assistant wrote, end marker included: what training learns from.
        A span starts inside the channel that the prompt opens, as a generated reply does.
    images, image_hashes: PIL images in order, and the SHA-256 (32 bytes) of mode, size and pixels of each.
    thinking_effort: the effort written into the prompt, None if none was.
    """

    ids: list[int]
    boundaries: list[int]
    assistant_spans: list[tuple[int, int]]
    images: list[Any] = field(default_factory=list)
    image_hashes: list[bytes] = field(default_factory=list)
    thinking_effort: str | None = None


@dataclass
class RenderedChat:
    """A conversation as segments (text, is_markup). Places are counts of segments; `token_ids`: turns given by ids."""

    segments: list[tuple[str, bool]] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    message_ends: list[int] = field(default_factory=list)
    assistant_spans: list[tuple[int, int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    image_hashes: list[bytes] = field(default_factory=list)
    thinking_effort: str | None = None
    is_open: bool = False  # the last message is a turn given by ids that was cut off before an end id

    def write(self, text: str) -> None:
        if text:
            self.segments.append((text, False))

    def markup(self, text: str) -> None:
        self.segments.append((text, True))

    def open(self, tag: str, attributes: Mapping[str, str] | None = None) -> None:
        self.markup("<|open|>")
        self.write(tag)
        for key, value in (attributes or {}).items():
            self.write(f" {key}")
            self.write('="')
            self.write(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.write('"')
        self.markup("<|sep|>")

    def close(self, tag: str) -> None:
        self.markup("<|close|>")
        self.write(tag)
        self.markup("<|sep|>")

    def open_message(self, attributes: Mapping[str, str]) -> None:
        if self.is_open:
            self.markup("<|end_of_msg|>")
            self.is_open = False
        self.open("message", attributes)

    def close_message(self) -> None:
        self.close("message")
        self.markup("<|end_of_msg|>")
        self.message_ends.append(len(self.segments))

    def internal_message(self, kind: str, body: str) -> None:
        self.open_message({"role": "system", "type": kind})
        self.write(body)
        self.close_message()


def encode_rendered(rendered: RenderedChat, tokenizer: "KimiK3Tokenizer") -> ChatEncoding:
    """Encode each segment alone. Raises: ValueError if the tokenizer lacks a marker that the prompt uses."""
    markers = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    if rendered.images:
        markers += ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    if missing := [marker for marker in markers if marker not in tokenizer.special_tokens]:
        raise ValueError(f"encode_chat: this tokenizer's table of special tokens has no {missing}")
    ids: list[int] = []
    offsets = [0]
    for place, (text, is_markup) in enumerate(rendered.segments):
        turn = rendered.token_ids.get(place)
        if turn is None:
            ids += tokenizer.encode(text, allow_special=is_markup)
        elif all(0 <= token_id < tokenizer.vocab_size for token_id in turn):
            ids += turn
        else:
            raise ValueError(f"encode_chat: token_ids: want ids 0..{tokenizer.vocab_size - 1}, got {turn}")
        offsets.append(len(ids))
    return ChatEncoding(
        ids=ids,
        boundaries=sorted({offsets[place] for place in rendered.message_ends} | {len(ids)}),
        assistant_spans=[(offsets[start], offsets[end]) for start, end in rendered.assistant_spans],
        images=rendered.images,
        image_hashes=rendered.image_hashes,
        thinking_effort=rendered.thinking_effort,
    )


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    bodies: ChatBodies,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = DEFAULT_EFFORT,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    end_token_ids: Collection[int] = (),
) -> RenderedChat:
    """Write a conversation as K3's segments.

    Args:
        messages: OpenAI form. `content` is a string or a list of parts {"type": "text", "text"}, {"type": "image",
            "image": PIL image, path or bytes}, {"type": "image_url", "image_url": {"url": data URL or path}}.
            system: `tools` declares further tools from there on, and `content` is then not shown, as in the release.
            assistant: `reasoning_content`, `content`, `tool_calls`; or `token_ids`, a turn as it was generated (inside
            the channel that its prompt opened, which `thinking` opens again; end id included), used as it is. If it was
            cut off before an end id, <|end_of_msg|> is added when anything follows.
            tool: `tool_call_id` of the call it answers, or `name`.
        tools: [{"type": "function", "function": {"name", ...}}].
        thinking: open the think channel, and show it in past turns.
        thinking_effort: "low", "high", "max", or None for no effort message. Left at its default it is "max" if the
            text of that message is known and None if not; given explicitly, a missing text is an error.
        tool_choice: None, "auto", "none" or "required".
        response_format: None, {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema":
            {"schema": ...}}.
        end_token_ids: ids that end a turn given by `token_ids`.
    Raises: ValueError naming message index and key, or the argument; also where a needed text is missing in `bodies`.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"encode_chat: messages: want a list of messages, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        _check_message(index, message)
    chat = RenderedChat()
    if tools:
        prefix = bodies.get("tools_prefix", "tools")
        chat.internal_message("tool-declare", prefix + _tools_json("tools", tools) + bodies.json_suffix)
    chat.thinking_effort = _resolve_effort(thinking_effort, thinking, bodies)
    if chat.thinking_effort is not None:
        body = bodies.get(f"effort_{chat.thinking_effort}", f"thinking_effort={str(chat.thinking_effort)!r}")
        chat.internal_message("thinking-effort", body.strip())
    _write_conversation(chat, messages, bodies, thinking, end_token_ids)
    has_tools = bool(tools) or any(message.get("tools") for message in messages)
    _write_tool_choice(chat, tool_choice, bodies, has_tools)
    _write_response_format(chat, response_format, bodies)
    if add_generation_prompt:
        chat.open_message({"role": "assistant"})
        chat.open("think" if thinking else "response")
    return chat


def _resolve_effort(effort: str | None, thinking: bool, bodies: ChatBodies) -> str | None:
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"encode_chat: thinking_effort: want one of {EFFORTS} or None, got {effort!r}")
    if effort is None or not thinking:
        return None
    if isinstance(effort, _DefaultEffort) and "effort_max" not in bodies.texts:
        return None
    return str(effort)


def _write_conversation(
    chat: RenderedChat,
    messages: Sequence[Mapping[str, Any]],
    bodies: ChatBodies,
    thinking: bool,
    end_token_ids: Collection[int],
) -> None:
    calls: list[tuple[str | None, str]] = []  # (id, name) of the last assistant turn's calls
    num_results = 0  # since the last assistant turn
    index = 0
    while index < len(messages):
        message, where = messages[index], f"messages[{index}]"
        role = message["role"]
        if role == "tool":
            end = index
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            for result_index, name in _order_results(messages, range(index, end), calls):
                num_results += 1
                chat.open_message({"role": "tool", "tool": name, "index": str(num_results)})
                _write_content(chat, f"messages[{result_index}]", messages[result_index]["content"])
                chat.close_message()
            index = end
            continue
        if role == "assistant":
            calls = _write_assistant(chat, where, message, thinking, end_token_ids)
            num_results = 0
        elif message.get("tools"):
            prefix = bodies.get("dynamic_tools_prefix", f"{where}.tools")
            declared = _tools_json(f"{where}.tools", message["tools"])
            chat.internal_message("tool-declare", prefix + declared + bodies.json_suffix)
        else:
            chat.open_message(_attributes(message))
            _write_content(chat, where, message["content"])
            chat.close_message()
        index += 1


def _write_assistant(
    chat: RenderedChat, where: str, message: Mapping[str, Any], thinking: bool, end_token_ids: Collection[int]
) -> list[tuple[str | None, str]]:
    """Write one assistant turn; returns (id, name) of its calls, in order."""
    calls = [_check_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.get("tool_calls") or ())]
    chat.open_message(_attributes(message))
    chat.open("think" if thinking else "response")
    start = len(chat.segments)
    turn = message.get("token_ids")
    if turn is not None:
        chat.token_ids[start] = [int(token_id) for token_id in turn]
        chat.markup("")
        chat.is_open = not turn or int(turn[-1]) not in end_token_ids
        chat.message_ends.append(len(chat.segments))
    else:
        if thinking:
            chat.write(message.get("reasoning_content") or "")
            chat.close("think")
            chat.open("response")
        _write_content(chat, where, message.get("content") or "", has_images=False)
        chat.close("response")
        if calls:
            chat.open("tools")
            for number, (_, name, arguments) in enumerate(calls, 1):
                chat.open("call", {"tool": name, "index": str(number)})
                _write_arguments(chat, arguments)
                chat.close("call")
            chat.close("tools")
        chat.close_message()
    chat.assistant_spans.append((start, len(chat.segments)))
    return [(call_id, name) for call_id, name, _ in calls]


def _write_arguments(chat: RenderedChat, arguments: Mapping[str, Any] | str) -> None:
    if isinstance(arguments, str):
        chat.open("json", {"type": "object"})
        chat.write(arguments)
        chat.close("json")
        return
    for key, value in arguments.items():
        chat.open("argument", {"key": key, "type": _json_type(value)})
        chat.write(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        chat.close("argument")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    # bool before number: True is an int in Python
    for kind, name in ((bool, "boolean"), ((int, float), "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def _order_results(
    messages: Sequence[Mapping[str, Any]], run: range, calls: Sequence[tuple[str | None, str]]
) -> list[tuple[int, str]]:
    """(message index, tool name) of a run of results: in call order if every result names a call, else as they came."""
    places = {call_id: place for place, (call_id, _) in reversed(list(enumerate(calls))) if call_id is not None}
    matched = {i: places[call_id] for i in run if (call_id := messages[i].get("tool_call_id")) in places}
    order = sorted(run, key=matched.__getitem__) if len(matched) == len(run) else list(run)
    results = []
    for i in order:
        name = calls[matched[i]][1] if i in matched else messages[i].get("name")
        if not name:
            raise ValueError(
                f"messages[{i}].name: want the tool's name, or a tool_call_id of the last assistant message "
                f"({sorted(places)}); got tool_call_id {messages[i].get('tool_call_id')!r}"
            )
        results.append((i, name))
    return results


def _write_tool_choice(chat: RenderedChat, tool_choice: str | None, bodies: ChatBodies, has_tools: bool) -> None:
    if tool_choice not in (None, "auto", "none", "required"):
        raise ValueError(f"encode_chat: tool_choice: want None, 'auto', 'none' or 'required', got {tool_choice!r}")
    if tool_choice == "required" and not has_tools:
        raise ValueError("encode_chat: tool_choice: 'required' wants tools, got none")
    if tool_choice in ("none", "required"):
        body = bodies.get(f"tool_choice_{tool_choice}", f"tool_choice={tool_choice!r}")
        chat.internal_message("tool-choice", body.strip())


def _write_response_format(chat: RenderedChat, response_format: Mapping[str, Any] | None, bodies: ChatBodies) -> None:
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(
            f"encode_chat: response_format: want type 'text', 'json_object' or 'json_schema', got {response_format!r}"
        )
    if kind == "json_object":
        body = bodies.get("json_object", "response_format json_object")
        chat.internal_message("response-format", body.strip())
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError(f"encode_chat: response_format: want json_schema.schema, an object, got {described!r}")
        prefix = bodies.get("json_schema_prefix", "response_format json_schema")
        body = prefix + _sorted_json("response_format", schema) + bodies.json_suffix
        chat.internal_message("response-format", body.strip())


def _sorted_json(where: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"encode_chat: {where}: want JSON values, got {error}") from error


def _tools_json(where: str, tools: Any) -> str:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"encode_chat: {where}: want a list of tools, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
        if not is_named or tool.get("type") != "function":
            raise ValueError(
                f"encode_chat: {where}[{i}]: want {{'type': 'function', 'function': {{'name': ...}}}}, got {tool!r}"
            )
    return _sorted_json(where, tools)


def _attributes(message: Mapping[str, Any]) -> dict[str, str]:
    return {key: message[key] for key in ("role", "name") if message.get(key)}


def _check_message(index: int, message: Any) -> None:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: want a mapping with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _MESSAGE_KEYS:
        raise ValueError(f"{where}.role: want one of {list(_MESSAGE_KEYS)}, got {role!r}")
    if unknown := sorted(map(str, message.keys() - _MESSAGE_KEYS[role])):
        raise ValueError(f"{where}.{unknown[0]}: unknown key for role {role}, want {sorted(_MESSAGE_KEYS[role])}")
    for key in ("name", "reasoning_content", "tool_call_id"):
        if message.get(key) is not None and not isinstance(message[key], str):
            raise ValueError(f"{where}.{key}: want a string, got {type(message[key]).__name__}")
    for key in ("tools", "tool_calls", "token_ids"):
        value = message.get(key)
        if value is not None and (not isinstance(value, Sequence) or isinstance(value, (str, bytes))):
            raise ValueError(f"{where}.{key}: want a list, got {type(value).__name__}")
    if not all(hasattr(token_id, "__index__") for token_id in message.get("token_ids") or ()):
        raise ValueError(f"{where}.token_ids: want a list of integers, got {message['token_ids']!r}")
    if message.get("tools") and message.get("name"):
        raise ValueError(f"{where}.name: unknown key beside tools, a declaration has no name")
    needs_content = role != "assistant" and not message.get("tools")
    if needs_content and message.get("content") is None:
        raise ValueError(f"{where}.content: want a string or a list of parts, got nothing")


def _check_call(where: str, call: Any) -> tuple[str | None, str, Mapping[str, Any] | str]:
    """(id, name, arguments) of a tool call; arguments that are no JSON object stay text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f"{where}: want {{'id', 'type', 'function': {{'name', 'arguments'}}}}, got {call!r}")
    function = call["function"]
    for mapping, known in ((call, {"id", "type", "function"}), (function, {"name", "arguments"})):
        if unknown := sorted(map(str, mapping.keys() - known)):
            raise ValueError(f"{where}.{unknown[0]}: unknown key, want {sorted(known)}")
    if call.get("type", "function") != "function":
        raise ValueError(f"{where}.type: want 'function', got {call['type']!r}")
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise ValueError(f"{where}.id: want a string, got {type(call['id']).__name__}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.function.name: want a non-empty string, got {name!r}")
    if isinstance(arguments, str):
        parsed = load_json(arguments) if arguments.strip() else {}
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    if isinstance(arguments, Mapping):
        _sorted_json(f"{where}.function.arguments", dict(arguments))
        if not all(isinstance(key, str) for key in arguments):
            raise ValueError(f"{where}.function.arguments: want string keys, got {list(arguments)}")
    elif not isinstance(arguments, str):
        raise ValueError(f"{where}.function.arguments: want JSON text or an object, got {type(arguments).__name__}")
    return call.get("id"), name, arguments


def _write_content(chat: RenderedChat, where: str, content: Any, has_images: bool = True) -> None:
    if isinstance(content, str):
        chat.write(content)
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{where}.content: want a string or a list of parts, got {type(content).__name__}")
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (("text", "image", "image_url") if has_images else ("text",)):
            raise ValueError(f"{place}.type: want text{', image or image_url' if has_images else ''}, got {kind!r}")
        if unknown := sorted(map(str, part.keys() - {"type", kind})):
            raise ValueError(f"{place}.{unknown[0]}: unknown key, want ['{kind}', 'type']")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise ValueError(f"{place}.text: want a string, got {type(part.get('text')).__name__}")
            chat.write(part["text"])
            continue
        image = _load_image(f"{place}.{kind}", part.get(kind), is_url=kind == "image_url")
        width, height = image.size
        chat.markup(image_prompt(width, height))
        chat.images.append(image)
        chat.image_hashes.append(_image_hash(image))


def _load_image(where: str, source: Any, is_url: bool) -> Any:
    """A loaded PIL image, as it is: no rotation by metadata, no change of mode."""
    if is_url:
        source = source.get("url") if isinstance(source, Mapping) and set(source) == {"url"} else None
        if not isinstance(source, str) or source.startswith(("http:", "https:")):
            raise ValueError(f"{where}: want {{'url': a data URL or a file path}}; nothing is downloaded")
        if source.startswith("data:"):
            header, comma, payload = source.partition(",")
            if not comma or not header.endswith(";base64"):
                raise ValueError(f"{where}.url: want 'data:image/...;base64,...', got {source[:40]!r}")
            source = payload.encode()
            try:
                source = base64.b64decode(source, validate=True)
            except ValueError as error:
                raise ValueError(f"{where}.url: want base64, got {payload[:40]!r}") from error
    try:
        return open_image(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot read the image: {error}") from error


def _image_hash(image: Any) -> bytes:
    """SHA-256 of what is seen, so that a file, its bytes and the opened image agree; palette and its alpha included."""
    described = repr((image.mode, image.size, image.getpalette("RGBA"), image.info.get("transparency")))
    return hashlib.sha256(described.encode() + image.tobytes()).digest()
