"""The tokens between a path of a session and the next answer.

Nothing that was drawn is decoded and encoded again. What follows an answer is found in a render of
a dummy conversation: everything behind the token that closes the dummy's answer. That token is put
in where the answer ended without it, at max_tokens or a stop text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from unirl.errors import UniRLError
from unirl.llm.agents.answer import MessagesRefused
from unirl.llm.agents.tool_calls import CLOSE, MARKS, OPEN, calls_of, content_text, sorted_json
from unirl.llm.tasks.task import Message

Thoughts = Literal["sampled", "rendered"]
"""What becomes of earlier thoughts where the chat template would take them out. sampled: they stay
in the context as they were drawn. rendered: the template has its way, and what it rewrites begins a
root.
"""
_MOST_KEPT = 256
_MARK = "xq7zanswerkz3w"
_PLAIN_TOOLS = """\
You may call these tools:
{tools}
To call one, answer with
<tool_call>
{{"name": "its name", "arguments": {{"its": "arguments"}}}}
</tool_call>"""


class Bridge:
    """Renders conversations, whole or what follows an answer. options: further keywords of the chat
    template. describes: False where the model is given no word of its tools. is_brief: calls are in
    what the model writes, and nothing is put into words for the template.
    """

    def __init__(
        self,
        tokenizer: Any,  # of transformers
        options: Mapping[str, Any] | None = None,
        thoughts: Thoughts = "sampled",
        describes: bool = True,
        is_brief: bool = False,
    ) -> None:
        self.tokenizer, self.thoughts, self._describes = tokenizer, thoughts, describes
        self._is_brief = is_brief
        self._options = dict(options or {})
        self._cache: dict[str, tuple[int, ...]] = {}
        marks = {tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
        self.special = frozenset(tokenizer.all_special_ids) - (marks - {tokenizer.unk_token_id})
        self._has_tools: bool | None = None
        if not tokenizer.chat_template:
            raise UniRLError(
                "the tokenizer has no chat template",
                "agents speak in messages, which a template turns into tokens",
                "take a model that can chat",
            )

    def whole(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The tokens of a conversation, up to where the next answer begins. Raises UniRLError where
        the template refuses it.
        """
        key = sorted_json(["whole", list(messages), list(tools)])
        return self._known(key, lambda: self._encode(self._render(*self.prepared(messages, tools))))

    def prepared(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """What the template is given: tools that it has no place for stand in the messages."""
        if not tools or self._is_brief:
            return messages, ()
        if self._writes_tools(tools):
            return messages, tools if self._describes else ()
        plain = _plain(messages)
        return _described(plain, tools) if self._describes else plain, ()

    def after(
        self,
        path: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...] | None:
        """What is given behind a path that ends with an answer, so that `messages` follow it; None
        where that cannot be known, and the conversation must be rendered whole.
        """
        if tools and not self._is_brief and not self._writes_tools(tools):
            messages = _plain(messages)
        tokens = self._known(
            sorted_json(["after", list(messages)]),
            lambda: self._encode(self._behind_mark(messages) or ""),
        )
        close = next((i for i, token in enumerate(tokens) if token in self.special), None)
        if close is None:
            return None
        return tokens[close + 1 :] if path[-1] in self.special else tokens[close:]

    def _known(self, key: str, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Episodes of a group render the same: the newest are kept."""
        found = self._cache.pop(key, None)
        if found is None:
            found = make()
        self._cache[key] = found
        if len(self._cache) > _MOST_KEPT:
            del self._cache[next(iter(self._cache))]
        return found

    def _behind_mark(self, messages: Sequence[Message]) -> str | None:
        """The text of `messages` behind a dummy answer, its closing token included."""
        plain: dict[str, Any] = {"role": "assistant", "content": _MARK}
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": _MARK}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", **call}]}
        # Some templates take a tool's word only behind a call, and know no others.
        follows_call = bool(messages) and messages[0].get("role") == "tool"
        for dummy in [calling, plain] if follows_call else [plain]:
            try:
                text = self._render([{"role": "user", "content": "u"}, dummy, *messages], ())
            except UniRLError:
                continue
            before, mark, behind = text.rpartition(_MARK)
            # A mark that is written twice says nothing.
            if mark and _MARK not in before:
                return behind
        return None

    def _writes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        if self._has_tools is None:
            dummy: list[Message] = [{"role": "user", "content": "u"}]
            try:
                self._has_tools = self._render(dummy, tools) != self._render(dummy, ())
            except UniRLError:
                self._has_tools = True  # it has an opinion of them: let it speak where it matters
        return self._has_tools

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception as error:  # a template is a program of the model's author
            raise MessagesRefused(
                "the chat template refuses these messages",
                f"{type(error).__name__}: {error}",
                "send roles in the order that the model knows",
            ) from error
        return str(text)


def _for_template(message: Message) -> dict[str, Any]:
    """Text instead of parts, and arguments as objects, which is what templates expect."""
    found = {**message, "content": content_text(message.get("content"))}
    if found.get("role") == "developer":
        found["role"] = "system"
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls_of(message)
        ]
    else:
        found.pop("tool_calls", None)
    return found


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Calls and what tools said as text, for templates that know neither."""
    found: list[Message] = []
    for message in messages:
        calls = [
            f"{OPEN}\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n{CLOSE}"
            for call in calls_of(message)
        ]
        said = "\n".join(filter(None, (content_text(message.get("content")), *calls)))
        if message.get("role") == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{said}\n</tool_response>"})
        else:
            found.append({"role": message.get("role"), "content": said})
    return found


def _described(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """With the tools in the system's turn."""
    lines = "\n".join(json.dumps(tool.get("function") or tool) for tool in tools)
    text = _PLAIN_TOOLS.format(tools=lines)
    if messages and messages[0]["role"] in ("system", "developer"):
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]
