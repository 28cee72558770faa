"""Foreign text on its way to a terminal or a log: one line, bounded, and without credentials.

Names, URLs and reasons come from engines, clients and files. A terminal obeys control characters, a
line break forges a log line, and bidirectional marks show a text in another order than it has.
"""

import re

#: of a line; longer ones say how much is left out
MAX_CHARACTERS = 4_000
#: lines of a traceback, the last ones
MAX_LINES = 200

#: a scheme and all up to the last @ before a space, a quote, or the next address of a list: a
#: password with an @ or / in it is wrong, and still one
_CREDENTIALS = re.compile(
    r"(\b[a-z][a-z0-9+.\-]*://)(?:(?!,\s*[a-z][a-z0-9+.\-]*://)[^\s\"'<>])*@", re.IGNORECASE
)
_SECRET = re.compile(
    r"(\b(?:password|passwd|pwd|passphrase|sslpassword|token|secret|api_?key|jwt|nkey)=)"
    r"(?:\"[^\"]*\"|'[^']*'|[^&\s\"'#,;]+)",
    re.IGNORECASE,
)


def printable(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a text as one line that a terminal shows as it is.

    Characters that are not printable (control, format, unassigned, line breaks) are written as
    Python escapes. Credentials of URLs are left out. O(length).
    """
    left_out = len(text) - max_characters
    if left_out > 0:
        text = text[: max(0, max_characters)]
    text = without_credentials(text)
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _escape(each) for each in text)
    return f"{text}... ({left_out} more characters)" if left_out > 0 else text


def printable_lines(text: str) -> str:
    """Return some lines, each printable; of many only the last."""
    lines = text.splitlines()
    return "\n".join(map(printable, lines[-MAX_LINES:]))


def printable_json(text: str) -> str:
    """Return JSON that means the same without credentials, in characters that are printable."""
    text = without_credentials(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape_json(each) for each in text)


def without_credentials(text: str) -> str:
    """Return a text with `***` in place of users, passwords and tokens of the URLs in it."""
    if "@" in text:
        text = _CREDENTIALS.sub(r"\1***@", text)
    return _SECRET.sub(r"\1***", text) if "=" in text else text


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _escape_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
