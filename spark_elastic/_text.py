"""Makes any text safe to send, to store and to show."""

from __future__ import annotations

import os
import re
import reprlib
from urllib.parse import unquote

# What separates the URLs of a chained one, such as zip://folder::https://host/x.zip.
_LINK = re.compile(r"::(?=[A-Za-z][\w+.-]*://)")
# What comes before the host in a URL: all up to the last @ ahead of the path. If there is none, a colon that does not begin a
# port begins a secret with a slash in it, which goes up to the last @ of all.
_USERINFO = re.compile(r"(?<=://)(?:[^/?]*@|[^/?@:]*:(?!\d+(?:[/?]|$))(?:[^?]*|.*)@)")
_PARAMETER = re.compile(r"(?<![^&])([^=&]*)=([^&]*)")
# The parameters in a URL's query whose values are shown. Those of all others may be secrets.
_OPEN_PARAMETERS = {"endpoint_override", "region", "scheme"}

_BRIEF = reprlib.Repr()
_BRIEF.maxother = _BRIEF.maxstring = 200


def as_utf8(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode, such as parts of file names that are not valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int) -> str:
    """Return the text without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters are left out …]\n{text[-half:]}"


def brief(value: object) -> str:
    """Return a value's repr, shortened; its class and address if the repr fails."""
    try:
        return _BRIEF.repr(value)
    except Exception:  # reprlib knows some classes by their names alone
        return object.__repr__(value)


def shown(url: str | os.PathLike[str]) -> str:
    """Return a URL for messages, without the keys and secrets that it may hold. Local paths stay as they are."""
    return "::".join(_shown(part) for part in _LINK.split(os.fspath(url)))


def without_secrets(text: object, url: str | os.PathLike[str]) -> str:
    """Return what a library says of a URL, without what ``shown`` leaves out: libraries repeat URLs, and parts of them."""
    full, told = os.fspath(url), str(text)
    masks = {full: shown(full)}
    for part in _LINK.split(full):
        masks.update(_masks(part))
    for secret, mask in masks.items():
        if mask != secret and any(map(str.isalnum, secret)):
            told = re.sub(f"{re.escape(secret)}|{_quoted_anyhow(secret)}", mask.replace("\\", r"\\"), told)
    return told


def _shown(part: str) -> str:
    address, mark, query = _USERINFO.sub("…@", part).partition("?")
    return address + mark + (_PARAMETER.sub(_masked, query) if "://" in address else query)


def _masks(part: str) -> dict[str, str]:
    """Return what of a URL that is none of a chain may be a secret, and what to show in its place."""
    masks = {part: _shown(part)}
    for userinfo in _USERINFO.findall(part):
        masks[userinfo] = "…@"
        if ":" in userinfo:  # a library may take what is before the first slash for the host
            masks[userinfo.rstrip("@").partition("/")[0]] = "…"
    if "://" in part:
        query = _USERINFO.sub("", part).partition("?")[2]
        masks.update({found[0]: _masked(found) for found in _PARAMETER.finditer(query)})
    return masks


def _quoted_anyhow(secret: str) -> str:
    """Return a pattern for a text in which any characters are percent-encoded: libraries encode a URL anew, each its own way."""
    return "".join(map(_character_anyhow, unquote(secret)))


def _character_anyhow(character: str) -> str:
    encoded = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    return f"(?:{re.escape(character)}{'|[+]' if character == ' ' else ''}|(?i:{encoded}))"


def _masked(parameter: re.Match[str]) -> str:
    return parameter[0] if parameter[1].lower() in _OPEN_PARAMETERS else f"{parameter[1]}=…"
