"""``python -m localrt``: the same as the ``localrt`` command."""

import sys

from localrt.common.processes import run_helper

if not run_helper():
    from localrt.cli import main

    sys.exit(main())
