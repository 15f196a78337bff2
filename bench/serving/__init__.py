"""How an engine serves with and without offloading: `python -m bench.serving --help`.

    __main__.py     the command
    runs.py         which engine is measured when; collects the results
    process.py      the process of one engine, as the bench sees it
    process_main.py what runs in that process
    engine.py       a vLLM engine with random weights and one connector
    sections.py     what is measured on one engine: time to first token, throughput, latency
    conversations.py  what users who come back wait for
    timeline.py     where the time of a hit goes
    shapes.py       models, caches and load; the connectors that are compared
    connector.py    this project's connector with its counters readable from another process
    report.py       tables of a result; the proof that all loads took place
    stats.py        medians, percentiles, and the interval of paired ratios

A new section is a function in `sections.py`, a name in `SECTIONS`, and a table in `report.py`.
"""
