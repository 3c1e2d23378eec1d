"""Reads config.json, which may hold numbers that JSON does not have.

Fields of `--hf-overrides` replace its own, as in vLLM.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BAD_JSON, ConfigError

FLAG = "--hf-overrides"
HEADS = ("ForCausalLM", "ForSequenceClassification")
NESTED = "text_config"  # whose fields are replaced one by one, too
INFINITY = re.compile(rb"(?<=[\[,:\s])Infinity(?=[\],}\s])")


def decode_config(data: bytes) -> dict[str, Any]:
    """Decode an object. Infinity becomes `{"__float__": "Infinity"}`, as transformers 5 writes it.

    Raises:
        BAD_JSON: it is something else.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        replaced = INFINITY.sub(b'{"__float__": "Infinity"}', data)
        if replaced == data:
            raise
        return msgspec.json.decode(replaced, type=dict[str, Any])


def read_overrides(flag: str | None) -> dict[str, Any]:
    """Return the fields of the flag; none without it.

    Raises:
        ConfigError: it is no JSON object.
    """
    if flag is None:
        return {}
    try:
        return msgspec.json.decode(flag, type=dict[str, Any])
    except BAD_JSON as error:
        raise ConfigError(f"{FLAG} {flag!r:.60} is not a JSON object: {error}") from None


def overridden(folder: Path, config: Mapping[str, Any], flag: str | None) -> dict[str, Any]:
    """Return a folder's config with the fields of the flag.

    Raises:
        ConfigError: the flag is no JSON object, or names an architecture of another family.
    """
    overrides = read_overrides(flag)
    check_architectures(folder, config.get("architectures"), overrides.get("architectures"))
    merged = {**config, **overrides}
    parts = config.get(NESTED), overrides.get(NESTED)
    if all(isinstance(part, dict) for part in parts):
        merged[NESTED] = {**config[NESTED], **overrides[NESTED]}
    return merged


def check_architectures(folder: Path, stored: Any, wanted: Any) -> None:
    """Refuse other architectures than those of the folder's family."""
    if wanted is None or wanted == stored:
        return
    family = str(stored[0]).partition("For")[0] if isinstance(stored, list) and stored else ""
    known = [family + head for head in HEADS]
    if not isinstance(wanted, list) or len(wanted) != 1 or wanted[0] not in known:
        raise ConfigError(
            f"{FLAG}: architectures {wanted} is not supported for {folder}; "
            f"{' or '.join(f'[{name!r}]' for name in known)} is"
        )
