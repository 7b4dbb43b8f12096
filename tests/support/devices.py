"""Where the pools of tests are that run real nodes.

`PREFIXKV_TEST_DEVICE=cuda pytest tests/unit/runtime` runs them all with their pools in VRAM, and
`tests/integration/hf` with the models there too. Imported where processes are forked, so nothing
here may ask for a GPU: CUDA does not outlive a fork.
"""

import os

DEVICE = os.environ.get("PREFIXKV_TEST_DEVICE", "cpu")
# UCX_TLS for writes that go on after the post. NIXL does not start without `cuda_copy` where there
# is a GPU; where there is none, UCX passes over it.
TCP = "tcp,cuda_copy"
