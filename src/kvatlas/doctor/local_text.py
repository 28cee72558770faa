"""A tokenizer's files, read here as the engine reads them: `tokenizers` for text, jinja2 for chats.

Both are optional (extra `tokenizer`); what is missing here or in the files is said, not guessed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.schemas.errors import InvalidSetting


class LocalTokenizer:
    """The tokenizer in a folder, or in one tokenizer.json; raises InvalidSetting without either."""

    def __init__(self, path: Path) -> None:
        self._file = path / "tokenizer.json" if path.is_dir() else path
        if not self._file.is_file():
            raise InvalidSetting("tokenizer", "flag --tokenizer", f"no file {self._file}")

    def encode(self, text: str) -> tuple[int, ...] | str:
        """Return the ids of a text with special tokens, or why there are none."""
        return self._ids(text, special=True)

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...] | str:
        """Return the ids of a conversation up to the answer, or why there are none."""
        config = self._config()
        template = self._template(config)
        if not template:
            return "no chat template beside the local tokenizer"
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            return "jinja2 is not installed here"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value: msgspec.json.encode(value).decode()
        special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            prompt = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except TemplateError as error:
            return f"the local chat template does not render: {error}"
        return self._ids(prompt, special=False)

    def _ids(self, text: str, special: bool) -> tuple[int, ...] | str:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            return "tokenizers is not installed here"
        ids = Tokenizer.from_file(str(self._file)).encode(text, add_special_tokens=special).ids
        return tuple(ids)

    def _config(self) -> dict[str, Any]:
        file = self._file.parent / "tokenizer_config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            return {}

    def _template(self, config: dict[str, Any]) -> str:
        file = self._file.parent / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = config.get("chat_template")
        return template if isinstance(template, str) else ""


def _content(token: Any) -> str:
    """Return a special token, which stands there as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
