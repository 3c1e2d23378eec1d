"""`python -m headrace.launch_server`: the public path of `headrace.launch.serve`."""

from headrace.launch.serve import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
