"""Records of conversations in the dialects that people have, read as one: a list of role and content.

What cannot be trained on as text (an image, an unknown role, no answer) is refused with its reason. What is odd
but usable (an assistant who speaks first, two user turns in a row) is kept and noted (case D3).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from backend.wire import printable

LISTS = ("messages", "conversations", "conversation", "chat")
"""Keys of a list of turns, the one to prefer first."""

PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"),
    ("query", "response"), ("input", "output"),
)  # fmt: skip
"""Keys of one question and its answer."""

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip


class Conversation(NamedTuple):
    """Turns for a chat template, the tools offered if any, and what is odd about them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    notes: list[str]


def has_ids(record: dict[str, Any]) -> bool:
    """Say whether a record brings token ids of its own."""
    return "input_ids" in record


def conversation(record: dict[str, Any]) -> Conversation:
    """Read a record's turns. Raises ValueError saying why it cannot be used."""
    notes: list[str] = []
    messages = [_message(number, turn) for number, turn in enumerate(_turns(record, notes), 1)]
    system = record.get("system", record.get("system_prompt"))
    if isinstance(system, str) and system:
        if messages and messages[0]["role"] == "system":
            notes.append('it has "system" and a first turn of the system; the turn was taken')
        else:
            messages.insert(0, {"role": "system", "content": system})
    _check(messages, notes)
    tools = record.get("tools")
    return Conversation(messages, tools if isinstance(tools, list) and tools else None, notes)


def _turns(record: dict[str, Any], notes: list[str]) -> list[Any]:
    lists = [key for key in LISTS if isinstance(record.get(key), list)]
    if lists:
        if len(lists) > 1:
            notes.append(f'it has "{lists[0]}" and "{lists[1]}"; "{lists[0]}" was taken')
        if not record[lists[0]]:
            raise ValueError(f'"{lists[0]}" is empty')
        return list(record[lists[0]])
    for question, answer in PAIRS:
        if record.get(question) is not None and record.get(answer) is not None:
            return _pair(record, question, answer)
    keys = printable(", ".join(map(str, record)), 120) or "none"
    raise ValueError(f'neither turns ("messages", "conversations", "prompt" and "response") nor "input_ids": {keys}')


def _pair(record: dict[str, Any], question: str, answer: str) -> list[Any]:
    asked, said = record[question], record[answer]
    if question == "instruction" and isinstance(record.get("input"), str) and record["input"]:
        asked = f"{asked}\n\n{record['input']}"
    turns = list(asked) if isinstance(asked, list) else [{"role": "user", "content": asked}]
    return turns + (list(said) if isinstance(said, list) else [{"role": "assistant", "content": said}])


def _message(number: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is no object with a role and a content")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"turn {number} has the unknown role {printable(repr(said), 40)}")
    content = next((turn[key] for key in ("content", "value", "text") if turn.get(key) is not None), None)
    text = _text(number, content)
    if role == "call":
        return _call(number, text)
    message: dict[str, Any] = {"role": role, "content": text}
    for key in ("reasoning_content", "tool_calls", "tool_call_id", "name"):
        if turn.get(key):
            message[key] = turn[key]
    if text is None and not (role == "assistant" and ("tool_calls" in message or "reasoning_content" in message)):
        raise ValueError(f"turn {number} ({role}) has no content")
    message["content"] = text or ""
    return message


def _call(number: int, text: str | None) -> dict[str, Any]:
    """Read a function call: a turn of the assistant, and a call for the template where it is one."""
    if not text:
        raise ValueError(f"turn {number} (function call) has no content")
    try:
        call = json.loads(text)
    except ValueError:
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return {"role": "assistant", "content": text}
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _text(number: int, content: Any) -> str | None:
    """Return a turn's text; parts of text are put together, any other part is refused."""
    if content is None or isinstance(content, str):
        return _whole(number, content)
    if not isinstance(content, list):
        raise ValueError(f"turn {number} has a content that is no text")
    texts = []
    for part in content:
        kind = part.get("type", "text" if "text" in part else "?") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"turn {number} holds {printable(str(kind), 40)!r}, which is no text")
        texts.append(text)
    return _whole(number, "".join(texts))


def _whole(number: int, text: str | None) -> str | None:
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"turn {number} holds half a surrogate pair, which is no character") from None
    return text


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _check(messages: list[dict[str, Any]], notes: list[str]) -> None:
    roles = [message["role"] for message in messages]
    if set(roles) == {"system"}:
        raise ValueError("it has only a system prompt")
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise ValueError("it has no turn of the assistant")
    silent = sum(not _says(message) for message in answers)
    if silent == len(answers):
        raise ValueError("no turn of the assistant says anything")
    if silent:
        notes.append(f"{silent} of {len(answers)} turns of the assistant are empty")
    spoken = [role for role in roles if role != "system"]
    if spoken[0] == "assistant":
        notes.append("the assistant speaks first")
    if any(spoken[number : number + 2] == ["user", "user"] for number in range(len(spoken))):
        notes.append("two turns of the user in a row")
    if spoken[-1] != "assistant":
        notes.append(f"the last turn, of the {spoken[-1]}, has no answer")
