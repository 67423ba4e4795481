"""`python -m megarl.serving.sglang_server <flags of sglang.launch_server>`: SGLang's server, with its own kernels.

Reads the API key from standard input, so that it is on no command line.
"""

from __future__ import annotations

import sys

from megarl.serving.launcher import read_api_key, run_sglang_server

if __name__ == "__main__":
    run_sglang_server(sys.argv[1:], read_api_key())
