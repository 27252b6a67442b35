"""Evaluate CLIP's and ORION's prototypes: ``accelerate launch training/evaluate.py --help``.

The work is done in ``orion_hf/commands/evaluate.py``, which ``orion-hf evaluate`` runs without a launcher.
"""

import sys

from orion_hf.cli import run

if __name__ == "__main__":
    sys.exit(run("evaluate", sys.argv[1:]))
