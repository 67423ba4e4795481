"""What each rank does for test_tower: as hash_ranks, copied of a process that has loaded what transformers makes towers with."""

from __future__ import annotations

import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

from tests.sync import hash_ranks

main = hash_ranks.main
