"""What the proofs share: where they run, and how they end."""

import os
import sys
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).parents[1]))
from alone import FLAG_GEMS, LIGHTLLM, SGLANG, VLLM, load  # noqa: E402

__all__ = ["DEVICE", "FLAG_GEMS", "LIGHTLLM", "SGLANG", "VLLM", "finish", "load"]


def finish(right: bool, wrong: str) -> None:
    """Print the verdict and the machine, and end the program: 0 for right, 1 for wrong."""
    place = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, Triton's interpreter"
    print(f"{'right' if right else 'WRONG: ' + wrong} ({place}, torch {torch.__version__})")
    sys.exit(0 if right else 1)
