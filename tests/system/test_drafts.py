"""Drafts on a server: no text changes, with several workers, through deaths; and bad starts."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from foreseeing_models import next_token, save_foreseeing
from mutants.mutants import mutants
from safetensors.torch import load_file, save_file
from servers import RunningServer, StartFailed, wait_until
from tiny_models import make_byte_folder, make_folder
from tokenizers import Tokenizer

from headrace.cli import doctor
from headrace.config.config import ServerConfig
from headrace.config.model_card import read_card
from headrace.exit_status import ExitStatus

TIMEOUT_S = 300
NUM_TOKENS = 64
STEADY = mutants("engine=steady")  # drafts pay, however long steps take
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1, "seed": 4, "logit_bias": {"9": 2}}
    | {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"temperature": 0.6, "seed": 5, "regex": "([a-f]{4}-){8}"},
)
BODIES: list[dict[str, Any]] = [
    {"prompt": list(range(9, 9 + length)), "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    for length in (3, 40)
    for sampling in SAMPLINGS
]
METHODS = ("draft_model", "self", "mtp", "eagle3")
# Drafts of EAGLE-3 move hidden states between workers.
EACH_ONCE = [("draft_model", 2), ("self", 1), ("mtp", 1), ("eagle3", 2)]
WITH_ONE_AND_TWO = [(method, tp) for method in METHODS for tp in (1, 2)]  # in `make soak`
GIANT = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 100}


class Folders(NamedTuple):
    """A model, drafts that it cannot have, and its texts without any."""

    model: Path
    of_bytes: Path
    giant: Path
    eagle: Path
    texts: list[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("drafts")
    model, of_bytes, giant = root / "model", root / "bytes", root / "giant"
    make_folder(model, "llama", initializer_range=0.2)
    add_mtp_layer(model)
    make_byte_folder(of_bytes)
    giant.mkdir()
    (giant / "tokenizer.json").symlink_to(model / "tokenizer.json")
    config = json.loads((model / "config.json").read_text())
    (giant / "config.json").write_text(json.dumps(config | GIANT))
    make_eagle(model, root / "eagle")
    server = RunningServer(str(model), *EXACT)
    texts = complete_all(server)
    assert server.stop() == 0
    assert len(set(texts)) == len(BODIES)
    return Folders(model, of_bytes, giant, root / "eagle", texts)


def make_eagle(model: Path, folder: Path) -> None:
    """Make a random layer of EAGLE-3, whose head knows the first half of the tokens."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, num_tokens = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    num_heads = config["num_attention_heads"]
    q = num_heads * (config.get("head_dim") or hidden // num_heads)
    kv = q // num_heads * config["num_key_value_heads"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (num_tokens // 2, hidden),
        "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    tensors["d2t"] = torch.zeros(num_tokens // 2, dtype=torch.int64)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {"num_hidden_layers": 1, "draft_vocab_size": num_tokens // 2}
    own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}
    (folder / "config.json").write_text(json.dumps(config | own))


def add_mtp_layer(folder: Path) -> None:
    """Add a layer that predicts a token beyond the next, from that token alone."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    size = tensors["model.norm.weight"].shape[0]
    further = {name.replace("layers.1.", "layers.2."): tensors[name] for name in tensors}
    last = "model.layers.2."
    further = {name: 0.1 * tensor for name, tensor in further.items() if name.startswith(last)}
    ones = torch.ones(size, dtype=torch.bfloat16)
    norms = ("enorm", "hnorm", "shared_head.norm")
    further |= {f"{last}{name}.weight": ones.clone() for name in norms}
    further[f"{last}eh_proj.weight"] = torch.eye(size, 2 * size, dtype=torch.bfloat16)
    save_file(tensors | further, path, {"format": "pt"})


def complete(server: RunningServer, body: dict[str, Any]) -> str:
    """Return an answer."""
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def complete_all(server: RunningServer) -> list[str]:
    """Return all answers, asked at once."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(lambda body: complete(server, body), BODIES))


