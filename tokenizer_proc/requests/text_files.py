"""Files of text within a request: their text, or why there is none. Pure.

Clients send them as `data:` URLs (RFC 2397), or as base64 beside a media type.
"""

import base64
import urllib.parse

import msgspec

from headrace.errors import InvalidValue, Unsupported

TEXT = "text/"
ALSO_TEXT = ("application/json", "application/xml", "application/yaml", "application/x-yaml")
DEFAULT_TYPE = "text/plain"  # of a data URL that names none


class FileData(msgspec.Struct):
    """`file` of a chat's part."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


def text_of_file(file: FileData, where: str) -> str:
    """Return a file's text, below its name where it has one.

    Raises:
        InvalidValue: there is no data, or it is not what its URL says.
        Unsupported: it is not text.
    """
    if file.file_data is None:
        raise InvalidValue(
            f"{where}.file_data: must be there, a data: URL; no files are kept here",
            f"{where}.file_data",
        )
    text = text_of_url(file.file_data, f"{where}.file_data")
    return f"{file.filename}\n{text}" if file.filename else text


def text_of_url(url: str, where: str) -> str:
    """Return the text in a `data:` URL; raises as `text_of_file` does."""
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and comma):
        raise InvalidValue(f"{where}: must be a data: URL, such as data:text/plain;base64,…", where)
    media_type, *parameters = head.removeprefix("data:").split(";")
    check_type(media_type, where)
    if "base64" in parameters:
        return text_of_base64(data, where)
    return decoded(urllib.parse.unquote_to_bytes(data), where)


def check_type(media_type: str, where: str) -> None:
    """Refuse a media type that is not text."""
    name = (media_type or DEFAULT_TYPE).lower()
    if not (name.startswith(TEXT) or name in ALSO_TEXT):
        raise Unsupported(
            f"{where}: files are read as text, and '{name[:64]}' is not; send the text in it", where
        )


def text_of_base64(data: str, where: str) -> str:
    """Return the text of bytes in base64."""
    try:
        found = base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidValue(f"{where}: is not valid base64", where) from None
    return decoded(found, where)


def decoded(data: bytes, where: str) -> str:
    """Return the text of bytes in UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{where}: byte {error.start} is not UTF-8", where) from None
