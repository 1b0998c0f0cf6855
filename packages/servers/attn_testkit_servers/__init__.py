"""Support for servers: bridges to SGLang and vLLM, recording, and fakes of vendor kernels."""
