"""`python -m bench`: time, memory and error of linear cross-entropy, ours and others', in one run."""

import sys
from importlib.util import find_spec

if sys.argv[0] == "-m":  # `python -m bench` or one of its parts is about to start
    missing = [name for name in ("matplotlib", "optax", "pandas", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f'The benchmarks need {", ".join(missing)}, which are not installed here: pip install ".[bench]"')
