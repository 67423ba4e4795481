"""In which order the workers of tests/suite.py take the files, and which of them are one entry of the queue."""

from __future__ import annotations

from collections.abc import Sequence

# From the longest on; the last of a run is then a short one, and no worker waits long for another.
LONGEST = (
    "tests/end_to_end/test_train.py",
    "tests/end_to_end/test_slurm.py",
    "tests/recipe/test_keys.py",
    "tests/sync/test_hashes.py",
    "tests/end_to_end/test_several_nodes.py",
    "tests/end_to_end/test_agents.py",
    "tests/end_to_end/test_async.py",
    "tests/end_to_end/test_ppo.py",
    "tests/training/test_invariance.py",
    "tests/end_to_end/test_engines.py",
    "tests/end_to_end/test_journal.py",
    "tests/end_to_end/test_disk.py",
    "tests/end_to_end/test_images.py",
    "tests/end_to_end/test_tower.py",
    "tests/models/test_lora.py",
    "tests/training/test_image_features.py",
    "tests/sync/test_broadcast_ranks.py",
    "tests/end_to_end/test_rm_and_dpo.py",
    "tests/end_to_end/test_ray_jobs.py",
    "tests/end_to_end/test_sft_and_eval.py",
    "tests/convert/test_convert.py",
    "tests/bench/test_benches.py",
    "tests/serving/test_server.py",
    "tests/run/test_serve.py",
    "tests/cluster/test_waits.py",
    "tests/end_to_end/test_adapters.py",
    "tests/end_to_end/test_experts.py",
    "tests/rewards/test_graders.py",
    "tests/sandbox/test_escapes.py",
    "tests/models/test_layouts.py",
    "tests/sync/test_faults.py",
    "tests/cluster/test_services.py",
    "tests/profiling/test_worker.py",
    "tests/commands/test_wheel.py",
    "tests/agents/test_mcp_server.py",
    "tests/models/test_fp8_weights.py",
    "tests/cuda_paths/test_layers.py",
    "tests/recipe/test_algorithm_keys.py",
    "tests/training/test_pretend_device.py",
    "tests/placement/test_memory.py",
    "tests/sync/test_disk.py",
    "tests/rollout/test_resumed.py",
    "tests/rollout/test_simulated_runs.py",
)
# Their tests share one server.
ONE_SERVER = ("tests/serving/test_server.py", "tests/serving/test_interrupted.py", "tests/sync/test_real_server.py")
# Their servers are copies of one process, which each worker that makes some has to load.
COPIED = (
    "tests/sync/test_hashes.py",
    "tests/sync/test_adapters.py",
    "tests/sync/test_images.py",
    "tests/sync/test_tower.py",
    "tests/serving/test_images.py",
    "tests/end_to_end/test_external.py",
    "tests/end_to_end/test_teacher.py",
)
# And theirs are copies of one that has loaded Megatron, and benchmarks.
LOADED = ("tests/bench/test_benches.py", "tests/bench/test_gpu_engine.py")
# Entries of several files, each in the place of its first.
TOGETHER = (ONE_SERVER, COPIED, LOADED)

KEPT = 60  # of the entries that are not named: for the end, when every worker needs short ones


def entry_of(nodeid: str) -> str:
    """The entry of the queue that a test belongs to."""
    file = nodeid.partition("::")[0]
    return next((files[0] for files in TOGETHER if file in files), file)


def place_of(nodeid: str) -> int:
    """Where in the queue the test's entry is; all that are not named come last, in the order in which they were found."""
    entry = entry_of(nodeid)
    return LONGEST.index(entry) if entry in LONGEST else len(LONGEST)


def next_of(queue: Sequence[str], computes: bool) -> str:
    """Which entry a worker takes. The longest ones mostly wait: so that the cores have work, one worker computes beside them.

    computes: whether it is that one. It takes entries that are not named, from the end, while more than KEPT wait.
    """
    if computes and len(queue) > KEPT and all(place_of(entry) == len(LONGEST) for entry in queue[-KEPT - 1 :]):
        return queue[-1]
    return queue[0]
