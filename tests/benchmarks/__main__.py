"""All benchmarks, one after another: `make bench`. Each prints ratios and asserts nothing."""

from __future__ import annotations

import sys

from tests.benchmarks import bench_corpus, bench_launch, bench_load, bench_record, bench_watch

if __name__ == "__main__":
    sys.argv[1:] = []
    for bench in (bench_record, bench_load, bench_launch, bench_watch, bench_corpus):
        assert bench.__doc__
        print(f"== {bench.__doc__.splitlines()[0]}", flush=True)
        bench.main()
