"""A real Ray cluster of three nodes on this machine; without Ray, these tests are skipped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "front_ends")]
sys.path[:0] = FOLDERS


class Nodes:
    """A head without GPUs, a node of each of two accelerator types with a GPU that is not there, and the driver."""

    def __init__(self, gate: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.gate = gate
        common = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args=common)
        self.by_type = {
            kind: self.cluster.add_node(num_gpus=1, labels={"ray.io/accelerator-type": kind}, **common)
            for kind in ("H100", "B200")
        }
        ray.init(
            address=self.cluster.address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"worker_process_setup_hook": "fake_workers.use_fake"},
        )

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    """The cluster, and the file that ``gated`` case-runs wait for."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'PATH_OF_THE_CHECKOUT[ray]'")
    gate = tmp_path_factory.mktemp("gate") / "open"
    before = dict(os.environ)
    # The nodes and their workers inherit it.
    os.environ |= {
        "ATTN_GATE": str(gate),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")]),
    }
    found = Nodes(gate)
    yield found
    found.close()
    os.environ.clear()
    os.environ |= before
