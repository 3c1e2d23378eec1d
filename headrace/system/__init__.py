"""The machine: processors, memory, GPUs, limits of the operating system."""
