"""Records of runs, and the pages, summaries and comparisons that are made from them."""
