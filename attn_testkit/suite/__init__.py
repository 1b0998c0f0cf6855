"""The suite that ``pytest --pyargs attn_testkit.suite`` collects."""
