"""A worker takes what the engine sends in order, but for masks that it waits for."""

from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.worker.step_inbox import StepInbox
from headrace.ipc.worker_messages import Masks, Rest, Resume, Step, ToWorker

SLOT_BYTES = 1000


def step(number: int) -> Step:
    return Step(
        token_ids=bytes([number]),
        positions=b"",
        sequences=b"",
        page_table=b"",
        logit_rows=b"",
        rows=b"",
    )


def test_steps_that_come_before_masks_are_kept_in_order() -> None:
    steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, SLOT_BYTES)
    inbox = StepInbox(StepChannel(steps.fd, ToWorker), None, None, lambda answer: None)
    sent = [step(1), step(2), Masks(), step(3), Masks(), Resume(), Rest()]
    for message in sent:
        steps.send(message)
    assert inbox.receive(0) == step(1)
    inbox.wait_for_masks(0)  # of the first
    assert inbox.receive(0) == step(2)
    inbox.wait_for_masks(0)
    assert [inbox.receive(0) for _ in range(3)] == [step(3), Resume(), Rest()]
    assert inbox.receive(0) is None
