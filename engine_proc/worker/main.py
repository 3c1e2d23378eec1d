"""Worker process: runs the model on the steps it is given; decides nothing.
In: ToWorker (engine_proc).  Out: FromWorker (engine_proc)."""

from collections.abc import Callable

import numpy as np

from headrace.board import Field, State
from headrace.config import WorkerConfig
from headrace.engine_proc.step_channel import StepChannel
from headrace.engine_proc.worker.cpu_executor import CpuExecutor, KVDtype, WeightDtype, page_bytes
from headrace.engine_proc.worker.executor import Batch, Executor
from headrace.engine_proc.worker.model import Model, open_model
from headrace.engine_proc.worker.sampler import ROW, Sampler
from headrace.messages import FromWorker, Step, StepResult, ToWorker, WorkerReady
from headrace.process import Context

IDLE_S = 0.5
PAGE_TOKENS = 32
# --dtype auto executes weights as they are stored, quantized blocks included.
WEIGHTS = {
    "auto": WeightDtype.PACKED,
    "float32": WeightDtype.FLOAT32,
    "bfloat16": WeightDtype.BFLOAT16,
}
# --kv-cache-dtype auto rounds: half the memory, and faster in long contexts.
KV = {
    "auto": KVDtype.BFLOAT16,
    "float32": KVDtype.FLOAT32,
    "bfloat16": KVDtype.BFLOAT16,
}


def main(config: WorkerConfig, context: Context) -> None:
    """Load the model, then execute steps until SIGTERM."""
    steps: StepChannel[ToWorker] = StepChannel(config.step_fd, ToWorker)
    results: StepChannel[FromWorker] = StepChannel(config.result_fd, FromWorker)

    def progress(done: int, total: int) -> None:
        context.slot[Field.PROGRESS] = 1000 * done // max(total, 1)

    model = open_model(config.model_path)
    num_pages = pages_within(config.kv_cache_memory_bytes, model, KV[config.kv_cache_dtype])
    executor = make_executor(config, model, num_pages, progress)
    sampler = Sampler(model.spec.vocab_size)
    context.slot.enter(State.READY)
    results.send(WorkerReady(num_pages, PAGE_TOKENS))
    while True:
        context.slot.beat()
        step = steps.receive(IDLE_S)
        if step is not None:
            results.send(execute(executor, sampler, step))


def pages_within(memory_bytes: int, model: Model, kv_dtype: KVDtype) -> int:
    """Return how many pages `memory_bytes` holds."""
    return memory_bytes // page_bytes(model.spec, PAGE_TOKENS, kv_dtype)


def make_executor(
    config: WorkerConfig, model: Model, num_pages: int, progress: Callable[[int, int], None]
) -> Executor:
    """Load the weights into the executor for this machine."""
    return CpuExecutor(
        model.spec,
        model.weights,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        weight_dtype=WeightDtype.INT8 if config.quantization == "int8" else WEIGHTS[config.dtype],
        kv_dtype=KV[config.kv_cache_dtype],
        progress=progress,
    )


def execute(executor: Executor, sampler: Sampler, step: Step) -> StepResult:
    """Run one step."""
    sequences = np.frombuffer(step.sequences, np.int32)
    table = np.frombuffer(step.page_table, np.int32).reshape(int(sequences[-1]) + 1, -1)
    batch = Batch(
        token_ids=np.frombuffer(step.token_ids, np.int32),
        positions=np.frombuffer(step.positions, np.int32),
        sequences=sequences,
        page_table=table,
        logit_rows=np.frombuffer(step.logit_rows, np.int32),
    )
    token_ids, logprobs = sampler.sample(
        executor.forward(batch),
        np.frombuffer(step.rows, ROW),
        np.frombuffer(step.history, np.int32),
        np.frombuffer(step.bias_tokens, np.int32),
        np.frombuffer(step.bias, np.float32),
    )
    return StepResult(token_ids.tobytes(), logprobs)
