"""A tokenizer's files, read here as the engine reads them: `tokenizers` for text, jinja2 for chats.

Both are optional (extra `tokenizer`); what is missing here or in the files is said, not guessed.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.doctor.facts import UNREADABLE
from kvatlas.schemas.errors import InvalidSetting

#: what the code within a template may raise besides
_TEMPLATE_ERRORS = (TypeError, LookupError, AttributeError, ArithmeticError, *UNREADABLE)
_INSTALL = "is not installed here: pip install 'kvatlas[tokenizer]'"


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
            return f"jinja2 {_INSTALL}"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value: msgspec.json.encode(value).decode()
        special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            prompt = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            return f"the local chat template does not render: {error}"
        return self._ids(prompt, special=False)

    def _ids(self, text: str, special: bool) -> tuple[int, ...] | str:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            return f"tokenizers {_INSTALL}"
        try:
            tokenizer = Tokenizer.from_file(str(self._file))
            return tuple(tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            return f"no tokenizer of --tokenizer {self._file}: {error}"

    def _config(self) -> dict[str, Any]:
        file = self._file.parent / "tokenizer_config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, *UNREADABLE):
            return {}

    def _template(self, config: dict[str, Any]) -> str:
        file = self._file.parent / "chat_template.jinja"
        if file.is_file():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                return file.read_text(encoding="utf-8")
        template = config.get("chat_template")
        return template if isinstance(template, str) else ""


def _content(token: Any) -> str:
    """Return a special token, which stands there as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
