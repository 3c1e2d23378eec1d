"""Errors that mean a lack of memory, on the host or on a GPU."""

from headrace.errors import HeadraceError

# CUDA, cuBLAS, cuda-python and torch on the CPU have no class of their own for it. The last is
# FlashInfer's, whose workspace is too small for a step.
OOM_MESSAGES = (
    "out of memory",
    "OUT_OF_MEMORY",
    "ALLOC_FAILED",
    "can't allocate memory",
    "AlignedAllocator",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was lacking, of the host or of a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_candidate = isinstance(error, RuntimeError | HeadraceError)
    return is_candidate and any(message in str(error) for message in OOM_MESSAGES)
