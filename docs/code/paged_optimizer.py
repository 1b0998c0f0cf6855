"""A paged optimizer: moments are in pinned host memory, and one page of them at a time is on the device."""

import sys

import torch

PAGE, PAGES = 4096, 3


def step(weight: torch.Tensor, grad: torch.Tensor, moments: torch.Tensor, waits: bool) -> None:
    """Momentum on every page of the weight. ``moments``: [PAGES, PAGE], pinned."""
    page, copies = torch.empty(PAGE, device="cuda"), torch.cuda.Stream()
    for index in range(PAGES):
        part = slice(index * PAGE, (index + 1) * PAGE)
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            page.copy_(moments[index], non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(copies)
        page.mul_(0.9).add_(grad[part], alpha=0.1)
        weight[part].sub_(page)
        moments[index].copy_(page, non_blocking=True)


if __name__ == "__main__":
    weight, grad = torch.zeros(PAGE * PAGES, device="cuda"), torch.ones(PAGE * PAGES, device="cuda")
    moments = torch.zeros(PAGES, PAGE).pin_memory()
    for _ in range(2):
        step(weight, grad, moments, waits="no-wait" not in sys.argv)
    torch.cuda.synchronize()
    print("moments", round(float(moments.mean()), 3), "weight", round(float(weight.mean()), 3))
