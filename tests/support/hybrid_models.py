"""Tiny random hybrids of transformers, and a scheduler that runs them on an executor."""

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import mixture_models
import torch
import transformers

from headrace.engine_proc.scheduling.page_pool import PagePool
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler, SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.scheduling.state_slots import StateSlots
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.step_builder import build_step
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Executor
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.ipc.messages import GenerateRequest, Sampling, request_id
from headrace.ipc.worker_messages import Step

PAGE_TOKENS, NUM_PAGES, NUM_STATES = 16, 16, 24
NUM_TOKENS = 24
TINY = mixture_models.TINY | {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
EXPERTS = {
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
DELTA_NETS = {
    "layer_types": None,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "head_dim": 32,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
GRANITE = MAMBA | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    "layer_types": None,
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-30,  # transformers bounds the steps of prompts, and no others
    "time_step_floor": 0.5,
}
KIMI = {
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "model_max_length": 512,
}
FALCON = MAMBA | {"layer_types": None, "mamba_d_ssm": 128, "mamba_norm_before_gate": False}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2 with biases and an adjusted size": {
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "lfm2_moe": EXPERTS | {"routed_scaling_factor": 1.7},
    "lfm2_moe without a bias of experts": EXPERTS
    | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    "qwen3_next": DELTA_NETS | SHARED_EXPERT,
    "qwen3_next with dense layers and biases": DELTA_NETS
    | SHARED_EXPERT
    | {
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "mlp_only_layers": [1],
        "attention_bias": True,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5_text": DELTA_NETS | {"rope_parameters": MROPE},
    "qwen3_5_moe_text": DELTA_NETS | SHARED_EXPERT | {"linear_num_value_heads": 2},
    "bamba": MAMBA | {"layer_types": None, "attn_layer_indices": [2]},
    "bamba with biases and groups": MAMBA
    | {
        "layer_types": None,
        "attn_layer_indices": [0, 3],
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "mamba_d_conv": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoehybrid without experts": GRANITE
    | {"num_local_experts": 0, "mamba_n_groups": 4, "position_embedding_type": "rope"},
    "granitemoehybrid of attention only": GRANITE
    | {"num_local_experts": 0, "layer_types": ["attention"] * 4},
    "nemotron_h": NEMOTRON | {"hybrid_override_pattern": "M-M*-M"},
    "nemotron_h with experts and biases": NEMOTRON
    | {
        "hybrid_override_pattern": "*EM-E",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
        "use_bias": True,
        "mlp_bias": True,
    },
    "falcon_h1": FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 2},
    "falcon_h1 without norms, with multipliers": FALCON
    | {
        "mamba_d_ssm": 96,
        "mamba_d_head": 12,
        "mlp_bias": True,
        "projectors_bias": True,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.8, 1.2],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.3, 0.8, 1.1, 0.9],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
    },
    "falcon_h1 with norms before gates": FALCON
    | {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_proj_bias": True,
        "attention_bias": True,
    },
}
HYBRIDS |= {
    "kimi_linear": KIMI,
    "kimi_linear with compressed queries": KIMI | {"q_lora_rank": 48, "mlp_layer_types": None},
}
# The first ends within a page, the second on a border, the third has several pages.
PROMPTS = [[17, 3, 94, 55, 8], [*range(20, 52)], [(7 * i) % 90 + 3 for i in range(53)]]


def tiny_hybrid(case: str, **differences: Any) -> Any:
    """Make the random model of a case, whose name begins with the family's.

    None for a field of `TINY` leaves it to the family.
    """
    torch.manual_seed(0)
    fields = TINY | HYBRIDS[case] | differences
    given = {name: value for name, value in fields.items() if value is not None}
    config = transformers.AutoConfig.for_model(case.split()[0], **given)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for name, numbers in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "norm" in name or name.endswith("bias"):  # they start as ones and zeros
            numbers.data += 0.3 * torch.randn_like(numbers)
        if name.endswith(("A_log", ".D")):  # states that last, and skips that differ
            numbers.data += 0.3 * torch.randn_like(numbers) - (3 if "A_log" in name else 0)
    return model.eval()


class HalfRightProposer(Speculation):
    """Knows the answers. One guess in four is wrong."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self._expected = dict(zip(map(tuple, PROMPTS), answers, strict=True))

    def propose(self, sequence: Sequence, most: int) -> "array[int]":
        answer = self._expected[tuple(sequence.tokens[: sequence.num_prompt])]
        first = sequence.num_generated
        guesses = answer[first : first + 3] if first + 1 < len(answer) else []
        if guesses and first % 4 == 0:
            guesses[-1] = (guesses[-1] + 1) % TINY["vocab_size"]
        return array("i", guesses[:most])


STEP_S = 0.1  # whatever is in it: drafts cost nothing


class Generation:
    """A scheduler whose steps an executor runs: an engine without its links.

    Args:
        make: makes an executor of so many pages and states; another one after a death.
        depth: steps that are open at once; with 2, one is sent while another is run.
    """

    def __init__(
        self,
        make: Callable[..., Executor],
        *,
        num_pages: int = NUM_PAGES,
        num_states: int = NUM_STATES,
        budget: int = 64,
        max_num_seqs: int = 4,
        depth: int = 1,
        **options: Any,
    ) -> None:
        self._make = lambda: make(
            num_pages=num_pages, page_tokens=PAGE_TOKENS, num_states=num_states
        )
        self._depth = depth
        self._num_requests = 0
        self._open: list[tuple[list[Chunk], Step]] = []
        self.slots = StateSlots(num_states)
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE_TOKENS),
            SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            slots=self.slots,
            **options,
        )
        self.start_worker()

    def start_worker(self) -> None:
        """Begin with an executor that knows nothing."""
        executor = self._make()
        self._runner = GenerationRunner(executor, Sampler(TINY["vocab_size"], threads=1))

    def add(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Sequence:
        """Ask for the greedy text of a prompt."""
        self._num_requests += 1
        request = GenerateRequest(
            id=request_id(0, self._num_requests),
            detokenizer=0,
            max_tokens=num_tokens,
            sampling=Sampling(),
            stop_token_ids=[],
            plan=b"",
        )
        sequence = Sequence.of(request, array("I", prompt).tobytes())
        self.scheduler.add(sequence)
        return sequence

    def die(self) -> None:
        """Lose the worker in the middle of a step."""
        self._send()
        self.scheduler.lose_workers()
        self.scheduler.recompute()
        self._open.clear()
        self.start_worker()

    def fail(self) -> None:
        """Run a step whose result is lost: it is run again."""
        self._send()
        if self._open:
            self._runner.run(self._open[0][1])
            self.scheduler.retry()
            self._open.clear()

    def _send(self) -> bool:
        chunks = self.scheduler.schedule()
        if chunks:
            self._open.append((chunks, build_step(chunks)))
        return bool(chunks)

    def step(self) -> None:
        """Send a step, then run the oldest unless another can be sent before."""
        if self._send() and len(self._open) < self._depth:
            return
        chunks, step = self._open.pop(0)
        result = self._runner.run(step)
        self.scheduler.observe(chunks, STEP_S)
        self.scheduler.update(chunks, ResultReader(result, 0))

    def run(self) -> None:
        """Step until all sequences have ended: then no slot is in use."""
        while self.scheduler.has_work:
            self.step()
        assert self.slots.num_free == self.slots.num_slots

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the texts of prompts that come together."""
        sequences = [self.add(prompt) for prompt in prompts]
        self.run()
        return [list(sequence.generated) for sequence in sequences]
