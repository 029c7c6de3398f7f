"""`python -m tp_runtime.http`: see process.py."""

import sys

from tp_runtime.http.process import main

sys.exit(main())
