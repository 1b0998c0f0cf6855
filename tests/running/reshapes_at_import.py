"""Breaks in an operation on the device, where it is imported."""

import torch

TABLE = torch.zeros(3, device="cuda").reshape(2, 2)
