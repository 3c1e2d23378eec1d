"""Hybrids on GPUs say what transformers and the C++ core say, whatever sequences go through."""

from typing import Any

import family_table
import pytest
from decoder_cases import DecoderCase, decoder_case
from generation import NUM_STATES, PROMPTS, Generation, HalfRightProposer
from gpu_tests import rarely
from hybrid_models import HYBRIDS
from on_kernels import OnKernels

NUM_TOKENS = 4 if family_table.WRITES else 3
PROMPT = PROMPTS[2]  # of several pages


def generation(made: DecoderCase, **options: Any) -> Generation:
    num_states = NUM_STATES if made.ours.spec.state_numbers else 0
    return Generation(
        lambda **sizes: OnKernels(made.ours.spec, made.ours.weights, **sizes, max_model_len=96),
        num_states=num_states,
        **options,
    )


@rarely
@pytest.mark.parametrize("case", sorted(HYBRIDS) if family_table.WRITES else ["lfm2"])
def test_hybrids_on_gpus_generate_the_text_of_transformers(case: str) -> None:
    """In chunks, then from a checkpoint, and with drafts of which one in four is wrong."""
    made = decoder_case(case)
    own = generation(made, budget=23, speculation=HalfRightProposer(made.answers))
    for _ in range(2):  # the second time, the prompt is known but for its last page
        sequence = own.add(PROMPT, NUM_TOKENS)
        own.run()
        assert list(sequence.generated) == made.answers[2][:NUM_TOKENS]
    counts = own.scheduler.counts
    assert counts.prefix_hits > 0
    assert counts.drafts > 0
