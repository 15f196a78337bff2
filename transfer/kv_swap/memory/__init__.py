"""Host memory for slots: mapping, page-locking, NUMA placement, sharing between processes.

Nothing here imports `kv_swap.cuda` or `kv_swap.host`.
"""
