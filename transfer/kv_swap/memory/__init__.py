"""Host memory for slots: mapping, page-locking, NUMA placement, sharing between processes.

Does not import `kv_swap.cuda` or `kv_swap.host`.
"""
