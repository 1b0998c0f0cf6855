"""Commands that ``attn-testkit`` finds by the entry-point group ``attn_testkit.commands``."""
