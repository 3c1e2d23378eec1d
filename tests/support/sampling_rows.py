"""The sampling rows of a step, by the names of their fields."""

from headrace.ipc.worker_messages import SAMPLING_ROW, SamplingRow


def sampling_rows(rows: bytes | bytearray) -> list[SamplingRow]:
    """Unpack the `rows` of a step."""
    return [SamplingRow._make(fields) for fields in SAMPLING_ROW.iter_unpack(rows)]
