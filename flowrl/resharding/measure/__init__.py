"""Parts of the benchmark of weight moves: its words, processes, truth, counters and report."""
