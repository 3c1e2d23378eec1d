"""lm-evaluation-harness scores a server as it scores the same model in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from demo_in_transformers import demo_model, demo_tokenizer
from servers import RunningServer
from tiny_models import make_folder

pytestmark = pytest.mark.filterwarnings("default")  # they are not ours

lm_eval = pytest.importorskip("lm_eval", reason="make ecosystem")

QUESTIONS = [
    ("The capital of France is", [" Paris.", " Rome, in Italy.", " a fish"], 0),
    ("Two and two are", [" five", " four", " twenty-two of them"], 1),
    ("The sky is", [" blue", " made of wood, as all of us know", " 42"], 0),
    ("Grass is", [" loud", " green", " a kind of soup"], 1),
    ("Water boils at", [" 100 °C", " 7 o'clock", " home"], 0),
    ("Le chat est", [" sur le tapis", " 猫", " 🦊🦊"], 0),
]
RATES = ("acc,none", "acc_norm,none")
TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: target
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a task, and no hub."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_task(folder)
    return folder


def write_task(folder: Path) -> None:
    """Write a task of the questions."""
    data = folder / "questions.jsonl"
    lines = [
        json.dumps({"text": text, "choices": choices, "target": target})
        for text, choices, target in QUESTIONS
    ]
    data.write_text("\n".join(lines) + "\n")
    (folder / "tiny_choice.yaml").write_text(TASK.format(data=data))


def evaluate(tasks: Path, kind: str, **arguments: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the scores, and what the model said of each answer."""
    found = lm_eval.simple_evaluate(
        kind,
        model_args=arguments,
        tasks=["tiny_choice"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = found["samples"]["tiny_choice"]
    return found["results"]["tiny_choice"], [sample["filtered_resps"] for sample in samples]


def evaluate_served(tasks: Path, url: str, model: str, tokenizer: Path) -> tuple[Any, list[Any]]:
    """Return the scores of a server, as `evaluate` does."""
    return evaluate(
        tasks,
        "local-completions",
        model=model,
        base_url=f"{url}/v1/completions",
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        num_concurrent=4,
    )


def test_scores_are_those_of_transformers(tmp_path: Path, tasks: Path) -> None:
    folder = tmp_path / "tiny"
    make_folder(folder, "llama")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    server = RunningServer(str(folder), "--dtype", "float32", "--kv-cache-dtype", "float32")
    try:
        ours, our_choices = evaluate_served(tasks, server.url, folder.name, folder)
    finally:
        assert server.stop() == 0
    theirs, their_choices = evaluate(
        tasks, "hf", pretrained=str(folder), dtype="float32", device="cpu"
    )
    assert ours == theirs
    for own, reference in zip(our_choices, their_choices, strict=True):
        for (logprob, greedy), (expected, is_greedy) in zip(own, reference, strict=True):
            assert logprob == pytest.approx(expected, abs=1e-3)
            assert greedy == is_greedy


def test_right_answers_of_real_models_are_likeliest(
    served: tuple[str, RunningServer], tokenizer: Path, tasks: Path
) -> None:
    """The demo model, of 135 million parameters, is right as often as in transformers."""
    model, server = served
    scores, _ = evaluate_served(tasks, server.url, model, tokenizer)
    expected = {"acc,none": 1.0, "acc_norm,none": 1.0}
    if model == "demo":
        expected, _ = evaluate(
            tasks, "hf", pretrained=demo_model(), tokenizer=demo_tokenizer(), device="cpu"
        )
    assert {name: scores[name] for name in RATES} == {name: expected[name] for name in RATES}
