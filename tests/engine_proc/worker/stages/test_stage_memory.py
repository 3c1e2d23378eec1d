"""What stages take of a machine's memory, beside what one worker would."""

from engine_configs import execution_config
from random_decoders import SPEC, random_weights

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import WeightDtype, matrix_bytes
from headrace.engine_proc.worker.loader import second_embedding
from headrace.engine_proc.worker.models.model import DecoderModel


def test_a_tied_embedding_counts_once_more_with_stages() -> None:
    model = DecoderModel(SPEC, random_weights(SPEC), ())
    alone, staged = execution_config(), execution_config(pp=2)
    taken = matrix_bytes(Format.F32, (SPEC.vocab_size, SPEC.hidden_size))
    assert second_embedding(staged, model, WeightDtype.PACKED) == taken > 0
    assert second_embedding(alone, model, WeightDtype.PACKED) == 0
