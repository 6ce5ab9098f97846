"""Parts of `recipes.bench_multi_gpu`: its cases, what fits, the commands of its parts, and its results."""
