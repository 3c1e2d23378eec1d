"""Train adapters with PEFT on texts of our own docs, and note what PEFT then generates.

Run:    PYTHON tests/support/peft_training.py MODEL OUT --steps 200
        PYTHON has torch, transformers and peft, MODEL is a Hugging Face folder.

OUT gets a folder for each adapter. Its `expected.json` has the greedy continuation of each prompt
in fp32, as token ids. `make trained-adapters MODEL=MODEL OUT=OUT` compares a server with them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCS = Path(__file__).parents[2] / "docs"
RANKS = (8, 16, 32, 64)
NUM_TOKENS, BATCH, LENGTH = 32, 2, 48
FEW = ["q_proj", "v_proj"]
WHOLE: dict[int, dict[str, Any]] = {  # beyond the layers
    8: {"target_modules": FEW, "modules_to_save": ["lm_head"]},
    9: {"target_modules": [*FEW, "embed_tokens"]},
}
PROMPTS = (
    "A request travels",
    "The engine is",
    "To serve a model with adapters, start the server",
    "| flag | default | meaning |\n| --- | --- | --- |\n",
)


def options_of(index: int, stacks: list[str]) -> dict[str, Any]:
    """Return how the adapter of an index is made: ranks and variants take turns.

    Args:
        stacks: of experts, parameters of the model.
    """
    if index in WHOLE:
        return {"r": RANKS[0], **WHOLE[index]}
    if stacks:
        of_index = stacks if index % 2 else stacks[-1:]
        more = {"target_modules": FEW, "target_parameters": of_index, "use_rslora": index % 3 == 1}
        return {"r": RANKS[index % len(RANKS)], "lora_alpha": 16, **more}
    targets: Any = "all-linear" if index % 2 else ["q_proj", "v_proj", "down_proj"]
    return {
        "r": RANKS[index % len(RANKS)],
        "lora_alpha": 16,
        "target_modules": targets,
        "use_rslora": index % 3 == 1,
        "use_dora": index % 4 == 3,
    }


def stacks_of(model: Any) -> list[str]:
    """Return the ends of the names of parameters that hold a matrix of each expert."""
    names = (name for name, numbers in model.named_parameters() if numbers.ndim == 3)
    return list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))


def train(model: Any, ids: torch.Tensor, num_steps: int, seed: int) -> None:
    """Train the adapter of a model on pieces of a text."""
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for _ in range(num_steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def continuations(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return what a model generates, greedily."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(whole[0, len(prompt) :].tolist())
    return found


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapters", type=int, nargs="+", default=range(10), help="by index")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = sorted(DOCS.glob("*.md"))
    for index in args.adapters:
        torch.manual_seed(index)
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        options = options_of(index, stacks_of(base))
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
        ids = torch.tensor(tokenizer(texts[index % len(texts)].read_text())["input_ids"])
        train(model, ids, args.steps, index)
        model.eval()
        folder = args.out / f"trained-{index}"
        model.save_pretrained(folder)
        expected = continuations(model, prompts)
        cases = {"prompts": prompts, "expected": expected}
        (folder / "expected.json").write_text(json.dumps(cases))
        print(folder.name, tokenizer.decode(expected[0]), flush=True)


if __name__ == "__main__":
    main()
