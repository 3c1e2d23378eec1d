"""Results are sent in the order of their steps, and no later than the next step's launch."""

from headrace.engine_proc.worker.result_sender import ResultSender
from headrace.ipc.worker_messages import StepFailed, StepResult


class Promised:
    """A result that is there when the test says so."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.is_there = False

    def wait(self) -> StepResult:
        return self.result


def result_of(number: int) -> StepResult:
    return StepResult(number.to_bytes(4, "little"))


def test_what_is_there_is_sent_at_once() -> None:
    sent: list[StepResult | StepFailed] = []
    answers = ResultSender(sent.append)
    answers.add(result_of(1))
    answers.add(StepFailed("no memory"))
    assert sent == [result_of(1), StepFailed("no memory")]
    assert not answers.is_open


def test_a_promise_is_kept_when_the_next_step_is_on_its_way() -> None:
    sent: list[StepResult | StepFailed] = []
    answers = ResultSender(sent.append)
    first = Promised(result_of(1))
    answers.add(first)
    assert (answers.is_open, answers.is_due, sent) == (True, False, [])
    answers.add(Promised(result_of(2)))
    assert sent == [result_of(1)]
    answers.add(StepFailed("no memory"))
    assert sent == [result_of(1), result_of(2), StepFailed("no memory")]
    assert not answers.is_open


def test_a_promise_is_kept_when_it_is_there_and_no_step_comes() -> None:
    sent: list[StepResult | StepFailed] = []
    answers = ResultSender(sent.append)
    promised = Promised(result_of(1))
    answers.add(promised)
    promised.is_there = True
    assert answers.is_due
    answers.flush()
    answers.flush()
    assert sent == [result_of(1)]
    assert not (answers.is_open or answers.is_due)
