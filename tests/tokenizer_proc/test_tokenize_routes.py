"""Millions of token ids are decoded a part at a time, to the text they are at once."""

from array import array
from pathlib import Path

import msgspec
import pytest

from headrace.config.model_card import find_demo_model
from headrace.config.process_configs import ModelCard
from headrace.errors import InvalidBody, InvalidValue
from headrace.ipc.messages import HttpRequest
from headrace.tokenizer_proc import tokenize_routes
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.requests import openai
from headrace.tokenizer_proc.requests.openai import decode_detokenize
from headrace.tokenizer_proc.tokenize_routes import TokenRoutes

HTTP = HttpRequest(1, "POST", "/detokenize", 0.0)
TEXT = 'A "quoted" line\n' + "grüße, 你好 🌊 " * 40
PARTS = [1, 2, 3, 7, 1 << 16]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    demo = find_demo_model()
    assert demo is not None
    return Encoder(str(demo))


def make_routes(encoder: Encoder) -> TokenRoutes:
    card = ModelCard(
        path=str(Path()),
        name="tiny",
        max_model_len=128,
        vocab_size=49152,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
    )
    return TokenRoutes(card, ChatTemplate(None, {}), encoder)


@pytest.mark.parametrize("size", PARTS)
def test_detokenize_in_parts_gives_the_whole_text(
    encoder: Encoder, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_routes, "CHUNK", size)
    ids = encoder._load_exact().encode([TEXT], add_special_tokens=False)[0].tolist()
    assert encoder.decodes_bytes
    for wanted in (ids, ids[3:-3], [*ids[5:], 0, 1, 2, *ids[:7]], []):
        body = msgspec.json.encode({"tokens": wanted})
        answer = make_routes(encoder).detokenize(HTTP, body)
        text = encoder.decode(wanted, skip_special_tokens=False) if wanted else ""
        assert answer.body == msgspec.json.encode({"prompt": text})


def test_detokenize_refuses_a_text_that_is_too_long(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_routes, "MAX_TEXT_BYTES", 100)
    with pytest.raises(InvalidValue, match="more than 100 bytes"):
        make_routes(encoder).detokenize(HTTP, msgspec.json.encode({"tokens": [5] * 200}))


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_ids_in_parts_are_the_ids_of_the_list(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "NUMBERS_BYTES", size)
    for ids in ([], [7], [*range(200)], [-1, 2**62]):
        assert decode_detokenize(msgspec.json.encode({"tokens": ids})) == (array("q", ids), None)
    assert decode_detokenize(b'{"tokens": [ 1 ,\n2 ], "model": "m"}') == (array("q", [1, 2]), "m")


@pytest.mark.parametrize(
    "bad", ["[1,[2,3],4]", '["1,2"]', "5", "null", '[1,2,3,"x"]', "[1.5]", "[18446744073709551615]"]
)
def test_wrong_ids_are_refused_with_their_place(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "NUMBERS_BYTES", 1)
    with pytest.raises((InvalidBody, InvalidValue)) as refused:
        decode_detokenize(b'{"tokens": %s}' % bad.encode())
    assert (refused.value.param or "").startswith("tokens")


@pytest.mark.parametrize("id", [1 << 63, -(1 << 63) - 1, 10**30])
def test_detokenize_refuses_ids_of_more_than_64_bits(id: int) -> None:
    with pytest.raises(InvalidValue, match=f"tokens: {id} is not a token id"):
        decode_detokenize(b'{"tokens": [1, %d]}' % id)
