"""Fine-tune over ranges of settings and seeds: ``accelerate launch training/sweep.py --help``.

The work is done in ``orion_hf/commands/sweep.py``, which ``orion-hf sweep`` runs without a launcher.
"""

import sys

from orion_hf.cli import run

if __name__ == "__main__":
    sys.exit(run("sweep", sys.argv[1:]))
