import sys

from tp_runtime.coordinator.process import main

sys.exit(main())
