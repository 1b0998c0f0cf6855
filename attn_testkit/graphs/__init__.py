"""Capture, replay and guards of graphs, on real or emulated torch.cuda."""