@pytest.mark.parametrize(
    ("method", "tp"), WITH_ONE_AND_TWO if "DRAFTS" in os.environ else EACH_ONCE
)
def test_drafts_change_no_text_though_a_worker_dies(folders: Folders, method: str, tp: int) -> None:
    model = str(folders.model)
    drafter = {"draft_model": folders.model, "eagle3": folders.eagle}.get(method)
    drafts = ("--speculative", method, *(("--draft-model", str(drafter)) if drafter else ()))
    server = RunningServer(
        model, *EXACT, *drafts, "--tp", str(tp), "--max-num-seqs", "5", env=STEADY
    )
    try:
        assert complete_all(server) == folders.texts
        before = server.metric("generation_tokens_total")
        num_drafts = server.metric("spec_decode_num_draft_tokens_total")
        assert num_drafts > 0
        if method == "draft_model":  # it is the model itself
            assert server.metric("spec_decode_num_accepted_tokens_total") > 0
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(complete_all, server)
            wait_until(
                lambda: server.metric("generation_tokens_total") > before + 40, "texts have begun"
            )
            os.kill(server.ring[f"headrace: worker {tp - 1}"].pid, signal.SIGKILL)
            assert asked.result() == folders.texts
        assert server.metric("spec_decode_num_draft_tokens_total") > num_drafts
        assert server.stop() == 0
    finally:
        server.close()


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3"])
def test_drafts_are_right_behind_pages_of_a_store(method: str, tmp_path: Path) -> None:
    """A layer that lacks the hidden states of those pages would draft another token."""
    model, eagle = tmp_path / "model", tmp_path / "eagle"
    save_foreseeing(model, eagle)
    drafter = {"draft_model": model, "eagle3": eagle}.get(method)
    drafts = ("--speculative", method, *(("--draft-model", str(drafter)) if drafter else ()))
    store = ("--kv-store", str(tmp_path / "store"), "--kv-store-disk-bytes", "20000000")
    prompt = list(range(9, 9 + 100))
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    texts = []
    for num_cached in (0, 96):
        server = RunningServer(str(model), *EXACT, *drafts, *store, env=STEADY)
        try:
            reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            details = reply["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == num_cached
            texts.append(reply["choices"][0]["text"])
            num_drafts = server.metric("spec_decode_num_draft_tokens_total")
            num_right = server.metric("spec_decode_num_accepted_tokens_total")
            assert num_drafts == num_right > 0
            assert server.stop() == 0
        finally:
            server.close()
    expected = [prompt[-1]]
    while len(expected) <= NUM_TOKENS:
        expected.append(next_token(expected[-1]))
    assert texts == 2 * [Tokenizer.from_file(str(model / "tokenizer.json")).decode(expected[1:])]


def flags_of(folders: Folders, draft: str) -> tuple[str, ...]:
    """Return the arguments of a server whose draft model is one of the folders."""
    return str(folders.model), "--draft-model", str(getattr(folders, draft))


def test_draft_of_another_vocabulary_is_one_clear_line(folders: Folders) -> None:
    says = "a draft model needs the model's vocabulary"
    assert says in refusal(*flags_of(folders, "of_bytes"))


def test_draft_larger_than_the_memory_is_one_clear_line(folders: Folders) -> None:
    says = refusal(*flags_of(folders, "giant"), "--load-format", "dummy")
    assert f"{folders.giant}: the draft model's weights take" in says
    assert "of memory; use a smaller one" in says


def test_model_without_a_layer_that_drafts_is_one_clear_line(folders: Folders) -> None:
    says = refusal(str(folders.of_bytes), "--speculative", "mtp")
    assert "it has no layer that predicts further tokens" in says


def test_folder_that_is_no_eagle_is_one_clear_line(folders: Folders) -> None:
    says = refusal(*flags_of(folders, "model"), "--speculative", "eagle3")
    assert f"{folders.model}: has 2 layers; EAGLE-3 drafts with one" in says


def refusal(*flags: str) -> str:
    """Return the line that a server which cannot start says."""
    with pytest.raises(StartFailed) as failure:
        RunningServer(*flags)
    said = str(failure.value)
    assert failure.value.exit_status in (ExitStatus.BAD_FLAGS, ExitStatus.BAD_MODEL)
    assert "Traceback" not in said
    (line,) = (line for line in said.splitlines() if "error" in line.lower())
    return line


def test_doctor_counts_the_memory_of_a_draft_model(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    def examined(**flags: Any) -> tuple[int, list[str]]:
        config = ServerConfig(model=str(folders.model), device="cpu", **flags)
        card = read_card(config)
        findings = doctor.examine_model(config, card)
        return doctor.weight_memory(config, card), [one.text for one in findings]

    alone, _ = examined()
    memory, findings = examined(speculative="draft_model", draft_model=str(folders.model))
    assert not findings
    assert 1.5 * alone < memory < 2 * alone + 4096
    assert f"draft model    {folders.model}: {doctor.mib(memory - alone)} of memory" in (
        capsys.readouterr().out
    )
    memory, findings = examined(speculative="self")
    assert not findings
    assert 1.2 * alone < memory < 1.5 * alone
    memory, findings = examined(speculative="mtp")
    assert not findings
    assert alone < memory < 1.1 * alone
    memory, findings = examined(speculative="eagle3", draft_model=str(folders.eagle))
    assert not findings
    assert memory > alone
    _, (finding,) = examined(speculative="draft_model", draft_model=str(folders.of_bytes))
    assert "a draft model needs the model's vocabulary" in finding
