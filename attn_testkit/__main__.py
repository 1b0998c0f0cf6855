"""The command ``attn-testkit`` as ``python -m attn_testkit``."""

import sys

from .cli import main

sys.exit(main())
