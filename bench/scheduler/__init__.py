"""Host time of the plugin's hooks in a scheduler step. Needs vLLM, but no GPU.

bench_scheduler.py  steps of decodes, new prompts, and a waiting hit: pytest-benchmark
bench_bursts.py     many requests at once, with equal or different prefixes
burst_bed.py        an engine that decodes while they arrive
bed.py              vLLM's own scheduler with our connector, without a model
"""
