"""Records of runs, and what is made of them: pages, summaries, comparisons."""
