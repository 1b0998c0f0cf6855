"""What ``pytest --pyargs attn_testkit.suite`` collects."""
