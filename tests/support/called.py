"""Calls a function of the tests in a process of its own: `processes.run_function`.

usage: python -m tests.support.called MODULE FUNCTION ARGUMENTS_AS_JSON
"""

from __future__ import annotations

import importlib
import json
import sys

from tests.support.processes import print_result

if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    print_result(getattr(importlib.import_module(module), name)(*json.loads(arguments)))
