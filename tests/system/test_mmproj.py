"""A GGUF file and its projector file answer chats with images as the Hugging Face folder does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import family_table
import httpx
import pytest
from image_parts import data_url, encoded, image_part, message
from image_reference import Reference
from mmproj_twins import make_twins
from servers import PATIENCE_S, RunningServer
from tiny_vision import picture

from headrace.exit_status import ExitStatus

EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
NUM_TOKENS = 12
FAMILIES = ("smolvlm", "gemma3", "qwen2_5_vl", "llava")
FEW = ("qwen2_5_vl", "smolvlm")  # in modules, and in the core; `make families` has all


def shown(seed: int, width: int, height: int) -> dict[str, Any]:
    """Return a part that is an image."""
    return image_part(data_url(encoded(picture(seed, width, height))))


CHATS: list[list[dict[str, Any]]] = [
    [message("What is this? ", shown(1, 80, 60), "Say it in one word.")],
    [message("No image here,", " only words and words.")],
    [message("First ", shown(2, 40, 90), " then ", shown(3, 64, 64), "?")],
]


@pytest.mark.parametrize("family", FAMILIES if family_table.WRITES else FEW)
def test_answers_are_those_of_the_folder_s_model(family: str, tmp_path: Path) -> None:
    twins = make_twins(tmp_path, family)
    reference = Reference(twins.model, twins.folder, family)
    server = RunningServer(str(twins.decoder), "--mmproj", str(twins.mmproj), *EXACT, *SMALL)
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    for chat in CHATS:
        body = {"messages": chat, **options}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        expected = reference.answer(chat, NUM_TOKENS)
        assert answer.json()["prompt_token_ids"] == expected.prompt
        assert answer.json()["choices"][0]["token_ids"] == expected.tokens
    assert server.metric("encoded_images_total") == 3
    assert server.stop() == 0


def test_a_projector_of_another_model_ends_the_start(tmp_path: Path) -> None:
    smol, gemma = (make_twins(tmp_path, family) for family in ("smolvlm", "gemma3"))
    for argv, says in (
        ([smol.decoder, "--mmproj", gemma.mmproj], "for decoders of architecture gemma3, and"),
        ([smol.mmproj], "an mmproj file with projector 'idefics3' and no decoder"),
        ([smol.decoder, "--mmproj", smol.decoder], "its architecture is 'llama', not 'clip'"),
    ):
        launch = str(Path(sys.executable).parent / "launch_server")
        command = [launch, "--port", "0", *map(str, argv)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert result.returncode == ExitStatus.BAD_MODEL
        assert says in result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
