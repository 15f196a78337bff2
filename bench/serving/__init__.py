"""Measures how an engine serves with and without offloading: `python -m bench.serving --help`.

    __main__.py     the command
    runs.py         plans the order of engines and sections, and collects the results
    settings.py     the connectors that are compared, and the settings of their engines
    shapes.py       models, caches and load
    process.py      the process of one engine: its handle, and the code that runs in it
    engine.py       a vLLM engine with random weights and one connector
    sections.py     the measurements on one engine: time to first token, throughput, latency
    report.py       tables of a result, and the proof that all loads took place
    plot.py         the plot of time to first token
    stats.py        medians, ranges and percentiles

A new connector needs a line in `CONNECTORS`. A new section needs a function in `sections.py`,
listed in `process.py`, its name in `SECTIONS` and `OF_ONE_ENGINE`, and a table in `report.py`.
"""
