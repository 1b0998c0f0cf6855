from attn_testkit.contract import Requires
from attn_testkit.examples import MinimalBackend


class NeedsTheImpossible(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(
        eager={"decode"}, graph=(), requires=Requires(packages=("no-such-kernels>=9",))
    )
