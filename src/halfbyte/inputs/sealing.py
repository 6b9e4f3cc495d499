"""JSON text with its own CRC: text that was damaged or edited does not pass for other, valid text."""

import json
import zlib
from typing import Any


def sealed_json(name: str, value: Any) -> dict[str, Any]:
    """Returns `{name: JSON text of value, "crc32": CRC of the text}`."""
    text = json.dumps(value, separators=(",", ":"))
    return {name: text, "crc32": zlib.crc32(text.encode())}


def sealed_text(name: str, stored: Any) -> str | None:
    """Returns the text in what `sealed_json` returned; None if `stored` is anything else, or does not match its CRC."""
    text = stored.get(name) if isinstance(stored, dict) else None
    is_whole = isinstance(text, str) and zlib.crc32(text.encode("utf-8", "surrogatepass")) == stored.get("crc32")
    return text if is_whole else None
