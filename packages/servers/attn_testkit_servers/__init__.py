"""Servers as attn-testkit knows them: bridges to SGLang and vLLM, recording, and fakes of vendor kernels."""
