"""Messages between processes, and the sockets and shared memory that carry them."""
