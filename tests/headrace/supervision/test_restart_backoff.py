"""Deaths in a row are answered later and later; work in between begins a new row."""

from headrace.supervision.restart_backoff import DELAYS_S, PATIENT_S, RestartBackoff


def test_deaths_in_a_row_wait_longer_and_then_are_final() -> None:
    restarts = RestartBackoff()
    delays = [restarts.delay_s() for _ in range(len(DELAYS_S) + 2)]
    assert delays == [*DELAYS_S, None, None]
    assert list(DELAYS_S) == sorted(DELAYS_S)


def test_work_in_between_begins_a_new_row() -> None:
    restarts = RestartBackoff()
    for _ in range(3 * len(DELAYS_S)):
        assert restarts.delay_s() == DELAYS_S[0]
        restarts.worked()


def test_what_is_always_started_again_waits_long_in_the_end() -> None:
    restarts = RestartBackoff()
    delays = [restarts.patient_delay_s() for _ in range(len(DELAYS_S) + 2)]
    assert delays == [*DELAYS_S, PATIENT_S, PATIENT_S]
