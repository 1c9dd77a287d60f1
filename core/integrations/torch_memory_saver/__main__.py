"""Print the directory with which, in `PYTHONPATH`, this library is found as torch_memory_saver."""

import sys

from hal.core.integrations.torch_memory_saver.install import DROP_IN

sys.stdout.write(f"{DROP_IN}\n")
