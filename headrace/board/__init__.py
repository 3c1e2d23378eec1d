"""Status of the ring in shared memory: one writer for each word."""
