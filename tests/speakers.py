"""A model on a server that answers chats with tools as it is told, and what its client hears."""

import json
from typing import Any

import openai
import torch

from setblock.masks import CLEAN

# As Qwen's, whose response template transformers knows.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Of today.", "parameters": PLACE},
}
TOOLS = [TOOL]
ASKED: Any = [{"role": "user", "content": "Rain in Köln?"}]
PARIS, KOELN = ({"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Köln"))


def call(function: Any) -> str:
    text = function if isinstance(function, str) else json.dumps(function, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


class Speaker:
    """A model on a server that answers every chat with one text, whatever the mode."""

    def __init__(self, model: Any, client: openai.OpenAI, address: str) -> None:
        self.model, self.client, self.address = model, client, address
        self.target = torch.zeros(model.context_length + 1, dtype=torch.long)
        forward = model.forward

        def spelling(tokens, layout, cache=None, logits_at=None):
            logits = forward(tokens, layout, cache, logits_at)
            places = layout.position + (layout.block == CLEAN)
            if logits_at is not None:
                places = places[:, logits_at]
            return 20 * torch.nn.functional.one_hot(self.target[places], logits.shape[-1]).float()

        model.forward = spelling

    def prompt(self, messages: Any, **given: Any) -> str:
        template = self.model.tokenizer.apply_chat_template
        return template(messages, tokenize=False, **{"add_generation_prompt": True, **given})

    def say(self, text: str, messages: Any = ASKED, tools: Any = TOOLS, **how: Any) -> None:
        """It answers this conversation so, and then ends."""
        encode = self.model.tokenizer.encode
        start = len(encode(self.prompt(messages, tools=tools, **how), add_special_tokens=False))
        ids = encode(f"{text}<|im_end|>", add_special_tokens=False)
        self.target[start : start + len(ids)] = torch.tensor(ids)

    def asked(self, messages: Any = ASKED, **given: Any) -> Any:
        usual = {"tools": TOOLS, "max_tokens": 200} | given
        own = {name: usual.pop(name) for name in ("mode", "block_size") if name in usual}
        return self.client.chat.completions.create(
            model="qwen", messages=messages, extra_body=own, **usual
        )

    def answered(self, messages: Any = ASKED, **given: Any) -> Any:
        """(text, thoughts, calls, why it ended), which a stream tells too."""
        [choice] = self.asked(messages, **given).choices
        calls = choice.message.tool_calls or []
        assert len({one.id for one in calls}) == len(calls)
        found = [(one.function.name, json.loads(one.function.arguments)) for one in calls]
        thoughts = getattr(choice.message, "reasoning_content", None) or ""
        told = (choice.message.content, thoughts, found, choice.finish_reason)
        assert parts(self.asked(messages, **given, stream=True)) == told
        return told


def parts(chunks: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """(text, thoughts, calls, why it ended) of a stream."""
    text, thoughts, calls, reason = "", "", [], ""
    for chunk in chunks:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for one in choice.delta.tool_calls or []:
            assert one.index == len(calls)
            calls.append((one.function.name, json.loads(one.function.arguments)))
        reason = choice.finish_reason or reason
    return text, thoughts, calls, reason
