pytest_plugins = ["attn_testkit.plugin", "pytester"]
