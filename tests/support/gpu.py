"""The mark of tests that need a GPU: they are skipped aloud where there is none."""

import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: nothing of it was run")
