"""An engine of a model whose prompts see themselves whole."""

from pathlib import Path

from engine_rig import FIRST, Rig, Small, generate

from headrace.ipc.messages import request_id
from headrace.ipc.worker_messages import WorkerReady


def test_a_prefix_lm_s_prompt_without_memory_fails_and_no_other(tmp_path: Path) -> None:
    """Steps of decodes go on beside it, and it has one of its own before it fails."""
    rig = Rig(tmp_path, ready=WorkerReady(16, 16), is_prefix_lm=True, max_num_batched_tokens=66)
    rig.take(generate(), prompt=(1, 2, 3))
    workers = Small(12)
    rig.engine.run_once(workers)  # type: ignore[arg-type]
    large = request_id(0, 2)
    rig.take(generate(large), prompt=tuple(range(40)))
    for _ in range(20):
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    rig.links.flush()
    assert [size for size in workers.sizes if size > 1] == [3, 41, 40]
    while not (output := rig.heard()[0]).failed:
        assert {id for id, _, _ in output.rows()} == {FIRST}
    assert output.failed == {large: b"plan %d" % large}
    rig.close()
