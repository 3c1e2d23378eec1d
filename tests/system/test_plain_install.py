"""Servers where torch, transformers and Pillow are missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from embedding_models import minilm
from servers import RunningServer

from headrace.config.model_card import find_demo_model
from headrace.exit_status import ExitStatus
from headrace.model.tokenizer_json import read_tokenizer_json

PLAIN = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "plain_install")}
LAUNCH = str(Path(sys.executable).parent / "launch_server")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GPT2 = {"model_type": "gpt2", "eos_token_id": 2, "n_positions": 64, "vocab_size": 49152}
ELECTRA = {  # whose embeddings are projected
    "model_type": "electra",
    "embedding_size": 16,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "vocab_size": 49152,
}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 1,
    "vision_config": {},
    "text_config": {"hidden_size": 64},
}


@pytest.mark.parametrize("flags", [[], ["--engine", "mock"]], ids=["demo", "mock"])
def test_a_plain_install_answers(flags: list[str]) -> None:
    running = RunningServer(*flags, env=PLAIN)
    try:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body).raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"]
        assert "Paris" in said or flags
        assert httpx.post(f"{running.url}/tokenize", json={"prompt": "a b"}).json()["count"] == 2
        assert running.stop() == 0
    finally:
        running.close()


def test_a_plain_install_embeds() -> None:
    running = RunningServer(str(minilm()), env=PLAIN)
    try:
        body = {"input": ["the sea", "the ocean", "a tax"]}
        answer = httpx.post(f"{running.url}/v1/embeddings", json=body).raise_for_status().json()
        sea, ocean, tax = (np.array(one["embedding"]) for one in answer["data"])
        assert sea @ ocean > 0.8 > sea @ tax + 0.4
        assert running.stop() == 0
    finally:
        running.close()


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (GPT2, [], "torch is missing; `pip install 'headrace[modules]'`"),
        (GPT2, ["--model-impl", "transformers"], "`pip install 'headrace[modules]'`"),
        (ELECTRA, [], "transformers may run it: the package torch is missing"),
        (
            LLAVA,
            [],
            "takes images (--max-images 0 takes none): the package pillow is missing; "
            "`pip install 'headrace[images]'`",
        ),
    ],
    ids=["modules", "model-impl", "encoder", "images"],
)
def test_what_needs_an_extra_names_it(
    config: dict[str, Any], flags: list[str], says: str, tmp_path: Path
) -> None:
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    ended = subprocess.run(
        [LAUNCH, "--port", "0", "--device", "cpu", *flags, str(tmp_path)],
        env=os.environ | PLAIN,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == ExitStatus.BAD_FLAGS, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_server: error: ")
    assert says in line
