"""The pages of a step, by sequence."""

from array import array
from itertools import accumulate

from headrace.ipc.worker_messages import Step


def page_rows(step: Step) -> list["array[int]"]:
    """Return the pages of each sequence."""
    pages, counts = array("i", step.page_table), array("i", step.page_counts)
    if not counts:
        num_sequences = array("i", step.sequences)[-1] + 1
        counts = array("i", [len(pages) // num_sequences]) * num_sequences
    ends = accumulate(counts)
    return [pages[end - count : end] for count, end in zip(counts, ends, strict=True)]
