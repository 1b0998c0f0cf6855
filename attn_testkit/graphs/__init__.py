"""How a graph is captured, replayed and guarded, on torch.cuda real or emulated."""
