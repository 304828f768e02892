"""A model towards the handlers of transformers' server: name, chat template, longest prompt."""

import time
from contextlib import suppress
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers.cli.serving.utils import Modality
from transformers.utils.chat_template_utils import render_jinja_template

from setblock.choices import Prompts
from setblock.conversations import prepared, refusal
from setblock.fields import TOO_LONG, Refused
from setblock.logprobs import Told
from setblock.model import Model

# What a handler passes to a chat template besides the request's chat_template_kwargs.
FROM_HANDLER = (
    "tools", "return_tensors", "return_dict", "tokenize", "add_generation_prompt",
    "load_audio_from_video",
)  # fmt: skip


class Served:
    """The model towards transformers' handlers: their model, processor and model manager in one."""

    force_model = None
    form: ClassVar[dict[str, str]] = {}  # of an answer, beyond what a request asks for

    def __init__(self, model: Model, name: str, block_size: int | None = None) -> None:
        self.model, self.name, self.created = model, name, int(time.time())
        self.block_size, self.told = block_size, Told(model)
        self.device = model.device
        self.generation_config = None
        # No architecture of transformers': a text is parsed for thoughts and calls by a Hearing.
        self.config = SimpleNamespace(model_type="setblock")
        longest = max(map(len, model.tokenizer.get_vocab()), default=1)
        self.most_characters = longest * model.context_length
        takers = (type(model.tokenizer).apply_chat_template, render_jinja_template)
        # Arguments of these are no variables of a chat template.
        self.reserved = {"messages", *FROM_HANDLER}.union(
            *(signature(f).parameters for f in takers)
        )

    def list_models(self) -> list[dict[str, Any]]:
        """What /v1/models lists."""
        return [
            {
                "id": self.name,
                "object": "model",
                "created": self.created,
                "owned_by": "setblock",
                "max_model_len": self.model.context_length,
            }
        ]

    get_gen_models = list_models  # its name in transformers below 5.24

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        return Modality.LLM

    def check_length(self, field: str, characters: int) -> None:
        """Raises: Refused for more characters than the context has room for."""
        if characters > self.most_characters:
            raise Refused(
                field,
                f"must fit into the model's context of {self.model.context_length} tokens, so have "
                f"at most {self.most_characters} characters, got {characters}",
                code=TOO_LONG,
            )

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], **given: Any
    ) -> transformers.BatchEncoding:
        """The ids of a conversation, up to where the model speaks, as the handlers take them."""
        tokenizer = self.model.tokenizer
        try:
            turns, ending = prepared(tokenizer.chat_template, conversation)
        except ValueError as error:
            raise Refused("messages", f"are refused: {error}") from None
        field, plain = "messages", None
        if tools := given.get("tools"):
            with suppress(Exception):  # a template may want tools
                plain, field = self._in_template(turns, None, ending, given), "tools"
        try:
            text = self._in_template(turns, tools or None, ending, given)
        except Exception as error:
            raise Refused(field, f"do not fit the chat template: {refusal(error)}") from None
        if text == plain:
            raise Refused("tools", "are left out by the model's chat template")
        self.check_length("messages", len(text))
        ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        return transformers.BatchEncoding({"input_ids": torch.tensor([list(ids)])})

    def rendered(self, conversation: list[dict[str, Any]], more: bool, **given: Any) -> str:
        """The text of a conversation as it is, with the model's cue if there is more to come."""
        ending = {"add_generation_prompt": more}
        return self._in_template(conversation, given.get("tools"), ending, given)

    def _in_template(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        ending: dict[str, bool],
        given: dict[str, Any],
    ) -> str:
        own = {name: value for name, value in given.items() if name not in FROM_HANDLER}
        words = {"tokenize": False, "tools": tools, **ending, **own}
        return str(self.model.tokenizer.apply_chat_template(turns, **words))

    def __call__(self, text: str, **_: Any) -> transformers.BatchEncoding:
        """The ids of a plain prompt; of Prompts a list of theirs."""
        found: Any
        if isinstance(text, Prompts):
            found = [self._ids(place, one) for place, one in text.named()]
        else:
            found = self._ids("prompt", text)
        return transformers.BatchEncoding({"input_ids": found})

    def _ids(self, field: str, prompt: str | list[int]) -> torch.Tensor:
        try:
            ids = self.model.encode(prompt) if isinstance(prompt, str) else prompt
        except ValueError as error:
            raise Refused(field, f"is refused: {error}") from None
        return torch.tensor([list(ids)])

    def another(self) -> "Served":
        """What another answer to the same request goes by."""
        return self
