"""Measures how an engine serves with and without offloading: `python -m bench.serving --help`.

    __main__.py     the command
    runs.py         which engine is started when, and what is asked of it; collects the results
    settings.py     the connectors that are compared, and what an engine is started with
    shapes.py       models, caches and load
    process.py      the process of one engine: as the bench sees it, and what runs in it
    engine.py       a vLLM engine with random weights and one connector
    sections.py     what is measured on one engine: time to first token, throughput, latency
    conversations.py  what users who come back wait for
    report.py       tables of a result; the proof that all loads took place
    stats.py        medians, percentiles, and the interval of paired ratios

A new connector needs a line in `CONNECTORS`. A new section needs a function in `sections.py`,
listed in `process.py`, its name in `SECTIONS` and `OF_ONE_ENGINE`, and a table in `report.py`.
"""
