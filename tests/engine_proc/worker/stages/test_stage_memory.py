"""What a stage takes of the memory of a machine of its own."""

import dataclasses

import pytest
from engine_configs import execution_config
from random_decoders import SPEC, random_weights

from headrace.config.config import CPU_KV_BYTES
from headrace.config.process_configs import WorkerConfig
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.memory_check import core_bytes, step_bytes
from headrace.engine_proc.worker.loader import check_frames, check_memory
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.stages.stage import models_of
from headrace.errors import ConfigError


def test_a_machine_has_memory_for_its_stage_alone() -> None:
    """A model that is larger than the machine is refused where all stages are there."""
    spec = dataclasses.replace(SPEC, layers=SPEC.layers * 8)
    model = DecoderModel(spec, random_weights(spec), ())
    kv_bytes = 1 << 20
    config = execution_config(pp=2, kv_cache_memory_bytes=kv_bytes)
    taken = core_bytes(spec, model.weights, WeightDtype.PACKED, True)
    free = step_bytes(spec, config.max_num_batched_tokens) + 3 * (taken + kv_bytes) // 4
    for stage in range(2):
        worker = WorkerConfig(execution=config, step_fd=-1, result_fd=-1, mask_fd=-1, stage=stage)
        with pytest.raises(ConfigError, match="its weights take"):
            check_memory(worker, model, WeightDtype.PACKED, free)
        apart = dataclasses.replace(config, distributed_executor_backend="ray")
        own = dataclasses.replace(worker, execution=apart)
        check_memory(own, model, WeightDtype.PACKED, free)
        with pytest.raises(ConfigError, match="its weights take"):
            check_memory(own, model, WeightDtype.PACKED, free // 3)


def test_a_machine_warns_of_its_part_of_a_full_cache(caplog: pytest.LogCaptureFixture) -> None:
    spec = dataclasses.replace(SPEC, layers=SPEC.layers * 8)
    model = DecoderModel(spec, random_weights(spec), ())
    config = execution_config(pp=2, kv_cache_memory_bytes=None, distributed_executor_backend="ray")
    worker = WorkerConfig(execution=config, step_fd=-1, result_fd=-1, mask_fd=-1)
    check_memory(worker, model, WeightDtype.PACKED, 3 * CPU_KV_BYTES // 4)
    assert not caplog.records
    check_memory(worker, model, WeightDtype.PACKED, CPU_KV_BYTES // 4)
    assert "full KV cache of 1.0 GiB" in caplog.text


def test_steps_whose_hidden_states_no_link_takes_are_refused() -> None:
    check_frames(8192, 16384)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 8193: .* lower it to 8192"):
        check_frames(8193, 16384)


@pytest.mark.parametrize(("stage", "num_links"), [(0, 1), (1, 2), (2, 1)])
def test_a_machine_has_memory_for_the_frames_of_its_links(stage: int, num_links: int) -> None:
    """A frame is in a link, and once more on its way to the next machine or from there."""
    spec = dataclasses.replace(SPEC, layers=SPEC.layers * 3)
    model = DecoderModel(spec, random_weights(spec), ())
    config = execution_config(pp=3, kv_cache_memory_bytes=3, distributed_executor_backend="ray")
    own, num_tokens = models_of(model, 3)[stage], config.max_num_batched_tokens
    needed = core_bytes(own.spec, own.weights, WeightDtype.PACKED, True) + 1
    needed += step_bytes(own.spec, num_tokens)
    needed += num_links * 3 * 2 * 4 * num_tokens * spec.hidden_size
    worker = WorkerConfig(execution=config, step_fd=-1, result_fd=-1, mask_fd=-1, stage=stage)
    check_memory(worker, model, WeightDtype.PACKED, needed)
    with pytest.raises(ConfigError, match="its weights take"):
        check_memory(worker, model, WeightDtype.PACKED, needed - 1)
