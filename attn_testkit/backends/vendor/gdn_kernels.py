"""Entry points of FlashInfer's kernels of the gated delta rule, and the names of their fakes.

``flashinfer.gdn_prefill`` does not import without CuTe DSL, so its fake is bound to the signature in the source.
"""

from __future__ import annotations

from .provider import EntryPoint

_SM = ((90, 90), (100, 103), (120, 121))
_FAKES = "gdn_fake"
DECODE = EntryPoint(
    "flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose", _SM, f"{_FAKES}:make_decode", "flashinfer"
)
VERIFY = EntryPoint("flashinfer.gdn_decode:gated_delta_rule_mtp", _SM, f"{_FAKES}:make_verify", "flashinfer")
PREFILL = EntryPoint(
    "flashinfer.gdn_prefill:chunk_gated_delta_rule", _SM, f"{_FAKES}:prefill", "flashinfer", from_source=True
)
