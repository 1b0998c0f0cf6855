"""Fakes of vendor kernels in torch, which adapters find by the entry-point group ``attn_testkit.fakes``."""
